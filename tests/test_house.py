"""The house rules that a machine can check: who may import whom, where hardware, families and kernels are named, names
and sizes of files."""

import ast
import graphlib
import re
import subprocess
import sys
import warnings
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "anabranch"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A room may import itself and the rooms before it. "root" is the plain files beside the rooms; the front door, `llm`,
# needs the engine and has a place of its own.
ORDER = (
    "root",
    "bundled",
    "formats",
    "platforms",
    "ops",
    "kernels",
    "parallel",
    "layers",
    "moe",
    "models",
    "text",
    "loader",
    "compile",
    "engine",
    "ranks",
    "mlx",
    "llm",
    "server",
    "replicas",
    "bench",
    "conformance",
    "cli",
)
HARDWARE = re.compile(r"\b(torch\.(cuda|npu|xpu|mps)|torch_npu|is_(cuda|npu|xpu))\b")
NAMELESS = {"utils", "util", "common", "misc", "helpers"}
WITHOUT_TORCH = ("models.config", "loader.checkpoint", "loader.locate", "engine.plan")
YARDSTICK, LIMIT = 600, 800
"""Lines of a source file: above the first a warning, above the second a failure."""
CORE = ("engine", "moe", "models", "layers", "ops", "compile", "platforms", "loader", "parallel")
CORE_LINES, PACKAGE_LINES = 15_252, 48_847
"""Ceilings: lines of all .py files of the core rooms, and of the whole package, docstrings and blank lines included.
Quantised weights took 3,000 of the package's: formats, kernels, FP8 by FP8 on Hopper, the FP8 cache, `quantize`.
Hybrid models took 1,300, of which 800 of the core's: the gated delta net, its kernels, three families, checkpoints of
states. Drafts took 400, and models that are divided among ranks, their engine and
their simulator, 1,000 so far.

Many devices took 2,300 (the rooms ranks and replicas are not core), drafts in models with states and the draft layer
500, INT4 on Hopper 300. Kernels in C for decode steps on a CPU took 570, of which 100 of the core's record them;
kernels that compute each row by itself, and their selftest, 870; embeddings 270, of which 50 of the core's; prompts of
latent attention by keys and values of heads 140, of which 90 of the core's. The same kernels in C for each row by
itself took 180, MXFP4 that is scaled before it is multiplied 90, the runner in three modules 60; tiles on GPUs that do
not depend on the number of rows 240; MXFP4 on Hopper 180; sums on a device that end where a rank has, long prompts of
latent attention together, and memory that a closed engine gives back 50 of the core's, and
60 elsewhere; profiles of prompts 30; experts that add to rows on Hopper 60, ends of engines 20;
experts in FP8, INT4 and MXFP4 for one token or two by matrix units 380; long prompts
of latent models in captured pieces 15 of the core's; keys of quantised checkpoints that are refused, orders of inputs
that are checked, and reordered heads in quantised formats 110, of which 33 of the core's; states that a step stores on
its way, so that a prompt takes one, 135, of which 84 of the core's; the scan of delta nets on Hopper 200; a rank 0
that is stopped, which the others and a server notice, 95; rows in two parts that norms write 34; matrix
units of x86 in the kernels in C, and threads that wait for less long, 19; tiles that the tuner compares between two
sizes 14; two stages of a start, and what follows each, 10; scales of 4-bit
weights that come with these 99, of which 17 of the core's, where a kernel prepares weights; kernels in C that GPUs do
not compile 6 of the core's; tags of Harmony that other tokens spell 52;
content in parts 59, tools without description 11; closing tags in strings of calls' arguments 38; the dtype of
checkpoints whose config names none 34, of which 30 of the core's.

A change that needs more raises the number here, in a commit whose message says what the lines are for.
"""


def room(module: str) -> str:
    """`anabranch.ops.route` → ops; the files beside the rooms → root, but for the front door."""
    name = module.split(".")[1] if "." in module else "root"
    return name if name in ORDER else "root"


def imports(source: str, module: str) -> Iterator[str]:
    """Our modules that a module imports, also inside functions and for types."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *filter(None, [node.module])])
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "anabranch")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def upward(source: str, module: str) -> list[str]:
    """Imports that go against the order."""
    place = ORDER.index(room(module))
    return [f"{module} imports {name}" for name in imports(source, module) if ORDER.index(room(name)) > place]


def test_every_room_has_its_place() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert not rooms - set(ORDER)


def test_imports_go_one_way() -> None:
    # The package's own __init__ is the door sign: it may name what it offers. __main__ is the command line.
    doors = (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
    modules = {module_name(path): path for path in SOURCES if path not in doors}
    assert not [line for module, path in modules.items() for line in upward(path.read_text(), module)]


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("anabranch.ops.route", "from anabranch import kernels", False),
        ("anabranch.ops.route", "from anabranch.kernels.torch import experts", False),
        ("anabranch.ops.route", "from .. import kernels", False),
        ("anabranch.ops.route", "def f():\n    import anabranch.moe.layer", False),
        ("anabranch.engine.engine", "from anabranch.server.app import App", False),
        ("anabranch.engine.engine", "from anabranch.cli import main", False),
        ("anabranch.kernels.torch.experts", "from anabranch import ops", True),
        ("anabranch.ops.route", "from anabranch.ops.op import op\nimport torch.kernels", True),
        ("anabranch.ops.op", "if TYPE_CHECKING:\n    from anabranch.cli import main", False),
        ("anabranch.cli.main", "from anabranch import __version__, ops, platforms", True),
        ("anabranch.config", "from anabranch import ops", False),
    ],
)
def test_the_guard_sees(module: str, source: str, allowed: bool) -> None:
    assert (upward(source, module) == []) == allowed


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other, in a circle, first and last the same; [] if none do."""
    graph = {}
    for module, source in sources.items():
        found = (
            defining_module(name, sources)
            for name in imports(
                source,
                module,
            )
        )
        graph[module] = {name for name in found if name and name != module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def defining_module(name: str, modules: Container[str]) -> str | None:
    """`anabranch.ops.op.Op` → anabranch.ops.op; `anabranch.ops` → anabranch.ops.__init__."""
    parent = name.rpartition(".")[0]
    return next((m for m in (name, f"{name}.__init__", parent, f"{parent}.__init__") if m in modules), None)


def test_no_module_is_in_an_import_circle() -> None:
    found = circle({module_name(path): path.read_text() for path in SOURCES})
    assert not found, f"{' imports '.join(found)}: move what they share into a module that both import"


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "from anabranch import b", "b": "from anabranch.a import x"}, True),
        (
            {"a": "import anabranch.b", "b": "from .c import x", "c": "try:\n    from . import a\nfinally: pass"},
            True,
        ),
        ({"a": "class X:\n    import anabranch.b", "b": "import anabranch.a"}, True),
        ({"p.__init__": "from .a import x", "p.a": "from anabranch.p import y"}, True),
        ({"p.__init__": "from .a import x", "p.a": "from anabranch.p.b import y", "p.b": ""}, False),
        ({"a": "from anabranch.b import x", "b": "def f():\n    from anabranch import a"}, True),
        ({"a": "from anabranch.b import x", "b": "if TYPE_CHECKING:\n    from anabranch import a"}, True),
        ({"a": "from anabranch.b import x", "b": "import a"}, False),
    ],
)
def test_the_guard_sees_circles(sources: dict[str, str], found: bool) -> None:
    assert bool(circle({f"anabranch.{module}": source for module, source in sources.items()})) == found


