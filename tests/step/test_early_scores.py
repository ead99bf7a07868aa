"""Responses are verified while others are still being made, with the scores they would have had afterwards."""

import threading
from dataclasses import replace

import pytest
from builders import make_rollout, make_task, make_tokenizer

from luffy.config.knobs import RewardConfig
from luffy.rewards import build_verifier
from luffy.rewards.kinds import reward
from luffy.rollout.native import NativeEngine
from luffy.step.groups import score, verified
from luffy.step.play import EarlyScores
from luffy.train.loop import Trainer

TASK = make_task(answer="5")


def test_scores_are_those_of_the_responses_whatever_came_first():
    tokenizer = make_tokenizer()
    texts = ["1+2=3", "12", "1+1", "2", "33=33", "0"]
    with (
        build_verifier("loop_rewards:length_parity", workers=1) as verifier,
        EarlyScores(verifier, tokenizer) as early,
    ):
        for number in (3, 0, 5, 1, 4, 2):
            early.add([(number, TASK, tokenizer(texts[number])["input_ids"])])
        assert [score.value for score in early.in_order()] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_response_inside_a_thought_that_the_prompt_opened_has_no_answer():
    tokenizer = make_tokenizer()
    ids = tokenizer("2+3\n#### 5")["input_ids"]
    tasks = [TASK, replace(TASK, in_thought=True)]
    with build_verifier("gsm8k") as verifier, EarlyScores(verifier, tokenizer) as early:
        early.add([(number, task, ids) for number, task in enumerate(tasks)])
        assert [score.value for score in early.in_order()] == [1.0, 0.0]
        assert [score.value for score in verified([(task, ids) for task in tasks], verifier, tokenizer)] == [1.0, 0.0]
    with RewardConfig(kind="gsm8k", prompt_opens_thought=False).verifier() as verifier:
        assert [score.value for score in verified([(task, ids) for task in tasks], verifier, tokenizer)] == [1.0, 1.0]


def test_a_response_that_was_cut_off_fails_if_the_recipe_says_so():
    tokenizer = make_tokenizer()
    ids = tokenizer("2+3\n#### 5")["input_ids"]
    whole, cut = (make_rollout(ids, task=TASK, finish=finish) for finish in ("stop", "length"))
    wrong = make_rollout(tokenizer("#### 6")["input_ids"], task=TASK, finish="length")
    for cut_off, failure, values in (("score", 0.0, [1.0, 1.0, 0.0]), ("failure", 0.2, [1.0, 0.2, 0.0])):
        with RewardConfig(kind="gsm8k", cut_off=cut_off, failure=failure).verifier() as verifier:
            (group,) = score([(whole, cut, wrong)], verifier, tokenizer)
        assert [one.value for one in group.scores] == values


def test_a_verifier_that_breaks_is_noticed():
    with (
        build_verifier("loop_rewards:length_parity", workers=1) as verifier,
        EarlyScores(verifier, make_tokenizer()) as early,
    ):
        verifier.close()
        early.add([(0, TASK, [3])])
        with pytest.raises(RuntimeError, match="closed"):
            early.in_order()


def test_a_training_verifies_the_first_response_before_the_last_has_ended(make_config, monkeypatch):
    """The engine waits, before it goes on from its first response, until that is verified."""
    cfg = make_config(reward={"kind": "loop_rewards:length_parity"}, train={"steps": 1}, rollout={"slots": 1})
    scored, finished = threading.Event(), NativeEngine._finished

    def patient(self, requests):
        for number, made in enumerate(finished(self, requests)):
            assert number == 0 or scored.wait(60)
            yield made

    monkeypatch.setattr(NativeEngine, "_finished", patient)
    with Trainer(cfg) as trainer:
        score = trainer.run.verifier.score
        monkeypatch.setattr(trainer.run.verifier, "score", lambda items: [score(items), scored.set()][0])
        trainer.train()
    assert scored.is_set()


@pytest.mark.parametrize(
    ("weights", "early"),
    [
        ({"loop_rewards:length_parity": 1.0}, True),
        ({"loop_rewards:length_parity": 1.0, "format": 0.1}, True),
        ({"gsm8k": 1.0}, True),
        ({"math": 1.0}, True),
        ({"own_forms:together": 1.0}, False),  # many under way at once
        ({"function_of_this_test": 1.0}, False),  # in this process
        ({"gsm8k": 1.0, "own_forms:even_length": 1.0}, False),  # of all at once
    ],
)
def test_what_scores_each_response_by_itself_does_so_early(weights, early, monkeypatch, request):
    monkeypatch.syspath_prepend(request.config.rootpath / "tests" / "rewards")
    reward("function_of_this_test")(lambda response, answer, problem: 1.0)
    with build_verifier(weights=weights, workers=1) as verifier:
        assert verifier.may_score_early is early
