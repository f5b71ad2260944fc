# ruff: noqa: E501 (names stand on long lines)
"""Stories out of `plots`: one has a state, so that it can be told again shorter, longer or with somebody else in it.

A story is a choice of templates and of words. The same choice with other words is the same story about somebody else;
what is asked about it afterwards is answered from the words.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tools.train_demo import plots, tables

GIRLS = tables.GIRLS + tables.words("""Hannah Olivia Sofia Alice Eva Julia Laura Maria Nora Paula Sarah Tara Uma Vera Yara Zara
Aisha Carmen Elena Fatima Ines Jana Kira Leila Mila Nadia Olga Petra Rita Selma Tilda Wanda Yuki Freya Greta Heidi""")
BOYS = (
    tables.BOYS
    + tables.words("""Adam Boris Daniel David Elias Emil Erik George Harry Ian Ivan Jonas Karl Liam Louis Marco
Martin Nico Oliver Omar Paul Pedro Robin Samuel Stefan Thomas Victor Walter Yusuf Anton Arthur Hassan Igor Kenji Ravi""")
)
ANIMALS = tables.KINDS + tables.words("""wolf tiger horse hamster parrot crab dolphin swan raccoon mole otter koala kangaroo camel
zebra giraffe cow sheep donkey crow goose spider ant worm snake lizard crocodile octopus fish shark butterfly beetle bat
dinosaur unicorn monster llama hippo rhino rooster squid goldfish peacock""")
PEOPLE = tables.words("""girl boy farmer baker king queen prince princess knight pirate wizard witch sailor painter teacher
cook doctor gardener fisherman clown giant elf fairy troll ghost mermaid astronaut inventor""")
THINGS_KINDS = tables.words("car train boat cloud snowman star tree teapot lamp clock kite shoe pumpkin")
TRAITS = tables.TRAITS + tables.words("big old tiny grumpy silly proud lonely friendly strange sleepy poor rich")
WOMEN = {"girl", "queen", "princess", "witch", "fairy", "mermaid", "hen", "cow"}
MEN = {"boy", "king", "prince", "knight", "wizard", "fisherman", "snowman"}
TOLD = ("place", "thing", "friend", "friend_kind", "food", "other", "fear", "skill")
STAGES = ("begin", "feel", "try", "turn", "end")
Words = dict[str, str]


def article(text: str) -> str:
    return f"an {text}" if text[0] in "aeiou" and not text.startswith("uni") else f"a {text}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def person(kind: str, name: str, girl: bool) -> Words:
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    found = {"he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize()}
    return found | {"himself": f"{him}self", "name": name, "kind": kind, "a_kind": article(kind)}


def draw_kind(rng: random.Random) -> str:
    return rng.choice(rng.choices((ANIMALS, PEOPLE, THINGS_KINDS), (70, 25, 5))[0])


def draw_words(rng: random.Random, kind: str = "", name: str = "") -> Words:
    kind = kind or draw_kind(rng)
    girl = name in GIRLS if name else kind in WOMEN or (kind not in MEN and rng.random() < 0.5)
    name = name or rng.choice(GIRLS if girl else BOYS)
    friend = rng.choice([other for other in (GIRLS if rng.random() < 0.5 else BOYS) if other != name])
    friend_kind = rng.choice([other for other in ANIMALS if other != kind])
    thing, home = rng.choice(tables.THINGS), rng.choice(tables.HOMES)[0]
    return person(kind, name, girl) | {
        "friend": friend,
        "friend_kind": friend_kind,
        "trait": rng.choice(TRAITS),
        "home": home,
        "Home": capital(home),
        "place": rng.choice(tables.PLACES)[0],
        "thing": thing,
        "a_thing": article(thing),
        "food": rng.choice(tables.FOODS),
        "fear": rng.choice(tables.FEARS),
        "skill": rng.choice(tables.SKILLS),
        "other": rng.choice(tables.OTHERS),
    }


def fill(template: str, words: Words) -> str:
    text = re.sub(r"\b([Aa]) (?=[aeio]|u(?!ni|se))", r"\1n ", template.format(**words))
    return capital(text.replace("magic magic", "magic"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    words: Words
    ask: str
    opening: str
    details: tuple[str, ...]
    stages: dict[str, str]
    """Of STAGES; `feel` may be missing."""
    moral: str
    summary: str
    questions: tuple[tuple[str, str], ...]
    paragraphs: tuple[str, ...]
    """The stages that begin one."""
    told: tuple[str, ...] = ()
    """Episodes after the end."""

    def about(self, kind: str = "", name: str = "", girl: bool | None = None) -> Story:
        """The same story about somebody else."""
        girl = self.words["he"] == "she" if girl is None else girl
        words = person(kind or self.words["kind"], name or self.words["name"], girl)
        return replace(self, words=self.words | words)

    def text(self, length: str = "") -> str:
        """`length`: short, long, or as it was drawn."""
        details = {"short": (), "long": (*self.details, *self.more_details())}.get(length, self.details)
        stages = [stage for stage in self.stages if length != "short" or stage in ("begin", "turn", "end")]
        parts = {"opening": " ".join((self.opening, *details))} | {stage: self.stages[stage] for stage in stages}
        if length == "long":
            parts["later"] = " ".join(plots.NEXT[1][stage][0] for stage in "abc")
        if self.moral and length != "short":
            parts["moral"] = self.moral
        text = ""
        for stage, part in zip(parts, introduce(parts.values()), strict=True):
            text += ("\n\n" if stage in self.paragraphs else " " if text else "") + fill(part, self.words)
        return text

    def answers(self, template: str) -> bool:
        """Whether the words that the answer would use stand in the story."""
        text = self.text()
        keys = {key for _, key, _, _ in string.Formatter().parse(template) if key in TOLD}
        return all(self.words[key] in text for key in keys)

    def more_details(self) -> list[str]:
        return [detail for detail in plots.DETAILS if detail not in self.details and "friend" not in detail][3:5]


def introduce(parts: Iterable[str]) -> list[str]:
    """The friend's kind stands where the friend comes in, and only there."""
    known, found = False, []
    for part in parts:
        first, *rest = part.split("{friend}")
        for piece in rest:
            for said in (" the {friend_kind}", ", a {friend_kind}"):
                if piece.startswith(said):
                    piece = piece.removeprefix(said) if known else piece
                    known = True
            if not known:
                piece, known = " the {friend_kind}" + piece, True
            first += "{friend}" + piece
        found.append(first)
    return found


