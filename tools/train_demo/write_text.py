"""Step 1: a teacher model, run by Anabranch itself, writes little stories and answers for the demo model to learn from.

    python -m tools.train_demo.write_text TEACHER OUT --minutes 4

Writes OUT/text-00.jsonl.gz ... (kind, request, given words, answer; each file under 15 MB) and OUT/text.json
(throughput, what was thrown away and why). Plans are made in rounds; within a round all first parts are written, then
all second parts, and so on, each a batch of its own. Answers that loop or stray are dropped between parts, before more
time goes into them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from anabranch.llm import LLM, SamplingParams
from tools.train_demo import plans, sentences

MAX_FILE_BYTES = 14_000_000


@dataclass(slots=True)
class Draft:
    plan: plans.Plan
    answer: str = ""
    fault: str = ""


@dataclass(slots=True)
class Tally:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Inside the engine."""


class Teacher:
    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        # Spawned: a fork of a process that holds a GPU is not safe.
        self.judges = ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
        self.llm = LLM(folder, max_model_len=1024, **options)
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        # A part is one paragraph. Ids instead of stop strings: the engine then need not make text of every token.
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        self.line_ends = tuple(sorted(token for text, token in vocabulary.items() if "Ċ" in text))
        self.tally = Tally()

    def close(self) -> None:
        self.judges.shutdown()
        self.llm.close()

    def write(self, numbers: range) -> list[Draft]:
        """Drafts of these plans that no test of the text objects to.

        In two halves: while the teacher writes for one, other processes judge what it wrote for the other.
        """
        drafts = [Draft(plans.make(number)) for number in numbers]
        halves = (drafts[::2], drafts[1::2])
        judged: list[Callable[[], None]] = [lambda: None, lambda: None]
        for place in range(max(len(draft.plan.parts) for draft in drafts)):
            for half_id, half in enumerate(halves):
                judged[half_id]()
                now = [draft for draft in half if not draft.fault and place < len(draft.plan.parts)]
                for draft in now:
                    part = draft.plan.parts[place]
                    draft.answer += (part.before if place else "") + part.given
                wanting = [draft for draft in now if draft.plan.parts[place].max_sentences]
                judged[half_id] = self.write_part(wanting, place) if wanting else lambda: None
        for wait in judged:
            wait()
        self.tally.faults.update(draft.fault or "none" for draft in drafts)
        return [draft for draft in drafts if not draft.fault]

    def write_part(self, drafts: list[Draft], place: int) -> Callable[[], None]:
        """Let the teacher go on from the end of every draft; what to call for the drafts to have what it wrote."""
        prompts = [
            encoding.ids
            for encoding in self.tokenizer.encode_batch(
                [chat(draft.plan) + draft.answer for draft in drafts], add_special_tokens=False
            )
        ]
        params = [
            SamplingParams(
                temperature=draft.plan.temperature,
                top_p=0.95,
                max_tokens=12 + 16 * draft.plan.parts[place].max_sentences,  # a sentence is rarely longer
                seed=draft.plan.number * 8 + place,
                stop_token_ids=self.line_ends,
                detokenize=False,
            )
            for draft in drafts
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        self.tally.seconds += time.perf_counter() - started
        written = [output.completions[0].token_ids for output in outputs]
        self.tally.prompt_tokens += sum(map(len, prompts))
        self.tally.cached_tokens += sum(output.num_cached for output in outputs)
        self.tally.output_tokens += sum(map(len, written))
        results = self.judges.map(
            sentences.extend,
            [draft.answer for draft in drafts],
            self.tokenizer.decode_batch(written),
            [draft.plan.parts[place].max_sentences for draft in drafts],
            [[part.given for part in draft.plan.parts] for draft in drafts],
            [draft.plan.hero for draft in drafts],
            chunksize=256,
        )

        def take() -> None:
            for draft, (answer, fault) in zip(drafts, results, strict=True):
                draft.answer, draft.fault = answer, fault

        return take


def chat(plan: plans.Plan) -> str:
    """As the teacher's own template writes it, up to the beginning of the answer."""
    turns = (("system", plan.system), ("user", plan.request))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def as_row(draft: Draft) -> dict[str, Any]:
    given = [part.given for part in draft.plan.parts]
    return {"kind": draft.plan.kind, "request": draft.plan.request, "given": given, "answer": draft.answer}


def save(drafts: list[Draft], folder: Path) -> list[Path]:
    """Compressed, in files small enough to be carried about."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [(json.dumps(as_row(draft)) + "\n").encode() for draft in drafts]
    num_files = 1 + sum(map(len, lines)) // (3 * MAX_FILE_BYTES)  # such text packs four times smaller and more
    paths = [folder / f"text-{file_id:02}.jsonl.gz" for file_id in range(num_files)]

    def pack(file_id: int) -> None:
        paths[file_id].write_bytes(gzip.compress(b"".join(lines[file_id::num_files]), 9, mtime=0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pack, range(num_files)))
    return paths


def report(tally: Tally, drafts: list[Draft], total_seconds: float) -> dict[str, Any]:
    from anabranch import platforms

    seconds = max(tally.seconds, 1e-9)
    return {
        "machine": platforms.current().describe(),
        "answers": len(drafts),
        "answers_by_kind": dict(Counter(draft.plan.kind for draft in drafts)),
        "characters": sum(len(draft.answer) for draft in drafts),
        "plans_by_fault": dict(tally.faults.most_common()),
        "prompt_tokens": tally.prompt_tokens,
        "prompt_tokens_from_prefix_cache": tally.cached_tokens,
        "output_tokens": tally.output_tokens,
        "seconds_in_engine": round(tally.seconds, 2),
        "seconds_in_all": round(total_seconds, 2),
        "prompt_tokens_per_second": round(tally.prompt_tokens / seconds, 1),
        "output_tokens_per_second": round(tally.output_tokens / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="folder of SmolLM2-135M-Instruct; tools/smollm2.py writes it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="no new round is begun that would end later")
    parser.add_argument("--round", type=int, default=16384, metavar="N", help="plans in a round (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first plan (%(default)s)")
    parser.add_argument("--max-plans", type=int, default=sys.maxsize, metavar="N")
    parser.add_argument("--max-num-seqs", type=int, default=1024, metavar="N", help="answers written at once")
    options = parser.parse_args()
    started = time.perf_counter()
    teacher = Teacher(options.teacher, {"max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": 16384})
    print(f"teacher ready after {time.perf_counter() - started:.1f} s", flush=True)
    drafts: list[Draft] = []
    next_plan, last_round = options.first, 0.0
    end = options.first + min(options.max_plans, 2**40)
    while next_plan < end and time.perf_counter() - started + last_round < options.minutes * 60:
        round_started = time.perf_counter()
        numbers = range(next_plan, min(next_plan + options.round, end))
        drafts += teacher.write(numbers)
        next_plan = numbers.stop
        last_round = time.perf_counter() - round_started
        figures = report(teacher.tally, drafts, time.perf_counter() - started)
        shown = ("answers", "output_tokens", "output_tokens_per_second", "seconds_in_all")
        print(", ".join(f"{name} {figures[name]}" for name in shown), flush=True)
    if not drafts:
        raise SystemExit("error: no answer was good enough; give more --minutes or more --max-plans")
    paths = save(drafts, options.out)
    figures = report(teacher.tally, drafts, time.perf_counter() - started)
    figures |= {"first_plan": options.first, "next_plan": next_plan, "files": [path.name for path in paths]}
    (options.out / "text.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    teacher.close()


if __name__ == "__main__":
    main()
