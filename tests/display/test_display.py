"""The display: what a frame shows, and what a terminal is left with."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise

import pytest
from rich.console import Console, ConsoleDimensions
from terminal import Terminal

from zeroshard.display import Live, Plain, Reading, bytes_text, clock_text, summary
from zeroshard.display.frame import frame
from zeroshard.display.reading import LoopRecord


def reading(step: int, of: int = 40, ranks: int = 2, loss: float | None = None) -> Reading:
    kinds = {"parameters": 11_000_000, "gradients": 11_000_000, "state": 22_000_000, "gathered": 900_000}
    return Reading(
        step=step,
        done=step / of,
        loss=2 + 5 / step if loss is None else loss,
        validation=2.5 + 5 / step if step % 10 == 1 else None,
        tokens=4096 * step,
        memory=[kinds] * ranks,
        sent={"gather": 20_000_000, "reduce": 10_000_000},
        waited=0.034,
        facts={"bits/byte": "1.234"},
    )


PLAIN = Plain(memory=88_000_000, sent=20_000_000)


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says of a terminal of 80 by 24."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("zeroshard.display.live.REDRAW_SECONDS", 0.0)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal as both standard streams. No fixture: pytest puts its own ones in place before the test."""
    shown = Terminal(80, 24)
    with redirect_stdout(shown), redirect_stderr(shown):
        yield shown
        assert sys.stdout is shown
        assert sys.stderr is shown


