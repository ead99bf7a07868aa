"""A reward of the user's own takes a sample or a batch, waits or does not; its parameters' names decide."""

import asyncio
import threading

import own_forms
import pytest

from luffy.errors import UserError
from luffy.rewards import build_verifier
from luffy.rewards.kinds import REWARDS, built_in, reward
from luffy.rewards.own_function import form_of
from luffy.rewards.verifier import (
    InProcessReward,
    OwnInThisProcess,
    Verifier,
    why_every_call_failed,
    why_nothing_was_scored,
)
from luffy.types import Message, Problem, Score

built_in()  # imports their files
FAILED = Score(0.0, "call_failed")


def problem_of_row(answer="5", name="p1", chat=False, **meta):
    prompt = (Message("user", "2+3?"),) if chat else "2+3?"
    return Problem(id=name, prompt=prompt, answer=answer, meta={"__row__": "file:1"} | meta)


def here(name, **others):
    """A verifier with the function in this process, which saves the start of a worker, and with other terms."""
    own = OwnInThisProcess(name, getattr(own_forms, name), timeout_s=8.0, concurrency=4)
    return Verifier({name: own} | {k: reward for k, (reward, _) in others.items()},
                    {name: 1.0} | {k: weight for k, (_, weight) in others.items()})  # fmt: skip


def test_trls_signature_as_it_is(caplog):
    with build_verifier("own_forms:trl", workers=1, timeout_s=2.0) as verifier:
        said = ["5", "6", "none", "nan", "huge", "text"]
        assert verifier.score([(problem_of_row(chat=chat), text) for text in said for chat in (False, True)]) == [
            *[Score(1.0)] * 2,
            *[Score(0.0)] * 2,
            *[Score(0.0, "not_scored")] * 2,
            *[Score(0.0, "error")] * 6,
        ]
        assert verifier.score([(problem_of_row(), "5"), (problem_of_row(), "raise")]) == [FAILED] * 2
        scores = verifier.score([(problem_of_row(), "5"), (problem_of_row(), "short")])
        assert scores == [FAILED] * 2 and "returned 1 scores for 2 completions" in scores[0].reason
        assert verifier.score([]) == []
        assert verifier.counts == {"ok": 4, "not_scored": 2, "error": 6, "call_failed": 4}
        assert len(caplog.records) == 3
        assert "call_failed on problem p1 (error: KeyError: 'no such thing')" in caplog.text
        scores = verifier.score([(problem_of_row(), "5"), (problem_of_row(), "hang")])  # killed as a whole
        assert scores == [FAILED] * 2 and "timeout: killed after 2 s" in scores[0].reason
        assert why_nothing_was_scored(scores) == why_every_call_failed(scores) == scores[0].reason
        assert verifier.score([(problem_of_row(), "5")]) == [Score(1.0)]


def test_what_a_batch_function_is_given():
    items = [(problem_of_row(name="a", chat=True, solution="five"), "5", (7, 8)), (problem_of_row(name="b"), "6", [9])]
    with here("seen") as verifier:
        assert verifier.score(items) == [Score(1.0), Score(0.0)]
        scores = verifier.score([(*item[:2],) for item in items])
        assert scores == [FAILED] * 2
        assert "asks for 'completion_ids', which the rows do not have" in scores[0].reason
    with here("lengths") as verifier:
        assert verifier.score(items) == [Score(2.0), Score(1.0)]


def test_an_async_batch_and_an_object_that_is_called():
    items = [(problem_of_row(bonus=2), "abc"), (problem_of_row(), "abcd")]
    with here("trl_async") as verifier:
        assert verifier.score(items) == [Score(5.0), Score(4.0)]
        assert verifier.score(items) == [Score(5.0), Score(4.0)]  # in the same loop
    with here("called") as verifier:
        assert verifier.score(items * 2) == [Score(4.0)] * 4  # all in one call


def test_async_samples_are_under_way_together_and_end_one_by_one():
    said = ["a", "hang", "raise", "none", "own limit", "b"]
    with build_verifier("own_forms:together", workers=1, timeout_s=0.5, concurrency=6) as verifier:
        assert verifier.score([(problem_of_row(), text) for text in said]) == [
            Score(6.0),
            Score(0.0, "timeout"),
            Score(0.0, "error"),
            Score(0.0, "not_scored"),
            Score(0.0, "error"),
            Score(6.0),
        ]
        said = ["a", "a", "a", "a", "a", "block", "a"]  # one that blocks its worker costs those beside it
        scores = verifier.score([(problem_of_row(), text) for text in said])
        assert scores == [Score(0.0, "timeout")] * 6 + [Score(1.0)]


def test_a_term_without_a_score_leaves_the_sample_to_the_others():
    with here("trl", gsm8k=(InProcessReward(REWARDS["gsm8k"].function), 0.5)) as verifier:
        said = ["none", "#### 5 none", "5"]
        items = [(problem_of_row(), text) for text in said]
        assert verifier.score(items) == [Score(0.0, "no_answer"), Score(0.5), Score(1.0, "no_answer")]
        scores = verifier.score([(problem_of_row(), "raise"), (problem_of_row(), "#### 5")])
        assert scores == [FAILED, Score(0.5, "call_failed")] and "no such thing" in scores[1].reason


def test_the_first_failure_is_told_where_nothing_was_scored():
    failed = [Score(0.0, "error", "reward own: error on problem p1"), Score(0.0, "not_scored"), FAILED]
    assert why_nothing_was_scored(failed) == "reward own: error on problem p1"
    assert why_nothing_was_scored(failed[1:]) == "not_scored"
    assert why_nothing_was_scored([*failed, Score(0.0, "no_answer")]) is why_nothing_was_scored([]) is None
    assert why_every_call_failed(failed) is why_every_call_failed([]) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ambiguous", "ambiguous: 'completions' is of a function that takes a batch, 'response' of one"),
        ("anything", "a batch names at least one of prompts, completions, completion_ids"),
    ],
)
def test_a_signature_that_fits_no_form_or_two(name, message):
    with pytest.raises(UserError, match=message):
        form_of(name, getattr(own_forms, name))


def test_a_column_that_no_row_has_is_named():
    with here("needs_a_column") as verifier:
        (score,) = verifier.score([(problem_of_row(bonus=1), "5")])
        assert score == FAILED
        assert "asks for 'missing_one', which the rows do not have; found: answer, bonus, completions, id, prompts" in (
            score.reason
        )


def test_functions_of_a_notebook_have_the_same_forms():
    class Longest:
        def __call__(self, response, answer, problem):
            return float(len(response))

    reward("notebook_object")(Longest())
    with build_verifier("notebook_object") as verifier:
        assert verifier.score([(problem_of_row(), "ab")]) == [Score(2.0)]

    @reward("notebook_batch")
    def batch(completions, **kwargs):
        return [1 / len(text) for text in completions]

    @reward("notebook_async")
    async def sample(response, answer, problem):
        return None if response == "none" else len(response) / len(answer)

    with build_verifier("notebook_batch") as verifier:
        assert verifier.score([(problem_of_row(), "ab"), (problem_of_row(), "abcd")]) == [Score(0.5), Score(0.25)]
        assert verifier.score([(problem_of_row(), "ab"), (problem_of_row(), "")]) == [FAILED] * 2
    with build_verifier("notebook_async") as verifier:
        items = [(problem_of_row(), "ab"), (problem_of_row(), "none"), (problem_of_row(""), "a")]
        assert verifier.score(items) == [Score(2.0), Score(0.0, "not_scored"), Score(0.0, "error")]


def test_a_closed_verifier_leaves_no_loop_and_no_thread():
    seen = []

    async def sample(response, answer, problem):
        seen.append((asyncio.get_running_loop(), threading.current_thread()))
        return 1.0

    verifier = Verifier({"own": OwnInThisProcess("own", sample, timeout_s=8.0, concurrency=4)}, {"own": 1.0})
    verifier.close()  # nothing was begun
    assert verifier.score([(problem_of_row(), "a"), (problem_of_row(), "b")]) == [Score(1.0)] * 2
    verifier.close()
    verifier.close()
    loop, thread = seen[0]
    thread.join(10)
    assert loop.is_closed() and not thread.is_alive()
