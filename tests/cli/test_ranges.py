"""Options of every command with numbers and texts that cannot be meant: refused in one line that names the option."""

import argparse
import os
import subprocess
import sys

import pytest

from anabranch.cli import main
from anabranch.server.settings import Settings

NOWHERE = "./nowhere"  # what is not refused gets this far, and no further
COMMANDS = {
    "serve": [NOWHERE],
    "generate": [NOWHERE, "Once upon a time"],
    "chat": [NOWHERE],
    "plan": [NOWHERE],
    "simulate": [NOWHERE],
    "tune": [NOWHERE],
    "bench offline": [NOWHERE],
    "bench step": [NOWHERE],
    "bench serve": ["--base-url", "http://127.0.0.1:1"],
    "bench host": [],
    "bench ops": [],
}
AT_PARSING = ("bench host", "bench ops")
"""They need no model that could be missing: a value that gets past the parser would be measured with."""
MEANT: dict[str, tuple[str, ...]] = {
    "--seed": ("0", "-1"),
    "--port": ("0",),  # any free one
    "--max-queue": ("0",),  # nothing waits
    "--expert-load-interval": ("0",),  # no histogram
    "--expert-copies": ("0",),
    "--rebalance-interval": ("0",),  # never
    "--shutdown-timeout": ("0", "inf"),
    "--keep-alive-timeout": ("0", "inf"),
    **{f"--{name}-timeout": ("inf",) for name in ("header", "body", "prepare", "stall", "step", "start")},
    "--temperature": ("0",),  # greedy
    "--top-k": ("0", "-1"),  # all
    "--min-p": ("0",),
    "--random-prefix-len": ("0",),
    "--random-range-ratio": ("0",),
    "--num-warmups": ("0",),
    "--request-rate": ("inf",),  # all at once
    "--burstiness": ("inf",),
    "--timeout": ("inf",),
    "--bandwidth": ("inf",),
    "--copies": ("0",),
    "--zipf": ("0",),  # equal loads
    "--link": ("inf",),
}
"""Values out of the ordinary that say something."""


def numeric(command: str) -> list[str]:
    """Options that take a number: that is what they make of "1"."""
    found = []
    for action in main.make_parser(command)[1]._actions:
        if (
            action.type in (None, str)
            or not action.option_strings
            or action.help is argparse.SUPPRESS  # other names of options that are checked
            or isinstance(action, argparse.BooleanOptionalAction)
        ):
            continue
        try:
            value = action.type("1")  # type: ignore[operator]
        except (argparse.ArgumentTypeError, ValueError):
            continue
        if isinstance(value, int | float):
            found.append(action.option_strings[-1])
    return found


def refused(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What was said; None if nothing was wrong with it."""
    parser = main.make_parser(command)[1]
    try:
        if command in AT_PARSING:
            main.check_texts(parser, parser.parse_args(words))
            return None
        code = main.main([*command.split(), *COMMANDS[command], *words])
    except SystemExit as end:
        code = int(end.code or 0)
    except ValueError as error:
        return str(error)
    said = capsys.readouterr().err
    assert code in (1, 2) and "Traceback" not in said
    return None if "nowhere" in said or "is a server running there" in said else said


CASES = [(command, option) for command in COMMANDS for option in numeric(command)]


def test_there_are_options_to_check() -> None:
    assert len(CASES) > 50 and {command for command, _ in CASES} == set(COMMANDS)


@pytest.mark.parametrize(("command", "option"), CASES)
def test_numbers_that_cannot_be_meant(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "-1", "nan", "inf", "", "x"):
        said = refused(command, [f"{option}={value}"], capsys)
        if value in MEANT.get(option, ()):
            assert said is None, said
        else:
            assert said is not None, f"{option} {value}"
            name = option.removeprefix("--")
            named = {name, name.replace("-", "_")} | (
                {"memory_fraction"} if name == "gpu-memory-utilization" else set()
            )
            assert any(one in said for one in named), said
            assert "did you mean" not in said
    good = "4096" if option.endswith("-bytes") else "0.5" if option.endswith("-ratio") else "1"
    assert refused(command, [f"{option}={good}"], capsys) is None


def texts() -> list[tuple[str, str]]:
    return [
        (command, action.option_strings[-1])
        for command in COMMANDS
        for action in main.make_parser(command)[1]._actions
        if action.option_strings and action.nargs != 0 and action.dest != "help" and action.help != argparse.SUPPRESS
        and action.type in (None, str) and not isinstance(action, argparse.BooleanOptionalAction)
    ]  # fmt: skip


@pytest.mark.parametrize(("command", "option"), texts())
def test_texts_that_are_empty(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(command, [option, ""], capsys)
    assert said is not None and (option in said or "API key" in said), said


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan"])
def test_a_model_without_a_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "", *(["Once"] if command == "generate" else [])]) == 1
    assert "the name of the model is empty" in capsys.readouterr().err


def test_names_of_the_served_model() -> None:
    with pytest.raises(ValueError, match="served_model_name must not be empty"):
        Settings(served_model_name=("good", " "))


# Standard files that are closed.


def closed(number: int, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import os, sys\nos.close(int(sys.argv[1]))\nos.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    command = [sys.executable, "-c", code, str(number), "-m", "anabranch.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))


@pytest.mark.parametrize("words", [["generate", "Once", "--max-tokens", "2"], ["plan"], ["chat"], ["--version"]])
def test_a_closed_output_is_one_line(words: list[str]) -> None:
    done = closed(1, *words)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "standard output is closed" in done.stderr


def test_a_closed_input_is_an_empty_one() -> None:
    done = closed(0, "generate", "-")
    assert done.returncode == 1 and "the prompt is empty" in done.stderr and done.stderr.count("\n") == 1


def test_a_closed_standard_error_says_nothing() -> None:
    done = closed(2, "generate", "Once", "--max-tokens", "2")
    assert done.returncode == 0 and done.stdout.startswith("Once") and done.stdout.count("\n") < 3
    assert closed(2, "plan", NOWHERE).stdout == ""


def test_a_server_needs_no_output() -> None:
    done = closed(1, "serve", NOWHERE)
    assert done.returncode == 1 and "no such folder" in done.stderr
