# ruff: noqa: E501 (phrases stand on long lines)
"""Conversations of one to many turns: who speaks refers back, and every answer follows from what stands before it.

A `Talk` holds what was said and what it was about (the story told, the list given, what the user said of himself). A
scene adds turns to it; a document is a few scenes. Document number n is a pure function of n, on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.train_demo import chatter, knowledge, stories
from tools.train_demo.knowledge import NUMBERS
from tools.train_demo.stories import article, capital, fill

MOST_TURNS = 24
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
STARTS = (
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "h",
    "j",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "sh",
    "st",
    "t",
    "v",
    "z",
)
VOWELS = ("a", "e", "i", "o", "u", "ai", "ee", "ia", "y")
CLOSES = ("", "", "", "n", "r", "l", "s", "m", "th", "k")


@dataclass(slots=True)
class Talk:
    rng: random.Random
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    user: dict[str, str] = field(default_factory=dict)
    """What the user said of himself, by its name in OF_USER."""
    story: stories.Story | None = None

    def add(self, asked: str, said: str) -> None:
        greeting = self.rng.choice(("Hi! ", "Hello! ", "Hey, ")) if not self.turns and self.rng.random() < 0.04 else ""
        self.turns.append((("" if asked.startswith("H") else greeting) + typed(self.rng, asked), said))

    def pick(self, *ways: str) -> str:
        return self.rng.choice(ways)


def typed(rng: random.Random, text: str) -> str:
    """As people type: now and then without the capital letter or the mark at the end, or with a polite word."""
    dice = rng.random()
    if dice < 0.08 and text.endswith((".", "?")):
        text = text[:-1]
    elif dice < 0.13:
        text = text.lower()
    elif dice < 0.18 and text.endswith((".", "?")):
        text = text[:-1].lower()
    elif dice < 0.21 and text.endswith("."):
        text = f"Please {text[:1].lower()}{text[1:]}" if text.split()[0] in COMMANDS else text
    elif dice < 0.23 and text.endswith("?") and text.split()[0] in QUESTIONS:
        text = f"Can you tell me: {text}"
    return text


QUESTIONS = {"What", "Why", "Where", "How", "Which", "Is", "Can", "Do", "Does", "Who"}
COMMANDS = {"Tell", "Write", "Name", "Count", "List", "Say", "Make", "Give", "Continue", "Change"}


def invented_name(rng: random.Random) -> str:
    parts = [rng.choice(STARTS) + rng.choice(VOWELS) + rng.choice(CLOSES) for _ in range(rng.choice((1, 2, 2, 3)))]
    return "".join(parts).capitalize()


def any_name(rng: random.Random) -> str:
    return invented_name(rng) if rng.random() < 0.4 else rng.choice(stories.GIRLS + stories.BOYS)


# Stories.

STORY_REQUESTS = (
    "Tell me a story about {topic}.", "Tell me a story about {topic}.", "Write a short story about {topic}.",
    "Can you tell me a story about {topic}?", "Please write a little story about {topic}.", "Write a story about {topic}.",
    "I want to hear a story about {topic}.", "Tell me about {topic}.", "A story about {topic}, please.",
    "I would like a story about {topic}.", "Could you write a story about {topic}?", "Make up a story about {topic}.",
    "Tell my daughter a story about {topic}.", "Story about {topic}.", "Tell us a bedtime story about {topic}.",
)  # fmt: skip
NO_TOPIC = (
    "Tell me a story.", "Write a story.", "Can you tell me a story?", "I want to hear a story.", "A story, please.",
    "Tell me a bedtime story.", "Tell me something.", "Please tell me a little story.", "Tell me a nice story.",
    "Do you have a story for me?", "Story time!", "Tell me any story.", "Tell me a tale.", "Once upon a time...",
)  # fmt: skip
GO_ON = (
    "And then?", "And then?", "What happened next?", "What happens next?", "Go on.", "Continue.", "Tell me more.",
    "More, please.", "What then?", "And after that?", "How does it go on?", "Please go on.", "Then what?", "Keep going.",
    "What did {he} do then?", "Continue the story.", "Is there more?", "And what happened after that?", "more",
)  # fmt: skip
SHORTER = (
    "Make it shorter.", "Can you make it shorter?", "Shorter, please.", "That is too long.", "Tell it in fewer words.",
    "Make the story shorter.", "A shorter version, please.", "Too long. Make it short.",
)  # fmt: skip
SUMMARY = (
    "Tell it in one sentence.", "Summarize the story.", "What was the story about?", "Sum it up.", "In one sentence, please.",
    "Give me a summary.", "What is the story about?", "Say it in one sentence.",
)  # fmt: skip
LONGER = (
    "Make it longer.",
    "Can you make it longer?",
    "A longer version, please.",
    "Longer, please.",
    "That is too short.",
)
ANOTHER = (
    "Another one.", "Another one, please.", "Tell me another story.", "Tell me another one.", "Again!", "One more.",
    "Tell me a different story.", "Now another story.", "Do you have another one?", "Can I hear another story?", "Next story.",
)  # fmt: skip


HOMES = {
    "the sea": "in a small house by the sea",
    "the forest": "in a green forest",
    "a forest": "in a green forest",
    "a farm": "on a farm near a river",
    "a village": "in a little village",
    "an old tree": "under a big old tree",
    "a lake": "near a blue lake",
    "the city": "in a tall house in the city",
    "a cave": "in a warm cave in the mountains",
    "the mountains": "in a warm cave in the mountains",
    "a pond": "next to a quiet pond",
    "an island": "on a small island",
}
"""Topics that are places, and the home of a hero there."""


def draw_story(talk: Talk, words: stories.Words | None = None) -> tuple[str, stories.Story]:
    rng = talk.rng
    story = stories.draw(rng, words)
    words, ask = story.words, story.ask
    if ask.startswith("about "):
        return ask.removeprefix("about "), story
    places = {place: home for place, home in HOMES.items() if home == words["home"]}
    if places and rng.random() < 0.06:
        return rng.choice(list(places)), story
    dice = rng.random()
    hero = words["kind"]
    if dice < 0.25:
        hero = f"{words['trait']} {hero}"
    hero = article(hero)
    if rng.random() < 0.2:
        hero += f" named {words['name']}"
    if dice > 0.85:
        return hero, story
    if dice > 0.8:
        return f"{article(words['kind'])} and {article(words['friend_kind'])}", story
    return f"{hero} {fill_plain(ask, words)}", story


def fill_plain(template: str, words: stories.Words) -> str:
    text = fill(template, words)
    return template[0] + text[1:]


def story_scene(talk: Talk) -> None:
    rng = talk.rng
    topic, story = draw_story(talk)
    length = ""
    if rng.random() < 0.15:
        asked = rng.choice(NO_TOPIC)
    elif rng.random() < 0.08:
        length = rng.choice(("short", "long"))
        asked = f"Tell me a {'very short' if length == 'short' else 'long'} story about {topic}."
    elif rng.random() < 0.05:
        talk.story = story
        asked = f"Tell me a story about {topic} in one sentence."
        talk.add(asked, fill(story.summary, story.words))
        return
    else:
        asked = rng.choice(STORY_REQUESTS).format(topic=topic)
    talk.add(asked, story.text(length))
    talk.story = story


def go_on(talk: Talk) -> None:
    assert talk.story
    asked = fill(talk.rng.choice(GO_ON), talk.story.words)
    text, talk.story = stories.next_episode(talk.rng, talk.story)
    talk.add(asked, text)


def shorter(talk: Talk) -> None:
    assert talk.story
    summary = fill(talk.story.summary, talk.story.words)
    if talk.rng.random() < 0.5:
        short = talk.story.text("short")
        talk.add(talk.rng.choice(SHORTER), summary if talk.turns[-1][1] in (short, summary) else short)
    else:
        talk.add(talk.rng.choice(SUMMARY), summary)


def longer(talk: Talk) -> None:
    assert talk.story
    talk.add(talk.rng.choice(LONGER), talk.story.text("long"))


def another(talk: Talk) -> None:
    assert talk.story
    rng, old = talk.rng, talk.story.words
    dice = rng.random()
    if dice < 0.6:
        words = stories.draw_words(rng)
        while words["kind"] == old["kind"] or words["name"] == old["name"]:
            words = stories.draw_words(rng)
        asked = rng.choice(ANOTHER)
    elif dice < 0.8:
        words = stories.draw_words(rng, kind=old["kind"])
        asked = talk.pick(
            "Another story about {a_kind}.", "One more about {a_kind}, please.", "Tell me another {kind} story."
        )
    else:
        words = stories.draw_words(rng, kind=old["kind"], name=old["name"])
        words |= {key: old[key] for key in ("he", "him", "his", "He", "His", "himself")}
        asked = talk.pick(
            "Another story about {name}.", "Tell me another story about {name}.", "More about {name}, please."
        )
    _, talk.story = draw_story(talk, words)
    talk.add(fill(asked, words), talk.story.text())


def change_hero(talk: Talk) -> None:
    assert talk.story
    rng, old = talk.rng, talk.story.words
    if rng.random() < 0.5:
        kind = stories.draw_kind(rng)
        while kind == old["kind"]:
            kind = stories.draw_kind(rng)
        girl = kind in stories.WOMEN or (kind not in stories.MEN and old["he"] == "she")
        talk.story = talk.story.about(kind=kind, girl=girl)
        asked = talk.pick(
            "Make the {kind} {new}.", "Can it be {new} instead?", "Now with {new}.", "Tell it again with {new}.",
            "Change the {kind} to {new}.", "The same story with {new}, please.", "Now {new} instead of the {kind}.",
            "I want {new} in the story.", "Make it {new} instead of {a_kind}.",
        )  # fmt: skip
        talk.add(asked.format(**old, new=article(kind)), talk.story.text())
    else:
        girl = rng.random() < 0.5
        name = talk.user.get("name", "") if rng.random() < 0.3 else ""
        name = name or rng.choice(stories.GIRLS if girl else stories.BOYS)
        girl = name in stories.GIRLS if name in stories.GIRLS + stories.BOYS else old["he"] == "she"
        talk.story = talk.story.about(name=name, girl=girl)
        asked = talk.pick(
            "Change the name to {new}.", "Call the {kind} {new}.", "The {kind} should be named {new}.", "Rename {name} to {new}.",
            "Can the {kind} be called {new}?", "Use the name {new} instead.", "Tell it again, but call {him} {new}.",
        )  # fmt: skip
        talk.add(asked.format(**old, new=name), talk.story.text())


def ask_story(talk: Talk) -> None:
    assert talk.story
    words = talk.story.words
    general = (
        ("What was the {kind}'s name?", "The {kind}'s name was {name}."),
        ("What is the name of the {kind}?", "The {kind}'s name is {name}."),
        ("Who was {name}?", "{name} was {a_kind} who lived {home}."),
        (
            "What kind of animal was {name}?" if words["kind"] in stories.ANIMALS else "What was {name}?",
            "{name} was {a_kind}.",
        ),
        ("Who is the story about?", "It is about {name}, {a_kind}."),
        ("What is the hero called?", "The hero is called {name}."),
        ("How does the story end?", talk.story.stages["end"]),
        ("What happened at the end?", talk.story.stages["end"]),
        ("How did it begin?", talk.story.stages["begin"]),
        ("Is that a true story?", "No. I made it up."),
        ("Did that really happen?", "No, it is only a story that I made up."),
        ("Was {name} {a_kind}?", "Yes. {name} was {a_kind}."),
        ("Was {name} a dinosaur?", "No. {name} was {a_kind}."),
        ("Who is {friend}?", "{friend} is {a_friend_kind}, a friend of {name}'s."),
        ("Did you like the story?", "I like every story with {a_kind} in it."),
        ("I like {name}.", "I am glad! {name} is a good {kind}."),
        ("I like that story.", "I am glad that you like it. Shall I tell you another one?"),
        ("Who told you that?", "Nobody. I made it up."),
    )
    rows = general if talk.rng.random() < 0.5 else talk.story.questions
    asked, said = talk.rng.choice([row for row in rows if talk.story.answers(row[0] + row[1])] or general[:1])
    words = words | {"a_friend_kind": article(words["friend_kind"])}
    talk.add(fill(asked, words), fill(" ".join(stories.introduce([said])) if "friend_kind" in said else said, words))


FOLLOW_UPS: tuple[tuple[Callable[[Talk], None], int], ...] = (
    (go_on, 30), (shorter, 14), (longer, 4), (another, 14), (change_hero, 16), (ask_story, 30),
)  # fmt: skip


def follow_story(talk: Talk) -> None:
    if not talk.story:
        return story_scene(talk)
    scenes, shares = zip(*FOLLOW_UPS, strict=True)
    talk.rng.choices(scenes, shares)[0](talk)


# What the user says of himself, and asks later.


@dataclass(frozen=True, slots=True)
class OfUser:
    tell: tuple[str, ...]
    reply: tuple[str, ...]
    ask: tuple[str, ...]
    known: tuple[str, ...]
    draw: Callable[[random.Random], str]
    what: str


def _of(*lists: str) -> Callable[[random.Random], str]:
    choices = [word for name in lists for word in knowledge.LISTS[name]]
    return lambda rng: rng.choice(choices)


OF_USER = {
    "name": OfUser(
        ("My name is {x}.", "I am {x}.", "Hello, I am {x}.", "Hi, my name is {x}.", "Hello! My name is {x}.", "I'm {x}.",
         "Call me {x}.", "You can call me {x}.", "People call me {x}.", "{x} here.", "Hi, I'm {x}!", "My name's {x}."),
        ("Hello, {x}! It is nice to meet you.", "Hi, {x}! What would you like to do today?", "Nice to meet you, {x}!",
         "Hello, {x}! How can I help you?", "Hello, {x}! Would you like to hear a story?"),
        ("What is my name?", "What's my name?", "Do you know my name?", "Do you remember my name?", "Who am I?", "Say my name.",
         "What am I called?", "Can you tell me my name?", "Tell me my name."),
        ("Your name is {x}.", "You are {x}.", "Your name is {x}. You told me so.", "You told me that your name is {x}."),
        any_name, "your name"),
    "age": OfUser(
        ("I am {x} years old.", "I'm {x} years old.", "My age is {x}.", "I turned {x} today."),
        ("{x} is a good age!", "{x} years old! That is nice.", "Thank you for telling me. {x} is a good age."),
        ("How old am I?", "What is my age?", "Do you know how old I am?", "Do you remember my age?"),
        ("You are {x} years old.", "You told me that you are {x} years old."),
        lambda rng: rng.choice((NUMBERS[rng.randrange(4, 21)], str(rng.randrange(4, 90)))), "how old you are"),
    "color": OfUser(
        ("My favorite color is {x}.", "I like {x} best of all colors.", "I love the color {x}."),
        ("{X} is a beautiful color!", "That is a nice color. I can think of many {x} things.", "{X} is a good choice."),
        ("What is my favorite color?", "Which color do I like?", "Do you remember my favorite color?"),
        ("Your favorite color is {x}.", "You like {x} best."),
        _of("colors"), "your favorite color"),
    "animal": OfUser(
        ("My favorite animal is {a_x}.", "I like {plural} best.", "I love {plural}."),
        ("{Plural} are wonderful! Shall I tell you a story about {a_x}?", "I like stories about {plural}, too."),
        ("What is my favorite animal?", "Which animal do I like?", "Which animal do I like best?"),
        ("Your favorite animal is the {x}.", "You like {plural} best."),
        _of("animals"), "your favorite animal"),
    "food": OfUser(
        ("My favorite food is {x}.", "I love {x}.", "I like to eat {x}."),
        ("{X} is delicious!", "That sounds good. Now I would be hungry, if I could eat.", "Who does not like {x}?"),
        ("What is my favorite food?", "What do I like to eat?", "Which food do I love?"),
        ("Your favorite food is {x}.", "You like {x}."),
        _of("foods"), "your favorite food"),
    "pet": OfUser(
        ("My dog is called {x}.", "I have a dog named {x}.", "My dog's name is {x}.", "I have a new dog. His name is {x}."),
        ("{x} is a good name for a dog!", "How lovely! Say hello to {x} from me.", "{x} must be a good dog."),
        ("What is my dog's name?", "What is my dog called?", "What is the name of my dog?", "Who is my dog?"),
        ("Your dog is called {x}.", "Your dog's name is {x}."),
        any_name, "your dog's name"),
    "cat": OfUser(
        ("My cat is called {x}.", "I have a cat named {x}.", "My cat's name is {x}."),
        ("{x} is a good name for a cat!", "How lovely! Does {x} like to sleep in the sun?"),
        ("What is my cat's name?", "What is my cat called?", "What is the name of my cat?"),
        ("Your cat is called {x}.", "Your cat's name is {x}."),
        any_name, "your cat's name"),
    "friend": OfUser(
        ("My best friend is {x}.", "I have a friend named {x}.", "My friend is called {x}."),
        ("It is good to have a friend like {x}.", "How nice! What do you and {x} do together?"),
        ("Who is my best friend?", "What is my friend's name?", "What is my friend called?"),
        ("Your friend is {x}.", "Your best friend is {x}."),
        any_name, "who your friend is"),
    "sister": OfUser(
        ("My sister's name is {x}.", "I have a sister named {x}."),
        ("{x} is a nice name. Do you play together?", "How nice that you have a sister!"),
        ("What is my sister's name?", "What is my sister called?", "Who is my sister?"),
        ("Your sister's name is {x}.", "Your sister is called {x}."),
        any_name, "your sister's name"),
    "home": OfUser(
        ("I live {x}.", "My house is {x}.", "My family lives {x}."),
        ("It must be nice to live {x}.", "That sounds like a good place."),
        ("Where do I live?", "Where is my house?", "Do you know where I live?"),
        ("You live {x}.", "You told me that you live {x}."),
        lambda rng: rng.choice(stories.tables.HOMES)[0], "where you live"),
    "number": OfUser(
        ("My lucky number is {x}.", "Remember the number {x}.", "The secret number is {x}.", "Please remember this number: {x}."),
        ("All right. I will remember {x}.", "{x}. I have it."),
        ("What was the number?", "Which number did I tell you?", "What is the number?", "What is my number?"),
        ("The number is {x}.", "It was {x}."),
        lambda rng: str(rng.randrange(1, 1000)), "a number"),
    "word": OfUser(
        ("Remember the word {x}.", "The secret word is {x}.", "The password is {x}. Remember it."),
        ("All right. The word is {x}.", "I will remember {x}."),
        ("What was the word?", "What is the secret word?", "Which word did I tell you?"),
        ("The word was {x}.", "It was {x}."),
        lambda rng: rng.choice(rng.choice(list(knowledge.LISTS.values()))), "a word"),
}  # fmt: skip
PLURALS = {row[0]: row[1] for row in knowledge.ANIMALS}


def _say(talk: Talk, ways: tuple[str, ...], value: str) -> str:
    words = {"x": value, "X": capital(value), "a_x": article(value)}
    words["plural"] = PLURALS.get(value, value)
    return talk.rng.choice(ways).format(**words, Plural=capital(words["plural"]))


def tell_of_user(talk: Talk) -> None:
    key = "name" if talk.rng.random() < 0.3 else talk.rng.choice(list(OF_USER))
    value = OF_USER[key].draw(talk.rng)
    talk.user[key] = value
    if key not in ("name",) and "name" not in talk.user and talk.rng.random() < 0.12:
        name = talk.user["name"] = any_name(talk.rng)
        said = _say(talk, OF_USER[key].tell, value)
        return talk.add(f"My name is {name}. {said}", f"Hello, {name}! {_say(talk, OF_USER[key].reply, value)}")
    talk.add(_say(talk, OF_USER[key].tell, value), _say(talk, OF_USER[key].reply, value))


def ask_of_user(talk: Talk) -> None:
    rng = talk.rng
    if talk.user and rng.random() < 0.8:
        key = rng.choice(list(talk.user))
        return talk.add(rng.choice(OF_USER[key].ask), _say(talk, OF_USER[key].known, talk.user[key]))
    missing = [key for key in OF_USER if key not in talk.user]
    key = rng.choice(["name"] * 4 + missing) if "name" in missing else rng.choice(missing)
    what = OF_USER[key].what
    if key in ("number", "word"):
        return talk.add(rng.choice(OF_USER[key].ask), f"You have not told me {what} yet.")
    said = talk.pick(f"You have not told me {what} yet.", f"I do not know {what}. You did not tell me.")
    talk.add(rng.choice(OF_USER[key].ask), said)


# Facts.


def number_word(value: int) -> str:
    return NUMBERS[value] if value < len(NUMBERS) else str(value)


def fact_scene(talk: Talk) -> None:
    scenes = (
        animal_fact,
        animal_fact,
        yes_no_fact,
        yes_no_fact,
        yes_no_fact,
        thing_fact,
        why_fact,
        opposite_fact,
        order_fact,
    )
    talk.rng.choice(scenes)(talk)


def animal_fact(talk: Talk) -> None:
    """A question about an animal, and perhaps "And a cat?" after it."""
    rng = talk.rng
    one, other = rng.sample(knowledge.ANIMALS, 2)
    kind = rng.choice(("legs", "color", "lives", "eats", "what", "sound", "can", "able", "able"))
    while kind == "sound" and not (one[9] and other[9]):
        one, other = rng.sample(knowledge.ANIMALS, 2)
    talk.add(*_animal_question(talk, kind, one))
    dice = rng.random()
    if dice < 0.3 and kind != "able":
        ask = talk.pick("And {}?", "What about {}?", "And what about {}?", "And for {}?").format(article(other[0]))
        talk.add(ask, _animal_question(talk, kind, other)[1])
    elif dice < 0.6:
        kind = rng.choice([left for left in IT if left != kind and (one[9] or left != "sound")])
        talk.add(capital(talk.pick("", "and ") + rng.choice(IT[kind])), _animal_question(talk, kind, one)[1])


IT = {
    "legs": ("how many legs does it have?", "how many legs do they have?"),
    "lives": ("where does it live?", "where do they live?"),
    "eats": ("what does it eat?", "what do they eat?"),
    "sound": ("what sound does it make?", "what does it say?"),
    "color": ("what color is it?", "what color are they?"),
    "can": ("what can it do?", "what can they do?"),
}
"""Questions about the animal that was last spoken of."""


def _animal_question(talk: Talk, kind: str, row: tuple[str, ...]) -> tuple[str, str]:
    name, plural, legs, _, color, lives, eats, can, cannot, sound, fact = row
    a_name = article(name)
    if kind == "able":
        able = talk.rng.random() < 0.5
        skill, lacks = talk.rng.choice(can.split(", ")), talk.rng.choice(cannot.split(", "))
        ask = talk.pick(f"Can {a_name} ", f"Can {plural} ") + (skill if able else lacks) + "?"
        no = f"No. {capital(plural)} cannot {lacks}, but they can {skill}."
        return ask, f"Yes. {capital(plural)} can {skill}." if able else no
    if kind == "legs":
        number = number_word(int(legs)) if int(legs) else "no"
        parts = "arms" if name == "octopus" else "legs"
        ask = (
            f"How many {parts} does {a_name} have?",
            f"How many {parts} do {plural} have?",
            f"How many {parts} has {a_name}?",
        )
        return talk.pick(*ask), f"{capital(a_name)} has {number} {parts}."
    if kind == "color":
        said = f"{capital(plural)} have {color}." if color == "many colors" else f"Many {plural} are {color}."
        return talk.pick(f"What color is {a_name}?", f"What color are {plural}?", f"Which color has {a_name}?"), said
    if kind == "lives":
        said = f"{capital(plural)} live {lives}."
        return talk.pick(f"Where do {plural} live?", f"Where does {a_name} live?", f"Where can I find {plural}?"), said
    if kind == "eats":
        said = f"{capital(plural)} eat {eats}."
        return talk.pick(f"What do {plural} eat?", f"What does {a_name} eat?", f"What food do {plural} like?"), said
    if kind == "sound":
        ask = (f"What sound does {a_name} make?", f"What does {a_name} say?", f"Which sound do {plural} make?")
        return talk.pick(*ask), f"{capital(article(name))} says {sound}." if sound != "song" else "A whale sings."
    if kind == "can":
        skills = can.split(", ")
        listed = " and ".join((", ".join(skills[:-1]), skills[-1])) if len(skills) > 1 else skills[0]
        said = f"{capital(a_name)} can {listed}, but it cannot {cannot.split(', ')[0]}."
        return talk.pick(f"What can {a_name} do?", f"What can {plural} do?", f"What is {a_name} able to do?"), said
    ask = (f"What is {a_name}?", f"Tell me about {plural}.", f"What do you know about {plural}?", f"Tell me something about {plural}.",
           f"What is {a_name}?", f"Describe {a_name}.", f"Can you tell me what {a_name} is?")  # fmt: skip
    category = CATEGORY.get(name, "an animal")
    said = f"{capital(a_name)} is {category} that lives {lives}. It eats {eats}. {fact}"
    return talk.pick(*ask), said


CATEGORY = (
    dict.fromkeys(["hen", "duck", "owl", "eagle", "parrot", "penguin", "bird"], "a bird")
    | dict.fromkeys(["bee", "ant", "butterfly"], "an insect")
    | dict.fromkeys(["cow", "horse", "pig", "sheep", "goat"], "a farm animal")
    | dict.fromkeys(["dog", "cat"], "a friendly animal")
    | dict.fromkeys(["lion", "tiger"], "a large wild cat")
)
OR_NO = (" Yes or no?", " Yes or no.", " Answer yes or no.", " Just say yes or no.", " Answer with yes or no.")


def draw_yes_no(talk: Talk) -> tuple[str, bool, str]:
    """(question, whether the answer is yes, the reason)."""
    rng = talk.rng
    dice = rng.random()
    if dice < 0.25:
        asked, yes, why = rng.choice(knowledge.YES_NO)
        return asked, yes == "Yes", why
    if dice < 0.45:
        noun, meaning, true, false, *_ = rng.choice(knowledge.THINGS)
        if rng.random() < 0.5:
            how = rng.choice(true.split(", "))
            return f"Is {noun} {how}?", True, f"{capital(noun)} is {how}."
        wrong, right = rng.choice(false.split(", ")).split(": ")
        return f"Is {noun} {wrong}?", False, f"{capital(noun)} is {right}."
    if dice < 0.6:
        one, other = rng.sample(knowledge.ANIMALS, 2)
        while one[3] == other[3]:
            one, other = rng.sample(knowledge.ANIMALS, 2)
        bigger = int(one[3]) > int(other[3])
        than = talk.pick("bigger", "smaller", "larger")
        large, small = (one, other) if bigger else (other, one)
        why = f"{capital(article(large[0]))} is bigger than {article(small[0])}."
        return f"Is {article(one[0])} {than} than {article(other[0])}?", bigger == (than != "smaller"), why
    row = rng.choice(knowledge.ANIMALS)
    name, plural, legs, _, _, lives, eats, can, cannot, _, fact = row
    if dice < 0.8:
        skill = rng.choice(can.split(", "))
        lacks = rng.choice(cannot.split(", "))
        ask = talk.pick(f"Can {article(name)} {{}}?", f"Can {plural} {{}}?")
        if rng.random() < 0.5:
            return ask.format(skill), True, f"{capital(plural)} can {skill}."
        return ask.format(lacks), False, f"{capital(plural)} cannot {lacks}, but they can {skill}."
    other = rng.choice(knowledge.ANIMALS)
    if dice < 0.87:
        count = int(legs) if rng.random() < 0.5 else rng.choice((0, 2, 4, 6, 8))
        number, real = (number_word(value) if value else "no" for value in (count, int(legs)))
        parts = "arms" if name == "octopus" else "legs"
        return (
            f"Does {article(name)} have {number} {parts}?",
            number == real,
            f"{capital(article(name))} has {real} {parts}.",
        )
    if dice < 0.94:
        place = lives if rng.random() < 0.5 else other[5]
        return f"Do {plural} live {place}?", place == lives, f"{capital(plural)} live {lives}."
    food = eats if rng.random() < 0.5 else other[6]
    return f"Do {plural} eat {food}?", food == eats, f"{capital(plural)} eat {eats}."


def yes_no_fact(talk: Talk) -> None:
    rng = talk.rng
    asked, yes, why = draw_yes_no(talk)
    word = "Yes" if yes else "No"
    if rng.random() < 0.4:
        forced = rng.choice(OR_NO)
        talk.add(f"{asked}{forced}" if rng.random() < 0.85 else f"{forced.strip(' .?')}: {asked}",
                 f"{word}." if "ust" in forced or rng.random() < 0.5 else f"{word}. {why}")  # fmt: skip
    else:
        talk.add(asked, f"{word}. {why}")
    if rng.random() < 0.25:
        ask = talk.pick(
            "Why?",
            "Why?",
            "Why is that?",
            "Are you sure?",
            "Really?",
            "How do you know?",
            "Why not?" if not yes else "Why?",
        )
        sure = {"Are you sure?": f"Yes, I am sure. {why}", "Really?": f"Yes, really. {why}"}
        said = sure.get(ask) or (
            "That is what I learned. " + why if ask.startswith("How") else f"Because {uncapital(why)}"
        )
        talk.add(ask, said)


def uncapital(text: str) -> str:
    first = text.split()[0]
    return text if first in ("I", "Africa", "Monday", "Tuesday") else text[:1].lower() + text[1:]


def thing_fact(talk: Talk) -> None:
    noun, meaning, true, _, color, fact = talk.rng.choice(knowledge.THINGS)
    dice = talk.rng.random()
    if dice < 0.2 and color not in ("-", "no color"):
        ask = talk.pick(f"What color is {noun}?", f"Which color does {noun} have?")
        said = f"{capital(noun)} can have {color}." if color == "many colors" else f"{capital(noun)} is {color}."
        return talk.add(ask, said)
    ask = talk.pick(
        f"What is {noun}?", f"What is {noun}?", f"Can you tell me what {noun} is?", f"Tell me about {noun}.",
        f"What do you know about {noun}?", f"Please tell me something about {noun}.", f"Describe {noun}.",
    )  # fmt: skip
    talk.add(ask, f"{capital(noun)} is {meaning}. {fact}")
    if talk.rng.random() < 0.2:
        how = talk.rng.choice(true.split(", "))
        talk.add(talk.pick(f"Is it {how}?", f"And is it {how}?"), f"Yes. {capital(noun)} is {how}.")


def why_fact(talk: Talk) -> None:
    asked, said = talk.rng.choice(knowledge.WHY)
    talk.add(asked, said)


def opposite_fact(talk: Talk) -> None:
    rng = talk.rng
    one, other = rng.choice(knowledge.OPPOSITES)
    ask = talk.pick(
        "What is the opposite of {}?", "The opposite of {}?", "Opposite of {}?", "Tell me the opposite of {}."
    )
    talk.add(ask.format(one), f"The opposite of {one} is {other}.")
    if rng.random() < 0.4:
        third, fourth = rng.choice(knowledge.OPPOSITES)
        talk.add(
            talk.pick("And of {}?", "And {}?", "What about {}?").format(third), f"The opposite of {third} is {fourth}."
        )


def order_fact(talk: Talk) -> None:
    rng = talk.rng
    kind = rng.choice(("day", "month", "letter", "number"))
    series = {
        "day": knowledge.DAYS,
        "month": knowledge.MONTHS,
        "letter": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        "number": NUMBERS,
    }[kind]
    round_trip = kind in ("day", "month")
    place = rng.randrange(1, len(series) - 1) if not round_trip else rng.randrange(len(series))
    after, before = series[(place + 1) % len(series)], series[place - 1]
    if rng.random() < 0.6:
        return talk.add(f"What {kind} comes after {series[place]}?", f"{capital(after)} comes after {series[place]}.")
    talk.add(f"What {kind} comes before {series[place]}?", f"{capital(before)} comes before {series[place]}.")


# Counting, lists, repeating.


def count_scene(talk: Talk) -> None:
    rng = talk.rng
    dice = rng.random()
    if dice < 0.4:
        start = 1 if rng.random() < 0.6 else rng.randrange(1, 11)
        stop = start + rng.randrange(2, 11)
        digits = rng.random() < 0.5
        names = [str(number) if digits else NUMBERS[number] for number in range(start, min(stop, 20) + 1)]
        ask = f"Count to {names[-1]}." if start == 1 else f"Count from {names[0]} to {names[-1]}."
        if rng.random() < 0.25:
            names.reverse()
            ask = (
                f"Count backwards from {names[0]} to {names[-1]}."
                if names[-1] not in ("1", "one")
                else f"Count down from {names[0]}."
            )
        return talk.add(ask, capital(", ".join(names)) + ".")
    if dice < 0.75:
        a, b = rng.randrange(0, 11), rng.randrange(0, 11)
        if rng.random() < 0.65:
            sign, word, result = "+", "plus", a + b
        else:
            a, b = max(a, b), min(a, b)
            sign, word, result = "-", "minus", a - b
        said = f"{a} {word} {b} is {result}."
        if rng.random() < 0.4:
            one, two = NUMBERS[a], NUMBERS[b]
            return talk.add(f"What is {one} {word} {two}?", f"{capital(one)} {word} {two} is {NUMBERS[result]}.")
        ask = (
            f"What is {a} {word} {b}?",
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b}",
            f"{a} {sign} {b} = ?",
            f"How much is {a} {word} {b}?",
        )
        return talk.add(talk.pick(*ask), said)
    if dice < 0.85:
        a, b = (rng.randrange(0, 1000) for _ in range(2))
        while a == b:
            b = rng.randrange(0, 1000)
        return talk.add(f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")
    if dice < 0.93:
        a, b = (rng.randrange(100, 10000) for _ in range(2))
        said = talk.pick(
            "Such large numbers are too hard for me.", "I can only add small numbers. That one is too hard for me."
        )
        return talk.add(f"What is {a} {rng.choice(('plus', 'times', 'minus', '*', '+'))} {b}?", said)
    letters = "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z."
    talk.add(
        talk.pick("Say the alphabet.", "What is the alphabet?", "Tell me the letters of the alphabet."),
        capital(letters),
    )


def list_scene(talk: Talk) -> None:
    rng = talk.rng
    name = rng.choice(list(knowledge.LISTS))
    items = knowledge.LISTS[name]
    count = rng.randrange(2, min(6, len(items) - 1) + 1)
    if name in ("seasons", "days of the week", "months") and rng.random() < 0.6:
        ask = talk.pick(f"Name the {name}.", f"What are the {name}?", f"List the {name}.", f"Which {name} are there?")
        return talk.add(ask, capital(_joined(items)) + ".")
    chosen = rng.sample(items, count)
    one = name.split()[0]
    ask = talk.pick(
        f"Name {NUMBERS[count]} {name}.", f"Name {count} {name}.", f"List {NUMBERS[count]} {name}.", f"Give me {NUMBERS[count]} {name}.",
        f"Tell me {NUMBERS[count]} {name}.", f"Can you name {NUMBERS[count]} {name}?", f"Which {NUMBERS[count]} {name} do you know?",
    )  # fmt: skip
    numbered = rng.random() < 0.2
    if numbered:
        ask = (
            ask.replace("Name", "Make a list of").rstrip(".?") + talk.pick(" as a list.", " in a list.")
            if "Name" not in ask
            else f"Make a list of {NUMBERS[count]} {name}."
        )
        said = "\n".join(f"{number}. {capital(item)}" for number, item in enumerate(chosen, 1))
    else:
        said = capital(_joined(chosen)) + "."
    talk.add(ask, said)
    left = [item for item in items if item not in chosen]
    if left and rng.random() < 0.45:
        more = rng.choice(left)
        ask = talk.pick(
            "Another one.", "One more.", "And another one?", "Another one, please.", "One more, please.", "More."
        )
        talk.add(ask, capital(more) + ".")
        chosen.append(more)
    if rng.random() < 0.3 and name not in ("months",):
        place = rng.randrange(min(3, len(chosen)))
        talk.add(
            f"What was the {('first', 'second', 'third')[place]} one?",
            talk.pick(
                f"The {('first', 'second', 'third')[place]} one was {chosen[place]}.", f"It was {chosen[place]}."
            ),
        )
    elif rng.random() < 0.15 and one.endswith("s"):
        talk.add("Which one do you like best?", talk.pick(f"I like {chosen[0]} best.", f"I would take {chosen[-1]}."))


def _joined(items: list[str]) -> str:
    return " and ".join((", ".join(items[:-1]), items[-1]))


def copy_scene(talk: Talk) -> None:
    """What was said is said again: the skill under all that refers back."""
    rng = talk.rng
    dice = rng.random()
    word = rng.choice(rng.choice(list(knowledge.LISTS.values()))) if rng.random() < 0.7 else invented_name(rng).lower()
    if dice < 0.2:
        count = rng.randrange(2, 6)
        ask = talk.pick(
            f"Say {word} {NUMBERS[count]} times.",
            f"Write the word {word} {NUMBERS[count]} times.",
            f"Repeat {word} {NUMBERS[count]} times.",
        )
        return talk.add(ask, capital(", ".join([word] * count)) + ".")
    if dice < 0.35:
        return talk.add(
            talk.pick(f"Say {word}.", f"Repeat after me: {word}", f"Say the word {word}."), capital(word) + "."
        )
    if dice < 0.5:
        return talk.add(
            talk.pick(f"How do you spell {word}?", f"Spell {word}.", f"Spell the word {word}."),
            "-".join(word.replace(" ", "")) + ".",
        )
    if dice < 0.6:
        asked, said = rng.choice(knowledge.WHY)
        return talk.add(f"Repeat this sentence: {said}", said)
    if dice < 0.68:
        name = any_name(rng)
        age = rng.randrange(3, 60)
        person = json.dumps({"name": name, "age": age})
        return talk.add(
            talk.pick(
                f"{name} is {age} years old. Write that as JSON.",
                f"Give me JSON with the name {name} and the age {age}.",
            ),
            person,
        )
    if not talk.turns or len(talk.turns[-1][0]) > 90 or len(talk.turns[-1][1]) > 160:
        return fact_scene(talk)
    asked, said = talk.turns[-1]
    if dice < 0.85:
        return talk.add(
            talk.pick(
                "Say that again.", "Can you repeat that?", "What did you say?", "Again, please.", "Repeat that, please."
            ),
            said,
        )
    talk.add(
        talk.pick("What did I just ask?", "What did I say?", "What was my question?", "What did I say before?"),
        f'You said: "{asked}"',
    )


# Talk.


def _exchange(talk: Talk, table: list[chatter.Exchange]) -> None:
    asked, answers = talk.rng.choice(table)
    talk.add(talk.rng.choice(asked), talk.rng.choice(answers))


def itself_scene(talk: Talk) -> None:
    _exchange(talk, chatter.ABOUT_ITSELF)


def cannot_scene(talk: Talk) -> None:
    if talk.rng.random() < 0.5:
        return _exchange(talk, chatter.CANNOT)
    it = talk.rng.choice(chatter.TOO_HARD)
    talk.add(
        talk.rng.choice(chatter.ASK_HARD).format(it=it), talk.rng.choice(chatter.SAY_HARD).format(it=it, It=capital(it))
    )


def small_talk(talk: Talk) -> None:
    _exchange(talk, chatter.SMALL_TALK)


def fun_scene(talk: Talk) -> None:
    rng = talk.rng
    if rng.random() < 0.45:
        one, other = rng.sample(chatter.JOKES, 2)
        talk.add(
            talk.pick(
                "Tell me a joke.",
                "Do you know a joke?",
                "Make me laugh.",
                "A joke, please.",
                "Tell me something funny.",
                "Say something funny.",
            ),
            one[0],
        )
        if rng.random() < 0.4:
            talk.add(talk.pick("Another one.", "Another joke, please.", "Tell me another one.", "One more."), other[0])
        return
    kind, other_kind = rng.sample(stories.ANIMALS, 2)
    one, other = (row[0].replace(" / ", "\n") for row in rng.sample(chatter.RHYMES, 2))
    ask = talk.pick(
        "Write a poem about {}.",
        "Write a short poem about {}.",
        "Can you write a poem about {}?",
        "A poem about {}, please.",
        "Make a rhyme about {}.",
        "Tell me a rhyme about {}.",
    )
    talk.add(ask.format(article(kind)), fill(one, {"kind": kind, "other": other_kind}))
    if rng.random() < 0.35:
        kind = rng.choice(stories.ANIMALS)
        talk.add(
            talk.pick("Now about {}.", "Another one about {}.", "And one about {}?").format(article(kind)),
            fill(other, {"kind": kind, "other": other_kind}),
        )


SCENES: tuple[tuple[Callable[[Talk], None], int], ...] = (
    (story_scene, 24), (fact_scene, 22), (tell_of_user, 11), (ask_of_user, 3), (count_scene, 7), (list_scene, 9), (copy_scene, 5),
    (itself_scene, 7), (cannot_scene, 6), (small_talk, 6), (fun_scene, 4),
)  # fmt: skip


def conversation(rng: random.Random) -> Talk:
    talk = Talk(rng)
    if rng.random() < 0.1:
        talk.system = rng.choice(chatter.SYSTEM_PROMPTS)
    num_scenes = rng.choices((1, 2, 3, 4, 6, 12), (40, 26, 16, 10, 6, 2))[0]
    scenes, shares = zip(*SCENES, strict=True)
    for _ in range(num_scenes):
        if len(talk.turns) > MOST_TURNS - 6:
            break
        if talk.story and rng.random() < 0.15:
            follow_story(talk)
            continue
        scene = rng.choices(scenes, shares)[0]
        scene(talk)
        if scene is story_scene:
            while rng.random() < 0.55 and len(talk.turns) < MOST_TURNS - 1:
                follow_story(talk)
        if talk.user and rng.random() < 0.45:
            ask_of_user(talk)
    return talk


def document(number: int) -> str:
    """Number n: a plain story, or a conversation as the chat template writes it."""
    rng = random.Random(f"document {number}")
    if rng.random() < 0.1:
        return END + stories.draw(rng).text(rng.choice(("", "", "short", "long")))
    return END + written(conversation(rng))


def written(talk: Talk) -> str:
    turns = [("system", talk.system)] if talk.system else []
    for asked, said in talk.turns:
        turns += [("user", asked), ("assistant", said)]
    return "".join(f"{TURN}{role}\n{text}{TURN_END}\n" for role, text in turns)
