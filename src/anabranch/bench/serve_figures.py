"""The figures of `bench serve`, computed from requests' times: as JSON (with the keys of vLLM's serving benchmark), a
table and a plot. Knows no HTTP.
"""

import statistics
from collections import Counter
from itertools import accumulate
from typing import Any

from anabranch.bench.records import plot_file
from anabranch.bench.serve_client import Sent

PERCENTILES = (90, 95, 99)
KINDS = {
    "ttft": "first token (TTFT)",
    "tpot": "each further token (TPOT)",
    "itl": "between pieces (ITL)",
    "e2el": "whole answer (E2EL)",
}
BUSY = 0.8  # of a core: above it, the client may be what is measured


def samples(done: list[Sent]) -> dict[str, list[float]]:
    """Seconds by kind. The time per output token excludes the first token, so it needs a second one."""
    return {
        "ttft": [sent.ttft for sent in done],
        "tpot": [(sent.e2el - sent.ttft) / (sent.num_output - 1) for sent in done if sent.num_output > 1],
        "itl": [gap for sent in done for gap in sent.itls],
        "e2el": [sent.e2el for sent in done],
    }


def figures(sent: list[Sent], duration: float, cpu_seconds: float) -> dict[str, Any]:
    done = [one for one in sent if not one.error]
    num_input, num_output = sum(one.num_input for one in done), sum(one.num_output for one in done)
    begin = min((one.started for one in done), default=0.0)
    pieces = Counter(int(at - begin) for one in done for at in one.times)
    all_pieces = sum(pieces.values())
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(sent) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        # Pieces are counted; a piece may hold several tokens, so the count is scaled to the server's.
        "max_output_tokens_per_s": max(pieces.values(), default=0) * (num_output / all_pieces if all_pieces else 0),
        "max_concurrent_requests": max((running for _, running in running_over_time(done)), default=0),
    }
    for kind, seconds in samples(done).items():
        ms = [1e3 * value for value in seconds] or [0.0]
        found[f"mean_{kind}_ms"] = statistics.fmean(ms)
        found[f"median_{kind}_ms"] = statistics.median(ms)
        found[f"std_{kind}_ms"] = statistics.pstdev(ms)
        percentiles = statistics.quantiles(ms if len(ms) > 1 else 2 * ms, n=100, method="inclusive")  # as numpy's
        found |= {f"p{share}_{kind}_ms": percentiles[share - 1] for share in PERCENTILES}
    found["client_cpu_us_per_token"] = 1e6 * cpu_seconds / max(1, num_output)
    found["client_cpu_share"] = cpu_seconds / duration
    found["tokens_counted_by"] = "server" if all(one.counted for one in done) else "pieces"
    return found


def running_over_time(done: list[Sent]) -> list[tuple[float, int]]:
    """(time, number of requests running from then on) at each change."""
    changes = sorted([(one.started, 1) for one in done] + [(one.times[-1], -1) for one in done])
    running = accumulate(change for _, change in changes)
    return [(at, count) for (at, _), count in zip(changes, running, strict=True)]


def details(sent: list[Sent]) -> dict[str, Any]:
    """Each request's figures, in the order they were sent."""
    return {
        "input_lens": [one.num_input for one in sent],
        "output_lens": [one.num_output for one in sent],
        "ttfts": [one.ttft if one.times else 0.0 for one in sent],
        "itls": [one.itls for one in sent],
        "latencies": [one.e2el if one.times else 0.0 for one in sent],
        "start_times": [one.started for one in sent],
        "queue_times": [one.waited for one in sent],
        "errors": [one.error for one in sent],
    }


def table(found: dict[str, Any], sent: list[Sent]) -> str:
    lines = [
        f"requests   {found['completed']:,} answered, {found['failed']:,} failed in {found['duration']:.2f} s: "
        f"{found['request_throughput']:.2f} a second, at most {found['max_concurrent_requests']:,} at once",
        f"tokens     {found['total_input_tokens']:,} in, {found['total_output_tokens']:,} out: "
        f"{found['output_throughput']:,.1f} out a second, {found['total_token_throughput']:,.1f} in all",
        "",
    ]
    names = ["mean", "median", *(f"p{share}" for share in PERCENTILES)]
    rows = {"ms": names} | {
        label: [f"{found[f'{name}_{kind}_ms']:,.2f}" for name in names] for kind, label in KINDS.items()
    }
    widths = [max(10, 2 + max(map(len, column))) for column in zip(*rows.values(), strict=True)]
    for label, cells in rows.items():
        lines.append(f"{label:<26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    share = found["client_cpu_share"]
    lines += ["", f"client     {found['client_cpu_us_per_token']:.0f} µs of CPU a token, {share:.0%} of a core"]
    if share > BUSY:
        lines.append("           the client is busy all the time: its own delays are in these figures")
    if found["completed"] and found["tokens_counted_by"] == "pieces":
        lines.append("           the server sends no usage: a piece of text is taken for a token")
    for error, count in Counter(one.error for one in sent if one.error).most_common(5):
        lines.append(f"failed     {count:,} × {error}")
    return "\n".join(lines)


def plot(sent: list[Sent], title: str, file: str) -> None:
    done = [one for one in sent if not one.error]
    begin = min(one.started for one in done)
    found = samples(done)
    with plot_file(file, 2, 2, (11, 7)) as axes:
        for axis, kinds in ((axes[0, 0], ("ttft", "e2el")), (axes[0, 1], ("tpot", "itl"))):
            for kind in kinds:
                ordered = sorted(1e3 * value for value in found[kind])
                shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
                axis.step(ordered, shares, where="post", label=KINDS[kind])
            axis.set(xlabel="ms", ylabel="% of them are at most", xscale="log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        pieces = Counter(int(at - begin) for one in done for at in one.times)
        seconds = range(max(pieces) + 1)
        axes[1, 0].step(seconds, [pieces[second] for second in seconds], where="post", label="pieces per second")
        at, running = zip(*running_over_time(done), strict=True)
        axes[1, 1].step([moment - begin for moment in at], running, where="post", label="requests running")
        for axis in axes[1]:
            axis.set(xlabel="s", ylim=(0, None))
        for axis in axes.flat:
            axis.grid(True, alpha=0.3)
            axis.legend(fontsize=8)
        axes[0, 0].figure.suptitle(title)
