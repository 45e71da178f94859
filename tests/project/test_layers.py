"""The house keeps its shape: imports point one way, torch stays in its place, files and functions small."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from zeroshard import extend

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"

# The package, low to high: files and folders. One imports only from rows above its own, and nothing beside
# itself. `__init__` is what users import: what stands below it in this table sees ZeroShard as they do.
HOUSE: tuple[tuple[str, ...], ...] = (
    ("collector", "errors", "output_file", "profiling"),
    ("kernels", "field_checks", "sizes"),
    ("machine", "sync_policies"),
    ("compress",),
    ("options",),
    ("layout", "convert"),
    ("comm", "tiers"),
    ("params",),
    ("checkpoint", "grads"),
    ("launch", "optim"),
    ("offload", "sync", "refusals"),
    ("planner",),
    ("runtime", "search"),
    ("api",),
    ("public", "extend"),
    ("__init__",),
    ("integrations", "testing", "display", "report"),
    ("parallel",),
    ("cli",),
    ("__main__",),
)
# They see ZeroShard as others' tools do: by its public names, and those of `extend`.
TOOLS = {"cli", "report", "display", "testing", "integrations", "parallel"}
LEVEL = {name: number for number, row in enumerate(HOUSE) for name in row}

# Plans are made of shapes and figures: nothing of what moves, keeps or updates anything.
PURE = {"planner": {"comm", "kernels", "tiers", "offload", "grads", "checkpoint", "sync"}}
# What counts and plans works without torch: a plan for 10,000 ranks is made on a laptop in a second.
NO_TORCH = {
    *("errors", "field_checks", "sizes", "output_file", "options", "machine", "report", "layout"),
    *(f"planner.{name}" for name in ("plan", "pricing", "planning_problem", "candidates", "choice")),
}
DISTRIBUTED = {
    *("comm", "launch", "testing", "integrations", "parallel"),
    *(f"params.{name}" for name in ("dtensor", "dtensor_lists", "rank_reads", "sharded_param")),
}
# Reading another library's files is no communication.
FOREIGN_FORMATS = {"checkpoint": "torch.distributed.checkpoint"}
# A trace hooks fake tensors only, which end with it; what a forward returns is hooked, too, and ends with its
# graph, that of a Fabric module too; a sharded DTensor passes on what it is asked for; a wrapper learns of
# optimizers by their steps.
HOOKED = {
    *("runtime.hooks", "runtime.forward", "runtime.second_backward", "planner.trace", "params.dtensor"),
    *("parallel.wrapper", "parallel.joining", "integrations.lightning_strategies.fabric"),
}
HOOKS = re.compile(r"_?register_\w*hook\w*")
VAGUE = {"util", "utils", "common", "helper", "helpers", "misc"}
# What decides who owns which rows, what travels together, in which order, and where it lies.
DECIDES = {
    *("ALIGN", "aligned", "buckets", "owner_runs", "slots_by_name", "slots_for", "rooms_of", "turns_of"),
    *("small_units", "bucket_limit", "gather_codec", "codec_for"),
}
# Files of an export, messages of a node, and whether options name what there is: none divides a model.
DECIDES_NOT = {"checkpoint.exporting": {"buckets"}, "comm.nodes": {"aligned"}, "refusals": {"codec_for"}}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
FILE_LINES, FUNCTION_LINES, ARGUMENTS = 800, 80, 10


def module_of(path: Path) -> str:
    """The dotted name of a file: `comm.shm` for `comm/shm.py`, `comm` for its `__init__`."""
    parts = [part.removesuffix(".py") for part in path.relative_to(PACKAGE).parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def within(module: str, names: set[str]) -> bool:
    """Whether a table has the module, or a package that it lies in."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts) + 1))


def sources() -> list[Path]:
    """All sources of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file says, which several tests look at."""
    return ast.parse(path.read_text(encoding="utf-8"))


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
    """The modules of ours that are imported; `zeroshard` and its public names count as `__init__`."""
    found = set()
    for _, name in names:
        parts = name.split(".")
        if parts[0] == "zeroshard":
            found.add(longest(parts[1:]) if len(parts) > 1 and is_module(parts[1]) else "__init__")
    return found


def longest(parts: list[str]) -> str:
    """The module that a dotted name leads to, without the name that is taken from it."""
    for count in range(len(parts), 1, -1):
        path = PACKAGE.joinpath(*parts[:count])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts[:count])
    return parts[0]


