"""The tags between which models think, and whether a prompt has left them open."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.server.parsers.lark import Rules


@dataclass(frozen=True, slots=True)
class Thinking:
    tag: str
    closes: str
    label: str = ""
    """Stands behind the tag."""
    anywhere: bool = False
    """A thought may begin in the middle of a text. Else it begins an answer or follows a call: a tag in the middle of
    prose is prose about tags."""

    @property
    def opens(self) -> str:
        return self.tag + self.label

    @property
    def tags(self) -> tuple[str, ...]:
        return self.tag, self.closes

    def is_open(self, prompt: str) -> bool:
        """The prompt has begun a thought for the model to go on with."""
        return prompt.rstrip().endswith(self.opens)

    def is_over(self, prompt: str) -> bool:
        """The prompt has ended the model's thought for it."""
        return prompt.rstrip().endswith(self.closes)

    def grammar(self, rules: Rules, prompt: str) -> str:
        """The expression of a thought before what else the output must be."""
        if self.is_over(prompt):
            return ""
        thought = f"{rules.text_before(self.closes)} /\\s{{0,2}}/"
        if self.is_open(prompt):
            return thought
        label = rules.text(self.label) if self.label else ""
        return f"({rules.tag(self.tag)} {label} {thought})?"


THINKING = {
    "think": Thinking("<think>", "</think>"),
    "gemma4": Thinking("<|channel>", "<channel|>", label="thought", anywhere=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
}
