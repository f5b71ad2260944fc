"""Print a script that completes commands and options in bash, zsh or fish:

anabranch completion bash > ~/.local/share/bash-completion/completions/anabranch
anabranch completion zsh > ~/.anabranch.zsh       then source it in ~/.zshrc
anabranch completion fish > ~/.config/fish/completions/anabranch.fish
"""

import argparse
import shlex

from anabranch.cli.main import COMMANDS, make_parser

BASH = """\
_anabranch() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" name="${{COMP_WORDS[1]}}" words=""
  [ "$name" = bench ] && name="bench ${{COMP_WORDS[2]}}"
  if [ "$COMP_CWORD" = 1 ]; then words={commands}
  elif [ "$COMP_CWORD" = 2 ] && [ "${{COMP_WORDS[1]}}" = bench ]; then words={benches}
  else case "$name $before" in
{values}
    *) case "$word" in -*) case "$name" in
{options}
    esac;; esac;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _anabranch anabranch
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    actions = {name: visible(name) for name in COMMANDS}
    if options.shell == "fish":
        print("\n".join(fish(actions)))
        return 0
    if options.shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(bash(actions), end="")
    return 0


def visible(command: str) -> list[argparse.Action]:
    """The options that `--help` shows, those of a rare kind too."""
    return [action for action in make_parser(command)[1]._actions if action.help is not argparse.SUPPRESS]


def bash(actions: dict[str, list[argparse.Action]]) -> str:
    values, options = [], []
    for name, found in actions.items():
        words = [option for action in found for option in action.option_strings]
        options.append(f"      {shlex.quote(name)}) words={shlex.quote(' '.join(words))};;")
        for action in found:
            if action.choices:
                names = " | ".join(shlex.quote(f"{name} {option}") for option in action.option_strings or [name])
                choices = [*map(str, action.choices), *([] if action.option_strings else words)]
                values.append(f"    {names}) words={shlex.quote(' '.join(choices))};;")
    first = dict.fromkeys(name.partition(" ")[0] for name in actions)
    benches = [name.partition(" ")[2] for name in actions if " " in name]
    return BASH.format(
        commands=shlex.quote(" ".join(first)),
        benches=shlex.quote(" ".join(benches)),
        values="\n".join(values),
        options="\n".join(options),
    )


def fish(actions: dict[str, list[argparse.Action]]) -> list[str]:
    lines = []
    for name, found in actions.items():
        first, _, second = name.partition(" ")
        lines.append(_line("__fish_use_subcommand", a=first, d="" if second else COMMANDS[name]))
        if second:
            lines.append(_line("__fish_seen_subcommand_from bench", a=second, d=COMMANDS[name]))
        where = "__fish_seen_subcommand_from bench; and" if second else "not __fish_seen_subcommand_from bench; and"
        for action in found:
            help = (action.help or "").replace("%(default)s", str(action.default))
            for option in action.option_strings:
                given = {"l" if option.startswith("--") else "s": option.lstrip("-"), "d": help}
                if action.choices:
                    given["xa"] = " ".join(map(str, action.choices))
                lines.append(_line(f"{where} __fish_seen_subcommand_from {second or first}", **given))
    return list(dict.fromkeys(lines))


def _line(condition: str, **words: str) -> str:
    given = " ".join(f"-{name} {_quoted(text)}" for name, text in words.items() if text)
    return f"complete -c anabranch -n {_quoted(condition)} {given}"


def _quoted(text: str) -> str:
    """As fish reads it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
