"""Grammars that would kill, starve or fill the process that compiles them are tried out where they can do no harm."""

import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")

from anabranch.sampling_params import Grammar
from anabranch.text.grammar import GrammarCompiler
from anabranch.text.grammar_process import GrammarTrial, Trial, exceeded
from tests.text.test_grammar import EOS, PADDED, TOKENIZER, trial_process


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, PADDED, [EOS])
    yield compiler
    compiler.close()


def chained(wrap: Callable[[Any], Any], count: int = 900) -> str:
    """Definitions that each lead to the next."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}})


def rules(count: int) -> str:
    return "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(count)), f'r{count}: "b"'])


REFERENCES = {
    "$ref": chained(lambda inner: inner),
    "anyOf": chained(lambda inner: {"anyOf": [inner, {"type": "null"}]}),
    "items": chained(lambda inner: {"type": "array", "items": inner}),
    "allOf": chained(lambda inner: {"allOf": [inner, {"type": ["object", "string"]}]}),
    "properties": chained(lambda inner: {"type": "object", "properties": {"a": inner}}),
}
DEEP = {name: Grammar(json_schema=schema) for name, schema in REFERENCES.items()} | {
    "rules": Grammar(lark=rules(3000)),
    "a schema in Lark": Grammar(lark=f"start: %json {REFERENCES['$ref']}"),
    "brackets": Grammar(json_schema='{"items": ' * 101 + "{}" + "}" * 101),
    "brackets in a value": Grammar(json_schema='{"const": ' + "[" * 5000 + "]" * 5000 + "}"),
    "brackets in Lark": Grammar(lark='start: %json {"const": ' + "[" * 5000 + "]" * 5000 + "}"),
}


def too_complex(seed: int) -> Grammar:
    patterns = [{"type": "string", "pattern": f".*[a-z]{{{i % 7}}}x{i}y{seed}.*"} for i in range(200)]
    return Grammar(json_schema=json.dumps({"allOf": patterns}))


@pytest.mark.parametrize("case", DEEP)
def test_depth_is_refused(case: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=r"^grammar: .*nested too deeply"):
        compiler.compile(DEEP[case])


@pytest.mark.parametrize("wrap", ["$ref", "anyOf", "items", "properties"])
def test_long_chains_that_people_may_have_are_compiled(wrap: str, compiler: GrammarCompiler) -> None:
    count = 100
    cut = {name: value for name, value in json.loads(REFERENCES[wrap])["$defs"].items() if int(name[1:]) < count}
    schema = {"$ref": "#/$defs/d0", "$defs": {**cut, f"d{count}": {"type": "string"}}}
    compiler.compile(Grammar(json_schema=json.dumps(schema)))
    compiler.compile(Grammar(lark=rules(800)))


def trial(text: str, *, kind: str = "choice", seconds: float = 2.0, memory: int = 256 << 20) -> Trial:
    """A choice's text is taken as it is: nothing of ours checks it."""
    return Trial(kind=kind, text=text, open_objects=False, seconds=seconds, wall_seconds=60, memory=memory)


def test_a_trial_dies_of_its_limits_alone() -> None:
    trials = GrammarTrial(TOKENIZER.to_str(), PADDED, [EOS])
    try:
        hungry = "start: A\nA: " + " | ".join(f'"{i:06}"' for i in range(60_000))
        slow = too_complex(0).json_schema
        assert slow is not None
        for one, died_of, reason in (
            (trial(rules(30_000)), (signal.SIGSEGV,), "is nested too deeply"),
            (trial(hungry, memory=4 << 20), (signal.SIGABRT,), "more than 4 MiB of memory"),
            (trial(slow, kind="json_schema", seconds=0.2), (signal.SIGPROF,), "not compiled within 0.2 seconds"),
        ):
            outcome = trials.run(one)
            assert outcome["signal"] in died_of and reason in exceeded(one, outcome), outcome
            assert trials.run(trial('start: "a"')) | {"source": "", "memory": 0} == {
                "source": "",
                "error": None,
                "signal": 0,
                "memory": 0,
            }
    finally:
        trials.close()


def test_good_grammars_do_not_wait_behind_bad_ones(compiler: GrammarCompiler) -> None:
    compiler.compile(Grammar(regex="warm"))
    memory = psutil.Process().memory_info().rss

    def timed(grammar: Grammar) -> tuple[str, float]:
        try:
            compiler.compile(grammar)
        except ValueError as error:
            return str(error), time.monotonic()
        return "", time.monotonic()

    with ThreadPoolExecutor(16) as pool:
        bad = [pool.submit(timed, too_complex(i)) for i in range(1, 5)]
        time.sleep(0.05)
        good = [pool.submit(timed, Grammar(regex=f"good{i}")) for i in range(12)]
        last_good = max(future.result()[1] for future in good)
        assert [future.result()[0] for future in good] == [""] * 12
        first_bad = min(future.result()[1] for future in bad)
        assert all("too complex: not compiled within 2 seconds" in future.result()[0] for future in bad)
    assert last_good < first_bad
    assert trial_process(compiler).children() == []  # nothing runs on
    assert psutil.Process().memory_info().rss - memory < 50 << 20


def test_the_process_may_die(compiler: GrammarCompiler) -> None:
    compiler.compile(Grammar(regex="before"))
    process = trial_process(compiler)
    process.kill()
    process.wait(10)
    compiler.compile(Grammar(regex="after"))
    assert trial_process(compiler).pid != process.pid
    files = psutil.Process().num_fds()
    compiler.compile(Grammar(regex="and again"))
    assert psutil.Process().num_fds() == files


def test_the_process_ends_with_its_compiler() -> None:
    gc.collect()
    files, known = psutil.Process().num_fds(), set(psutil.Process().children(recursive=True))
    closed, forgotten = (GrammarCompiler(TOKENIZER, PADDED, [EOS]) for _ in range(2))
    forgotten.compile(Grammar(regex="a"))
    assert len(set(psutil.Process().children()) - known) == 2
    closed.close()
    closed.close()
    with pytest.raises(ValueError, match="^grammar: the engine is being closed"):
        closed.compile(Grammar(regex="a"))
    del forgotten
    gc.collect()
    assert set(psutil.Process().children(recursive=True)) == known and psutil.Process().num_fds() == files


ENGINE = """
import json, sys
from anabranch.text.grammar_process import GrammarTrial
tokenizer, vocab_size, eos, *trials = json.load(sys.stdin)
process = GrammarTrial(tokenizer, vocab_size, [eos])
for trial in trials:
    print(process._running().process.pid, flush=True)
    process.run(trial)
"""


def test_the_process_ends_with_its_engine() -> None:
    """However that ends; and with it what is being compiled."""
    slow = trial(str(too_complex(9).json_schema), kind="json_schema", seconds=60)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with engine:
        assert engine.stdin is not None and engine.stdout is not None
        json.dump([TOKENIZER.to_str(), PADDED, EOS, trial('start: "a"'), slow], engine.stdin)
        engine.stdin.close()
        process = psutil.Process(int(engine.stdout.readline()))
        engine.stdout.readline()
        end = time.monotonic() + 10
        while not (running := process.children()):
            assert time.monotonic() < end
            time.sleep(0.01)
        engine.kill()
    gone, left = psutil.wait_procs([process, *running], timeout=10)
    assert not left
