"""Runs that learn, without the hint, what the policy did with one: its gradient, ranks, micro-batches, resume, turns."""

import json
import random
import re

import pytest
import torch
from builders import write_rows
from conversing import make_chat_tokenizer
from kills import copied_at
from ranks import run_ranks
from test_gate_training import rows_of_samples
from test_tool_training import batches_of, chat_model, chats, make_talking  # noqa: F401  (fixtures)
from trainings import (
    assert_same_metrics,
    assert_same_weights,
    final_weights,
    train,
    train_untimed,
    untimed_metrics,
)
from transformers import AutoModelForCausalLM

from luffy.config import load_config
from luffy.rollout.native import NativeEngine
from luffy.schema import to_dict
from luffy.step import training_step
from luffy.train.loop import Trainer
from luffy.types import Author


def of_method(make, method, name="run", **changes):
    """A run with the guidance and the loss of a method's recipe."""
    recipe, gate = to_dict(load_config(f"tiny/{method}")), load_config(f"tiny/{method}").guidance.gate
    known = {
        "guidance": {**recipe["guidance"], "hint_text": " {solution}", "gate": {"name": str(gate), "samples": 3}},
        "algorithm": {**recipe["algorithm"], "reject_extreme": False, "entropy_coef": 0.0},
        "replay": recipe["replay"],
        "record": {"samples": 12, "samples_every": 1},
        "train": {"steps": 1, "save_every": 1},
    }
    return make(name=name, **(known | changes))


@pytest.fixture
def make_single(make_config, sums, tmp_path):
    """Runs of single turns: a response of odd length is right, so a quarter of all groups of two fails."""
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    for row in rows:
        row["traces"] = [f"{trace} " for trace in row["traces"]]
    path = str(write_rows(tmp_path / "odd.jsonl", rows))

    def make(**changes):
        settings = {
            "reward": {"kind": "loop_rewards:length_parity"},
            "data": {"train": path, "max_prompt_tokens": 40},
            "rollout": {"n": 2, "max_tokens": 20},
            "batch": {"problems": 12, "tokens": 256},
        }
        return make_config(**(settings | changes))

    return make


class Guess:
    """Says a number, and ends the episode at the third turn, whose length must be odd."""

    def reset(self, seed: int) -> str:
        self.turns, number = 0, random.Random(seed).randrange(10)
        return f" no {number}"

    def step(self, text: str):
        self.turns += 1
        return f"{len(text)} letters", float(self.turns == 3 and len(text) % 2), self.turns == 3


@pytest.fixture
def make_guessing(make_talking):  # noqa: F811
    """Runs with an environment that says something first, and of which no own episode of a group may be right."""

    def make(**changes):
        settings = {
            "environment": {"name": f"{__name__}:Guess", "arguments": {}},
            "rollout": {"n": 2, "max_tokens": 48},
            "data": {"max_prompt_tokens": 200},
            "batch": {"problems": 12},
            "reward": {"success": 1.0, "failure": 0.0},
        }
        return make_talking(**(settings | changes))

    return make


def one_step(cfg, monkeypatch):
    """The first batch of a run and the gradient of its update."""
    found = {}
    with Trainer(cfg) as trainer, monkeypatch.context() as patch:
        optimizer = type(trainer.run.policy.optimizer)
        original = optimizer.step

        def keep(self, *args, **kwargs):
            found.update({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})
            return original(self, *args, **kwargs)

        patch.setattr(optimizer, "step", keep)
        batch = training_step.take_step(trainer.run, 0)
    return batch, found


