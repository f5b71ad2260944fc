"""Run the offline workloads that engines are compared by: start, time to first token, decode at several batch sizes,
throughput; with --speculative, also what drafts gain.

CONFIG is the name of a bundled config (qwen3-30b-a3b, qwen3.6-35b-a3b, qwen1.5-moe-a2.7b, gemma4-26b-a4b; with
--load-format dummy), a folder or a hub id. Prompts are token ids, all different, uniform in [1000, 100000) from
random.Random(0); sampling is greedy and ignores end-of-text; nothing is detokenised; the prefix cache is off. TTFT: one
request, one token, median of 5 after a warm-up. Decode at batch B: prompts of 128 tokens, (best of 2 full runs − best
of 2 one-token runs) / (N − 1), N = 129 (65 from batch 128 on). Throughput: 512 requests in one call. Speculation:
decode of prompts that repeat 16 random tokens, and the share of drafts that were right; then the same by an engine
without speculation. Start: a separate process with empty caches (import_s, startup_s), then this one (import_warm_s,
startup_warm_s).

Each figure is written to the JSON file as soon as it is measured. Parts may be measured by several calls with the same
file, as long as commit, model and machine stay the same.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from anabranch import __version__
from anabranch.bench.records import bundled, commit
from anabranch.engine import plan
from anabranch.engine.progress import Line
from anabranch.kernels.compiling import compile_server
from anabranch.llm import LLM
from anabranch.loader.locate import locate
from anabranch.models.config import read_config
from anabranch.options import FLAGS, SPECULATION, add_engine_options, add_memory_fraction, at_least, engine_fields
from anabranch.sampling_params import SamplingParams
from anabranch.stages import Stages

KINDS = ("startup", "ttft", "decode", "throughput", "speculation")
SAME = ("engine", "model", "version", "commit", "load_format", "dtype", "options", "shrink")
"""Values that must be equal for two calls to share a file; so must the machine."""
CACHES = {"TRITON_CACHE_DIR": "triton", "ANABRANCH_CACHE": "anabranch", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Environment variables that name the caches of kernels and tables, and a folder for each."""
PHRASE = 16
"""Tokens that the prompts for drafts repeat."""
LARGE = 64
"""The largest batch that decodes for the longer time."""


