"""Options that users of other engines know, and `--config`: what becomes of them, wherever they stand."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from anabranch import LLM
from anabranch.cli.main import COMMANDS, main, make_parser
from anabranch.config import EngineConfig
from anabranch.known_flags import FAMILIES, FLAGS, MODEL, TABLE, engine_options

PAGE = Path(__file__).parents[2] / "docs" / "from_vllm.md"


def parse(command: str, *words: str) -> argparse.Namespace:
    return make_parser(command)[1].parse_intermixed_args(list(words))


def row(flag: Any) -> str:
    here = f"`{flag.use}`"
    if flag.refused:
        but = f" (but for {', '.join(f'`{value}`' for value in flag.unless)})" if flag.unless else ""
        here = f"refused{but}: {flag.why}"
    elif not flag.use:
        here = f"no effect: {flag.why}"
    return f"| {', '.join(f'`{name}`' for name in flag.names)} | {here} |"


def test_the_page_shows_the_table() -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = [row(flag) for flag in TABLE]
    rows += [f"| {', '.join(f'`{one}`' for one in some.split())} | {why} |" for why, some in FAMILIES.items()]
    assert shown == rows, "\n".join(rows)


def test_each_name_is_there_once_and_is_none_of_ours() -> None:
    assert len(FLAGS) == sum(len(flag.names) for flag in TABLE)
    own = {
        option
        for action in make_parser("serve")[1]._actions
        if action.help is not argparse.SUPPRESS
        for option in action.option_strings
    }
    assert not own & set(FLAGS)
    assert {flag.use.split()[0] for flag in TABLE if flag.use} - {MODEL} <= own


@pytest.mark.parametrize("name", FLAGS)
def test_serve_has_an_answer_to_each(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as ours, a line that says why there is no effect, or a refusal with the reason."""
    flag, (_, parser) = FLAGS[name], make_parser("serve")
    action = parser._option_string_actions[name]
    given = [] if action.nargs == 0 else ["0.5" if "memory" in flag.use or "timeout" in flag.use else "2"]
    if flag.use == MODEL:
        assert parse("serve", name, "folder").model == "folder"
        return
    if flag.use:
        given = {"--quantization": ["fp8"], "--state-dtype": ["model"]}.get(flag.use, given)
        before = ["--no-prefix-cache"] if flag.use == "--prefix-cache" else []  # else it is the default
        ours = parse("serve", *before, *flag.use.split(), *given)
        assert parse("serve", *before, name, *given) == ours != parse("serve", *before)
        return
    if not flag.refused:
        assert parse("serve", name, *given) == parse("serve")
        assert f"{name} has no effect: {flag.why}" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as end:
        parse("serve", name, *given)
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"{name}: {flag.why}" in said and "did you mean" not in said
    for value in flag.unless:
        assert parse("serve", name, value) == parse("serve")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_one_for_another(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, parser = make_parser(command)
    for name in FLAGS:
        with pytest.raises((SystemExit, ValueError)):
            parser.parse_intermixed_args([name, "--no-such-option"])
        assert "did you mean" not in capsys.readouterr().err, name


@pytest.mark.parametrize(
    ("command", "option"),
    [("bench serve", "--port=8000"), ("plan", "--enable-prefix-caching"), ("doctor", "--tp=2")],
)
def test_an_option_of_serve_alone_is_named(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(command, *["model"] * (command == "plan"), option)
    said, name = capsys.readouterr().err, option.partition("=")[0]
    assert f"; {name}: an option of `anabranch serve`\n" in said and "did you mean" not in said


def test_values_by_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse("serve", "--dtype", "half", "--kv-cache-dtype", "fp8", "--generation-config", "vllm")
    assert (found.dtype, found.kv_cache_dtype, found.generation_config) == ("float16", "fp8_e4m3", "none")
    assert parse("plan", "--dtype", "bf16").dtype == "bfloat16"
    with pytest.raises(SystemExit):
        parse("serve", "--quantization", "awq")
    assert "leave the option out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("serve", "--quantization", "bitsandbytes")
    assert "bitsandbytes: not supported: a plain checkpoint takes fp8 or int4" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--model", "a"], ["--model-path=a"], ["--quiet", "--model", "a"]])
def test_a_model_by_name_comes_before_the_prompt(words: list[str]) -> None:
    found = parse("generate", *words, "Once")
    assert (found.model, found.prompt) == ("a", "Once")
    assert parse("generate", "a", "--", "--model").prompt == "--model"


def test_the_model_of_bench_serve_is_its_own() -> None:
    assert parse("bench serve", "--model", "name").model == "name"


# -- in Python ---------------------------------------------------------------------------------------------------------

FIELDS = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}


def test_keyword_arguments_of_others() -> None:
    given = {"gpu_memory_utilization": 0.5, "enforce_eager": True, "enable_prefix_caching": False, "dtype": "half"}
    given |= {"tp_size": 2, "enable_lora": False, "tokenizer": None, "pipeline_parallel_size": 1, "typo": 1}
    wanted = {"memory_fraction": 0.5, "graphs": "none", "prefix_cache": False, "dtype": "float16"}
    assert engine_options(given, FIELDS) == wanted | {"tensor_parallel_size": 2, "typo": 1}
    assert engine_options({"enforce_eager": False, "disable_radix_cache": True}, FIELDS) == {"prefix_cache": False}
    others = "enable_prefix_caching block_size num_gpu_blocks_override gpu_memory_utilization tokenizer swap_space"
    assert engine_options(dict.fromkeys([*FIELDS, *others.split()]), FIELDS) == {}, "None is the default"
    assert engine_options({"typo": None}, FIELDS) == {"typo": None}, "which is then refused"


def test_keyword_arguments_that_are_refused() -> None:
    for name, value, said in [
        ("enable_lora", True, "adapters are not supported"),
        ("quantization", "awq", "leave the option out"),
        ("max_queued_requests", 3, "an option of `anabranch serve`, --max-queue"),
        ("model_path", "x", "the first argument"),
    ]:
        with pytest.raises(ValueError, match=said):
            LLM("./nowhere", **{name: value})
    with pytest.warns(UserWarning, match="swap_space has no effect"), pytest.raises(ValueError, match="no such folder"):
        LLM("./nowhere", swap_space=4)


# -- files -------------------------------------------------------------------------------------------------------------

YAML = """
model: folder
port: 8001
served-model-name: [a, b]
max_model_len: 4096
prefix-cache: false
enforce-eager: true
allow-no-api-key: false
api-key: [one, two]
allowed-hosts: [here, there]
tp: 2
enable-lora: false
chat-template: null
"""


def test_options_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    found = parse("serve", "--config", str(tmp_path / "a.yaml"))
    assert (found.model, found.port, found.served_model_name) == ("folder", 8001, ["a", "b"])
    assert (found.max_model_len, found.prefix_cache, found.graphs) == (4096, False, "none")
    assert (found.api_key, found.tensor_parallel_size) == (["one", "two"], 2)
    assert (found.allow_no_api_key, found.allowed_hosts) == (False, ("here", "there"))
    found = parse("serve", "other", f"--config={tmp_path / 'a.yaml'}", "--port", "1", "--prefix-cache")
    assert (found.model, found.port, found.prefix_cache, found.max_model_len) == ("other", 1, True, 4096)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("enable-prefix-caching: false", ["--no-prefix-cache"]),
        ("disable-radix-cache: false", ["--prefix-cache"]),
        ("no-prefix-cache: false", ["--prefix-cache"]),
        ("no-prefix-cache: true", ["--no-prefix-cache"]),
        ("prefix-cache: false\ndisable-radix-cache: false", ["--prefix-cache"]),
        ("disable-cuda-graph: false", []),
        ("enable-torch-compile: false", []),
        ("trust-remote-code: false", []),
    ],
)
def test_what_false_means_in_a_file(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    found, wanted = vars(parse("serve", "--config", str(tmp_path / "a.yaml"))), vars(parse("serve", *words))
    assert found | {"config": None} == wanted


def test_false_is_refused_in_python_where_it_is_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill: prompts are always computed in chunks"):
        engine_options({"enable_chunked_prefill": False}, FIELDS)
    with pytest.warns(UserWarning, match="enable_log_requests has no effect"):
        assert engine_options({"enable_log_requests": False, "trust_remote_code": False}, FIELDS) == {}


def test_false_is_refused_in_a_file_where_it_is_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("enable-chunked-prefill: false")
    with pytest.raises(SystemExit):
        parse("serve", "--config", str(tmp_path / "a.yaml"))
    assert "--no-enable-chunked-prefill: prompts are always computed in chunks" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("enable-log-requests: false")
    parse("serve", "--config", str(tmp_path / "a.yaml"))
    assert "--no-enable-log-requests has no effect" in capsys.readouterr().err


def test_files_of_other_kinds_and_of_other_commands(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"model": "folder", "max-tokens": 3, "stop": ["x"]}))
    found = parse("generate", "--config", str(tmp_path / "a.json"), "Once")
    assert (found.model, found.prompt, found.max_tokens, found.stop) == ("folder", "Once", 3, ["x"])
    (tmp_path / "a.toml").write_text('model = "qwen3-30b-a3b"\nload-format = "dummy"\n')
    found = parse("bench offline", "--config", str(tmp_path / "a.toml"))
    assert (found.model, found.load_format) == ("qwen3-30b-a3b", "dummy")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert parse("plan", "--config", str(tmp_path / "empty.yaml")).model is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "prot: no option of anabranch serve; did you mean port?"),
        ("port: many", "port: invalid int value: 'many'"),
        ("dtype: int3", "dtype: invalid choice: 'int3'"),
        ("max-model-len: 0", "must be a whole number of at least 1"),
        ("port: ", ""),
        ("host: ''", "host: is empty"),
        ("enforce-eager: 3", "is true or false"),
        ("seed: true", "takes a value"),
        ("config: a.yaml", "no option"),
        ("host: {a: b}", "a table is no value"),
        ("- a", "must be a table of options"),
        ("a: [", "expected"),
    ],
)
def test_mistakes_in_a_file(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert main(["serve", "./nowhere", "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (f"--config {file}: " in error) == bool(said) and said in error


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "./nowhere.yaml"]) == 1
    assert "nowhere.yaml: No such file" in capsys.readouterr().err
