"""`anabranch`: finds the command, parses its options, turns the user's mistakes into one line and exit code 1 or 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from typing import NoReturn

from anabranch import __version__

COMMANDS = {
    "serve": "OpenAI's API over HTTP",
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


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest option when one is mistyped."""

    def error(self, message: str) -> NoReturn:
        hints = []
        for word in message.replace("'", " ").replace(",", " ").split():
            known = [option for action in self._actions for option in action.option_strings]
            if word.startswith("-") and word.partition("=")[0] not in known:
                near = difflib.get_close_matches(word.partition("=")[0], known, 1)
                hints += [f"did you mean {near[0]}?"] if near else []
        print(f"{self.prog}: {message}{'; ' + ' '.join(hints) if hints else ''}", file=sys.stderr)
        print(f"{self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [ABOUT, "", "usage: anabranch COMMAND [options]", ""]
    lines += [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "anabranch COMMAND --help explains a command; anabranch --version"])


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"anabranch {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "bench":
        name, rest = " ".join(arguments[:2]), arguments[2:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"anabranch: no command {name!r}{hint} (commands: {', '.join(COMMANDS)})", file=sys.stderr)
        return 2
    room, _, file = name.rpartition(" ")
    command = importlib.import_module(f"anabranch.{room or 'cli'}.{file}")
    parser = Parser(prog=f"anabranch {name}", description=command.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_options(parser)
    options = parser.parse_intermixed_args(rest)  # an optional MODEL may stand before options and a PROMPT behind them
    try:
        code: int = command.run(options)
        return code
    except (ValueError, OSError) as error:  # the user's or the machine's; anything else is ours and shows its trace
        print(f"anabranch {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
