"""`anabranch`: finds the command, parses its options, turns the user's mistakes into one line and an exit code.

0    done
1    the user's or the machine's mistake, said in one line with its cure
2    no such command or option
130  Ctrl-C
141  whoever read our output has left (as after SIGPIPE)
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import select
import sys
from types import ModuleType
from typing import NoReturn

from anabranch import __version__

COMMANDS = {
    "serve": "a server and a web page: OpenAI's and Anthropic's API over HTTP",
    "generate": "write a continuation of a prompt",
    "chat": "talk to a model",
    "plan": "does it fit? weights by kind, KV cache, context × concurrency in a given memory",
    "tune": "measure the best tiles of a model's experts on this GPU",
    "doctor": "this machine: versions, platform, and which kernel each op would use",
    "conformance": "does a platform do what it must? ops, models, streams and graphs, judged on the CPU",
    "bench offline": "time to first token, decode and throughput, as other engines are measured",
    "bench serve": "load on a server, ours or another's: latencies and throughput",
    "bench report": "result files, ours and other engines', as one table with ratios and targets",
    "bench step": "one decode step, kernel by kernel: µs, share, floor, gaps",
    "bench ops": "each op's kernel alone: µs, bytes or arithmetic a second, share of what the machine can do",
    "bench host": "µs of Python per step, without a model",
}

ABOUT = "Anabranch: an inference and serving engine for Mixture-of-Experts language models."
HELP = ("-h", "--help")
CHECKED_ELSEWHERE = {"anabranch serve": ("api_key",)}
"""Options whose own error is better than "it is empty"."""
VERSION = ("-V", "--version", "version")


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest option when one is mistyped."""

    def error(self, message: str) -> NoReturn:
        hints = []
        known = [option for action in self._actions for option in action.option_strings]
        for word in message.replace("'", " ").replace(",", " ").split():
            word = word.partition("=")[0].rstrip(":")
            if word.startswith("-") and word not in known:
                near = difflib.get_close_matches(word, known, 1)
                hints += [f"did you mean {near[0]}?"] if near else []
        print(f"{self.prog}: {message}{'; ' + ' '.join(hints) if hints else ''}", file=sys.stderr)
        print(f"{self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)


def usage(room: str = "") -> str:
    """Every command, or those of a room."""
    shown = {name: what for name, what in COMMANDS.items() if name.startswith(room)}
    width = max(map(len, shown))
    lines = [ABOUT, "", f"usage: anabranch {room + ' ' if room else ''}COMMAND [options]", ""]
    lines += [f"  {name:<{width}}  {what}" for name, what in shown.items()]
    if not room:
        lines += ["", "Start with: anabranch serve    (the small model that comes with it; then open the page)"]
    return "\n".join([*lines, "", "anabranch COMMAND --help explains a command; anabranch --version"])


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    is_bench = given[:1] == ["bench"] and len(given) > 1 and not given[1].startswith("-")
    length = 2 if is_bench else 1
    name, rest = " ".join(given[:length]), given[length:]
    said = f"anabranch {name}" if name in COMMANDS else "anabranch"
    if "stdout" in open_closed_files() and name != "serve":
        print(f"{said}: standard output is closed, and the answer would go there; send it to a file", file=sys.stderr)
        return 1
    try:
        try:
            return run(name, rest)
        finally:
            sys.stdout.flush()  # a reader that has left is noticed here, and not when the interpreter ends
    except (ValueError, OSError) as error:  # the user's or the machine's; anything else is ours and shows its trace
        left = isinstance(error, BrokenPipeError) and reader_has_left()
        drop_output()
        if left:
            return 141
        print(f"{said}: {in_words(error)}", file=sys.stderr)
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
    options = parser.parse_intermixed_args(rest)  # an optional MODEL may stand before options and a PROMPT behind them
    check_texts(parser, options)
    code: int = command.run(options)
    return code


def check_texts(parser: Parser, options: argparse.Namespace) -> None:
    """An option that is given and empty is a mistake: most often a shell variable that is not set."""
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        empty = value == "" or (isinstance(value, list | tuple) and "" in value)
        if action.option_strings and empty and value != action.default:
            if action.dest in CHECKED_ELSEWHERE.get(parser.prog, ()):
                continue
            raise ValueError(f"{action.option_strings[-1]} is empty: give a value, or leave it out")


def make_parser(name: str) -> tuple[ModuleType, Parser]:
    """A command's module, imported now, and the parser of its options."""
    room, _, file = name.rpartition(" ")
    command = importlib.import_module(f"anabranch.{room or 'cli'}.{file}")
    parser = Parser(prog=f"anabranch {name}", description=command.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_options(parser)
    # argparse would begin every help with all options there are.
    shapes = {None: "{}", "?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    words = [shapes[action.nargs].format(action.metavar) for action in parser._actions if not action.option_strings]  # type: ignore[index]
    parser.usage = " ".join([parser.prog, *words, "[options]"])
    return command, parser


def in_words(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def open_closed_files() -> list[str]:
    """Standard files that were closed (as by `>&-`) become /dev/null, or else the next file or socket that is opened
    would take their number. Which they were."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        number = ("stdin", "stdout", "stderr").index(name)
        if (opened := os.open(os.devnull, os.O_RDWR)) != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    return closed


def reader_has_left() -> bool:
    """Whether it is standard output that is broken, and not some other pipe."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_output() -> None:
    """What cannot be written goes nowhere: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