def is_module(name: str) -> bool:
    """Whether `zeroshard.<name>` is a module and not one of the public names."""
    return name in LEVEL or (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


def direction_faults(module: str, imported: set[str]) -> list[str]:
    """Imports that point up, or sideways."""
    mine = module.partition(".")[0]
    others = sorted({name.partition(".")[0] for name in imported} - {mine})
    faults = [
        f"{module} imports {other}, which stands above it" for other in others if LEVEL[other] > LEVEL[mine]
    ]
    if mine in TOOLS:
        inside = set(others) - TOOLS - {"extend", "__init__"}
        faults += [f"{module} imports {other}: a tool takes it from extend" for other in sorted(inside)]
    faults += [
        f"{module} imports {other}: plans are made of shapes and figures"
        for other in sorted(set(others) & PURE.get(mine, set()))
    ]
    return faults + [
        f"{module} imports {other}, which stands beside it" for other in others if LEVEL[other] == LEVEL[mine]
    ]


def division_faults(module: str, tree: ast.Module, package: tuple[str, ...]) -> list[str]:
    """Decisions on how a model is divided, outside of the layout."""
    if within(module, {"layout", "options"}):
        return []
    used = {name.rpartition(".")[2] for _, name in imports(tree, package) if name.startswith("zeroshard.")}
    decided = sorted(used & DECIDES - DECIDES_NOT.get(module, set()))
    packed = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and {keyword.arg for keyword in node.keywords} & {"align", "flags"}
        and ast.unparse(node.func).endswith("PackLayout")
    ]
    faults = [f"{module} imports {name}: how a model is divided is decided in the layout" for name in decided]
    return faults + [f"{module} packs slots: where they lie is decided in the layout" for _ in packed]


