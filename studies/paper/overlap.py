"""Is this question one of the evaluation's, or one we already have?

Two readings of a question. Its *key* (letters, digits and every operator, no layout) tells repeats apart from
problems that differ in one sign. Its *words* (no operators) are what n-grams are made of: an evaluation question that
was rephrased in layout only still shares long runs of them.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from luffy.data import load_problems
from luffy.errors import UserError
from luffy.types import Message, Problem

_WORD = re.compile(r"[^\W_]+")
_LAYOUT = re.compile(r"[\s$]+|\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]")


def question_text(prompt: str | tuple[Message, ...]) -> str:
    """What is asked. A system message is the same in every row and would match everything."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message.content for message in prompt if message.role == "user")


def question_key(question: str) -> str:
    plain = unicodedata.normalize("NFKC", question).casefold()
    letters = _LAYOUT.sub("", plain).rstrip(".?!:")
    return hashlib.blake2b(letters.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def words_of(question: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", question).casefold())


@dataclass(frozen=True)
class Match:
    """An evaluation item and the words it shares with a question."""

    item: str
    ngram: str


class EvaluationIndex:
    """The n-grams of evaluation questions. One with fewer than n words matches only as a whole."""

    def __init__(self, ngram: int) -> None:
        if ngram < 1:
            raise UserError(f"--ngram {ngram} matches everything; give 1 or more (13 is usual)")
        self.ngram = ngram
        self.items: list[str] = []
        self._grams: dict[int, int] = {}
        self._short: dict[str, int] = {}

    def add(self, problem: Problem, label: str) -> None:
        question = question_text(problem.prompt)
        words, place = words_of(question), len(self.items)
        self.items.append(f"{label}#{problem.id}")
        if len(words) < self.ngram:
            self._short.setdefault(question_key(question), place)
        for gram in self._grams_of(words):
            self._grams.setdefault(hash(gram), place)

    def find(self, question: str) -> Match | None:
        """The first n-gram that an evaluation item has too."""
        words = words_of(question)
        if len(words) < self.ngram:
            place = self._short.get(question_key(question))
            return None if place is None else Match(self.items[place], " ".join(words))
        for gram in self._grams_of(words):
            place = self._grams.get(hash(gram))
            if place is not None:
                return Match(self.items[place], gram)
        return None

    def _grams_of(self, words: Sequence[str]) -> list[str]:
        return [" ".join(words[i : i + self.ngram]) for i in range(len(words) - self.ngram + 1)]


@dataclass(frozen=True)
class EvaluationSet:
    """What was indexed of one evaluation file; unreadable rows cannot be guarded against, so they are named."""

    path: str
    fingerprint: str
    items: int
    skipped: int


def index_evaluation(paths: Sequence[str], ngram: int) -> tuple[EvaluationIndex, list[EvaluationSet]]:
    index, sets = EvaluationIndex(ngram), []
    for path in paths:
        problems = load_problems(path, split="test", require_answer=False, bad_rows="skip")
        for problem in problems:
            index.add(problem, path)
        sets.append(EvaluationSet(path, problems.fingerprint, len(problems), problems.skipped.total()))
    return index, sets
