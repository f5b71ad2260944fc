"""Many benchmarks one after another on one machine, with nobody watching.

    python benchmarks/in_one_go.py OUT documents                  a group of STEPS
    python benchmarks/in_one_go.py OUT documents --only modes_16 start --minutes 20
    python benchmarks/in_one_go.py --list

Each step is a process of its own with a time limit. OUT gets its output (NAME.log) and its figures (NAME.json), and
steps.json says after each step how it ended. What has ended well is not run again, so a run that was cut short goes on.
Steps that would not end within --minutes are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from anabranch.bench.records import commit


class Step(NamedTuple):
    name: str
    seconds: int
    """The most that it may take."""
    command: str
    """{python}, {json}: this interpreter, the file for its figures."""


def offline(model: str, options: str) -> str:
    return f"{{python}} -m anabranch bench offline {model} --load-format dummy {options} --json {{json}}"


def loops(model: str, options: str) -> str:
    return f"{{python}} benchmarks/closed_loops.py {model} --vary {options} --json {{json}}"


PARTS = "--only ttft,decode,throughput --batches 1"
MODES = "graphs full pieces compiled decode --loops"
STEPS = {
    "documents": [  # the figures of the documents that the project began with
        *(
            Step(f"step_{n}", 60, "{python} -m anabranch bench step qwen3-30b-a3b --load-format dummy --json {json} "
                 f"--batch {n}")
            for n in (1, 4, 16, 64, 256)
        ),
        # After others, so that what it reads from disk has been read before: empty are the caches of kernels.
        Step("start", 90, offline("qwen3-30b-a3b", "--only startup")),
        Step("router", 120, offline("gemma4-26b-a4b", PARTS)),
        Step("no_router", 120, "env ANABRANCH_KERNELS=route=reference " + offline("gemma4-26b-a4b", PARTS)),
        Step("router_serving", 150,
             loops("gemma4-26b-a4b", 'ANABRANCH_KERNELS "" route=reference --loops --rates 16')),
        Step("router_alone", 200,
             "{python} -m anabranch bench ops route --compile --models gemma4-26b-a4b --json {json}"),
        Step("shared_qwen1.5", 200, loops("qwen1.5-moe-a2.7b", "shared-expert stream inline")),
        Step("shared_gemma4", 200, loops("gemma4-26b-a4b", "shared-expert stream inline")),
        *(
            Step(f"prompts_{graphs}", 100,
                 f"{{python}} benchmarks/prompt_modes.py qwen1.5-moe-a2.7b {graphs} --json {{json}}")
            for graphs in ("full", "pieces", "compiled", "none")
        ),
        Step("modes_16", 300, loops("qwen1.5-moe-a2.7b", f"{MODES} --rates 16")),
        Step("modes_4", 700, loops("qwen1.5-moe-a2.7b", f"{MODES} --rates 4")),
    ],
    "answers": [  # why ours are not vLLM's, which are kept: checkpoints are the same on every H200
        step
        for name in ("int4", "fp8")
        for step in (
            Step(f"checkpoint_{name}", 90, "{python} benchmarks/make_checkpoint.py "
                 f"src/anabranch/bench/configs/qwen3-30b-a3b /dev/shm/{name} --quantization {name}"),
            Step(f"answers_{name}", 200, f"{{python}} benchmarks/compare_answers.py /dev/shm/{name} "
                 f"benchmarks/results/answers_vllm-0.26.0_qwen3-30b-a3b_{name}.json --json {{json}}"),
        )
    ],
    "hybrid": [
        Step("delta_nets", 90, "{python} -m anabranch bench ops gdn_decode gdn_prefill --json {json}"),
        *(
            Step(name, 90, f"{{python}} benchmarks/prefix_reuse.py qwen3.6-35b-a3b {option} --json {{json}}")
            for name, option in (("prefix", "--prefix-cache"), ("no_prefix", "--no-prefix-cache"))
        ),
        Step("offline", 200, offline("qwen3.6-35b-a3b", "")),
    ],
    "quantised": [
        Step("cache_fp8", 300,
             loops("qwen3-30b-a3b", "kv-cache-dtype auto fp8_e4m3 --input 8192 --loops 1 16 64 --rounds 2")),
        Step("experts_tiles", 120, "{python} benchmarks/quantized_experts.py --tiles --tokens 8 16 64 --json {json} "
             "--models gpt-oss-20b qwen3-30b-a3b-int4"),
        Step("linear_tiles", 90, "{python} benchmarks/linear_tiles.py --tokens 32 96 128 --json {json}"),
        Step("decode_gpt_oss", 90, offline("gpt-oss-20b", "--only decode")),
        Step("decode_int4", 90, offline("qwen3-30b-a3b", "--only decode --quantization int4")),
        *(
            Step(f"step_gpt_oss_{n}", 60, "{python} -m anabranch bench step gpt-oss-20b --load-format dummy "
                 f"--batch {n} --json {{json}}")
            for n in (16, 64, 256)
        ),
        *(
            Step(f"tune_{name}", 240,
                 f"{{python}} -m anabranch tune qwen3-30b-a3b --quantization {name} --out {{json}}")
            for name in ("int4", "fp8")
        ),
    ],
}  # fmt: skip


def run(step: Step, out: Path) -> str:
    """How it ended: a code, or `too long`."""
    names = {"python": shlex.quote(sys.executable), "json": str(out / f"{step.name}.json")}
    source = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))}
    with open(out / f"{step.name}.log", "w") as log:
        process = subprocess.Popen(
            shlex.split(step.command.format(**names)),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # with what it starts, it is ended as one
        )
        try:
            return str(process.wait(step.seconds))
        except subprocess.TimeoutExpired:
            return "too long"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("group", nargs="?", choices=STEPS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="steps of the group")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="for all of them")
    parser.add_argument("--list", action="store_true", help="print the steps, run nothing")
    options = parser.parse_args()
    if options.list or options.out is None or options.group is None:
        for group, steps in STEPS.items():
            print(f"{group}: at most {sum(step.seconds for step in steps) // 60 + 1} minutes")
            print("".join(f"  {step.name:20} {step.seconds:4} s  {step.command}\n" for step in steps))
        return
    steps = [step for step in STEPS[options.group] if options.only is None or step.name in options.only]
    if unknown := set(options.only or ()) - {step.name for step in steps}:
        parser.error(f"--only: no step of {options.group} is called {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.out / "steps.json"
    ended = json.loads(report.read_text())["steps"] if report.exists() else {}
    began = time.monotonic()
    for step in steps:
        if ended.get(step.name, {}).get("ended") == "0":
            continue
        left = 60 * options.minutes - (time.monotonic() - began)
        if step.seconds > left:
            print(f"{step.name:20} left out: {step.seconds} s, and {left:.0f} are left", flush=True)
            continue
        start = time.monotonic()
        how = run(step, options.out)
        ended[step.name] = {"ended": how, "seconds": round(time.monotonic() - start, 1), "command": step.command}
        report.write_text(json.dumps({"commit": commit(), "steps": ended}, indent=1) + "\n")
        print(f"{step.name:20} {how:>8} {ended[step.name]['seconds']:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
