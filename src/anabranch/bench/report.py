"""Show result files, ours and those of other engines, as one table per model: figures, ratios, targets.

    anabranch bench report benchmarks/*/*.json --plot decode.svg

Files are written by `anabranch bench offline` or have the same keys. The ratio says how many times better our last file
is than the best of the others; ✓ marks a target that is reached. targets.json (one H200, bf16) holds the targets, the
floors and the figures that cannot be compared.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.bench.records import PLOT_NEEDS, TARGETS, plot_file

AIM_STYLES = {"floor": ".:", "target": ".--", "moonshot": ".-."}
"""The aims in targets.json, and the line each is drawn with."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: a figure that engines are compared by."""

    label: str
    path: str
    """Keys in a result file, joined with dots."""
    more_is_better: bool = False
    digits: int = 2


@dataclass(frozen=True, slots=True)
class ResultFile:
    values: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return bool(self.values["engine"] == "anabranch")

    @property
    def title(self) -> str:
        commit = f" ({self.values['commit']})" if self.is_ours and "commit" in self.values else ""
        shrink = f" SHRUNK {self.values['shrink']}×" if "shrink" in self.values else ""
        kept = self.values.get("quantization", "none")
        quantized = "" if kept == "none" else f" {kept}"
        return f"{self.values['engine']} {self.values.get('version', '')}{commit}{quantized}{shrink}".strip()

    def get(self, path: str) -> float | None:
        if not path.startswith("start_"):
            return pick(self.values, path)
        warm = "" if path == "start_s" else "_warm"
        imported, started = (pick(self.values, f"{name}{warm}_s") for name in ("import", "startup"))
        return None if imported is None or started is None else imported + started


def pick(values: dict[str, Any], path: str) -> float | None:
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def figures_in(results: list[ResultFile]) -> list[Figure]:
    """The figures that at least one of the files has."""

    def sizes(part: str) -> list[str]:
        return sorted({size for result in results for size in result.values.get(part, {})}, key=int)

    figures = [Figure(f"decode, batch {size} (ms)", f"decode_ms.{size}") for size in sizes("decode_ms")]
    figures += [Figure(f"TTFT, {int(size):,} tokens (ms)", f"ttft_ms.{size}", digits=1) for size in sizes("ttft_ms")]
    keys = {key for result in results for key in result.values if key.startswith("thr_")}
    for length, tokens in sorted((tuple(map(int, key.split("_")[1:])) for key in keys), reverse=True):
        what, kind = ("total", "total_tok_s") if length > tokens else ("output", "out_tok_s")
        label = f"{length} in, {tokens} out, {what} tok/s"
        figures.append(Figure(label, f"thr_{length}_{tokens}.{kind}", more_is_better=True, digits=0))
    figures.append(Figure("import + start-up (s)", "start_s", digits=1))
    figures.append(Figure("the same, caches warm (s)", "start_warm_s", digits=1))
    return [figure for figure in figures if any(result.get(figure.path) is not None for result in results)]


def table(model: str, results: list[ResultFile]) -> str:
    """One model's table in Markdown."""
    aims = TARGETS.get(model, {})
    known = [name for name in AIM_STYLES if name in aims]
    ours = [result for result in results if result.is_ours and "shrink" not in result.values]
    others = [result for result in results if not result.is_ours]
    head = [model, *(result.title for result in results), *(["ratio"] if ours and others else []), *known]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for figure in figures_in(results):
        cells = [figure.label]
        comparable = figure.path not in aims.get("not_comparable", ())
        for result in results:
            value = result.get(figure.path)
            mark = "" if comparable or result.is_ours else " ¹"
            cells.append("" if value is None else f"{value:,.{figure.digits}f}{mark}")
        mine = ours[-1].get(figure.path) if ours else None
        if ours and others:
            cells.append(_ratio(figure, mine, others if comparable else []))
        for name in known:
            cells.append(_aim(figure, pick(aims[name], figure.path), mine, judged=name != "floor"))
        lines.append("| " + " | ".join(cells) + " |")
    if aims.get("not_comparable") and others:
        lines += ["", "¹ with skewed routing, from dummy weights: not compared"]
    return "\n".join(lines)


def _ratio(figure: Figure, mine: float | None, others: list[ResultFile]) -> str:
    theirs = [value for result in others if (value := result.get(figure.path)) is not None]
    if not mine or not theirs:
        return ""
    return f"{mine / max(theirs) if figure.more_is_better else min(theirs) / mine:.2f}×"


def _aim(figure: Figure, aim: float | None, mine: float | None, judged: bool) -> str:
    if aim is None:
        return ""
    bound = ("≥ " if figure.more_is_better else "≤ ") if judged else ""
    reached = judged and mine is not None and (mine >= aim if figure.more_is_better else mine <= aim)
    return f"{bound}{aim:,g}{' ✓' if reached else ''}"


def read(files: list[str]) -> dict[str, list[ResultFile]]:
    """Results by model: those of other engines first, else in the order given."""
    by_model: dict[str, list[ResultFile]] = {}
    for file in files:
        try:
            values = json.loads(Path(file).read_text())
        except ValueError as error:
            raise ValueError(f"{file}: not JSON ({error})") from None
        if not isinstance(values, dict) or not {"engine", "model"} <= set(values):
            print(f"{file}: skipped, it names no engine and model", file=sys.stderr)
            continue
        by_model.setdefault(values["model"], []).append(ResultFile(values))
    return {model: sorted(results, key=lambda result: result.is_ours) for model, results in sorted(by_model.items())}


def plot(by_model: dict[str, list[ResultFile]], file: str) -> None:
    kinds = {"decode_ms": "decode, ms a step, by batch", "ttft_ms": "time to first token, ms, by prompt"}
    with plot_file(file, len(by_model), 2, (11, 4 * len(by_model))) as axes:
        for line, (model, results) in zip(axes, by_model.items(), strict=True):
            for axis, (part, title) in zip(line, kinds.items(), strict=True):
                _plot_part(axis, TARGETS.get(model, {}), results, part)
                axis.set(title=f"{model}: {title}")


def _plot_part(axis: Any, aims: dict[str, Any], results: list[ResultFile], part: str) -> None:
    curves = [(result.title, result.values.get(part, {}), "o-" if result.is_ours else "s-") for result in results]
    curves += [(name, aims.get(name, {}).get(part, {}), style) for name, style in AIM_STYLES.items()]
    sizes: set[int] = set()
    for label, points, style in curves:
        kept = {int(x): y for x, y in points.items() if f"{part}.{x}" not in aims.get("not_comparable", ())}
        if kept:
            color = {"color": "grey"} if label in AIM_STYLES else {}
            axis.plot(sorted(kept), [kept[x] for x in sorted(kept)], style, label=label, **color)
            sizes |= set(kept)
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(sorted(sizes), [f"{size:,}" for size in sorted(sizes)], minor=False)
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(True, which="both", alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=7)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help=f"draw decode and TTFT (svg, png, pdf); {PLOT_NEEDS}")


def run(options: argparse.Namespace) -> int:
    by_model = read(options.files)
    if not by_model:
        raise ValueError("none of the files is a result of `anabranch bench offline` or has its keys")
    print("\n\n".join(table(model, results) for model, results in by_model.items()))
    if options.plot:
        plot(by_model, options.plot)
    return 0
