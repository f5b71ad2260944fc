"""The command line as a person meets it: in its own process, but for mistakes that are reported alike in this one."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch import kernels, ops, platforms
from anabranch.bench.records import CONFIGS
from anabranch.cli import plan
from anabranch.cli.main import COMMANDS, main, make_parser, usage
from anabranch.formats.grouped import STORED
from tests.models import tiny
from tools import tiny_model


def anabranch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anabranch.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tiny_model.write(folder)
    return folder


def test_without_arguments_it_explains_itself() -> None:
    done = anabranch()
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("usage", "generate", "plan", "doctor"))


def test_a_mistyped_command_names_the_nearest() -> None:
    done = anabranch("genrate")
    assert done.returncode == 2 and "did you mean 'generate'?" in done.stderr


def test_a_mistyped_option_names_the_nearest(model: Path) -> None:
    done = anabranch("plan", str(model), "--memroy", "3GB")
    assert done.returncode == 2 and "did you mean --memory?" in done.stderr and "Traceback" not in done.stderr


GENERATE = ("Once upon", "--max-tokens", "12")


@pytest.fixture(scope="module")
def generated(model: Path) -> subprocess.CompletedProcess[str]:
    return anabranch("generate", str(model), *GENERATE)


def test_generate_writes_text(generated: subprocess.CompletedProcess[str]) -> None:
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("Once upon") and len(generated.stdout) > len("Once upon\n")
    assert "12 tokens" in generated.stderr and "weights" not in generated.stderr


def test_verbose_says_where_the_time_of_the_start_went(
    model: Path, generated: subprocess.CompletedProcess[str]
) -> None:
    done = anabranch("generate", str(model), *GENERATE, "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stdout == generated.stdout
    table = {name: float(seconds) for name, seconds in re.findall(r"^(\w+) +([\d.]+) s\b", done.stderr, re.M)}
    assert {"import", "config", "weights", "other", "ready"} <= set(table) and list(table)[-1] == "ready"
    assert sum(table.values()) == pytest.approx(2 * table["ready"], abs=0.05)


def test_the_figures_stand_on_a_line_of_their_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdout and stderr go into one file, or one pipe, as in the log of a container."""
    path = tmp_path / "log"
    with open(path, "a") as out, open(path, "a", buffering=1) as error:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        assert main(["generate", str(model), *GENERATE]) == 0
    assert re.fullmatch(r"Once upon.*\n\[12 tokens in .*\]\n", path.read_text(), re.S)


@pytest.mark.slow  # tests/ops holds every kernel against its reference
def test_reference_kernels_write_the_same_text(model: Path, generated: subprocess.CompletedProcess[str]) -> None:
    done = anabranch("generate", str(model), *GENERATE, "--quiet", ANABRANCH_KERNELS="reference")
    assert done.returncode == 0 and done.stdout == generated.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{model}", ""), "the prompt is empty"),
        (("{model}", "x", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("{model}", "x" * 3000), "maximum context length is 2048 tokens"),
        (("{model}-typo", "x"), "did you mean"),
        (("./nowhere", "x"), "no such folder"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *(argument.format(model=model) for argument in arguments)]) == 1
    out, error = capfd.readouterr()
    assert message in error and error.count("\n") == 1, error
    assert out == ""


def test_generate_without_a_tokenizer_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny.save(tiny.CASES[0], tmp_path / "model")
    capfd.readouterr()  # transformers shows that it writes
    assert main(["generate", str(folder), "x"]) == 1
    out, error = capfd.readouterr()
    assert "no tokenizer.json" in error and error.count("\n") == 1, error
    assert out == ""


def test_unknown_platform_names_the_nearest(model: Path) -> None:
    done = anabranch("doctor", ANABRANCH_PLATFORM="cpv")
    assert done.returncode == 1 and "did you mean 'cpu'?" in done.stderr


def test_doctor_lists_every_op() -> None:
    from anabranch import ops

    done = anabranch("doctor")
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in ops.OPS)
    assert "in use" in done.stdout and "never run" not in done.stdout.split("ops (")[1]


def test_without_a_c_compiler_doctor_and_a_start_say_so(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anabranch.kernels.c import build, library

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(library, "problem", build.load())
    said = "torch's kernels run instead of those in C, slower in fp32: there is no C compiler; install gcc (or clang)"
    assert main(["doctor", "--platform", "cpu"]) == 0
    assert said in capsys.readouterr().out.splitlines()
    kernels.compile_ahead(platforms.make("cpu"), lambda: None)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]
    monkeypatch.setattr(library, "problem", "")
    assert main(["doctor", "--platform", "cpu"]) == 0 and said not in capsys.readouterr().out


def test_doctor_says_which_quantised_weights_are_multiplied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out.split("quantised weights (")[1].splitlines()[1:]
    assert [line.split() for line in shown] == [[kind, "dequantised"] for kind in STORED]

    @ops.linear.kernel("int4_alone", on=("cpu",), traits=("int4",))
    def linear(x_TD, weight_FD, bias_F=None, out_dtype=None):
        raise NotImplementedError

    try:
        monkeypatch.setattr(platforms.load("cpu"), "providers", {"int4_alone": "anabranch.kernels.torch"})
        assert main(["doctor", "--platform", "cpu"]) == 0
    finally:
        ops.linear.kernels.pop("int4_alone")
        monkeypatch.undo()
        kernels.bind(platforms.current())
    assert "  int4               kernels of linear\n" in capsys.readouterr().out


