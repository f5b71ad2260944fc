"""What a demo model does in conversations that it was not trained on, counted: names, stories, yes and no, loops.

    python -m tools.train_demo.behave FOLDER [FOLDER...]

Sampled at temperature 0.3 with fixed seeds, on a CPU in some ten seconds a folder.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from anabranch.llm import LLM, SamplingParams
from tools.train_demo import conversations, sentences, stories

NUM = 64
"""Conversations of each kind for the card."""
NUM_RECALL = 24
STORIES = (3, 5, 6, 7, 8, 9, 11)
"""Stories after which a name is asked for that the first turn told."""


def loops(text: str) -> bool:
    """Whether it says the same words again and again, or breaks off."""
    again = sentences.repeats(text) > len(sentences.words_of(text)) // 30
    return again or bool(re.search(r"\b(\w+)(,? \1\b){2}", text)) or not re.search(r"""[.!?]["']?$""", text)


def answers(llm: LLM, talks: list[list[str]]) -> list[list[str]]:
    """The model's answers to the user's turns of each talk; all talks are as long."""
    messages: list[list[dict[str, str]]] = [[] for _ in talks]
    for place in range(len(talks[0])):
        for told, talk in zip(messages, talks, strict=True):
            told.append({"role": "user", "content": talk[place]})
        params = [SamplingParams(temperature=0.3, seed=seed, max_tokens=300) for seed in range(len(talks))]
        for told, output in zip(messages, llm.chat(messages, params), strict=True):
            told.append({"role": "assistant", "content": output.completions[0].text.strip()})
    return [[message["content"] for message in told[1::2]] for told in messages]


def behaviour(folder: Path, num: int = NUM) -> dict[str, float]:
    """Shares of `num` conversations of each kind, by what is counted."""
    rng = random.Random("behaviour")
    names = [conversations.any_name(rng) for _ in range(num)]
    asked = [conversations.draw_yes_no(conversations.Talk(rng)) for _ in range(num)]
    heroes = [stories.draw_words(rng) for _ in range(num)]
    told = [[f"Tell me a story about {hero['a_kind']} named {hero['name']}.", "And then?"] for hero in heroes]
    with LLM(str(folder), max_num_seqs=32, max_num_batched_tokens=2048) as llm:
        recalled = answers(llm, [[f"My name is {name}.", "What is my name?"] for name in names])
        later = answers(llm, [[f"Hi, I am {name}.", "Why do we sleep?", "What is my name?"] for name in names])
        yes_no = answers(llm, [[f"{question} Yes or no."] for question, _, _ in asked])
        tales = answers(llm, told)
    words = [re.match(r"(yes|no)\b", answer.lower()) for (answer,) in yes_no]
    right = [bool(word) and (word[1] == "yes") == yes for word, (_, yes, _) in zip(words, asked, strict=True) if word]
    every = [answer for talk in (*recalled, *later, *yes_no, *tales) for answer in talk]
    return {
        "a name, asked for at once": sum(n in a[1] for n, a in zip(names, recalled, strict=True)) / num,
        "a name, asked for a turn later": sum(n in a[2] for n, a in zip(names, later, strict=True)) / num,
        "yes or no where asked for": sum(map(bool, words)) / num,
        "the right one": sum(right) / num,
        "a story about the hero asked for": mentions(heroes, [tale[0] for tale in tales]),
        'the same hero after "And then?"': mentions(heroes, [tale[1] for tale in tales]),
        "stories that loop or do not end": sum(loops(text) for tale in tales for text in tale) / 2 / num,
        "empty answers": sum(not answer for answer in every) / len(every),
    }


def recall(folder: Path, counts: tuple[int, ...] = STORIES, num: int = NUM_RECALL) -> dict[int, float]:
    """Shares of names that are known, by the mean tokens of the prompts; the recipe's stories stand between."""
    rng = random.Random("recall")
    names = [conversations.any_name(rng) for _ in range(num)]
    found = {}
    with LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=2048) as llm:
        for count in counts:
            talks = []
            for name in names:
                said = [f"My name is {name}.", f"Hello, {name}! How can I help you?"]
                for _ in range(count):
                    words = stories.draw_words(rng)
                    said += [f"Tell me a story about {words['a_kind']}.", stories.draw(rng, words).text()]
                said.append("What is my name?")
                roles = ("user", "assistant")
                talks.append([{"role": roles[place % 2], "content": text} for place, text in enumerate(said)])
            outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=24))
            texts = [output.completions[0].text for output in outputs]
            tokens = sum(len(output.prompt_ids) for output in outputs) // num
            found[tokens] = sum(name in text for name, text in zip(names, texts, strict=True)) / num
    return found


def mentions(heroes: list[stories.Words], texts: list[str]) -> float:
    return sum(hero["name"] in text for hero, text in zip(heroes, texts, strict=True)) / len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    for folder in parser.parse_args().folder:
        print(folder, {name: f"{share:.0%}" for name, share in behaviour(folder).items()})
        print({tokens: f"{share:.0%}" for tokens, share in recall(folder).items()})


if __name__ == "__main__":
    main()
