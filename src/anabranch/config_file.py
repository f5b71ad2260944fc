"""`--config FILE`: the options of a command in a file. What the command line gives is used instead of the file's.

YAML (with the parser that huggingface_hub brings), JSON or TOML: a table of options, named as on the command line but
without the dashes in front; `model` is MODEL.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from anabranch.known_flags import FLAGS, MODEL, Known, nearest, reason, turned_off

HELP = "read options from a YAML, JSON or TOML file"


def add_config(parser: Any) -> None:
    parser.add_argument("--config", metavar="FILE", help=HELP)


def read(file: str) -> dict[str, Any]:
    text = Path(file).read_text(encoding="utf-8")
    try:
        if file.endswith(".toml"):
            found = tomllib.loads(text)
        elif file.endswith(".json"):
            found = json.loads(text)
        else:
            import yaml

            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from None
    except ImportError:
        raise ValueError(f"--config {file}: YAML needs the package pyyaml; write it as .json or .toml") from None
    except ValueError as error:
        raise ValueError(f"--config {file}: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"--config {file}: it must be a table of options, such as max-model-len: 8192")
    return found


def apply(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Make what the file of `--config` says the defaults of the parser."""
    words = words[: words.index("--")] if "--" in words else words
    files = [after for word, after in zip(words, [*words[1:], ""]) if word == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    if "--config" not in parser._option_string_actions:
        return
    if len(files) > 1:
        raise ValueError("--config: give one file")
    for file in filter(None, files):
        namespace = argparse.Namespace()
        for key, given in read(file).items():
            try:
                _add(parser, namespace, f"--{key.replace('_', '-')}", given)
            except (ValueError, argparse.ArgumentError) as error:
                raise ValueError(f"--config {file}: {key}: {getattr(error, 'message', error)}") from None
        parser.set_defaults(**vars(namespace))


def _add(parser: argparse.ArgumentParser, namespace: argparse.Namespace, name: str, given: Any) -> None:
    off = turned_off(name)
    if off is not None and given is True:
        if off.refused:  # that is done anyway
            return
        name = name.replace("--no-", "--", 1)
    action = parser._option_string_actions.get(name)
    if action is None or name in ("--config", "--help"):
        if (why := reason(name)) and (given is None or given is False):
            return
        near = nearest(parser, name).removeprefix("--")
        raise ValueError(why or f"no option of {parser.prog}{f'; did you mean {near}?' if near else ''}")
    if given == "" or (isinstance(given, list) and "" in given):
        raise ValueError("is empty: give a value, or leave it out")
    if isinstance(given, dict) and isinstance(action, Known) and action.target is None:
        given = json.dumps(given)  # refused, or without effect
    if isinstance(given, dict):
        raise ValueError("a table is no value of an option")
    if given is None:
        return
    known = FLAGS.get(name)
    if known is not None and known.use == MODEL and action.dest == argparse.SUPPRESS:
        positional = next(one for one in parser._actions if one.dest == "model" and not one.option_strings)
        positional.nargs, positional.required, positional.default = "?", False, str(given)
    elif action.nargs == 0:
        if not isinstance(given, bool):
            raise ValueError(f"is true or false, not {given!r}")
        if not given:
            if isinstance(action, Known) and isinstance(action.target, argparse.BooleanOptionalAction):
                name, action = action.flag.use, action.target
            name = name.replace("--no-", "--", 1) if name.startswith("--no-") else name.replace("--", "--no-", 1)
            if not isinstance(action, argparse.BooleanOptionalAction):
                action = parser._option_string_actions.get(name) if name in FLAGS else None
            if action is None:  # it is off unless it is given
                return
        action(parser, namespace, [], name)
    elif isinstance(given, bool):
        raise ValueError("takes a value, not true or false")
    else:
        texts = [str(one) for one in given] if isinstance(given, list) else [str(given)]
        if isinstance(action, argparse._AppendAction):
            groups = [[text] for text in texts]
        elif action.nargs is None:
            groups = [[",".join(texts)]]
        else:
            groups = [texts]
        for group in groups:
            action(parser, namespace, parser._get_values(action, group), name)
