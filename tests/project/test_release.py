"""What is released: a wheel with the kernels and a source distribution, installed where nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch, zeroshard as zs
from zeroshard.kernels import library
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
run = zs.shard(model, optimizer, stage=3, offload=zs.Offload("host"))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(zs.__file__, library.kernels() is not None, run.stats().steps)
run.close()
"""

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`./do build` of a copy of the sources."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        path = ROOT / name
        no_builds = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        shutil.copytree(path, folder / name, ignore=no_builds) if path.is_dir() else shutil.copy(path, folder)
    function = re.search(r"^build\(\) \{\n.*?^\}\n", (ROOT / "do").read_text(), re.MULTILINE | re.DOTALL)
    assert function
    script = f"set -euo pipefail\nPYTHON={sys.executable}\n{function[0]}build"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def installed(package: Path, folder: Path, **environ: str) -> Path:
    """The Python of an environment of its own with nothing but this package, and torch in reach."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    # A path alone: what is installed there, but not what is linked to a checkout from there.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ["install", "--quiet", "--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "--python", str(python), *words, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def trained(python: Path, folder: Path) -> list[str]:
    environ = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", TRAIN], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert Path(words[0]).is_relative_to(python.parents[1])
    told = subprocess.run(
        [python.parent / "zeroshard", "--version"], env=environ, capture_output=True, text=True
    )
    assert told.stdout == f"zeroshard {zeroshard.__version__}\n", told.stderr
    return words[1:]


def test_a_wheel_installs_without_a_compiler_and_has_the_kernels(built: Path, tmp_path: Path) -> None:
    """One for every Python of the platform: what it is made for stands in its name."""
    (wheel,) = built.glob("*.whl")
    assert re.match(rf"zeroshard-{re.escape(zeroshard.__version__)}-cp311-abi3-\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert "zeroshard/kernels/_kernels.abi3.so" in archive.namelist()
    python = installed(wheel, tmp_path / "empty", CC="/bin/false", PATH=os.environ["PATH"])
    assert trained(python, tmp_path) == ["True", "1"]


def test_a_source_distribution_builds_the_kernels_where_there_is_a_compiler(
    built: Path, tmp_path: Path
) -> None:
    (source,) = built.glob("*.tar.gz")
    assert trained(installed(source, tmp_path / "empty"), tmp_path) == ["True", "1"]


def test_a_source_distribution_installs_without_a_compiler(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    python = installed(source, tmp_path / "empty", CC="/bin/false")
    assert trained(python, tmp_path) == ["False", "1"]
