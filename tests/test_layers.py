"""The house keeps its shape: imports point one way, torch stays in its place, files and functions small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"

# The house, low to high: files and folders of the package. One imports only from rows above its own; beside
# itself only in the row of options. `__init__` is the public face: what stands below it in this table sees
# ZeroShard as a user does.
HOUSE: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("native",),
    ("fields", "sizes", "policy", "offload", "codec", "routes", "config", "machine", "stats"),
    ("count",),
    ("tier",),
    ("comm",),
    ("life",),
    ("sync", "host"),
    ("planning", "checkpoint", "net"),
    ("launch", "search", "page"),
    ("run",),
    ("api",),
    ("public",),
    ("__init__",),
    ("integrations", "testing", "display"),
    ("cli",),
    ("__main__",),
)
# The same inside of folders that have floors: rows low to high, and nothing beside itself.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "count": (
        ("layout", "placement"),
        ("shapes", "lending", "coding"),
        ("wires",),
        ("division",),
        ("meeting", "crossing"),
        ("memory",),
        ("timeline", "balance"),
    ),
    "life": (
        ("reading", "spans"),
        ("guard", "face", "units"),
        ("private", "shard"),
        ("bucket", "published"),
        ("moments", "together"),
        ("param", "grad", "step"),
        ("saved",),
    ),
    "host": (
        ("form", "landing", "outlook"),
        ("part", "eligible"),
        ("due",),
        ("ways",),
        ("crew",),
        ("mail",),
        ("updates",),
        ("place",),
    ),
    "planning": (
        ("frozen",),
        (
            "plan",
            "pricing",
            "fakes",
            "fused",
            "recurrent",
            "widening",
            "likeness",
            "blueprint",
            "unfit",
            "batch",
        ),
        ("traffic", "question", "stretch"),
        ("meter", "measure", "planner"),
        ("trace", "choice", "frames"),
        ("traces",),
        ("answer",),
        ("promise",),
    ),
    "run": (
        (
            *("steps", "agree", "whole", "norm", "scaling", "state", "loading"),
            *("written", "changes", "late", "again"),
        ),
        ("live",),
        ("supply", "wiring"),
        ("runtime",),
        ("weights",),
        ("build", "hooks", "snapshot"),
        ("resume",),
        ("keeper",),
        ("kept", "resting", "admission", "closing"),
    ),
}


def leveled(rows: tuple[tuple[str, ...], ...], folder: str = "") -> dict[str, int]:
    """The row of every name."""
    return {folder + name: number for number, row in enumerate(rows) for name in row}


LEVEL = leveled(HOUSE)
FLOOR = {name: at for folder, rows in FLOORS.items() for name, at in leveled(rows, f"{folder}.").items()}
# The row whose members may use one another, in one direction: a cycle is found all the same.
BESIDE = LEVEL["config"]

# What counts and plans works without torch: a plan for 10,000 ranks is made on a laptop in a second.
NO_TORCH = {
    *("errors", "fields", "sizes", "offload", "config", "machine", "page"),
    *(f"count.{name}" for row in FLOORS["count"] for name in row),
    *(f"planning.{name}" for name in ("frozen", "plan", "pricing", "question", "planner", "choice")),
    "planning.frames",
}
DISTRIBUTED = {"comm", "life.face", "life.reading", "life.shard", "launch", "testing"}
# Reading another library's files is no communication.
FOREIGN_FORMATS = {"checkpoint": "torch.distributed.checkpoint"}
# A trace hooks fake tensors only, which end with it; a face passes on what it is asked for.
HOOKED = {"run.hooks", "planning.trace", "life.face"}
HOOKS = re.compile(r"_?register_\w*hook\w*")
VAGUE = {"util", "utils", "common", "helper", "helpers", "misc"}
FILE_LINES, FUNCTION_LINES, ARGUMENTS = 450, 80, 10


def module_of(path: Path) -> str:
    """Whose a file is, as the tables name it: `comm` for `comm/shm.py`, `life.param` for `life/param.py`."""
    return named([part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts])


def named(parts: list[str]) -> str:
    """The name in the tables of what a dotted name leads to."""
    floor = len(parts) > 1 and parts[0] in FLOORS and parts[1] != "__init__"
    return f"{parts[0]}.{parts[1]}" if floor else parts[0]


def sources() -> list[Path]:
    """All sources of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def of_types_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes that run only for a type checker."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[ast.AST, str]]:
    """Every imported dotted name, relative ones made absolute; `package` is where the file lies."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node, f"{module}.{alias.name}"


def inner(names: Iterator[tuple[ast.AST, str]]) -> set[str]:
    """The names of the tables that are imported; `zeroshard` and its public names count as `__init__`."""
    found = set()
    for _, name in names:
        parts = name.split(".")
        if parts[0] == "zeroshard":
            found.add(named(parts[1:]) if len(parts) > 1 and is_module(parts[1]) else "__init__")
    return found


def is_module(name: str) -> bool:
    """Whether `zeroshard.<name>` is a module and not one of the public names."""
    return name in LEVEL or (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


def direction_faults(module: str, imported: set[str]) -> list[str]:
    """Imports that point up, or sideways where they must not."""
    faults = []
    folder = module.partition(".")[0]
    for other in sorted(imported - {module}):
        if other.partition(".")[0] != folder:
            mine, theirs, beside = LEVEL[folder], LEVEL[other.partition(".")[0]], BESIDE
        elif other in FLOOR and module in FLOOR:
            mine, theirs, beside = FLOOR[module], FLOOR[other], None
        else:
            continue
        if theirs > mine:
            faults.append(f"{module} imports {other}, which stands above it")
        elif theirs == mine != beside:
            faults.append(f"{module} imports {other}, which stands beside it")
    return faults


def torch_faults(module: str, tree: ast.Module, package: tuple[str, ...]) -> list[str]:
    """torch, torch.distributed and hook registration where they do not belong."""
    exempt = of_types_only(tree)
    faults = []
    for node, name in imports(tree, package):
        parts = name.split(".")
        if node in exempt or parts[0] != "torch":
            continue
        if module in NO_TORCH:
            faults.append(f"{module} imports {name}; it must work without torch")
        elif f"{name}.".startswith(f"{FOREIGN_FORMATS.get(module)}."):
            continue
        elif parts[1:2] == ["distributed"] and module not in DISTRIBUTED:
            faults.append(
                f"{module} imports {name}; torch.distributed belongs into {', '.join(sorted(DISTRIBUTED))}"
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in exempt:
            if ast.unparse(node) == "torch.distributed" and module not in DISTRIBUTED:
                faults.append(f"{module} uses torch.distributed")
            if HOOKS.fullmatch(node.attr) and module not in HOOKED:
                faults.append(f"{module} uses {node.attr}; registration belongs into hooks")
    return faults


def size_faults(text: str, tree: ast.Module) -> list[str]:
    """Files and functions that have grown: a noun is missing."""
    faults = []
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        faults.append(f"{lines} lines, at most {FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in given)
            if length > FUNCTION_LINES:
                faults.append(f"{node.name} has {length} lines, at most {FUNCTION_LINES}")
            if count > ARGUMENTS:
                faults.append(f"{node.name} has {count} arguments, at most {ARGUMENTS}")
    return faults


def package_of(path: Path) -> tuple[str, ...]:
    """Where a file lies, as the parts of a dotted name."""
    return ("zeroshard", *path.relative_to(PACKAGE).parts[:-1])


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_keeps_its_place_and_its_size(path: Path) -> None:
    module, text = module_of(path), path.read_text(encoding="utf-8")
    assert module in (FLOOR if "." in module else LEVEL), (
        f"{module} has no place: add it to HOUSE or FLOORS in tests/test_layers.py and to DESIGN.md"
    )
    tree = ast.parse(text)
    package = package_of(path)
    faults = direction_faults(module, inner(imports(tree, package)))
    faults += torch_faults(module, tree, package) + size_faults(text, tree)
    assert not faults, "\n".join(faults)


def test_modules_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        module = module_of(path).partition(".")[0]
        imported = inner(imports(ast.parse(path.read_text(encoding="utf-8")), package_of(path)))
        graph.setdefault(module, set()).update({name.partition(".")[0] for name in imported} - {module})
    assert len(graph) > 5
    assert not cycle(graph)


def test_no_file_has_a_name_that_says_nothing() -> None:
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    words = {path: set(re.split(r"[_.]", path.stem)) | set(path.parent.name.split("_")) for path in paths}
    assert not [str(path) for path, parts in words.items() if parts & VAGUE]


# The checks themselves, on code that breaks each rule: a check that finds nothing proves nothing.


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("life.param", "from .grad import Bucket", "life.param imports life.grad, which stands beside it"),
        (
            "life.step",
            "from zeroshard.life import grad",
            "life.step imports life.grad, which stands beside it",
        ),
        ("life.shard", "from .moments import x", "life.shard imports life.moments, which stands above it"),
        ("count.layout", "import zeroshard.comm", "count.layout imports comm, which stands above it"),
        (
            "run.runtime",
            "def f():\n    from zeroshard.api import shard",
            "run.runtime imports api, which stands above it",
        ),
        ("sync", "from zeroshard.host.part import Part", "sync imports host.part, which stands beside it"),
        ("api", "import zeroshard as zs", "api imports __init__, which stands above it"),
        ("planning.plan", "from zeroshard.config import Options", None),
        ("life.step", "from .moments import x", None),
        ("config", "from zeroshard.codec import Codec", None),
        ("cli", "import zeroshard as zs", None),
    ],
)
def test_the_direction_check_sees(module: str, code: str, fault: str | None) -> None:
    package = ("zeroshard", *module.split(".")[:-1])
    faults = direction_faults(module, inner(imports(ast.parse(code), package)))
    assert faults == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("count.layout", "import torch", "count.layout imports torch; it must work without torch"),
        (
            "planning.planner",
            "def f():\n    from torch import nn",
            "planning.planner imports torch.nn; it must work without torch",
        ),
        (
            "life.grad",
            "import torch.distributed as dist",
            "life.grad imports torch.distributed; torch.distributed belongs",
        ),
        (
            "life.grad",
            "from torch import distributed",
            "life.grad imports torch.distributed; torch.distributed belongs",
        ),
        ("life.grad", "import torch\ntorch.distributed.barrier()", "life.grad uses torch.distributed"),
        (
            "run.runtime",
            "leaf.register_hook(f)",
            "run.runtime uses register_hook; registration belongs into hooks",
        ),
        (
            "api",
            "m.register_full_backward_pre_hook(f)",
            "api uses register_full_backward_pre_hook; registration",
        ),
        ("run.hooks", "leaf.register_post_accumulate_grad_hook(f)", None),
        ("comm", "from torch.distributed import TCPStore", None),
        (
            "checkpoint",
            "import torch.distributed as dist",
            "checkpoint imports torch.distributed; torch.distr",
        ),
        ("checkpoint", "from torch.distributed.checkpoint import FileSystemReader", None),
        ("api", "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup", None),
    ],
)
def test_the_torch_check_sees(module: str, code: str, fault: str | None) -> None:
    faults = torch_faults(module, ast.parse(code), ("zeroshard",))
    assert len(faults) == (fault is not None)
    assert not fault or faults[0].startswith(fault)


def test_the_size_check_sees() -> None:
    wide = f"def f(self, {', '.join(f'a{i}' for i in range(11))}): pass"
    long = "def f():\n" + "    pass\n" * 80
    for code, word in ((wide, "11 arguments"), (long, "81 lines"), ("\n" * 451, "451 lines")):
        faults = size_faults(code, ast.parse(code))
        assert len(faults) == 1
        assert word in faults[0]
    assert not size_faults("def f(a): pass\n", ast.parse("def f(a): pass\n"))


def test_the_cycle_check_sees() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []
