"""The house rules that a machine can check: who may import whom, where hardware is named, names and sizes of files."""

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
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
    "layers",
    "moe",
    "models",
    "text",
    "loader",
    "compile",
    "engine",
    "mlx",
    "llm",
    "server",
    "bench",
    "conformance",
    "cli",
)
HARDWARE = re.compile(r"\b(torch\.(cuda|npu|xpu|mps)|torch_npu|is_(cuda|npu|xpu))\b")
NAMELESS = {"utils", "util", "common", "misc", "helpers"}
WITHOUT_TORCH = ("models.config", "loader.checkpoint", "loader.locate", "engine.plan")
YARDSTICK, LIMIT = 600, 800
"""Lines of a source file: above the first a warning, above the second a failure."""


def room(module: str) -> str:
    """`anabranch.ops.route` → ops; the files beside the rooms → root, but for the front door."""
    name = module.split(".")[1] if "." in module else "root"
    return name if name in ORDER else "root"


def imports(source: str, module: str) -> Iterator[str]:
    """Our modules that a module imports when it runs, also inside functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
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
    # The package's own __init__ is the door sign: it may name what it offers.
    modules = {module_name(path): path for path in SOURCES if path != PACKAGE / "__init__.py"}
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
        ("anabranch.ops.op", "if TYPE_CHECKING:\n    from anabranch.cli import main", True),
        ("anabranch.ops.op", "if TYPE_CHECKING:\n    pass\nelse:\n    from anabranch.cli import main", False),
        ("anabranch.cli.main", "from anabranch import __version__, ops, platforms", True),
        ("anabranch.config", "from anabranch import ops", False),
    ],
)
def test_the_guard_sees(module: str, source: str, allowed: bool) -> None:
    assert (upward(source, module) == []) == allowed


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
