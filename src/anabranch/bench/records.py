"""What all benchmarks share: the names of bundled configs, the source of a figure (commit, machine) and plot files."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLOT_NEEDS = "needs matplotlib: pip install 'anabranch[plot]'"
CONFIGS = Path(__file__).with_name("configs")
TARGETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("targets.json").read_text())
"""Floors, targets and figures of other engines, by the name of a bundled config."""


def bundled(model: str, load_format: str) -> str:
    """The folder of a config that comes with the package, in letters of any case; other models stay as they are."""
    folder = CONFIGS / model.lower()
    if os.sep in model or not folder.is_dir() or Path(model).is_dir():
        return model
    if load_format != "dummy":
        raise ValueError(
            f"{model} is a config without weights: add --load-format dummy, or give a folder that has some"
        )
    return str(folder)


def commit() -> str:
    """The commit of the sources, with a + if they have changed since."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "") or "unknown"


def host_machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only; ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"--plot {PLOT_NEEDS}") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def plot_file(file: str | Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes to draw on, as a rows × columns array; the file is written at the end."""
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False)
    yield axes
    figure.tight_layout()
    figure.savefig(file)
    pyplot().close(figure)
