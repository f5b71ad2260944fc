"""What the teacher is asked to write: a request and the beginnings of the answer's parts, all drawn from `tables`.

A 135M-parameter teacher left alone wanders or loops after a few sentences. So an answer has parts: the plan gives the
beginning of each ("One day, Pip found a red ball."), the teacher goes on for a sentence or three, then the next
beginning is set. Plan number n is a pure function of n: the same number, the same plan, on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.train_demo import tables

STORYTELLER = "You are a kind teacher who tells short, simple stories to small children."
ANSWERER = "You are a kind teacher. You answer small children in short, simple sentences."

MAX_SENTENCES = {"opening": (0, 0, 1), "middle": (1, 2, 3), "ending": (0, 0, 1, 1)}
"""What the teacher may add to a part of a story: openings and endings need nothing, and it strays there most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    given: str
    """The plan's own words, which end in the middle of a sentence or after one."""
    before: str = " "
    """What stands between this part and the one before it."""
    max_sentences: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    number: int
    kind: str
    request: str
    system: str
    parts: tuple[Part, ...]
    hero: str
    """Whose name may be said again and again; empty: nobody's."""
    temperature: float


def make(number: int) -> Plan:
    rng = random.Random(f"plan {number}")
    kind = rng.choices(("story", "noun", "question", "talk"), (68, 16, 8, 8))[0]
    return {"story": _story, "noun": _noun, "question": _question, "talk": _talk}[kind](number, rng)


def _story(number: int, rng: random.Random) -> Plan:
    words = _story_words(rng)
    topic, second, last = rng.choice(tables.PLOTS)
    hero = f"a {words['trait']} {words['kind']}" if rng.random() < 0.3 else f"a {words['kind']}"
    if rng.random() < 0.2:
        hero += f" named {words['name']}"
    request = rng.choice(tables.STORY_REQUESTS)[0].format(topic=f"{_article(hero)} {topic.format(**words)}")
    ending = last if rng.random() < 0.6 else rng.choice(tables.ENDINGS)[0]
    given = [rng.choice(tables.OPENINGS)[0], second, rng.choice(tables.MIDDLES)[0], ending]
    if rng.random() < 0.25:
        del given[2]
    parts = [
        Part(
            given=_capital(text.format(**words)),
            before=rng.choice(("\n\n", "\n\n", " ")) if 0 < place != 2 else " ",
            max_sentences=rng.choice(
                MAX_SENTENCES["opening" if place == 0 else "ending" if text is last else "middle"]
            ),
        )
        for place, text in enumerate(given)
    ]
    return Plan(
        number=number,
        kind="story",
        request=request,
        system=STORYTELLER,
        parts=tuple(parts),
        hero=words["name"],
        temperature=rng.choice((0.5, 0.6, 0.7)),
    )


def _story_words(rng: random.Random) -> dict[str, str]:
    girl = rng.random() < 0.5
    name, friend = rng.sample(tables.GIRLS if girl else tables.BOYS, 2)
    if rng.random() < 0.5:
        friend = rng.choice(tables.BOYS if girl else tables.GIRLS)
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    kind = ("girl" if girl else "boy") if rng.random() < 0.3 else rng.choice(tables.KINDS)
    other_kind = rng.choice([other for other in tables.KINDS if other != kind])
    thing, home = rng.choice(tables.THINGS), rng.choice(tables.HOMES)[0]
    return {
        "name": name,
        "friend": friend,
        "kind": kind,
        "a_kind": _article(f"a {other_kind}"),
        "other_kind": other_kind,
        "trait": rng.choice(tables.TRAITS),
        "home": home,
        "Home": _capital(home),
        "place": rng.choice(tables.PLACES)[0],
        "thing": thing,
        "a_thing": _article(f"a {thing}"),
        "A_thing": _capital(_article(f"a {thing}")),
        "food": rng.choice(tables.FOODS),
        "fear": rng.choice(tables.FEARS),
        "skill": rng.choice(tables.SKILLS),
        "other": rng.choice(tables.OTHERS),
        "pet": rng.choice(tables.PETS),
        **{"he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize()},
    }


def _noun(number: int, rng: random.Random) -> Plan:
    noun, meaning = rng.choice(tables.NOUNS)
    request = rng.choice(tables.NOUN_REQUESTS)[0].format(noun=noun)
    return _answer(number, rng, "noun", request, f"{_capital(noun)} is {meaning}.")


def _question(number: int, rng: random.Random) -> Plan:
    question, first = rng.choice(tables.QUESTIONS)
    return _answer(number, rng, "question", question, first)


def _talk(number: int, rng: random.Random) -> Plan:
    words = _story_words(rng)
    said, first = (text.format(**words) for text in rng.choice(tables.TALK))
    return _answer(number, rng, "talk", said, first)


def _answer(number: int, rng: random.Random, kind: str, request: str, first: str) -> Plan:
    part = Part(given=first, max_sentences=rng.choice((1, 1, 2)))
    temperature = rng.choice((0.3, 0.5, 0.7))  # few prompts, so that heat must make the difference
    return Plan(
        number=number,
        kind=kind,
        request=request,
        system=ANSWERER,
        parts=(part,),
        hero="",
        temperature=temperature,
    )


def _article(text: str) -> str:
    """a old map → an old map."""
    head, _, rest = text.partition(" ")
    return f"an {rest}" if head == "a" and rest[:1] in "aeiou" else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
