"""The second task: generated word problems of one to six steps with a written solution each.

A story has a quantity, and each step changes it. Every step has several wordings; the last wording of each is held
out, so that one test set asks known steps in words never trained on. Numbers are chosen so that every intermediate
result is a whole number from 2 to 99 (prices: to 198).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = {
    "He": ("Tom", "Sam", "Omar", "Luis", "Peter", "Ravi", "Jack", "Henry", "Noah", "Kofi"),
    "She": ("Anna", "Mia", "Lena", "Sara", "Ruth", "Nina", "Priya", "Emma", "Grace", "Aiko"),
}
THINGS = ("apples", "marbles", "stickers", "books", "cards", "shells", "pencils", "coins", "balloons", "cookies")
LARGEST = 99


@dataclass(frozen=True)
class Step:
    """What a step says in the question, what it says in the solution, and the quantity after it."""

    said: str
    solved: str
    after: int


@dataclass(frozen=True)
class Teller:
    """Who the story is about, and which wordings it may use."""

    name: str
    pronoun: str
    friend: str
    things: str
    pick: Callable[[tuple[str, ...]], str]
    random: random.Random

    def step(self, wordings: tuple[str, ...], solved: str, after: int, **numbers: int) -> Step:
        words = {
            "name": self.name,
            "he": self.pronoun.lower(),
            "He": self.pronoun,
            "friend": self.friend,
            "his": "his" if self.pronoun == "He" else "her",
            "things": self.things,
            **numbers,
        }
        return Step(self.pick(wordings).format(**words), solved.format(**words, after=after), after)


def begin_counted(t: Teller) -> Step:
    a = t.random.randint(5, 40)
    return t.step(
        (
            "{name} has {a} {things}.",
            "There are {a} {things} in {name}'s bag.",
            "{name} starts the day with {a} {things}.",
            "{name} owns {a} {things}.",
        ),
        "",
        a,
        a=a,
    )


def begin_boxes(t: Teller) -> Step:
    return _equal_lots(
        t,
        "{name} has {a} boxes with {b} {things} in each box.",
        "{name} buys {a} bags. Each bag holds {b} {things}.",
        "{name} puts {b} {things} on each of {a} tables.",
        "{name} fills {a} jars with {b} {things} apiece.",
    )


def begin_days(t: Teller) -> Step:
    return _equal_lots(
        t,
        "{name} finds {a} {things} every day for {b} days.",
        "For {b} days, {name} collects {a} {things} a day.",
        "{name} makes {a} {things} each morning. {He} does this for {b} mornings.",
        "Over {b} days, {name} gathers {a} {things} daily.",
    )


def _equal_lots(t: Teller, *wordings: str) -> Step:
    a, b = t.random.randint(2, 9), t.random.randint(2, 9)
    return t.step(wordings, "{name} has {a} * {b} = {after} {things}.", a * b, a=a, b=b)


def more(t: Teller, v: int) -> Step | None:
    a = t.random.randint(2, 30)
    return t.step(
        (
            "{He} gets {a} more {things} from {friend}.",
            "Then {he} buys {a} more {things}.",
            "{friend} gives {name} {a} {things}.",
            "Later {he} picks up another {a} {things}.",
        ),
        "With {a} more, {name} has {v} + {a} = {after} {things}.",
        v + a,
        a=a,
        v=v,
    )


def fewer(t: Teller, v: int) -> Step | None:
    if v < 4:
        return None
    a = t.random.randint(2, v - 1)
    return t.step(
        (
            "{He} gives {a} {things} to {friend}.",
            "Then {he} loses {a} of {his} {things}.",
            "{name} sells {a} {things}.",
            "{friend} takes {a} of the {things} away.",
        ),
        "After that {name} has {v} - {a} = {after} {things} left.",
        v - a,
        a=a,
        v=v,
    )


def twice(t: Teller, v: int) -> Step | None:
    a = t.random.choice((2, 3))
    word = {2: "twice", 3: "three times"}[a]
    return t.step(
        (
            f"By the end of the week {{he}} has {word} as many {{things}}.",
            f"{{He}} goes on until {{he}} has {word} as many {{things}}.",
            f"A month later {{he}} has {word} that number of {{things}}.",
            f"{{name}}'s {{things}} then grow to {word} as many.",
        ),
        "Then {name} has {v} * {a} = {after} {things}.",
        v * a,
        a=a,
        v=v,
    )


def half(t: Teller, v: int) -> Step | None:
    if v % 2 or v < 4:
        return None
    return t.step(
        (
            "{He} gives half of the {things} to {friend}.",
            "Half of {his} {things} get lost.",
            "{name} uses half of the {things}.",
            "{friend} gets one half of all the {things}.",
        ),
        "Half of them is {v} / 2 = {after} {things}.",
        v // 2,
        v=v,
    )


def share(t: Teller, v: int) -> Step | None:
    divisors = [d for d in range(3, 10) if v % d == 0 and v // d >= 2]
    if not divisors:
        return None
    a = t.random.choice(divisors)
    return t.step(
        (
            "{He} packs the {things} into {a} equal boxes and keeps one box.",
            "{He} divides the {things} equally among {a} people and is one of them.",
            "{He} makes {a} equal piles of the {things} and takes one pile.",
            "The {things} are split evenly into {a} parts, and {name} keeps one part.",
        ),
        "One part is {v} / {a} = {after} {things}.",
        v // a,
        a=a,
        v=v,
    )


def ask_count(t: Teller, v: int) -> Step | None:
    return t.step(
        (
            "How many {things} does {name} have now?",
            "How many {things} does {name} have in the end?",
            "How many {things} does {he} have then?",
            "What number of {things} does {name} end up with?",
        ),
        "",
        v,
    )


def ask_price(t: Teller, v: int) -> Step | None:
    a = t.random.randint(2, 6)
    if v * a > 2 * LARGEST:
        return None
    return t.step(
        (
            "{He} sells all of them for ${a} each. How many dollars does {name} get?",
            "Each of them is worth ${a}. How many dollars are they worth in all?",
            "They cost ${a} each. How many dollars do they cost together?",
            "At a price of ${a} apiece, how many dollars does {name} earn by selling them all?",
        ),
        "The money is {v} * {a} = {after} dollars.",
        v * a,
        a=a,
        v=v,
    )


def ask_both(t: Teller, v: int) -> Step | None:
    a = t.random.randint(2, 30)
    if v + v + a > 2 * LARGEST:
        return None
    return t.step(
        (
            "{friend} has {a} more {things} than {name}. How many {things} does {friend} have?",
            "If {friend} has {a} {things} more than {name}, how many {things} does {friend} have?",
            "{friend} owns {a} more {things} than {name} does now. How many is that?",
            "How many {things} does {friend} have, who has {a} more than {name}?",
        ),
        "{friend} has {v} + {a} = {after} {things}.",
        v + a,
        a=a,
        v=v,
    )


BEGINNINGS = ((begin_counted, 0), (begin_boxes, 1), (begin_days, 1))  # with the number of steps each counts for
CHANGES = (more, fewer, twice, half, share)
QUESTIONS = ((ask_count, 0), (ask_price, 1), (ask_both, 1))


def tell(rng: random.Random, steps: int, held_out: bool = False) -> dict[str, object] | None:
    """One problem of exactly ``steps`` calculations; None when the numbers drawn do not work out."""
    pronoun = rng.choice(tuple(NAMES))
    name = rng.choice(NAMES[pronoun])
    friend = rng.choice([n for names in NAMES.values() for n in names if n != name])
    teller = Teller(name, pronoun, friend, rng.choice(THINGS), _picker(rng, held_out), rng)
    begin, begun = rng.choice(BEGINNINGS)
    ask, asked = rng.choice(QUESTIONS)
    between = steps - begun - asked
    if between < 0:
        return None
    told = [begin(teller)]
    for change in [rng.choice(CHANGES) for _ in range(between)]:
        step = change(teller, told[-1].after)
        if step is None or not 2 <= step.after <= LARGEST:
            return None
        told.append(step)
    last = ask(teller, told[-1].after)
    if last is None:
        return None
    told.append(last)
    question = " ".join(step.said for step in told)
    solution = "\n".join([step.solved for step in told if step.solved] + [f"#### {last.after}"])
    return {"prompt": question, "answer": str(last.after), "traces": [solution], "steps": steps}


def _picker(rng: random.Random, held_out: bool) -> Callable[[tuple[str, ...]], str]:
    return lambda wordings: wordings[-1] if held_out else rng.choice(wordings[:-1])


def stories(seed: int, count: int, steps: tuple[int, ...], held_out: bool = False) -> Iterator[dict[str, object]]:
    """``count`` different problems, as many of each length."""
    rng, seen = random.Random(seed), set[object]()
    while len(seen) < count:
        row = tell(rng, steps[len(seen) % len(steps)], held_out)
        if row is None or row["prompt"] in seen:
            continue
        seen.add(row["prompt"])
        yield row