def test_plan_as_json_and_text(model: Path) -> None:
    done = anabranch("plan", str(model), "--memory", "1GB", "--json")
    found = json.loads(done.stdout)
    on_disk = (model / "model.safetensors").stat().st_size
    assert sum(found["weights"].values()) == found["on_disk_bytes"] < on_disk
    assert found["memory"][0]["fits"] and found["memory"][0]["largest_context"] == 2048
    assert found["quantization"] == "none"
    text = anabranch("plan", str(model), "--memory", "1GB").stdout
    assert "routed experts" in text and "shared experts" in text and "2,048 tokens" in text


def test_plan_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(CONFIGS / "qwen3-30b-a3b"), "--memory", "80GB", "--tensor-parallel-size", "4"]
    assert main([*words, "--json", "--link-rate", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    rank, whole = found["rank"], sum(found["weights"].values())
    assert whole / 4 < sum(rank["weights"].values()) < whole / 4 + 0.1e9  # routers and norms are not divided
    assert rank["kv_bytes_per_token"] * 4 == found["kv_bytes_per_token"][0]["bytes"]
    sent = sum(call["sent_bytes"] for call in rank["collectives"])
    assert rank["link_seconds"] == pytest.approx(sent / 100e9, rel=1e-3)
    assert main(words) == 0
    assert "each of 4 ranks, a part of each expert" in capsys.readouterr().out
    assert main([*words, "--nodes", "3"]) == 1
    assert "4 ranks cannot be divided among so many" in capsys.readouterr().err


def test_plan_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    words, found = ["plan", "qwen3.6-35b-a3b", "--tensor-parallel-size", "2", "--json"], {}
    for dtype in ("float32", "model"):
        assert main([*words, "--state-dtype", dtype]) == 0
        plan = json.loads(capsys.readouterr().out)
        found[dtype] = plan["rank"]["state_bytes_per_request"]
        assert 2 * found[dtype] == plan["kv_bytes_per_token"][0]["bytes"]  # heads are divided
    assert 1.9 < found["float32"] / found["model"] <= 2
    assert main(words[:-1]) == 0
    assert f"states: {found['float32']:,} per request" in capsys.readouterr().out


def test_replicas_whose_ranks_cannot_work_are_refused_before_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", "2", "--data-parallel-size", "2"]) == 1
    assert "data_parallel_size divides experts among ranks: it needs expert_parallel" in capsys.readouterr().err


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 33e9), ("int4", 19e9)])
def test_plan_of_qwen3_30b_quantised(quantization: str, most: float, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(CONFIGS / "qwen3-30b-a3b")
    assert main(["plan", folder, "--quantization", quantization, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"] == quantization
    assert 0.8 * most < sum(found["weights"].values()) <= most
    assert main(["plan", folder, "--quantization", quantization]) == 0
    assert f"weights (bfloat16, {quantization})" in capsys.readouterr().out


def test_plan_in_fp32_counts_matrices_as_they_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*words: str) -> tuple[str, int, int]:
        assert main(["plan", "qwen3-30b-a3b", "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["dtype"], sum(found["weights"].values()), found["kv_bytes_per_token"][0]["bytes"]

    dtype, weights, kv = planned()
    assert dtype == "bfloat16"
    monkeypatch.setenv("ANABRANCH_KERNELS", "reference")
    assert planned("--dtype", "float32") == ("float32", 2 * weights, 2 * kv)
    monkeypatch.delenv("ANABRANCH_KERNELS")
    if "c" in platforms.current().providers and not kernels.c_problem(platforms.current()):
        dtype, stored, kv_fp32 = planned("--dtype", "float32")
        assert dtype == "float32" and weights < stored < 1.01 * weights and kv_fp32 == 2 * kv
    kernels.bind(platforms.current())


def test_plan_of_a_config_alone_is_quick_and_needs_no_torch(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    started = time.perf_counter()
    done = anabranch("plan", str(tmp_path), "--memory", "100MB")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 2
    code = (
        f"import sys; from anabranch.cli.main import main; main(['plan', {str(tmp_path)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("10", 10e9), ("80", 80e9), ("0.5", 5e8), ("141GB", 141e9), ("2 GiB", 2**31), ("100MB", 1e8),
     ("85899345920", 80 * 2**30), ("3000000b", 3e6)],
)  # fmt: skip
def test_plan_reads_a_bare_number_as_gigabytes(size: str, num_bytes: float) -> None:
    assert plan.parse_size(size) == num_bytes


def test_plan_knows_the_names_that_bench_knows(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in CONFIGS.iterdir():
        assert main(["plan", folder.name, "--json"]) == 0
        by_name = capsys.readouterr().out
        assert main(["plan", str(folder), "--json"]) == 0
        assert capsys.readouterr().out == by_name


@pytest.mark.parametrize("name", [*COMMANDS, "", "bench"])
@pytest.mark.parametrize("columns", ["60", "200"])
def test_help_has_no_long_lines(name: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = make_parser(name)[1].format_help() if name in COMMANDS else usage(name)
    assert max(map(len, text.splitlines())) <= 80
    if "--plot" in text:
        assert "anabranch[plot]" in text


@pytest.mark.parametrize("size", ["lots", "-3GB", "0", "3 parsecs"])
def test_plan_refuses_odd_sizes(model: Path, size: str) -> None:
    done = anabranch("plan", str(model), f"--memory={size}")
    assert done.returncode == 1 and "is not a size" in done.stderr


def test_plan_of_a_model_that_does_not_fit(model: Path) -> None:
    done = anabranch("plan", str(model), "--memory", "1MB")
    assert done.returncode == 0 and "does not fit" in done.stdout
