"""Which notation of calls and of thoughts a model has: given by name, or found in the text of its chat template."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom

from anabranch.sampling_params import Grammar
from anabranch.server.parsers.call_grammar import Rules
from anabranch.server.parsers.gemma4 import Gemma4
from anabranch.server.parsers.harmony import ANALYSIS, Harmony, HarmonyReader
from anabranch.server.parsers.json_calls import Hermes, Mistral, PlainJson
from anabranch.server.parsers.parts import Named, ToolChoice, ToolSpec
from anabranch.server.parsers.reader import Notation, Output, Reader, Thinking
from anabranch.server.parsers.section_calls import DeepSeek, KimiK2
from anabranch.server.parsers.tagged_values import Glm45, MiniMaxM2, Qwen3Coder

NOTATIONS: dict[str, Callable[[str], Notation | None]] = {
    "hermes": lambda template: Hermes(),
    "qwen3_coder": lambda template: Qwen3Coder(),
    "gemma4": lambda template: Gemma4(),
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "glm45": Glm45,
    "kimi_k2": lambda template: KimiK2(),
    "minimax_m2": lambda template: MiniMaxM2(),
    "json": PlainJson,
    "harmony": lambda template: Harmony(),
    "none": lambda template: None,
}
THINKING = {
    "think": Thinking("<think>", "</think>"),
    "gemma4": Thinking("<|channel>", "<channel|>", label="thought", anywhere=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "harmony": ANALYSIS,
}
# Names that users of other servers know.
SAME_NOTATION = {"qwen": "hermes", "qwen3_xml": "qwen3_coder", "llama3_json": "json", "glm47": "glm45"}
SAME_NOTATION |= {"deepseek_v3": "deepseek", "deepseek_v31": "deepseek", "openai": "harmony"}
SAME_THINKING = {"qwen3": "think", "deepseek_r1": "think", "deepseek_v3": "think", "glm45": "think"}
SAME_THINKING |= {"kimi_k2": "think", "minimax_m2": "think", "openai_gptoss": "harmony"}


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one model."""

    tool_parser: str
    reasoning_parser: str
    notation: Notation | None
    thinking: Thinking | None
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    short_ids: bool = False
    """Ids of calls are nine letters and digits, the only ones that the chat template takes."""
    mark: str = ""
    """Of Harmony's tags that are tokens."""

    @property
    def kept_tokens(self) -> frozenset[int]:
        """Tags that are tokens: they must stay in the text, even where special tokens are skipped."""
        tags = self.notation.tags if self.notation else ()
        tags += (self.thinking.tag, self.thinking.closes) if self.thinking else ()
        tags += Harmony.tags if self.reasoning_parser == "harmony" else ()
        return frozenset(self.added_tokens[tag] for tag in tags if tag in self.added_tokens)

    @property
    def marked_tokens(self) -> dict[int, bytes]:
        """Tags that are spelled with a mark where text is read, and how."""
        return {self.added_tokens[tag]: (self.mark + tag).encode() for tag in Harmony.tags if self.mark}

    def start(
        self,
        tools: Sequence[ToolSpec],
        tool_choice: ToolChoice,
        reasoning: bool,
        prompt: str = "",
        parallel: bool = True,
        random: Random | None = None,
        continued: str = "",
    ) -> Reader:
        """A reader for one completion.

        `reasoning`: separate thoughts from the content; otherwise they stay in it, with their tags. `prompt`: as
        rendered, or the end of it: it may have begun a thought. `parallel`: give all calls, not only the first.
        `random`: the source of calls' ids. `continued`: the text of the message that the completion continues, with
        which the prompt ends.
        """
        offered = {} if tool_choice == "none" else {tool.name: tool for tool in tools}
        thinking = self.thinking if reasoning else None
        out = Output(offered, random or SystemRandom(), self.short_ids)
        if "harmony" in (self.tool_parser, self.reasoning_parser):
            calls = bool(offered) and self.tool_parser == "harmony"
            thoughts = reasoning and self.reasoning_parser == "harmony"
            return HarmonyReader(out, calls, thoughts, prompt, parallel, continued, self.mark)
        thinks = thinking is not None and thinking.is_open(prompt, continued)
        within = thinking is not None and not prompt.rstrip().endswith(thinking.opens)
        return Reader(self.notation if offered else None, thinking, out, thinks, parallel, thinks and within)

    def tool_grammar(
        self,
        tools: Sequence[ToolSpec],
        tool_choice: ToolChoice,
        prompt: str = "",
        parallel: bool = True,
        continued: str = "",
    ) -> Grammar | None:
        """The grammar of the whole output where a call must come: a thought if there may be one, and calls.

        A named tool, one of `tools`, is called once; with `required` there may be several calls if they are allowed in
        `parallel`. None where no call must come. ValueError if a tool's schema cannot be enforced.
        """
        if tool_choice in ("none", "auto"):
            return None
        if isinstance(tool_choice, Named):
            parallel, tools = False, [tool for tool in tools if tool.name == tool_choice.name]
        assert tools, "Chat.check refuses a choice among no tools"
        if self.notation is None:
            raise ValueError(
                "tool_choice cannot be 'required' or name a tool: this server runs with tool parser 'none'"
            )
        rules = Rules(self.added_tokens)
        try:
            calls = self.notation.grammar(rules, tools, parallel)
        except RecursionError:
            raise ValueError("tools: a schema is nested too deeply") from None
        thought = self.thinking.grammar(rules, prompt, continued) if self.thinking else ""
        return Grammar(lark=rules.source(f"{thought} {calls}"))

    def after_thought(self, grammar: Grammar, prompt: str, continued: str = "") -> Grammar:
        """A grammar of the answer → of the whole output, in which a thought is free; ValueError if that is impossible.

        Without this a model whose prompt has begun a thought could not end it, and its answer would count as thought.
        """
        if self.thinking is None or self.thinking.is_over(prompt, continued):
            return grammar
        rules = Rules(self.added_tokens)
        answer = rules.of(grammar)
        source = rules.source(f"{self.thinking.answer_grammar(rules, prompt, continued)} {answer}")
        return Grammar(lark=source, open_objects=grammar.open_objects)


def find_parsers(
    chat_template: str | None,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    added_tokens: Mapping[str, int] | None = None,
) -> Parsers:
    """`chat_template`: the text of a template, or of several joined. `added_tokens`: the tokenizer's, text → id;
    without them a grammar cannot require a tag that is one token."""
    template = chat_template or ""
    tools = _known("tool parser", tool_parser, NOTATIONS, SAME_NOTATION) or _find_notation(template)
    thoughts = _known("reasoning parser", reasoning_parser, {**THINKING, "none": None}, SAME_THINKING)
    if not thoughts and "harmony" in (tools, _find_notation(template)):
        thoughts = "harmony"
    found = (name for name, tags in THINKING.items() if tags.closes in template and name != "harmony")
    thoughts = thoughts or next(found, "none")
    short_ids = re.search(r"length\s*!=\s*9\b", template) is not None
    notation, thinking = NOTATIONS[tools](template), THINKING.get(thoughts)
    added, mark = dict(added_tokens or {}), ""
    if "harmony" in (tools, thoughts) and added.keys() >= set(Harmony.tags):
        mark = chr(SystemRandom().randrange(0x100000, 0x10FFFE))  # for private use, and not to be guessed
    return Parsers(tools, thoughts, notation, thinking, added, short_ids, mark)


def _known(what: str, name: str, names: Mapping[str, object], others: Mapping[str, str]) -> str:
    """Our own name for it; empty for auto."""
    if name == "auto":
        return ""
    if name not in names and name not in others:
        raise ValueError(f"unknown {what} {name!r}; known are auto, {', '.join([*names, *others])}")
    return others.get(name, name)


def _find_notation(template: str) -> str:
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "<|tool_call>" in template and "call:" in template:
        return "gemma4"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    for name, kind in (("deepseek", DeepSeek), ("kimi_k2", KimiK2), ("minimax_m2", MiniMaxM2)):
        if kind.OPENS in template:
            return name
    if "<tool_call>" in template and "<tool_calls>" not in template:
        if "<function=" in template and "<parameter=" in template:
            return "qwen3_coder"
        if Glm45.PARAMETER in template and Glm45.PARAMETER_ENDS in template:
            return "glm45"
        if re.search(r'\\?"arguments\\?"', template):
            return "hermes"
    return "json"
