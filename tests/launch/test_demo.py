"""The demo: its text, its model, and the script under every way to start it."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from terminal import Terminal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpt_data  # noqa: E402
import gpt_model  # noqa: E402

CODE = "def count(self, items):\n    return self.count + len(items)\n\n\nclass Counter:\n    pass\n"


# --------------------------------------------------------------------------------------------------- the text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some Python files, a few of which must be left alone."""
    for number in range(40):
        (tmp_path / f"module_{number:02}.py").write_text(CODE * 20 + f"file = {number}\n")
    for name in ("test", "site-packages", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left_out.py").write_text("LEFT_OUT")
    return tmp_path


def test_tokens_are_the_text_again() -> None:
    tokenizer = gpt_data.Tokenizer(CODE * 50, 300)
    for text in (CODE, "naïve = '→'\t\r\n\n  x", "", "\x00"):
        as_bytes = text.encode().decode("latin-1")
        assert tokenizer.decode(tokenizer.encode(as_bytes)) == text


def test_merges_glue_the_most_frequent_pair_first() -> None:
    tokenizer = gpt_data.Tokenizer("abab abab abab cd", 258)
    assert tokenizer.bytes[256:] == [b"ab", b"abab"]
    assert tokenizer.encode("ababc") == [257, ord("c")]


def test_a_vocabulary_ends_where_nothing_is_left_to_glue() -> None:
    assert len(gpt_data.Tokenizer("aa bb", 5000)) < 262


def test_a_line_break_takes_its_indentation_along() -> None:
    assert gpt_data.SHARDS.findall("a:\n    b = _c1") == ["a", ":", "\n    ", "b", " =", " _", "c", "1"]


def test_prose_and_tables_are_left_out() -> None:
    head = b'"""A module."""\r\n\r\nx = "#"  # why\r\n# and how\r\n\r\n\r\n\r\n\r\n'
    body = b'def f():\r\n    """It.\r\n\r\n    More."""\r\n\treturn 1\r\n'
    assert gpt_data.code(head + body) == 'x = "#"\n\n\ndef f():\n        return 1\n'
    assert gpt_data.is_table("table = {\n" + "    'a': 1,\n" * 5 + "}\n")
    assert not gpt_data.is_table(CODE)


def test_files_are_read_in_one_order_and_split_by_file(folder: Path) -> None:
    paths = gpt_data.sources(folder)
    assert paths == sorted(paths)
    assert all(path.parent == folder for path in paths)
    train, held = gpt_data.read(paths, 10**9)
    assert (train, held) == gpt_data.read(paths, 10**9)
    numbers = [set(re.findall(r"file = (\d+)", side)) for side in (train, held)]
    assert len(numbers[0]) == 37
    assert len(numbers[1]) == 3
    assert not numbers[0] & numbers[1]


def test_the_standard_library_is_there_without_its_tests() -> None:
    paths = gpt_data.sources()
    assert Path(os.__file__) in paths
    assert not [path for path in paths if "test" in path.parts or "site-packages" in path.parts]


def test_a_folder_without_sources_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no Python source under .*--text FOLDER"):
        gpt_data.sources(tmp_path)


def test_ranks_share_the_windows_of_a_pass() -> None:
    text = gpt_data.Text(torch.arange(1 + 8 * 24, dtype=torch.int32), bytes=0)
    two = [gpt_data.Batches(text, 8, 2, rank, 2) for rank in range(2)]
    one = gpt_data.Batches(text, 8, 4, 0, 1)
    starts = []
    for step in range(6):
        parts = [batches[step] for batches in two]
        inputs, targets = one[step]
        assert torch.equal(inputs, torch.cat([part[0] for part in parts]))
        assert torch.equal(targets, inputs + 1)
        starts += inputs[:, 0].tolist()
    assert sorted(starts) == list(range(0, 8 * 24, 8))
    assert not torch.equal(one[0][0], one[6][0])  # the next pass is shuffled anew


# -------------------------------------------------------------------------------------------------- the model


@pytest.fixture
def model() -> gpt_model.GPT:
    torch.manual_seed(0)
    return gpt_model.GPT(gpt_model.Config(vocabulary=50, context=16, width=32, blocks=2, heads=2))


def test_the_first_loss_is_that_of_a_guess(model: gpt_model.GPT) -> None:
    tokens = torch.randint(50, (2, 16))
    assert model(tokens, tokens).item() == pytest.approx(math.log(50), rel=1e-6)


def train_a_little(model: gpt_model.GPT, tokens: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_learns_looks_only_back_and_writes_what_it_learnt(model: gpt_model.GPT) -> None:
    tokens = torch.arange(17).repeat(2, 1)
    losses = train_a_little(model, tokens)
    assert losses[-1] < 0.1 < 3 < losses[0]
    changed = tokens[:, :16].clone()
    changed[:, 10:] = 49
    with torch.no_grad():
        before, after = model(tokens[:, :16]), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    written = model.generate(tokens[:1, :4], 12)
    assert written.tolist() == [list(range(16))]
    assert torch.equal(written, model.generate(tokens[:1, :4], 12))


# ------------------------------------------------------------------------------------------------- the script

SHORT = ["--steps", "4", "--vocabulary", "300", "--sample", "8", "--seconds", "1"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def demo(folder: Path, *arguments: str, start: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *start, str(EXAMPLES / "gpt.py"), "--text", str(folder), *SHORT, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


RANKS = ("-m", "zeroshard", "run", "--ranks", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def validation_loss(output: str) -> float:
    found = re.search(r"│ validation loss +│ (\d\.\d{3}) per token", output)
    assert found, output
    return float(found[1])


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(folder: Path) -> None:
    alone = demo(folder, "--rows", "4")
    both = demo(folder, "--rows", "2", start=RANKS)
    assert "one rank" in alone
    assert "stage 3 · 2 ranks" in both
    assert validation_loss(both) == pytest.approx(validation_loss(alone), abs=0.0015)
    assert validation_loss(both) < math.log(300) - 0.2
    samples = [output.split("the model writes")[1:] for output in (alone, both)]
    assert len(samples[0]) == len(samples[1]) == 2
    share = re.search(r"│ memory per rank +│ ([\d.]+) MB \(plain data parallel: ([\d.]+) MB\)", both)
    assert share, both
    assert float(share[1]) < 0.8 * float(share[2])


@pytest.mark.ranks
@pytest.mark.slow
def test_it_runs_under_torchrun(folder: Path) -> None:
    output = demo(folder, "--rows", "1", "--stage", "2", start=TORCHRUN)
    assert "stage 2 · 2 ranks" in output
    assert output.count("Summary") == 1


@pytest.mark.ranks
@pytest.mark.slow
def test_the_clock_of_rank_0_ends_it(folder: Path) -> None:
    output = demo(folder, "--rows", "1", "--steps", "0", "--seconds", "2", start=RANKS)
    assert int(re.findall(r"trained +│ ([\d,]+) steps", output)[0].replace(",", "")) >= 1


@pytest.mark.ranks
@pytest.mark.slow
def test_in_a_terminal_it_draws(folder: Path) -> None:
    """Frames, then below the last one the samples and the summary, and nothing stray."""
    main, side = pty.openpty()
    command = [sys.executable, *RANKS, str(EXAMPLES / "gpt.py"), "--text", str(folder), *SHORT, "--rows", "1"]
    terminal_environment = environment() | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "32"}
    with subprocess.Popen(command, stdout=side, stderr=side, stdin=side, env=terminal_environment) as process:
        os.close(side)
        written = b"".join(iter(lambda: _read(main), b""))
    os.close(main)
    assert process.returncode == 0
    screen = Terminal(100, 32)
    screen.write(written.decode())
    text = "\n".join(screen.lines)
    assert text.startswith("Learning 300 tokens from"), text
    assert screen.lines[1].startswith("ZeroShard · GPT"), text
    assert text.count("╭─ loss") == 1
    assert re.search(r"rank 1 +▆+ ", text)
    assert text.index("sent per step") < text.index("the model writes") < text.index("Summary")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed: every process that held it is gone
        return b""