def torch_faults(module: str, tree: ast.Module, package: tuple[str, ...]) -> list[str]:
    """torch, torch.distributed and hook registration where they do not belong."""
    exempt = of_types_only(tree)
    faults = []
    for node, name in imports(tree, package):
        parts = name.split(".")
        if node in exempt or parts[0] != "torch":
            continue
        if within(module, NO_TORCH):
            faults.append(f"{module} imports {name}; it must work without torch")
        elif f"{name}.".startswith(f"{FOREIGN_FORMATS.get(module.partition('.')[0])}."):
            continue
        elif parts[1:2] == ["distributed"] and not within(module, DISTRIBUTED):
            faults.append(
                f"{module} imports {name}; torch.distributed belongs into {', '.join(sorted(DISTRIBUTED))}"
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in exempt:
            distributed = node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
            if distributed and not within(module, DISTRIBUTED):
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
    assert module.partition(".")[0] in LEVEL, (
        f"{module} has no place: add it to HOUSE in tests/project/test_layers.py"
    )
    tree = tree_of(path)
    package = package_of(path)
    faults = direction_faults(module, inner(imports(tree, package)))
    faults += torch_faults(module, tree, package) + size_faults(text, tree)
    assert not faults, "\n".join(faults)


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: neither functions nor what only a type checker reads."""
    exempt = of_types_only(tree)
    inside = {node for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for node in ast.walk(f)}
    body = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.Module([node for node in body if node not in exempt and node not in inside], [])


def test_modules_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        module = module_of(path)
        names = imports(at_import(tree_of(path)), package_of(path))
        graph[module] = inner(names) - {module}
    assert len(graph) > 100
    assert not cycle(graph)


def test_what_is_loaded_late_is_what_a_type_checker_sees() -> None:
    tree = tree_of(PACKAGE / "extend.py")
    typed = {
        (node.module, alias.name, alias.asname or alias.name)
        for node in of_types_only(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    late = {(f"zeroshard.{module}", inside, name) for name, (module, inside) in extend._BY_NAME.items()}
    assert late == typed
    assert all(getattr(extend, name) is not None for name in dir(extend))


def class_names(module: str, tree: ast.Module) -> list[str]:
    """Of all classes in a file. What the front ends name for their users is left out: Lightning comes as two
    packages, and who changes from one to the other changes an import alone."""
    public = set[str]()
    for node in tree.body if within(module, {"integrations"}) else ():
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            public = set(ast.literal_eval(node.value))
    return [
        node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name not in public
    ]


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        module = module_of(path)
        for name in class_names(module, tree_of(path)):
            places.setdefault(name, []).append(module)
    assert len(places) > 400
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_the_class_check_sees() -> None:
    tree = ast.parse('__all__ = ["A"]\nclass A: ...\ndef f():\n    class B: ...\nclass C:\n    class D: ...')
    assert class_names("grads.bucket", tree) == ["A", "C", "B", "D"]
    assert class_names("integrations.hf", tree) == ["C", "B", "D"]


def test_the_page_of_tests_has_every_file() -> None:
    page = (ROOT / "docs" / "architecture" / "tests.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `(\w+/test_\w+\.py)`:", page, re.MULTILINE)
    files = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").glob("*/test_*.py")]
    told = "docs/architecture/tests.md has a line for each test file, with what it shows"
    assert sorted(listed) == sorted(files), told
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("test_*.py"))}
    assert folders - {"project"} <= {path.stem for path in PACKAGE.iterdir()}, "folders are the package's"


def test_no_file_has_a_name_that_says_nothing() -> None:
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    words = {path: set(re.split(r"[_.]", path.stem)) | set(path.parent.name.split("_")) for path in paths}
    assert not [str(path) for path, parts in words.items() if parts & VAGUE]


# The checks themselves, on code that breaks each rule: a check that finds nothing proves nothing.


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("grads.bucket", "from zeroshard import optim", "grads.bucket imports optim, which stands above it"),
        ("layout.sharding", "import zeroshard.comm", "layout.sharding imports comm, which stands above it"),
        (
            "runtime.runtime",
            "def f():\n    from zeroshard.api import shard",
            "runtime.runtime imports api, which stands above it",
        ),
        ("sync", "from zeroshard.offload.group import x", "sync imports offload, which stands beside it"),
        ("api", "import zeroshard as zs", "api imports __init__, which stands above it"),
        ("planner.plan", "from zeroshard.options import Options", None),
        (
            "planner.trace",
            "from zeroshard.kernels import trim",
            "planner.trace imports kernels: plans are made of shapes and figures",
        ),
        ("optim.sharded_optimizer", "from .optimizer_kinds import x", None),
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
        ("layout.sharding", "import torch", "layout.sharding imports torch; it must work without torch"),
        (
            "planner.candidates",
            "def f():\n    from torch import nn",
            "planner.candidates imports torch.nn; it must work without torch",
        ),
        (
            "grads.reducer",
            "import torch.distributed as dist",
            "grads.reducer imports torch.distributed; torch.distributed belongs",
        ),
        (
            "grads.reducer",
            "from torch import distributed",
            "grads.reducer imports torch.distributed; torch.distributed belongs",
        ),
        (
            "grads.reducer",
            "import torch\ntorch.distributed.barrier()",
            "grads.reducer uses torch.distributed",
        ),
        (
            "runtime.runtime",
            "leaf.register_hook(f)",
            "runtime.runtime uses register_hook; registration belongs into hooks",
        ),
        (
            "api",
            "m.register_full_backward_pre_hook(f)",
            "api uses register_full_backward_pre_hook; registration",
        ),
        ("runtime.hooks", "leaf.register_post_accumulate_grad_hook(f)", None),
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


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_a_model_is_divided_in_the_layout_alone(path: Path) -> None:
    package = ("zeroshard", *path.relative_to(PACKAGE).parts[:-1])
    assert not division_faults(module_of(path), tree_of(path), package)


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("runtime.build", "from zeroshard.layout.sharding import aligned", "runtime.build imports aligned"),
        ("offload.build", "from zeroshard.options import bucket_limit", "offload.build imports bucket_limit"),
        ("runtime.build", "PackLayout(slots, world, align=16)", "runtime.build packs slots"),
        ("layout.memory", "from .sharding import aligned", None),
        ("runtime.build", "from zeroshard.layout.specs import BucketSpec", None),
    ],
)
def test_the_division_check_sees(module: str, code: str, fault: str | None) -> None:
    faults = division_faults(module, ast.parse(code), ("zeroshard",))
    assert len(faults) == (fault is not None)
    assert not fault or faults[0].startswith(fault)


def test_the_size_check_sees() -> None:
    wide = f"def f(self, {', '.join(f'a{i}' for i in range(11))}): pass"
    long = "def f():\n" + "    pass\n" * 80
    for code, word in ((wide, "11 arguments"), (long, "81 lines"), ("\n" * 801, "801 lines")):
        faults = size_faults(code, ast.parse(code))
        assert len(faults) == 1
        assert word in faults[0]
    assert not size_faults("def f(a): pass\n", ast.parse("def f(a): pass\n"))


def test_the_cycle_check_sees() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []
