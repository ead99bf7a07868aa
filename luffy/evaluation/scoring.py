"""Scores of responses: one line of items.jsonl for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luffy.conversations import Conversations
from luffy.errors import UserError
from luffy.evaluation.plan import PlannedResponse
from luffy.evaluation.results import ITEMS, Settings, read_items
from luffy.files import write_atomically
from luffy.models.load import decode
from luffy.rewards.own_function import CALL_FAILED
from luffy.rewards.verifier import GO_ON, Verifier, why_every_call_failed, why_nothing_was_scored
from luffy.types import Episode

Response = tuple[PlannedResponse, Episode]


def score_again(jobs: Sequence[PlannedResponse], verifier: Verifier, settings: Settings, out: Path) -> None:
    """Score anew the saved responses whose call of the reward failed. One may fail again, and is saved as before."""
    rows, by_key = read_items(out), {job.key: job for job in jobs}
    failed = [row for row in rows if row["status"] == CALL_FAILED]
    if not failed:
        return
    asked = [by_key[key_of(row)] for row in failed]
    answers = [(row["response"], row.get("token_ids")) for row in failed]
    scores = verifier.score(
        [(job.task.problem, *answer, job.task.in_thought) for job, answer in zip(asked, answers, strict=True)]
    )
    for row, verdict in zip(failed, scores, strict=True):
        score = verifier.at_its_end(verdict, row["finish"])
        row.update(score=score.value, right=score.value >= settings.success, status=score.status)
        if score.status != CALL_FAILED:
            row.pop("token_ids", None)
    write_atomically(out / ITEMS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["benchmark"], row["id"], row["sample"]


def scored(
    responses: Sequence[Response],
    tokenizer: Any,
    verifier: Verifier,
    settings: Settings,
    is_first: bool,
    conversations: Conversations | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """A line of items.jsonl for each response; it has the token ids where the reward must be asked again. And why to
    stop when they are saved: every call of the reward failed. Where nothing in the first part was scored for other
    reasons, which nobody asks about again, a UserError."""
    ids = [episode.answer_ids.tolist() for _, episode in responses]
    texts = decode(tokenizer, ids)
    asked = zip(responses, texts, ids, strict=True)
    scores = verifier.score([(job.task.problem, text, own, job.task.in_thought) for (job, _), text, own in asked])
    for place, (_, episode) in enumerate(responses):
        if conversations is not None:
            scores[place] = conversations.score(episode.outcome, scores[place])
        scores[place] = verifier.at_its_end(scores[place], episode.finish)
    several = len({job.task.problem.id for job, _ in responses}) > 1  # a single one may be at fault itself
    no_call = why_every_call_failed(scores)
    reason = no_call or (why_nothing_was_scored(scores) if is_first and several else None)
    failure = reason and f"the reward failed on all {len(scores)} responses, first: {reason}; {GO_ON}"
    if failure is not None and no_call is None:
        raise UserError(failure)
    rows = [
        {
            "benchmark": job.benchmark,
            "id": job.task.problem.id,
            "sample": job.sample,
            "seed": job.seed(settings.seed),
            "response": text,
            "tokens": episode.length,
            "finish": episode.finish,
            "answer": job.task.problem.answer,
            "score": score.value,
            "right": score.value >= settings.success,
            "status": score.status,
            **({"token_ids": own} if score.status == CALL_FAILED else {}),
            **turns_of(episode, tokenizer),
        }
        for (job, episode), text, own, score in zip(responses, texts, ids, scores, strict=True)
    ]
    return rows, failure


def turns_of(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """What a line says of an episode with an environment; its ``response`` is the last turn alone."""
    outcome = episode.outcome
    if outcome is None:
        return {}
    whole = tokenizer.decode(episode.token_ids, skip_special_tokens=False)
    faults = list(outcome.faults)
    return {"turns": outcome.turns, "calls": outcome.calls, "end": outcome.end, "faults": faults, "conversation": whole}
