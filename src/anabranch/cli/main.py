"""`anabranch`: finds the command, parses its options, turns errors into one line and an exit code.

0    success
1    an error of the user or the machine: one line with its cause and cure
2    no such command or option
130  Ctrl-C
141  the reader of our output has closed it (as after SIGPIPE)
"""

import argparse
import difflib
import importlib
import os
import select
import shutil
import sys
import textwrap
from itertools import groupby
from types import ModuleType
from typing import NoReturn

from anabranch import __version__, config_file, known_flags

COMMANDS = {
    "serve": "serve over HTTP: a page, APIs of OpenAI, Anthropic and Ollama",
    "generate": "write a continuation of a prompt",
    "chat": "chat with a model in the terminal",
    "plan": "show whether a model fits: weights, KV cache, requests at once",
    "simulate": "simulate experts on many ranks: loads, bytes that move",
    "tune": "measure the best tiles of a model's experts on this GPU",
    "quantize": "write a model again with quantised weights",
    "doctor": "show this machine: versions, platforms, each op's kernel",
    "conformance": "test whether a platform computes correctly",
    "selftest": "prove on this machine: determinism of a model's answers",
    "completion": "print a script that completes words in bash, zsh or fish",
    "bench offline": "measure start, first token, decode and throughput",
    "bench serve": "measure latencies and throughput of a server under load",
    "bench report": "show result files as tables with ratios and targets",
    "bench step": "profile one step, kernel by kernel",
    "bench ops": "time each op's kernel alone, beside what the machine can do",
    "bench host": "measure the host's time in a step, without a model",
}

ABOUT = "Anabranch: inference and serving of Mixture-of-Experts language models."
HELP = ("-h", "--help")
CHECKED_ELSEWHERE = {"anabranch serve": ("api_key",)}
"""Options that the command checks itself, with a better message than "is empty"."""
WIDTH = 80
"""Columns of a line of help, at most."""
VERSION = ("-V", "--version", "version")


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest option when one is mistyped."""

    def error(self, message: str) -> NoReturn:
        hints = []
        serves = {} if self.prog == "anabranch serve" else make_parser("serve")[1]._option_string_actions
        for word in message.split() if message.startswith("unrecognized") else ():
            name = word.partition("=")[0] if word.startswith("-") else ""
            why = known_flags.reason(name) or "an option of `anabranch serve`" * (name in serves)
            near = known_flags.nearest(self, name)
            hints += [f"{name}: {why}"] if why else [f"did you mean {near}?"] if near else []
        print(f"{self.prog}: {'; '.join([message, *hints])}", file=sys.stderr)
        print(f"{self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)

    def _get_option_tuples(self, option_string):  # type: ignore[no-untyped-def,override]
        """-O3 is -O 3; no other word is taken for an option that begins like it, as -c for -cc."""
        return super()._get_option_tuples(option_string) if option_string[2:].isdecimal() else []

    def parse_known_intermixed_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        words = known_flags.spelled(self, list(sys.argv[1:] if args is None else args))
        words = known_flags.model_first(self, words)
        config_file.apply(self, words)
        return super().parse_known_intermixed_args(words, namespace)


class HelpLines(argparse.HelpFormatter):
    """Lines of at most 80 columns. In the description, indented lines stay as they are: they are examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(WIDTH, shutil.get_terminal_size().columns))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = ("\n".join(lines) for _, lines in groupby(text.splitlines(), lambda line: (line[:1] == " ", not line)))
        return "\n".join(part if part.startswith(" ") else textwrap.fill(part, width) for part in parts)


def usage(prefix: str = "") -> str:
    """Every command, or those that begin with "bench"."""
    shown = {name: what for name, what in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, shown))
    lines = [ABOUT, "", f"usage: anabranch {prefix + ' ' if prefix else ''}COMMAND [options]", ""]
    lines += [f"  {name:<{width}}  {what}" for name, what in shown.items()]
    if not prefix:
        lines += ["", "To begin: anabranch serve    (the small model that comes with it, and a page)"]
    return "\n".join([*lines, "", "anabranch COMMAND --help explains a command; --version shows the version"])


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    is_bench = given[:1] == ["bench"] and len(given) > 1 and not given[1].startswith("-")
    length = 2 if is_bench else 1
    name, rest = " ".join(given[:length]), given[length:]
    prog = f"anabranch {name}" if name in COMMANDS else "anabranch"
    if "stdout" in open_closed_files() and name != "serve":
        print(f"{prog}: standard output is closed, and the answer would go there; send it to a file", file=sys.stderr)
        return 1
    try:
        try:
            return run(name, rest)
        finally:
            sys.stdout.flush()  # raises here if the reader has closed it, not when the interpreter ends
    except (ValueError, OSError) as error:  # of the user or the machine; anything else is a bug and shows its trace
        closed = isinstance(error, BrokenPipeError) and output_is_closed()
        drop_output()
        if closed:
            return 141
        print(f"{prog}: {message(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def run(name: str, rest: list[str]) -> int:
    if name in ("", "bench", *HELP) and not set(rest) - set(HELP):
        print(usage("bench" if name == "bench" else ""))
        return 0
    if name in VERSION:
        print(f"anabranch {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"anabranch: no command {name!r}{hint}\nanabranch --help lists the commands", file=sys.stderr)
        return 2
    command, parser = make_parser(name)
    options = parser.parse_intermixed_args(rest)  # options may stand between MODEL and PROMPT
    check_texts(parser, options)
    return command.run(options)


def check_texts(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse options that are given but empty: most often a shell variable is not set."""
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        empty = value == "" or (isinstance(value, list | tuple) and "" in value)
        if action.option_strings and empty and value != action.default:
            if action.dest in CHECKED_ELSEWHERE.get(parser.prog, ()):
                continue
            raise ValueError(f"{action.option_strings[-1]} is empty: give a value, or leave it out")


def make_parser(name: str) -> tuple[ModuleType, Parser]:
    """The module of a command, imported now, and the parser of its options."""
    package, _, file = name.rpartition(" ")
    command = importlib.import_module(f"anabranch.{package or 'cli'}.{file}")
    parser = Parser(prog=f"anabranch {name}", description=command.__doc__, allow_abbrev=False)
    parser.formatter_class = HelpLines
    command.add_options(parser)
    if any(action.dest == "model" and not action.option_strings for action in parser._actions):
        if "--config" not in parser._option_string_actions:
            config_file.add_config(parser)
    known_flags.add(parser)
    # argparse's own usage line would list every option.
    shapes = {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    words = [shapes[action.nargs].format(action.metavar) for action in parser._actions if not action.option_strings]  # type: ignore[index]
    parser.usage = " ".join([parser.prog, *words, "[options]"])
    return command, parser


def message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def open_closed_files() -> list[str]:
    """Open /dev/null for standard files that are closed (as by `>&-`), else the next file or socket that is opened
    would take their number. Returns their names."""
    numbers = {name: number for number, name in enumerate(("stdin", "stdout", "stderr")) if getattr(sys, name) is None}
    for name, number in numbers.items():
        if (opened := os.open(os.devnull, os.O_RDWR)) != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    return list(numbers)


def output_is_closed() -> bool:
    """Whether standard output is the broken pipe, and not another one."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_output() -> None:
    """Discard output that cannot be written; else the interpreter tries again at its end and prints an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