@dataclass(frozen=True, slots=True)
class Workloads:
    lengths: tuple[int, ...] = (128, 1024, 4096, 8192)
    """Tokens of the prompts whose time to first token is measured."""
    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    decode_length: int = 128
    decode_tokens: tuple[int, ...] = (129, 65)
    """For batches up to LARGE, and for larger ones."""
    throughput: tuple[tuple[int, ...], ...] = ((512, 1024, 128), (512, 256, 256))
    """Requests, tokens in, tokens out."""
    repeats: int = 5

    def shrunk(self, by: int) -> Self:
        """Lengths, batches and counts divided by a number, to see that everything runs; not for comparisons."""

        def divide(numbers: tuple[int, ...], least: int = 1) -> tuple[int, ...]:
            return tuple(max(least, number // by) for number in numbers)

        return replace(
            self,
            lengths=tuple(dict.fromkeys(divide(self.lengths))),
            batches=tuple(dict.fromkeys(divide(self.batches))),
            decode_length=max(1, self.decode_length // by),
            decode_tokens=divide(self.decode_tokens, least=3),
            throughput=tuple(map(divide, self.throughput)),
            repeats=2,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="CONFIG")
    add_engine_options(parser, "load_format", "dtype", "expert_load_interval")
    add("--max-model-len", type=at_least(1), default=16384, metavar="N", help="tokens of context (default 16384)")
    add_memory_fraction(parser, "share of memory (default 0.85)", 0.85)
    add("--only", metavar="KINDS", help=f"some of {', '.join(KINDS)}, separated by commas")
    add("--batches", metavar="N,N", help="measure decode at these batch sizes only")
    add("--json", metavar="FILE", help="write the figures to a file, after each one")
    add("--shrink", type=int, default=1, metavar="N", help="workloads N times smaller, to see that everything runs")
    add("--max-num-seqs", type=at_least(1), default=512, metavar="N", help="requests that run at once (default 512)")
    add("--max-num-batched-tokens", type=at_least(1), default=0, metavar="N", help="tokens of a step (default auto)")
    add_engine_options(parser, *FLAGS, *SPECULATION)
    parser.set_defaults(tune="off")  # figures are taken with the tables that are there


class Result:
    """The content of the JSON file."""

    def __init__(self, about: dict[str, Any], file: str | None) -> None:
        self.file = Path(file) if file else None
        earlier: dict[str, Any] = {}
        if self.file is not None and self.file.exists():
            try:
                earlier = dict(json.loads(self.file.read_text()))
            except (ValueError, TypeError):
                raise ValueError(f"--json {self.file}: holds something else; give another file, or remove it") from None
            for key in SAME:
                self._must_agree(key, earlier.get(key), about.get(key))
        self.values: dict[str, Any] = {**earlier, **about}

    def _must_agree(self, key: str, before: object, now: object) -> None:
        if before != now:
            raise ValueError(
                f"--json {self.file}: its figures are of {key} {before!r}, these are of {now!r}; "
                "give another file, or remove it"
            )

    def set_machine(self, machine: str) -> None:
        self._must_agree("machine", self.values.get("machine", machine), machine)
        self.values["machine"] = machine

    def save(self) -> None:
        """Replace the file in one operation, so that it is complete whenever the process ends."""
        if self.file is not None:
            part = self.file.with_name(self.file.name + ".part")
            part.write_text(json.dumps(self.values, indent=1) + "\n")
            part.replace(self.file)


class Bench:
    def __init__(self, llm: LLM, workloads: Workloads, result: Result) -> None:
        self.llm, self.workloads, self.result = llm, workloads, result
        self.random = random.Random(0)

    def measure(self, kinds: list[str]) -> None:
        """Print each figure and save the file as soon as it is measured."""
        workloads, longest = self.workloads, self.llm.engine.config.max_model_len - 8
        parts: dict[str, dict[str, Callable[[], str]]] = {
            "ttft": {f"ttft {n}": partial(self.ttft, n) for n in workloads.lengths if n <= longest},
            "decode": {f"decode {n}": partial(self.decode, n) for n in workloads.batches},
            "speculation": {f"speculation {n}": partial(self.speculation, n) for n in workloads.batches},
            "without drafts": {f"no drafts {n}": partial(self.without_drafts, n) for n in workloads.batches},
            "throughput": {f"thr_{i}_{o}": partial(self.throughput, n, i, o) for n, i, o in workloads.throughput},
        }
        figures = [figure for kind in kinds for figure in parts[kind].items()]
        line = Line("measuring")
        for number, (name, measure) in enumerate(figures):
            line.draw(number / len(figures), name)
            shown = measure()
            line.clear()
            print(f"{name:>16}  {shown}", flush=True)
            self.result.save()

    def prompts(self, count: int, length: int, phrase: int) -> list[list[int]]:
        vocabulary = self.llm.engine.model.vocab_size
        low, high = (1000, 100_000) if vocabulary >= 100_000 else (0, vocabulary)
        phrase = phrase or length
        phrases = [[self.random.randrange(low, high) for _ in range(phrase)] for _ in range(count)]
        return [(tokens * -(-length // phrase))[:length] for tokens in phrases]

    def seconds(self, count: int, length: int, num_tokens: int, phrase: int = 0) -> float:
        """`phrase`: so many tokens, which each prompt repeats; 0: no repetition."""
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = self.prompts(count, length, phrase)
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        assert all(len(output.token_ids) == num_tokens for output in outputs)
        return seconds

    def warm_up(self) -> None:
        longest = self.llm.engine.config.max_model_len - 8
        self.seconds(min(8, self.workloads.batches[-1]), self.workloads.decode_length, 16)
        self.seconds(1, min(1024, longest, max(self.workloads.lengths)), 4)

    def ttft(self, length: int) -> str:
        self.seconds(1, length, 1)
        ms = 1e3 * statistics.median(self.seconds(1, length, 1) for _ in range(self.workloads.repeats))
        self.result.values.setdefault("ttft_ms", {})[str(length)] = ms
        return f"{ms:.2f} ms"

    def decode(self, batch: int) -> str:
        ms = self.decode_ms(batch)
        self.result.values.setdefault("decode_ms", {})[str(batch)] = ms
        return f"{ms:.3f} ms"

    def decode_ms(self, batch: int, phrase: int = 0) -> float:
        length, num_tokens = self.workloads.decode_length, self.workloads.decode_tokens[batch > LARGE]
        self.seconds(batch, length, 2, phrase)
        one = min(self.seconds(batch, length, 1, phrase) for _ in range(2))
        full = min(self.seconds(batch, length, num_tokens, phrase) for _ in range(2))
        return 1e3 * (full - one) / (num_tokens - 1)

    def speculation(self, batch: int) -> str:
        metrics = self.llm.engine.metrics
        drafted, accepted = metrics.draft_tokens, metrics.accepted_tokens
        self.random.seed(0)
        ms = self.decode_ms(batch, PHRASE)
        drafted, accepted = metrics.draft_tokens - drafted, metrics.accepted_tokens - accepted
        figures = {"ms": ms, "draft_tokens": drafted, "acceptance": accepted / max(1, drafted)}
        self.result.values.setdefault("speculation", {})[str(batch)] = figures
        return f"{ms:.3f} ms a token, {figures['acceptance']:.0%} of {drafted} drafts were right"

    def without_drafts(self, batch: int) -> str:
        """The same in an engine without speculation: one with a draft layer always computes it."""
        self.random.seed(0)
        ms, figures = self.decode_ms(batch, PHRASE), self.result.values["speculation"][str(batch)]
        figures |= {"ms_without": ms, "speed_up": ms / figures["ms"]}
        return f"{ms:.3f} ms a token: drafts make it {figures['speed_up']:.2f} x as fast"

    def throughput(self, count: int, length: int, num_tokens: int) -> str:
        seconds = self.seconds(count, length, num_tokens)
        total, out = count * (length + num_tokens) / seconds, count * num_tokens / seconds
        figures = {"s": seconds, "out_tok_s": out, "total_tok_s": total}
        self.result.values[f"thr_{length}_{num_tokens}"] = figures
        return f"{total:.0f} tok/s, {out:.0f} out"


def run(options: argparse.Namespace) -> int:
    usual = KINDS if options.speculative != "none" else KINDS[:-1]
    kinds = [kind.strip() for kind in options.only.split(",")] if options.only else list(usual)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--only: {kind!r} is none of {', '.join(KINDS)}")
        if kind not in usual:
            raise ValueError(f"--only {kind}: needs --speculative")
    workloads = chosen_workloads(options)
    folder = bundled(options.model, options.load_format)
    locate(folder, weights=options.load_format != "dummy")  # a download is no part of the start
    stages = Stages.of_process()
    result = Result(about(options, folder), options.json)
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as caches:
        if "startup" in kinds:
            os.environ.update({name: os.path.join(caches, place) for name, place in CACHES.items()})
            began = time.perf_counter()
            first = first_start(options, folder)
            stages.skip(time.perf_counter() - began)
            result.values |= first
            print(f"{'first start':>16}  {first['import_s']:.1f} + {first['startup_s']:.1f} s", flush=True)
            result.save()
        llm, start = open_llm(options, folder, stages)
        result.set_machine(llm.engine.runner.platform.describe())
        quantization = plan.quantized(llm.engine.model, options.quantization).quantization
        result.values["quantization"] = quantization
        print(f"{'model':>16}  {Path(folder).name}, {llm.engine.config.dtype}, quantization {quantization}", flush=True)
        result.values["max_num_batched_tokens"] = llm.engine.config.max_num_batched_tokens
        print(f"{'start':>16}  {start['import_s']:.1f} + {start['startup_s']:.1f} s", flush=True)
        if "startup" in kinds:
            warm = {"import_s": "import_warm_s", "startup_s": "startup_warm_s", "stages": "stages_warm"}
            result.values |= {warm[name]: figure for name, figure in start.items()}
        elif "startup_warm_s" not in result.values:  # with the caches as they are; does not replace a measured start
            result.values |= start
        result.save()
        measure(llm, workloads, result, [kind for kind in kinds if kind != "startup"])
        if "speculation" in kinds:
            plain = argparse.Namespace(**vars(options) | {"speculative": "none"})
            measure(open_llm(plain, folder, Stages.of_process())[0], workloads, result, ["without drafts"])
    return 0


def measure(llm: LLM, workloads: Workloads, result: Result, kinds: list[str]) -> None:
    bench = Bench(llm, workloads, result)
    if kinds:
        bench.warm_up()
    bench.measure(kinds)
    llm.close()


def open_llm(options: argparse.Namespace, folder: str, stages: Stages) -> tuple[LLM, dict[str, Any]]:
    """An engine for the workloads, and its start: seconds of importing (from the start of the process) and the rest."""
    compile_server.start_early()
    with stages("import"):
        import anabranch.engine.engine  # noqa: F401  and torch, the bulk of it
    limit = read_config(folder).max_position if Path(folder).is_dir() else options.max_model_len
    fields = engine_fields(options) | engine_options(options) | {"max_model_len": min(options.max_model_len, limit)}
    fields |= {"memory_fraction": options.memory_fraction, "prefix_cache": False}
    llm = LLM(folder, show_progress=False, stages=stages, **fields)
    assert stages.ready is not None
    imported = stages.seconds["import"]
    return llm, {"import_s": imported, "startup_s": stages.ready - imported, "stages": stages.as_dict()}


FIRST = """
import argparse, json, sys
from anabranch.bench import offline
from anabranch.stages import Stages
try:
    llm, start = offline.open_llm(argparse.Namespace(**json.loads(sys.argv[1])), sys.argv[2], Stages.of_process())
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
else:
    print(json.dumps(start), flush=True)
    llm.close()
"""


def first_start(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Import and start in a new process with empty caches, which ends before this one uses the device."""
    command = [sys.executable, "-c", FIRST, json.dumps(vars(options)), folder]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise ValueError(f"the first start failed with exit code {done.returncode}; its messages are above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "refused" in found:
        raise ValueError(found["refused"])
    return found


def chosen_workloads(options: argparse.Namespace) -> Workloads:
    if options.shrink < 1:
        raise ValueError(f"--shrink: at least 1, not {options.shrink}")
    workloads = Workloads() if options.shrink == 1 else Workloads().shrunk(options.shrink)
    if options.batches:
        try:
            batches = tuple(int(batch) for batch in options.batches.split(","))
        except ValueError:
            raise ValueError(f"--batches: {options.batches!r} is no list of numbers such as 1,16,64") from None
        if min(batches) < 1:
            raise ValueError("--batches: at least 1")
        workloads = replace(workloads, batches=batches)
    return workloads


def about(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    versions = {}
    for name in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "engine": "anabranch",
        "model": Path(folder).name,
        "version": __version__,
        "commit": commit(),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "load_format": options.load_format,
        "dtype": options.dtype,
        "options": engine_options(options),
        **({"shrink": options.shrink} if options.shrink > 1 else {}),
    }


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that figures depend on."""
    names = ("max_num_seqs", "max_num_batched_tokens", "expert_load_interval", *FLAGS, *SPECULATION)
    return {name: getattr(options, name) for name in names}