def gradient_with_hints_dropped(cfg, batch, weight):
    """The gradient of a step in float64 from the formula. Own tokens weigh 1, those of a response that was drawn with a
    hint or written by a teacher ``weight(p now without the hint, p as it was written)``, replies nothing; A is the reward less the group's mean,
    over its standard deviation; the mean is over all responses, divided by the longest there may be."""
    model, total = AutoModelForCausalLM.from_pretrained(cfg.model.path).double(), 0.0
    groups = [batch.groups[i] for i in sorted(batch.groups)]
    scale = cfg.rollout.max_tokens * sum(len(group.rollouts) for group in groups)
    for group in groups:
        rewards = torch.tensor([score.value for score in group.scores], dtype=torch.float64)
        for episode, advantage in zip(group.rollouts, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
            prompt = episode.task.prompt_ids
            ids = torch.tensor([*prompt, *episode.token_ids.tolist()])
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            streams = zip(
                log_p[len(prompt) - 1 :], episode.behavior_log_probs.double().exp(), episode.authors, strict=True
            )
            for value, drawn_with, author in streams:
                if author != Author.ENVIRONMENT:
                    w = weight(value.detach().exp(), drawn_with) if author >= Author.TEACHER else 1.0
                    total = total - advantage * w * value / scale
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hinted(batch):
    """The responses of a batch that were drawn with a hint and learned without it."""
    every = [episode for group in batch.groups.values() for episode in group.rollouts]
    return [episode for episode in every if (episode.authors == Author.REPLAY).any()]


WEIGHTS = {
    "act_guide": lambda p, q: p / q / (p / q + 0.1),
    "bepa": lambda p, q: 0.1 * (p / q) / (p / q + 0.1) ** 2,
}


@pytest.mark.parametrize("method", WEIGHTS)
@pytest.mark.parametrize("kind", ["make_single", "make_guessing"])
def test_the_gradient_is_that_of_the_formula(request, kind, method, monkeypatch):
    cfg = of_method(request.getfixturevalue(kind), method, optim={"grad_clip": 0.0})
    batch, found = one_step(cfg, monkeypatch)
    guided = hinted(batch)
    assert guided and all(e.task.hint and e.task.plain_ids is None for e in guided)
    plain = {g.task.problem.id: {e.task.prompt_ids for e in g.rollouts if e.is_own} for g in batch.groups.values()}
    if kind == "make_single":
        assert all(plain[e.task.problem.id] <= {e.task.prompt_ids} for e in guided)
    else:  # what the environment said to it stays in the prompt, the hint does not
        texts = [make_chat_tokenizer().decode(e.task.prompt_ids) for e in guided]
        assert all(re.search(r"go \d+ no \d<", text) for text in texts), texts
        assert any((e.authors == Author.ENVIRONMENT).any() for e in guided)
    expected = gradient_with_hints_dropped(cfg, batch, WEIGHTS[method])
    assert len(set(found) & set(expected)) > 5
    for name in set(found) & set(expected):
        torch.testing.assert_close(found[name].double(), expected[name], rtol=5e-4, atol=1e-7)


@pytest.mark.parametrize("method", [pytest.param("act_guide", marks=pytest.mark.slow), "bepa"])
@pytest.mark.parametrize("kind", ["make_single", "make_guessing"])
def test_ranks_and_micro_batches_change_nothing(request, kind, method):
    make, two = request.getfixturevalue(kind), {"steps": 2, "save_every": 2}
    alone = of_method(make, method, "alone", train=two)
    many = of_method(make, method, "many", train=two, batch={"problems": 12, "tokens": 700})
    rows = train_untimed(alone)
    run_ranks(2, train, many)
    assert sum(row["batch/gated"] for row in rows) > 0
    speed = ("perf/", "memory/", "environment/")
    ours, theirs = (
        [{k: v for k, v in r.items() if not k.startswith(speed)} for r in x] for x in (untimed_metrics(many), rows)
    )
    assert_same_metrics(ours, theirs, tolerance=1e-4)
    assert_same_weights(final_weights(many), final_weights(alone), tolerance=1e-4)


def test_what_a_kill_between_rounds_leaves_is_resumed_and_equals_undisturbed(make_single):
    every = {"steps": 4, "save_every": 1}
    for method in WEIGHTS:
        whole, killed = (
            of_method(make_single, method, f"{method}-{name}", train=every) for name in ("whole", "killed")
        )
        with copied_at(NativeEngine, "generate", 8, whole.folder, killed.folder):
            train(whole)
        assert 1 <= len(untimed_metrics(killed)) < 4
        train(killed)
        assert rows_of_samples(killed) == rows_of_samples(whole)
        assert_same_weights(final_weights(killed), final_weights(whole), tolerance=0)


@pytest.mark.parametrize("kind", ["make_single", "make_guessing"])
def test_bepa_recalls_the_newest_success_of_the_problem(request, kind):
    """Where all own responses failed: that, if there is one; else what was done under a plan, else the trace."""
    cfg = of_method(request.getfixturevalue(kind), "bepa", train={"steps": 5, "save_every": 5})
    known, ways = {}, []
    for batch in batches_of(cfg):
        new = {}
        for group in (batch.groups | batch.rejected).values():
            name, pairs = group.task.problem.id, list(zip(group.rollouts, group.scores, strict=True))
            own, others = ([p for p in pairs if p[0].is_own is is_own] for is_own in (True, False))
            assert len(others) <= (not any(score.value for _, score in own))
            for episode, score in others:
                ways.append("plan" if episode.task.hint else "own" if name in known else "trace")
                assert score.value == 1.0 and (episode.finish == "trace") == (ways[-1] != "plan")
                author = Author.TEACHER if ways[-1] == "trace" else Author.REPLAY
                assert set(episode.authors.tolist()) <= {author, Author.ENVIRONMENT}
                if ways[-1] == "own":
                    seen, ids, log_probs = known[name]
                    assert episode.task.prompt_ids == seen and episode.token_ids.tolist() == ids
                    assert torch.equal(episode.behavior_log_probs, log_probs)
            right = [e for e, score in pairs if score.value and (e.is_own or e.task.hint)]
            if right:
                ids = right[-1].token_ids.tolist()
                new[name] = right[-1].task.prompt_ids, ids, right[-1].behavior_log_probs
        known |= new
    assert {"own", "plan"} <= set(ways), ways
