"""Multiple choice: read the options out of a question, put them in an order drawn from the seed, relabel them.

The paper shuffles options against contamination (section 4). Labels become letters in any case, because some
questions number theirs (22 of ARC-c's) and the ``choice`` reward reads letters.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from luffy.errors import DataError
from luffy.seeds import seed_of
from luffy.types import Problem

LETTERS = "ABCDEFGHIJ"
NUMBERS = tuple(str(number) for number in range(1, 11))
_OPTION = re.compile(r"^[ \t]*\(?([A-J]|10|[1-9])[).:][ \t]+(?=\S)", re.MULTILINE)
# "Both A and B", "all of the above": such an option means something only where it stands.
_REFERS = re.compile(
    r"\b(?i:both|neither|either|options?|choices?|answers?)\b[^\n]{0,12}\b[A-J]\b|\b[A-J] (?:and|or) [A-J]\b"
)
_POSITIONAL = re.compile(r"\b(?:all|none|any|both|neither) of (?:the )?(?:above|these)\b|\bthe above\b", re.IGNORECASE)


@dataclass(frozen=True)
class Choices:
    """``stem`` is the question before the first option; ``gold`` an index into ``options``."""

    stem: str
    options: tuple[str, ...]
    gold: int

    @property
    def movable(self) -> bool:
        """Whether no option speaks of another by its place."""
        return not any(_REFERS.search(option) or _POSITIONAL.search(option) for option in self.options)

    def text(self) -> str:
        lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, self.options, strict=False)]
        return self.stem.rstrip() + "\n\n" + "\n".join(lines) + "\n"


def read_choices(question: str, answer: str, where: str) -> Choices:
    """The options are the last run of lines labelled A, B, C ..., up to the end of the question.

    Only a question without such a run may number its options 1, 2, 3 ...: an option's own text can contain lines
    such as "2. HCl".
    """
    labels = list(_OPTION.finditer(question))
    run = _last_run(labels, LETTERS)
    if len(run) < 2:
        run = _last_run(labels, NUMBERS)
    if len(run) < 2:
        raise DataError(f"{where}: no options found in the question; write them as lines 'A) ...', 'B) ...'")
    ends = [match.start() for match in run[1:]] + [len(question)]
    options = tuple(question[match.end() : end].strip() for match, end in zip(run, ends, strict=True))
    names = [match[1] for match in run]
    gold = answer.strip().strip("()").upper()
    if gold not in names:
        raise DataError(f"{where}: the gold {answer!r} is none of the options {', '.join(names)}; fix the row")
    return Choices(question[: run[0].start()], options, names.index(gold))


def _last_run(labels: list[re.Match[str]], names: Sequence[str]) -> list[re.Match[str]]:
    """Labels from the last ``names[0]`` on, as long as each is the next one of ``names``."""
    labels = [match for match in labels if match[1] in names]
    starts = [place for place, match in enumerate(labels) if match[1] == names[0]]
    run: list[re.Match[str]] = []
    for match in labels[starts[-1] :] if starts else []:
        if len(run) < len(names) and match[1] == names[len(run)]:
            run.append(match)
    return run


def shuffled(choices: Choices, seed: int) -> Choices:
    """Options in an order that depends on the seed alone; the gold moves with its option."""
    if not choices.movable:
        return choices
    order = list(range(len(choices.options)))
    random.Random(seed).shuffle(order)
    options = tuple(choices.options[place] for place in order)
    return replace(choices, options=options, gold=order.index(choices.gold))


def arranged(problem: Problem, question: str, seed: int | None) -> Problem:
    """The problem with letters as labels and its options in an order drawn from the seed (None: as they are)."""
    choices = read_choices(question, problem.answer, f"problem {problem.id!r}")
    if seed is not None:
        choices = shuffled(choices, seed_of(f"options:{seed}:{problem.id}"))
    return replace(problem, prompt=choices.text(), answer=LETTERS[choices.gold])