def comparisons(source: str, name: str) -> Iterator[tuple[int, str]]:
    """Lines in which a variable, field or key of this name is compared; asking for it in a named table is none."""

    def is_name(node: ast.AST) -> bool:
        return any(name in (getattr(part, field, None) for field in ("id", "attr", "value")) for part in ast.walk(node))

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left, [ast.In() | ast.NotIn()], [ast.Name() | ast.Attribute()]):
                continue
            case ast.Compare(left, _, others) if any(map(is_name, (left, *others))):
                yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Attribute(value, "startswith" | "endswith")) if is_name(value):
                yield node.lineno, ast.unparse(node)
            case ast.Match(subject) if is_name(subject):
                yield node.lineno, f"match {ast.unparse(subject)}"


def compared(name: str, sources: Iterable[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in sources
        for number, line in comparisons(path.read_text(), name)
    ]


def test_families_are_told_apart_in_models_only() -> None:
    elsewhere = (path for path in SOURCES if room(module_name(path)) != "models")
    wrong = compared("model_type", elsewhere)
    assert not wrong, "what differs between families belongs in a field of ModelConfig"


def test_the_moe_layer_knows_no_provider() -> None:
    wrong = compared("provider", (PACKAGE / "moe").rglob("*.py"))
    assert not wrong, "ask the op or the kernel for what it can do, not for its name"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if config.model_type == 'llama': pass", True),
        ("x = 'llama' != config['model_type']", True),
        ("config.model_type in ('llama', 'qwen3')", True),
        ("config.get('model_type').startswith('gemma4')", True),
        ("FAMILIES[config.model_type] is GEMMA4", True),
        ("match config.model_type:\n    case 'llama': pass", True),
        ("if config.model_type not in FAMILIES: pass", False),
        ("print(f'a {config.model_type} model', FAMILIES[config.model_type])", False),
    ],
)
def test_the_guard_sees_comparisons(source: str, found: bool) -> None:
    assert bool(list(comparisons(source, "model_type"))) == found


def test_hardware_is_named_only_where_it_lives() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        if room(module_name(path)) not in ("platforms", "kernels")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if HARDWARE.search(line)
    ]
    assert not wrong, "ask the platform instead"
    assert HARDWARE.search("if x.is_cuda:") and HARDWARE.search("torch.cuda.Stream()")
    assert not HARDWARE.search("is_cudagraph")


def test_every_file_says_what_it_is_by_its_name() -> None:
    files = [path.relative_to(ROOT).with_suffix("") for path in (*SOURCES, *(ROOT / "tests").rglob("*.py"))]
    assert not [path for path in files if NAMELESS & {part.removeprefix("test_") for part in path.parts}]


def test_files_stay_small() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    for name, number in lines.items():
        if YARDSTICK < number <= LIMIT:
            warnings.warn(f"{name} has {number} lines; {YARDSTICK} is enough", stacklevel=1)
    assert not {name: number for name, number in lines.items() if number > LIMIT}


def test_the_package_stays_small() -> None:
    lines = dict.fromkeys(ORDER, 0)
    for path in SOURCES:
        lines[room(module_name(path))] += len(path.read_text().splitlines())
    core, package = sum(lines[name] for name in CORE), sum(lines.values())
    assert core <= CORE_LINES, f"{core} lines in {', '.join(CORE)}"
    assert package <= PACKAGE_LINES, f"{package} lines in the package: {lines}"


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_pages_give_the_lines_of_the_core_that_are_held(page: str) -> None:
    (figure,) = re.findall(r"under ([\d,]+) lines", (ROOT / page).read_text())
    assert 0 < int(figure.replace(",", "")) - CORE_LINES <= 100, f"{figure} lines, and the ceiling is {CORE_LINES:,}"


def test_tests_mirror_the_rooms() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()}


def test_planning_needs_no_torch() -> None:
    code = f"import sys, {', '.join(f'anabranch.{module}' for module in WITHOUT_TORCH)}; "
    code += "anabranch.models.family.known(); print(*sys.modules)"  # every family's file is imported
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {code}", str(PACKAGE.parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert "anabranch.models.families.gemma4" in modules
    assert "torch" not in modules
