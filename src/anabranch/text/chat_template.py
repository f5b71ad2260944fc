"""Chat templates: Jinja programs that turn messages into a prompt, rendered as transformers renders them.

A template comes from the model folder or from a file that the operator names, never from a request: the sandbox keeps
it from the machine, but not from filling the memory. All templates share one environment. The prompt contains its
special tokens: encode it with add_special_tokens=False. render_chat also keeps special tokens that a
message spells apart from the template's own.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from anabranch.text.tokenizer import named_special_tokens, read_tokenizer_config

RESERVED = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "chat_template", "tokenize", "tokenizer_kwargs")
    + ("continue_final_message", "return_tensors", "return_dict", "return_assistant_tokens_mask")
    + ("padding", "truncation", "max_length", "self")
    + ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
)
"""Users cannot set what `render` sets itself, nor the parameters of transformers' apply_chat_template."""

NO_TOOLS = (
    "the model's chat template does not write tools, so the model would not see them; serve it with a template that "
    'does (--chat-template FILE), or leave tools out (in a request also: tool_choice "none")'
)
SEARCHES = ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "replace")
"""Methods of strings that search for their arguments."""


class ChatTemplate:
    def __init__(self, folder: str | Path, template: str | None = None) -> None:
        """`template`: None for the folder's own, or a file's name, or the text of a template.

        A folder may have several by name: `tool_use` renders chats with tools, `default` all others. A folder without
        a template is an error only when a chat is rendered.
        """
        self.folder = Path(folder)
        self.special_tokens = named_special_tokens(config := read_tokenizer_config(self.folder))
        if template is None:
            self.sources = _find_templates(self.folder, config)
            """Text of the templates by name: it tells how the model writes tool calls and thoughts."""
        else:  # every template has a brace; a path with one would be odd
            self.sources = {"default": template if "{" in template else _read(Path(template))}
        self.templates = {name: _compile(name, text) for name, text in self.sources.items()}
        self.call_form: tuple[bool, bool] | None = None
        """See text/call_form, which finds it out."""
        self.part_form: dict[tuple[str, bool], bool] = {}
        """See text/part_form: (kind of message, with tools) → whether content may be a list of parts."""

    def render(
        self,
        /,  # so that even "self" among kwargs is refused by us
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of the chat; `add_generation_prompt` adds the beginning of the assistant's answer.

        `kwargs` are the template's own variables, such as enable_thinking or documents.
        """
        from jinja2 import TemplateError

        _check_messages(messages)
        self.check_variables(kwargs)
        template = self.templates[self._choose(tools)]
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = template.render(self.special_tokens | {"documents": None} | kwargs | given)
        except TemplateError as error:  # raised by the template itself: "roles must alternate"
            raise ValueError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except Exception as error:  # a template is a program and can fail like one
            reason = f"{type(error).__name__}: {_one_line(error)}"
            raise ValueError(f"the chat template cannot render these messages: {reason}") from None
        return text

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes tools into the prompt, that is, reads the variable."""
        from jinja2 import nodes

        if not self.templates:
            return True  # `render` reports what is missing
        names = _environment().parse(self.sources[self._choose(tools=())]).find_all(nodes.Name)
        return any(node.name == "tools" and node.ctx == "load" for node in names)

    @cached_property
    def sought(self) -> frozenset[str]:
        """Text that the templates search for in messages, such as </think>."""
        from jinja2 import nodes

        found: list[nodes.Expr] = []
        for tree in map(_environment().parse, self.sources.values()):
            for compared in tree.find_all(nodes.Compare):
                if any(operand.op in ("in", "notin") for operand in compared.ops):
                    found.append(compared.expr)
            for call in tree.find_all(nodes.Call):
                if isinstance(call.node, nodes.Getattr) and call.node.attr in SEARCHES:
                    found += call.args
        return frozenset(node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str))

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse variables that users cannot set; for requests, before `render` gets a name twice."""
        for name in names:
            if name in RESERVED or name in self.special_tokens or name in _environment().globals:
                raise ValueError(f"the chat template variable {name!r} is reserved and cannot be set")

    def _choose(self, tools: object) -> str:
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if name in self.templates:
                return name
        if not self.templates:
            raise ValueError(f"{self.folder}: no chat template; name a file with one, or give a prompt, not messages")
        names = ", ".join(sorted(self.templates))
        raise ValueError(f"{self.folder}: no chat template is the default ({names}); name a file with the one to use")


@cache
def _environment() -> Any:
    """The sandbox with what transformers gives its templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} marks text to train on; here it is only the text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Without the HTML escapes of Jinja's own."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _compile(name: str, text: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat template {name!r}, line {error.lineno}: {_one_line(error.message)}") from None
    except Exception as error:  # Python's own compiler comes after Jinja's, and has limits too
        raise ValueError(f"chat template {name!r}: {type(error).__name__}: {_one_line(error)}") from None


def _find_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files come before the template in tokenizer_config.json, as in transformers."""
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        paths["default"] = path
    if paths:
        return {name: _read(path) for name, path in paths.items()}
    match config.get("chat_template"):
        case None:
            return {}
        case str(text):
            return {"default": text}
        case [*entries] if all(_is_named_template(entry) for entry in entries):
            return {entry["name"]: entry["template"] for entry in entries}
        case dict(named) if all(isinstance(text, str) for text in named.values()):
            return named
        case _:
            path = folder / "tokenizer_config.json"
            raise ValueError(f"{path}: chat_template must be a string, or a list of objects with name and template")


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read the chat template: {error}") from None


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty: give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be an object with a role")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
