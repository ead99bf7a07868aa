"""First pass over OpenR1: measure and verify every generation, and write the findings to the journal.

A record holds what the second pass needs besides the row itself:

    {"row": 7, "key": "5e1c...", "drop": "no_answer", "generations": 2}          dropped as a problem
    {"row": 8, "key": "09ab...", "prompt": 211, "traces": [[3120, "ok"], [9400, "too_long"]]}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from luffy.data import Encoder
from luffy.data.rows import ReadOptions, RowView
from luffy.data.schemas import LABELS, READERS, as_verdict
from luffy.data.sources import RowError, RowSource
from luffy.evaluation.accuracy import SUCCESS
from luffy.evaluation.background_work import BackgroundWork
from luffy.prepare.journal import Journal, Record
from luffy.progress import Advance
from luffy.rewards import Verifier
from luffy.types import Problem, Score
from studies.paper.overlap import EvaluationIndex, question_key, question_text

# Enough to keep the workers busy beside one slow item, few enough that a kill costs seconds.
TRACES_AT_ONCE = 256
PENDING = "pending"
ID_PREFIX = "openr1-"

_NO_GOLD = {"proof", "notfound", "not found", "none", "n/a", "nan"}
_PARTS = re.compile(r"(?:^|(?<=[\s;,:$]))\(?(a|b|1|2|i|ii)(?:\)|[.:](?=\s))", re.IGNORECASE)
_TUPLE = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_PROSE_WORD = re.compile(r"[A-Za-z]{3,}")


@dataclass
class ScreenedRow:
    """A row on its way through the first pass; ``pending`` are the traces only the verifier can judge."""

    record: Record
    problem: Problem | None = None
    pending: tuple[int, ...] = ()
    in_thought: bool = False

    def items(self) -> list[tuple[Problem, str, None, bool]]:
        if self.problem is None:
            return []
        texts = [self.problem.traces[place].text or "" for place in self.pending]
        return [(self.problem, text, None, self.in_thought) for text in texts]

    def settle(self, scores: Sequence[Score]) -> None:
        for place, score in zip(self.pending, scores, strict=True):
            self.record["traces"][place][1] = verdict_of(score)


def verdict_of(score: Score) -> str:
    if score.status != "ok":
        return score.status
    return "ok" if score.value >= SUCCESS else "wrong"


def read_problem(row: dict[str, Any], where: str) -> Problem:
    """The row with ALL its generations as traces: the labels are not believed here."""
    unlabelled = {key: value for key, value in row.items() if key not in LABELS}
    texts = unlabelled.get("generations")
    if isinstance(texts, list):
        # A place must stay a place: the reader refuses an empty trace, so it gets a blank that is told apart later.
        unlabelled["generations"] = [text if isinstance(text, str) and text.strip() else "\0" for text in texts]
    if isinstance(unlabelled.get("answer"), str) and not unlabelled["answer"].strip():
        unlabelled["answer"] = None
    problem = READERS["openr1"](RowView(unlabelled, where, where, ReadOptions(require_answer=False)))
    if not isinstance(problem.prompt, str):
        raise RowError(where, "column 'problem' holds a chat, where OpenR1 has a question", "problem")
    return replace(problem, id=ID_PREFIX + question_key(problem.prompt))


def is_unverifiable(answer: str, question_type: Any = None) -> bool:
    """Golds that no parser can compare: proofs, several parts (Math-Verify reads only the last), prose."""
    if answer.strip().casefold() in _NO_GOLD or str(question_type).casefold() == "proof":
        return True
    # Without points and intervals first: the end of "(0, 1)" looks like the label of a part.
    parts = {part.casefold() for part in _PARTS.findall(_TUPLE.sub("", answer))}
    if any(pair <= parts for pair in ({"a", "b"}, {"1", "2"}, {"i", "ii"})):
        return True
    is_plain = not any(character.isdigit() or character in "\\$=" for character in answer)
    return is_plain and len(_PROSE_WORD.findall(answer)) >= 3


class Screener:
    """Everything about a row that can be said without the verifier."""

    def __init__(self, encoder: Encoder, index: EvaluationIndex, max_trace_tokens: int, trust_labels: bool) -> None:
        self._encoder = encoder
        self._index = index
        self._max_trace_tokens = max_trace_tokens
        self._trust_labels = trust_labels

    def look(self, number: int, where: str, row: dict[str, Any] | RowError) -> ScreenedRow:
        if isinstance(row, RowError):
            return ScreenedRow({"row": number, "drop": "bad_row", "why": str(row), "generations": 0})
        texts = row.get("generations")
        head: Record = {"row": number, "generations": len(texts) if isinstance(texts, list) else 0}
        try:
            problem = read_problem(row, where)
        except RowError as error:
            return ScreenedRow({**head, "drop": "bad_row", "why": str(error)})
        head |= {"key": problem.id.removeprefix(ID_PREFIX), "generations": len(problem.traces)}
        dropped = self._why_drop(problem, row)
        return ScreenedRow({**head, **dropped}) if dropped else self._measured(head, problem, row)

    def _why_drop(self, problem: Problem, row: dict[str, Any]) -> Record:
        if not problem.answer.strip():
            return {"drop": "no_answer"}
        match = self._index.find(question_text(problem.prompt))
        if match is not None:
            return {"drop": "contaminated", "item": match.item, "ngram": match.ngram}
        return {"drop": "unverifiable"} if is_unverifiable(problem.answer, row.get("question_type")) else {}

    def _measured(self, head: Record, problem: Problem, row: dict[str, Any]) -> ScreenedRow:
        task = self._encoder.encode(problem)
        if task is None:
            return ScreenedRow({**head, "drop": "prompt_too_long"})
        lengths = [len(demonstration.token_ids) for demonstration in task.demonstrations]
        verdicts = self._first_verdicts(problem, lengths, _labels(row, len(lengths)))
        pending = tuple(place for place, verdict in enumerate(verdicts) if verdict == PENDING)
        traces = [list(pair) for pair in zip(lengths, verdicts, strict=True)]
        record = {**head, "prompt": len(task.prompt_ids), "traces": traces}
        return ScreenedRow(record, problem, pending, task.in_thought)

    def _first_verdicts(self, problem: Problem, lengths: Sequence[int], labels: Sequence[Any]) -> list[str]:
        verdicts: list[str] = []
        seen: set[str] = set()
        for trace, length, label in zip(problem.traces, lengths, labels, strict=True):
            text = trace.text or ""
            verdicts.append(self._first_verdict(text, length, label, text in seen))
            seen.add(text)
        return verdicts

    def _first_verdict(self, text: str, length: int, label: Any, repeated: bool) -> str:
        if text == "\0":
            return "empty"
        if repeated:
            return "repeated"
        if "<think>" in text and "</think>" not in text:
            return "cut_off"  # a box inside unfinished thoughts is no answer, and its end no place for an EOS
        if self._trust_labels and label is False:
            return "labelled_wrong"
        return "too_long" if length > self._max_trace_tokens else PENDING


def _labels(row: dict[str, Any], count: int) -> list[Any]:
    """Math-Verify's label of each generation as the dataset has it; None where it has none."""
    labels = row.get(LABELS[0])
    return [*map(as_verdict, labels)] if isinstance(labels, list) and len(labels) == count else [None] * count


def screen(source: RowSource, journal: Journal, screener: Screener, verifier: Verifier, advance: Advance) -> None:
    """Look at every row the journal does not have yet. The next batch is tokenised while one is verified."""
    first = len(journal)
    rows = enumerate(islice(source.scan(), first, None), start=first)
    looks = (screener.look(number, source.name(number), row) for number, row in rows)

    def verify(batch: list[ScreenedRow]) -> None:
        if batch[0].record["row"] != len(journal):  # the batch before failed, and record i is that of row i
            return
        scores = iter(verifier.score([item for look in batch for item in look.items()]))
        for look in batch:
            look.settle(list(islice(scores, len(look.pending))))
        journal.append([look.record for look in batch])
        advance(len(batch))

    with BackgroundWork() as background:
        for batch in _batches(looks, TRACES_AT_ONCE):
            background.submit(verify, batch)


def _batches(looks: Iterable[ScreenedRow], traces: int) -> Iterator[list[ScreenedRow]]:
    batch: list[ScreenedRow] = []
    pending = 0
    for look in looks:
        batch.append(look)
        pending += len(look.pending)
        if pending >= traces or len(batch) >= traces:
            yield batch
            batch, pending = [], 0
    if batch:
        yield batch
