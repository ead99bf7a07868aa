"""``luffy prepare traces``: sample a teacher n times per problem and keep the correct responses as traces.

Every finished problem is a line of the journal next to the output, so a resumed run repeats no request.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from luffy.data import ProblemDataset, load_problems
from luffy.data.prompts import where
from luffy.errors import UserError
from luffy.evaluation.accuracy import SUCCESS
from luffy.evaluation.background_work import BackgroundWork
from luffy.files import whole_file, write_atomically
from luffy.prepare.dataset_files import message_rows, problem_writer, traces_schema
from luffy.prepare.journal import Journal, Record, whole_text
from luffy.prepare.teachers import Answer, Teacher, TeacherResponse
from luffy.progress import progress
from luffy.rewards.verifier import CALL_FAILED, GO_ON, Verifier, build_verifier, why_every_call_failed
from luffy.types import Problem, Score, Trace

logger = logging.getLogger(__name__)

REFUSED_IN_A_ROW = 64  # problems after which nothing more is asked


def prepare_traces(
    file: str,
    out: Path,
    teacher: Teacher,
    name: str,
    settings: Mapping[str, Any],
    *,
    n: int = 4,
    reward: str = "math",
    workers: int = 2,
    keep_wrong: bool = False,
    keep_traces: bool = False,
    limit: int | None = None,
    answer_in_thought: bool = False,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write ``out``, problems with the teacher's traces, and a card next to it; returns the card.

    Columns that luffy does not use are kept. Traces of ``file`` are dropped, or with ``keep_traces`` come first.
    """
    if out.suffix != ".parquet":
        raise UserError(f"--out {out}: name a .parquet file")
    out.parent.mkdir(parents=True, exist_ok=True)
    problems = load_problems(file, limit=limit, columns=columns)
    schema = traces_schema(problems, keep_traces, turns="environment" in settings)
    decisive = {**settings, "n": n, "reward": reward, "problems_sha256": problems.fingerprint}
    if answer_in_thought:  # only then, so that files of before this option go on
        decisive["answer_in_thought"] = True
    with Journal(out.with_suffix(".progress.jsonl"), decisive, id=str, samples=list) as journal:
        with build_verifier(reward, workers=workers, answer_in_thought=answer_in_thought) as verifier:
            ask(problems, n, teacher, verifier, journal)
        counts = _write(problems, schema, journal, out, name, keep_wrong, keep_traces, n)
    if not counts["problems_with_a_trace"]:
        logger.warning("no problem has a trace; if samples were cut off, raise --max-tokens")
    if counts["samples_unscored"]:
        logger.warning("%d samples have no score; the same command asks for it again", counts["samples_unscored"])
    card = {"counts": dict(counts), "teacher": name, "settings": decisive}
    write_atomically(out.with_suffix(".card.json"), json.dumps(card, indent=2) + "\n")
    return card


def ask(problems: ProblemDataset, n: int, teacher: Teacher, verifier: Verifier, journal: Journal) -> None:
    """Ask the teacher for every problem that is not in the journal; repeat reward calls that failed.

    A problem that the teacher refuses is not recorded: the next run asks again.
    """
    score_again(problems, verifier, journal)
    done = {record["id"] for record in journal}
    refused: list[Answer] = []
    in_a_row = 0
    with progress("answered problems", len(problems), len(done)) as advance, BackgroundWork() as background:

        def save(answered: Sequence[Answer]) -> None:
            records, failure = scored(answered, verifier)
            journal.append(records)
            advance(len(answered))
            if failure is not None:
                raise UserError(failure)

        for answered in teacher.answer((problem for problem in problems if problem.id not in done), n):
            for answer in answered:
                in_a_row = 0 if answer.samples else in_a_row + 1
            refused += [answer for answer in answered if not answer.samples]
            background.submit(save, answered)
            if in_a_row >= REFUSED_IN_A_ROW:
                break
    if refused:
        first = f"first: {where(refused[0].problem)}: {refused[0].refusal}"
        if in_a_row >= REFUSED_IN_A_ROW or not len(journal):
            raise UserError(f"{in_a_row} problems in a row were refused by the teacher, {first}")
        logger.warning("%d problems get no trace: the teacher refuses them, %s", len(refused), first)


def score_again(problems: ProblemDataset, verifier: Verifier, journal: Journal) -> None:
    """Score samples whose reward call failed, and append their records again; a problem's last record counts."""
    again: dict[str, Record] = {}
    for record in journal:
        again.pop(record["id"], None)
        if is_unscored(record):
            again[record["id"]] = record
    if not again:
        return
    unscored = [
        (problem, sample)
        for problem in problems
        if problem.id in again
        for sample in again[problem.id]["samples"]
        if sample["status"] == CALL_FAILED
    ]
    scores = verifier.score([(problem, sample["text"]) for problem, sample in unscored])
    for (_, sample), score in zip(unscored, scores, strict=True):
        sample |= {"score": score.value, "status": score.status}
    journal.append([record for record in again.values() if not is_unscored(record)])


