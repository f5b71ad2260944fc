"""Result files, ours and other engines', as one table a model: figures, ratios, targets.

    anabranch bench report benchmarks/anchors/*.json benchmarks/results/*.json --plot decode.svg

Files are those of `anabranch bench offline` or have its keys. The ratio is how many times better the last file of ours
is than the best of the others; an aim that is reached is marked ✓. Targets, floors and what cannot be compared stand in
targets.json (one H200, bf16).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "anabranch"
TARGETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("targets.json").read_text())
"""By the name of a bundled config."""
AIMS = ("floor", "target", "moonshot")
GREY = {"floor": ".:", "target": ".--", "moonshot": ".-."}
"""How aims are drawn."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure that engines are compared by."""

    label: str
    path: str
    """Keys in a result, with dots."""
    more_is_better: bool = False
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Found:
    """A result file."""

    file: Path
    values: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.values["engine"] == OURS

    @property
    def title(self) -> str:
        commit = f" ({self.values['commit']})" if self.is_ours and "commit" in self.values else ""
        shrink = f" SHRUNK {self.values['shrink']}×" if "shrink" in self.values else ""
        return f"{self.values['engine']} {self.values.get('version', '')}{commit}{shrink}".strip()

    def get(self, path: str) -> float | None:
        if path.startswith("start_"):
            return self._start("" if path == "start_s" else "_warm")
        return pick(self.values, path)

    def _start(self, kind: str) -> float | None:
        parts = [pick(self.values, f"{name}{kind}_s") for name in ("import", "startup")]
        return None if None in parts else sum(part for part in parts if part is not None)


def pick(values: dict[str, Any], path: str) -> float | None:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def rows_of(results: list[Found]) -> list[Row]:
    """What at least one of the files has, in the order of the contract."""

    def sizes(part: str) -> list[str]:
        return sorted({size for found in results for size in found.values.get(part, {})}, key=int)

    thr = sorted({key for found in results for key in found.values if key.startswith("thr_")}, key=_thr_order)
    rows = [Row(f"decode, batch {size} (ms)", f"decode_ms.{size}") for size in sizes("decode_ms")]
    rows += [Row(f"TTFT, {int(size):,} tokens (ms)", f"ttft_ms.{size}", digits=1) for size in sizes("ttft_ms")]
    for key in thr:
        length, tokens = key.removeprefix("thr_").split("_")
        prompt_heavy = int(length) > int(tokens)
        what, kind = ("total", "total_tok_s") if prompt_heavy else ("output", "out_tok_s")
        rows.append(Row(f"{length} in, {tokens} out, {what} tok/s", f"{key}.{kind}", True, 0))
    rows += [
        Row("import + start-up (s)", "start_s", digits=1),
        Row("the same, caches warm (s)", "start_warm_s", digits=1),
    ]
    return [row for row in rows if any(found.get(row.path) is not None for found in results)]


def _thr_order(key: str) -> tuple[int, ...]:
    return tuple(-int(part) for part in key.removeprefix("thr_").split("_"))


def table(model: str, results: list[Found]) -> str:
    """One model in markdown."""
    aims = TARGETS.get(model, {})
    known = [name for name in AIMS if name in aims]
    ours = [found for found in results if found.is_ours and "shrink" not in found.values]
    others = [found for found in results if not found.is_ours]
    head = [model, *(found.title for found in results), *(["ratio"] if ours and others else []), *known]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows_of(results):
        cells = [row.label]
        comparable = row.path not in aims.get("not_comparable", ())
        for found in results:
            value = found.get(row.path)
            mark = "" if comparable or found.is_ours else " ¹"
            cells.append("" if value is None else f"{value:,.{row.digits}f}{mark}")
        if ours and others:
            cells.append(_ratio(row, ours[-1], others if comparable else []))
        mine = ours[-1].get(row.path) if ours else None
        for name in known:
            cells.append(_aim(row, pick(aims[name], row.path), mine, judged=name != "floor"))
        lines.append("| " + " | ".join(cells) + " |")
    if aims.get("not_comparable") and others:
        lines += ["", "¹ with skewed routing, from dummy weights: not compared"]
    return "\n".join(lines)


def _ratio(row: Row, ours: Found, others: list[Found]) -> str:
    mine = ours.get(row.path)
    theirs = [value for found in others if (value := found.get(row.path)) is not None]
    if mine is None or not theirs or not mine:
        return ""
    best = max(theirs) if row.more_is_better else min(theirs)
    return f"{mine / best if row.more_is_better else best / mine:.2f}×"


def _aim(row: Row, aim: float | None, mine: float | None, judged: bool) -> str:
    if aim is None:
        return ""
    bound = ("≥ " if row.more_is_better else "≤ ") if judged else ""
    reached = judged and mine is not None and (mine >= aim if row.more_is_better else mine <= aim)
    return f"{bound}{aim:,g}{' ✓' if reached else ''}"


def read(files: list[str]) -> dict[str, list[Found]]:
    """Results by model, those of others first, each in the order given."""
    by_model: dict[str, list[Found]] = {}
    for name in files:
        file = Path(name)
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from None
        if not isinstance(values, dict) or not {"engine", "model"} <= set(values):
            print(f"{file}: passed over, it names no engine and model", file=sys.stderr)
            continue
        by_model.setdefault(values["model"], []).append(Found(file, values))
    return {model: sorted(found, key=lambda one: one.is_ours) for model, found in sorted(by_model.items())}


def pyplot() -> Any:
    """matplotlib, for files alone; ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'anabranch[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot(by_model: dict[str, list[Found]], file: str) -> None:
    plt = pyplot()
    kinds = {"decode_ms": "decode, ms a step, by batch", "ttft_ms": "time to first token, ms, by prompt"}
    figure, axes = plt.subplots(len(by_model), 2, figsize=(11, 4 * len(by_model)), squeeze=False)
    for line, (model, results) in zip(axes, by_model.items(), strict=True):
        for axis, (part, title) in zip(line, kinds.items(), strict=True):
            aims = TARGETS.get(model, {})
            curves = [(found.title, found.values.get(part, {}), "o-" if found.is_ours else "s-") for found in results]
            curves += [(name, aims.get(name, {}).get(part, {}), style) for name, style in GREY.items()]
            sizes: set[int] = set()
            for label, points, style in curves:
                kept = {int(x): y for x, y in points.items() if f"{part}.{x}" not in aims.get("not_comparable", ())}
                if kept:
                    color = {"color": "grey"} if label in GREY else {}
                    axis.plot(sorted(kept), [kept[x] for x in sorted(kept)], style, label=label, **color)
                    sizes |= set(kept)
            axis.set(title=f"{model}: {title}", xscale="log", yscale="log")
            axis.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)], minor=False)
            axis.set_xticks([], minor=True)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.grid(True, which="both", alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw decode and TTFT (svg, png, pdf); needs matplotlib")


def run(options: argparse.Namespace) -> int:
    by_model = read(options.files)
    if not by_model:
        raise ValueError("none of the files is a result of `anabranch bench offline` or has its keys")
    print("\n\n".join(table(model, results) for model, results in by_model.items()))
    if options.plot:
        plot(by_model, options.plot)
    return 0