def draw(rng: random.Random, words: Words | None = None) -> Story:
    plot = rng.choice(plots.PLOTS)
    tie = rng.randrange(2)
    stages = {}
    for stage in STAGES:
        if stage + "*" in plot:
            stages[stage] = plot[stage + "*"][tie]
        elif stage != "feel" or rng.random() < 0.75:
            stages[stage] = rng.choice(plot[stage])
    words = words or draw_words(rng)
    if words["kind"] == "dragon" and "dragon" in plot["sum"][0]:
        words = words | person("bear", words["name"], words["he"] == "she")
    return Story(
        words=words,
        ask=rng.choice(plot["ask"]),
        opening=rng.choice(plots.OPENINGS),
        details=tuple(rng.sample(plots.DETAILS, rng.choice((0, 0, 1, 1, 2)))),
        stages=stages,
        moral=rng.choice(plots.MORALS) if rng.random() < 0.4 else "",
        summary=plot["sum"][0],
        questions=tuple((asked.strip(), said.strip()) for asked, said in (row.split(" = ") for row in plot["qa"])),
        paragraphs=tuple(
            stage
            for stage, share in (("begin", 0.8), ("try", 0.4), ("turn", 0.3), ("end", 0.5))
            if rng.random() < share
        ),
    )


def next_episode(rng: random.Random, story: Story) -> tuple[str, Story]:
    """What happened then; each episode once."""
    left = [block for block in plots.NEXT if block["a"][0] not in story.told] or plots.NEXT
    block = rng.choice(left)
    place = rng.randrange(2)
    parts = (rng.choice(block["a"]), block["b"][place], block["c"][place])
    if story.words["friend"] not in story.text():
        parts = tuple(introduce(parts))
    text = " ".join(fill(part, story.words) for part in parts)
    return text, replace(story, told=(*story.told, block["a"][0]))