def is_unscored(record: Record) -> bool:
    return any(sample["status"] == CALL_FAILED for sample in record["samples"])


def scored(answered: Iterable[Answer], verifier: Verifier) -> tuple[list[Record], str | None]:
    """Journal records of the problems that were not refused; and an error message if every reward call failed."""
    answered = [answer for answer in answered if answer.samples]
    items = [(answer.problem, sample.text) for answer in answered for sample in answer.samples]
    found = verifier.score(items)
    reason = why_every_call_failed(found)
    failure = reason and f"the reward failed on all {len(found)} samples, first: {reason}; {GO_ON}"
    finals = [sample.final for answer in answered for sample in answer.samples]
    scores = iter([final(score) for final, score in zip(finals, found, strict=True)])
    records = [
        {"id": answer.problem.id, "samples": [_record(sample, next(scores)) for sample in answer.samples]}
        for answer in answered
    ]
    return records, failure


def _record(sample: TeacherResponse, score: Score) -> Record:
    record: Record = {
        "text": sample.text,
        "finished": sample.finished,
        "score": score.value,
        "status": score.status,
        "log_prob_status": sample.log_prob_status,
    }
    if sample.token_ids is not None:
        record |= {"token_ids": sample.token_ids, "log_probs": sample.log_probs}
    if sample.messages is not None:
        record["messages"] = message_rows(sample.messages)
    return record


def verdicts(samples: Sequence[Record], keep_wrong: bool, there: Iterable[Record] = ()) -> Iterator[str]:
    """Verdict on each sample: "kept" if it becomes a trace, else the reason. ``there``: existing traces."""
    seen = set(map(_said, there))
    for sample in samples:
        if not sample["finished"]:
            yield "cut_off"  # its end is no place for an EOS, whatever it says
        elif not sample["text"].strip() or any(map(_says_nothing, sample.get("messages", ()))):
            yield "empty"
        elif sample["status"] == CALL_FAILED:
            yield "unscored"
        elif sample["score"] < SUCCESS and not keep_wrong:
            yield "wrong"
        elif _said(sample) in seen:
            yield "repeated"
        else:
            seen.add(_said(sample))
            yield "kept"


def _said(trace: Record) -> str | None:
    """What tells traces apart."""
    return json.dumps(trace["messages"]) if trace.get("messages") is not None else trace["text"]


def _says_nothing(turn: Record) -> bool:
    return turn["role"] == "assistant" and not turn["content"].strip() and not turn["tool_calls"]


def _write(
    problems: Iterable[Problem],
    schema: pa.Schema,
    journal: Journal,
    out: Path,
    name: str,
    keep_wrong: bool,
    keep_traces: bool,
    n: int,
) -> Counter[str]:
    places = {record["id"]: place for place, record in enumerate(journal)}
    counts: Counter[str] = Counter()
    with whole_file(out) as temporary, problem_writer(temporary, schema) as add:
        for problem in problems:
            place = places.get(problem.id)
            samples = [] if place is None else journal[place]["samples"]
            before = [_trace_of_file(trace) for trace in problem.traces] if keep_traces else []
            found = list(verdicts(samples, keep_wrong, before))
            new = [_trace(sample, name) for sample, what in zip(samples, found, strict=True) if what == "kept"]
            others = {column: problem.meta.get(column) for column in schema.names}
            add(others | _output_row(problem, [*before, *new]))
            counts["problems_refused"] += place is None
            counts.update({"problems": 1, "samples": len(samples), "problems_with_a_trace": int(bool(before or new))})
            counts.update(f"samples_{what}" for what in found)
            counts["samples_refused"] += n - len(samples)
            counts.update(f"samples_{sample['log_prob_status']}" for sample in samples)
            counts["samples_right"] += sum(sample["score"] >= SUCCESS for sample in samples)
            counts["traces_with_log_probs"] += sum(trace["log_probs"] is not None for trace in new)
            if problem.traces:
                counts[f"traces_of_the_file_{'kept' if keep_traces else 'left_out'}"] += len(problem.traces)
    return counts


def _output_row(problem: Problem, traces: Sequence[Record]) -> Record:
    prompt = problem.prompt if isinstance(problem.prompt, str) else message_rows(problem.prompt)
    return {"id": problem.id, "prompt": prompt, "answer": problem.answer, "traces": traces, "source": problem.source}


def _trace_of_file(trace: Trace) -> Record:
    messages = None if trace.messages is None else message_rows(trace.messages)
    return {**asdict(trace), "messages": messages, "score": None}


def _trace(sample: Record, name: str) -> Record:
    """Trace with either text or token ids, as the reader expects it."""
    ids, messages = sample.get("token_ids"), sample.get("messages")
    return {
        "messages": messages,
        "text": whole_text(sample["text"]) if ids is None and messages is None else None,
        "token_ids": ids,
        "log_probs": sample.get("log_probs"),
        "score": sample["score"],
        "teacher": name,
    }