def drawn(record: LoopRecord, last: Reading, width: int, rows: int) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=rows + 1, force_terminal=True, color_system=None
    )
    with console.capture() as captured:
        console.print(frame(record, last, width, rows))
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("width", "rows"), [(100, 31), (80, 23), (72, 19), (60, 17), (40, 12), (30, 5), (200, 60)]
)
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_a_frame_fits_whatever_the_size(width: int, rows: int, ranks: int) -> None:
    record = LoopRecord("a title that is rather long for some terminals, but not for others", PLAIN)
    for step in range(1, 41):
        record.add(reading(step, ranks=ranks))
    lines = drawn(record, reading(40, ranks=ranks), width, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= width
    assert {len(line) for line in lines if line[0] in "╭│╰"} <= {width}
    text = "\n".join(lines)
    assert ("plain DP" in text) == (width >= 72 and rows >= 19)
    assert ("●" in text) == (rows >= 10)


def test_a_frame_says_what_was_read() -> None:
    record = LoopRecord("GPT", PLAIN)
    for step in range(1, 42):
        record.add(reading(step, of=80))
    text = "\n".join(drawn(record, reading(41, of=80), 100, 31))
    assert re.search(
        r"loss 2\.1\d\d   validation 2\.622   tokens/s [\d,]+   step 41   bits/byte 1\.234", text
    )
    assert re.search(r"rank 1 +▆+ +44\.9 MB +51%", text)
    assert re.search(r"plain DP ▆+ +88\.0 MB +100%", text)
    assert re.search(r"all +▆+ +30\.0 MB +150%", text)
    assert re.search(r"DDP +▆+ +20\.0 MB +100%", text)
    assert "■ gathered    0.9 MB" in text
    assert "3.4% of the time spent waiting" in text
    half = next(line for line in text.splitlines() if "━" in line)
    assert half.count("━") == pytest.approx(half.count("─"), abs=4)


def is_dots(char: str) -> bool:
    return 0x2800 < ord(char) < 0x2900


def curve_of(losses: list[float]) -> list[str]:
    record = LoopRecord("GPT", None)
    for step, loss in enumerate(losses, start=1):
        record.add(Reading(step=step, done=step / len(losses), loss=loss))
    assert record.last is not None
    return [line for line in drawn(record, record.last, 60, 14) if line.startswith("│")]


def test_the_curve_falls_with_the_loss_and_stays_in_its_box() -> None:
    rows = curve_of([8 * 0.97**step for step in range(100)])
    last_dots = [
        max((column for column, char in enumerate(line) if is_dots(char)), default=0) for line in rows
    ]
    assert last_dots[-1] == 0  # the times
    assert all(0 < above < below for above, below in pairwise(last_dots[:-1]))
    assert rows[0].startswith("│ 8.00")


@pytest.mark.parametrize(
    "losses", [[3.0], [3.0, 3.0], [-1.0, -5.0, 0.0], [math.nan, 2.0, math.inf, 1.0], [1e-9, 1e9], [1e9, 1e-9]]
)
def test_the_curve_bears_any_loss(losses: list[float]) -> None:
    assert any(is_dots(char) for line in curve_of(losses) for char in line)


def test_a_long_run_is_remembered_in_few_points() -> None:
    record = LoopRecord("GPT", None)
    for step in range(1, 20_001):
        record.add(Reading(step=step, done=step / 20_000, loss=20_000 - step))
    assert 1900 < len(record.train) <= 2001
    assert all(abs(20_000 * (1 - done) - loss) <= 10 for done, loss in record.train)
    assert record.loss == 4.5  # the last ten steps, not the last ten points


def test_a_run_without_one_finite_loss_says_so() -> None:
    assert "no finite loss yet" in "\n".join(curve_of([math.nan, math.inf]))


@pytest.mark.usefixtures("size")
def test_frames_replace_one_another_and_the_last_one_stays() -> None:
    with terminal() as screen:
        print("before")
        with Live("GPT", plain=PLAIN) as live:
            for step in range(1, 41):
                live.show(reading(step))
            assert screen.writes == 2 + 40  # the two of print, then one for each frame
        print("after")
    text = "\n".join(screen.lines)
    assert screen.lines[:2] == ["before", "GPT"]
    assert text.count("╰") == 3
    assert text.count("step ") == 2  # in the headline, and in the name of a panel
    assert "step 40" in text
    assert screen.lines[-2:] == ["after", ""]


@pytest.mark.usefixtures("size")
def test_what_is_printed_lands_above_the_frame() -> None:
    with terminal() as screen, Live("GPT", plain=PLAIN) as live:
        live.show(reading(1))
        print("a line", "and its end", flush=True)
        print("look out", file=sys.stderr)
        live.show(reading(2))
        sys.stdout.write("half a line")
    assert screen.lines[:4] == ["a line and its end", "look out", "half a line", "GPT"]
    assert "\n".join(screen.lines).count("╰") == 3


@pytest.mark.usefixtures("size")
def test_a_resize_starts_on_a_clean_screen() -> None:
    with terminal() as screen, Live("GPT", plain=PLAIN) as live:
        for step in range(1, 20):
            live.show(reading(step))
        assert live._screen is not None
        live._screen.console.size = ConsoleDimensions(60, 18)
        # What a terminal does when it shrinks: long lines take two rows, and the upper ones scroll away.
        screen.lines = [part for line in screen.lines for part in (line[:60], line[60:]) if part or not line]
        screen.columns, screen.rows = 60, 18
        screen.row, screen.top = len(screen.lines) - 1, len(screen.lines) - 18
        for step in range(20, 41):
            live.show(reading(step))
            if step == 30:
                print("a line")
    text = "\n".join(screen.lines[screen.top :])
    assert text.startswith("GPT\n")
    assert text.count("╰") == 1
    assert "loss 2.142 " in text  # the mean of the last ten
    assert "a line" in screen.lines


@pytest.mark.usefixtures("size")
def test_the_display_survives_an_error_in_the_loop() -> None:
    def loop() -> None:
        with Live("GPT") as live:
            live.show(reading(1))
            raise KeyError("boom")

    with terminal() as screen, pytest.raises(KeyError, match="boom"):
        loop()
    assert "step 1" in "\n".join(screen.lines)


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    with Live("GPT", plain=PLAIN, every=3600, stream=stream) as live:
        for step in range(1, 41):
            live.show(reading(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "GPT"
    assert len(lines) == 3  # the title, the first reading, the last
    assert lines[1].startswith("step 1 | 2% | loss 7.000 | validation 7.500 | bits/byte 1.234")
    assert lines[2].startswith("step 40 | 100% | loss 2.1")
    assert "44.9 MB of 88.0 MB per rank | 30.0 MB sent per step" in lines[2]
    assert "left" not in lines[2]


def test_other_ranks_draw_nothing() -> None:
    stream = io.StringIO()
    with Live("GPT", rank=1, stream=stream) as live:
        live.show(reading(1))
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (41_640_000, "41.6 MB"),
        (999_600, "1.00 MB"),
        (2e15, "2000 TB"),
    ],
)
def test_bytes_have_three_digits(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (7200, "2:00:00")])
def test_clocks(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_summary_is_a_table() -> None:
    stream = io.StringIO()
    summary("Summary", [("loss", "3.1"), ("speed", "9 [tokens]/s")], stream)
    assert re.search(r"│ loss +│ 3\.1 +│\n│ speed +│ 9 \[tokens\]/s +│", stream.getvalue())
