"""Writes the bundled training text: original, seeded, free of foreign rights.

`python -m fsdpbench.bench.corpus` rewrites `data/default.jsonl` from the words in
`data/words.json`, byte for byte the same on every machine. The text is simple on purpose: a small
model learns its patterns within a few steps, so that a falling loss shows that training works. What
it says is true or plainly invented.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from fsdpbench.bench.json_text import parse_object

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
DEFAULT_DATA = DATA / "default.jsonl"
SEED = 20
NUM_ROUNDS = 42  # of one entry by each writer
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Source:
    """Words, and choices among them that depend on the seed alone, on any version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.words: dict[str, Any] = parse_object((DATA / "words.json").read_bytes())

    def number(self, low: int, high: int) -> int:
        """Return a whole number from low to high, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.number(0, len(items) - 1)]

    def word(self, kind: str) -> Any:
        """Return one of the words of this kind; a (key, value) pair where words have values."""
        words = self.words[kind]
        return self.pick(list(words.items()) if isinstance(words, dict) else words)

    def two_words(self, kind: str) -> tuple[Any, Any]:
        """Return two different words of this kind."""
        words = self.words[kind]
        first = self.number(0, len(words) - 1)
        second = (first + self.number(1, len(words) - 1)) % len(words)
        return words[first], words[second]


def write_sum(source: Source) -> str:
    """Write a word problem about things bought and given away."""
    buyer, friend = source.two_words("names")
    goods, price = source.word("goods")
    count, given = source.number(4, 20), source.number(1, 3)
    return (
        f"{buyer} buys {count} {goods} for {price} coins each and gives {given} of them "
        f"to {friend}. How much does {buyer} pay, and how many {goods} are left?"
        "\n"
        f"{buyer} pays {count} times {price}, which is {count * price} coins. After "
        f"giving away {given}, {buyer} has {count} minus {given}, which is {count - given} "
        f"{goods}."
    )


def write_conversion(source: Source) -> str:
    """Write a question that turns one unit into another."""
    large, small, factor = source.word("units")
    count = source.number(2, 30)
    return (
        f"How many {small} are there in {count} {large}?"
        "\n"
        f"One of the {large} holds {factor} {small}, so {count} {large} hold {count} "
        f"times {factor}, which is {count * factor} {small}."
    )


def write_weekday(source: Source) -> str:
    """Write a question about the days of the week."""
    today, weeks, rest = source.number(0, 6), source.number(2, 6), source.number(1, 6)
    ahead = 7 * weeks + rest
    return (
        f"Today is {WEEKDAYS[today]}. Which day of the week will it be in {ahead} days?"
        "\n"
        f"In {ahead} days there are {weeks} whole weeks, and {rest} more. Whole "
        f"weeks do not change the day, so we count {rest} from {WEEKDAYS[today]} and reach "
        f"{WEEKDAYS[(today + ahead) % 7]}."
    )


def write_order(source: Source) -> str:
    """Write a question about the order of four numbers."""
    numbers = [source.number(10, 999) for _ in range(4)]
    shown = ", ".join(map(str, numbers))
    ordered = ", ".join(map(str, sorted(numbers)))
    return (
        f"Put these numbers in order, the smallest first: {shown}."
        "\n"
        f"In order, the smallest first: {ordered}. The largest of them is "
        f"{max(numbers)} and the smallest is {min(numbers)}."
    )


def write_spelling(source: Source) -> str:
    """Write a question about the letters of a word."""
    word = source.word("goods")[0].split()[-1]
    letters = ", ".join(word)
    return (
        f"Spell the word {word} and say how many letters it has."
        "\n"
        f"The word {word} is spelled {letters}. It has {len(word)} letters; the "
        f"first is {word[0]} and the last is {word[-1]}."
    )


def write_definition(source: Source) -> str:
    """Write what something is."""
    thing, meaning = source.word("definitions")
    question = source.pick(("What is {}?", "Explain in simple words: {}.", "Tell me about {}."))
    return f"{question.format(thing)}\n{meaning}"


def write_procedure(source: Source) -> str:
    """Write how something is done, step by step."""
    task, steps = source.word("procedures")
    words = ("First", "Then", "After that", "Next", "Finally")
    told = " ".join(f"{word}, {step}." for word, step in zip(words, steps, strict=True))
    return f"How do I {task}?\n{told}"


def write_town(source: Source) -> str:
    """Write a description of an invented town."""
    town, neighbour = source.two_words("towns")
    landscape, weather = source.word("landscapes"), source.word("weathers")
    craft, rival = source.two_words("crafts")
    people, distance = source.number(3, 90) * 100, source.number(4, 60)
    return (
        f"{town} is a small town {landscape}. About {people} people live there, and most "
        f"of them know each other by name. The town is known for its {craft}, which are sold at "
        f"the market every {source.pick(WEEKDAYS)}. {distance} kilometres to the north lies "
        f"{neighbour}, whose people make {rival} instead. In winter {weather}, and the road "
        f"between the two towns is closed for {source.number(2, 9)} days or more. Then the people "
        f"of {town} stay at home, light their stoves and tell stories until the road is open again."
    )


def write_story(source: Source) -> str:
    """Write a very short story."""
    hero, friend = source.two_words("names")
    animal, other = source.two_words("animals")
    town, food = source.word("towns"), source.word("foods")
    return (
        f"One morning {hero} walked out of {town} to look for a lost {animal}. The path "
        "led through the fields and over a bridge, and under the bridge sat another animal: it "
        f'was a {other}. "Have you seen my {animal}?" asked {hero}. The {other} said nothing, but '
        f"looked towards the old mill. There {hero} found {friend}, who was sharing {food} with "
        f'the {animal}. "I hoped that you would come," said {friend}. They laughed, ate what was '
        f"left of the {food}, and walked home together before it grew dark."
    )


WRITERS: tuple[Callable[[Source], str], ...] = (
    write_sum,
    write_conversion,
    write_weekday,
    write_order,
    write_spelling,
    write_definition,
    write_procedure,
    write_town,
    write_story,
)


def build_corpus(seed: int = SEED, num_rounds: int = NUM_ROUNDS) -> str:
    """Return the corpus as JSON Lines."""
    source = Source(seed)
    texts = [writer(source) for _ in range(num_rounds) for writer in WRITERS]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    DEFAULT_DATA.write_text(build_corpus(), encoding="ascii")
