"""Runs whose episodes have an environment: what is learned, and that nothing depends on who was faster."""

import json
import random
import time
from dataclasses import replace

import pytest
import torch
from builders import write_rows
from conversing import make_chat_tokenizer, save_chat_model
from ranks import run_ranks
from trainings import (
    assert_same_metrics,
    assert_same_weights,
    final_weights,
    samples,
    train,
    train_untimed,
    untimed_metrics,
)
from transformers import AutoModelForCausalLM

from luffy import conversations
from luffy.config import EnvironmentConfig
from luffy.data import load_problems
from luffy.errors import ConfigError, UserError
from luffy.evaluation.trained_with import environment_of, evaluate
from luffy.generate import generate_texts
from luffy.prepare.teachers import local_teacher
from luffy.prepare.traces import prepare_traces
from luffy.rollout.native.scheduler import SequenceState
from luffy.run_folder.checkpoint import Checkpoint
from luffy.run_folder.recorder import read_json_lines
from luffy.step import training_step
from luffy.step.memory import under_prefix
from luffy.step.snapshot import MemoryCheck
from luffy.train.loop import Trainer
from luffy.types import Author, Problem

END = "<|im_end|>"


class Words:
    """Answers each turn with its length in words; the third turn ends the episode. Scores short turns."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def reset(self, seed: int) -> None:
        self.turns, self.random = 0, random.Random(seed)

    def step(self, text: str):
        if self.slow:
            time.sleep(random.random() / 100)  # never the same twice
        self.turns += 1
        return f"{len(text)} letters", 1.0 if len(text) % 2 else 0.0, self.turns == 3


TRACE = [
    {"role": "assistant", "content": "ab"}, {"role": "user", "content": "2 letters"},
    {"role": "assistant", "content": "abc"}, {"role": "user", "content": "3 letters"},
    {"role": "assistant", "content": "a"},
]  # fmt: skip


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    rows = [{"id": f"p{i}", "prompt": f"go {i}", "answer": "1", "traces": [TRACE] * (i % 3 != 2)} for i in range(12)]
    return str(write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", rows))


@pytest.fixture
def make_talking(make_config, chat_model, chats):
    def make(slow=False, environment=None, **changes):
        known = {"name": f"{__name__}:Words", "max_turns": 3, "arguments": {"slow": slow}, "at_once": 8}
        settings = {
            "model": {"path": chat_model},
            "data": {"train": chats, "style": "chat", "max_prompt_tokens": 64},
            "rollout": {"n": 4, "max_tokens": 48},
            "environment": {**known, **(environment or {})},
            "batch": {"problems": 4, "tokens": 1024},
            "train": {"steps": 2, "save_every": 1},
            "reward": {"success": 2.0, "failure": 0.0},
            "algorithm": {"reject_extreme": False},
        }
        for section, entries in changes.items():
            settings[section] = {**settings.get(section, {}), **entries} if isinstance(entries, dict) else entries
        return make_config(**settings)

    return make


def batches_of(cfg, **options):
    """The batches of a run, as the update sees them."""
    seen = []
    with Trainer(cfg, **options) as trainer:
        run = trainer.run
        for step in range(cfg.train.steps):
            seen.append(training_step.take_step(run, step))
    return seen


def test_the_ids_that_are_trained_are_those_that_were_drawn(make_talking, monkeypatch):
    drawn, completion = [], SequenceState.completion

    def noted(sequence):
        drawn.append((sequence.request.given_ids, tuple(sequence.token_ids)))
        return completion(sequence)

    monkeypatch.setattr(SequenceState, "completion", noted)
    cfg = make_talking(train={"steps": 1}, guidance={"n_prefix": 1})
    (batch,) = batches_of(cfg)
    trained = [s for group in batch.samples.values() for s in group]
    assert len(trained) == 16
    several = 0
    for sample in trained:
        whole, own = [*sample.prompt_ids, *sample.token_ids.tolist()], sample.authors == Author.POLICY
        edges = torch.diff(own.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int()).nonzero().flatten()
        turns = edges.view(-1, 2).tolist()
        several += len(turns) > 1
        for start, end in turns:
            first, last = len(sample.prompt_ids) + start, len(sample.prompt_ids) + end
            assert (tuple(whole[:first]), tuple(whole[first:last])) in drawn
        masked = sample.authors == Author.ENVIRONMENT
        assert (sample.rl_weights[masked] == 0).all() and (sample.sft_weights[masked] == 0).all()
        counted = sample.rl_weights + sample.sft_weights
        assert (counted[~masked] > 0).all()
    assert several >= 4, "the model ends enough of its turns"
    teacher = [s for s in trained if (s.authors == Author.TEACHER).any()]
    assert teacher and all((s.authors == Author.ENVIRONMENT).any() for s in teacher)


def test_metrics_of_a_run(make_talking):
    cfg = make_talking(guidance={"n_prefix": 1})
    for row in train_untimed(cfg):
        assert row["environment/turns"] > 1
        assert row["environment/reward"] >= 0 and row["environment/reply_tokens"] > 0
        assert row["response_length/max"] <= 48, "replies are no part of a response"
    for sample in samples(cfg):
        assert sample["length"] <= 48


def test_samples_do_not_depend_on_who_is_faster(make_talking):
    quick, slow = (make_talking(slow=slow, name=f"slow-{slow}") for slow in (False, True))
    assert_same_metrics(train_untimed(slow), train_untimed(quick), tolerance=1e-6)
    assert_same_weights(final_weights(slow), final_weights(quick), tolerance=1e-6)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(make_talking, tmp_path, monkeypatch):
    whole = make_talking(name="whole", train={"steps": 3})
    rows = train_untimed(whole)
    killed = replace(whole, name="killed")
    with monkeypatch.context() as patch:
        count, ask = iter(range(10_000)), conversations.Table.finish

        def finish(self, number, completion):
            if next(count) == 60:
                raise KeyboardInterrupt
            return ask(self, number, completion)

        patch.setattr(conversations.Table, "finish", finish)
        with pytest.raises(KeyboardInterrupt):
            train(killed)
    again = train_untimed(killed)
    assert [row["step"] for row in again] == [1, 2, 3]
    assert_same_metrics(again, rows)  # log-probs of the engine round by who was drawn together
    assert_same_weights(final_weights(killed), final_weights(whole), tolerance=0)


@pytest.mark.parametrize("tokens", [200, 4096])
def test_micro_batches_are_invisible(make_talking, tokens):
    ours, theirs = (make_talking(name=str(t), batch={"tokens": t}, train={"steps": 1}) for t in (tokens, 700))
    untimed = [
        [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in train_untimed(cfg)]
        for cfg in (ours, theirs)
    ]
    assert_same_metrics(*untimed, tolerance=1e-4)
    assert_same_weights(final_weights(ours), final_weights(theirs), tolerance=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree(make_talking, ranks):
    alone, together = make_talking(name="alone"), make_talking(name="together", launch="torchrun")
    rows = train_untimed(alone)
    run_ranks(ranks, train, together)
    found = untimed_metrics(together)
    shared = ["critic/score/mean", "environment/turns", "environment/calls", "actor/pg_loss"]
    for ours, theirs in zip(found, rows, strict=True):
        assert {k: ours[k] for k in shared} == pytest.approx({k: theirs[k] for k in shared}, rel=1e-4, abs=1e-5)
    assert_same_weights(final_weights(together), final_weights(alone), tolerance=1e-4)


def test_a_step_ahead_of_the_update(make_talking):
    cfg = make_talking(train={"steps": 3}, **{"async": {"max_staleness": 1}})
    rows = train_untimed(cfg)
    assert rows[-1]["async/staleness/max"] == 1 and rows[-1]["environment/turns"] > 1


IN_PARTS = {"n": 4, "max_tokens": 48, "max_tokens_per_step": 13}


def of_problems(cfg):
    """The responses to each problem, the first time it was drawn."""
    found = {}
    for row in samples(cfg):
        found.setdefault(row["problem"], {}).setdefault(row["step"], []).append(row)
    return {problem: next(iter(by_step.values())) for problem, by_step in found.items()}


def test_episodes_in_parts_are_those_that_were_never_cut(make_talking):
    """Under weights that do not move."""
    settings = {"optim": {"lr": 1e-30}, "guidance": {"n_prefix": 1}, "record": {"samples": 99, "samples_every": 1}}
    whole = make_talking(name="whole", train={"steps": 2}, **settings)
    parts = make_talking(name="parts", train={"steps": 6}, rollout=IN_PARTS, **settings)
    train(whole)
    rows = train_untimed(parts)
    expected, found = of_problems(whole), of_problems(parts)
    assert len(expected) == 8
    told = ("token_ids", "replies", "end", "turns", "calls", "environment_reward", "finish", "score", "text")
    for problem, group in expected.items():
        for ours, theirs in zip(found[problem], group, strict=True):
            assert {k: ours.get(k) for k in told} == {k: theirs.get(k) for k in told}
            drawn = [v for v in ours["versions"] if v >= 0]
            assert all(drawn.count(version) <= 13 for version in drawn) and drawn == sorted(drawn)
    several = [r for group in found.values() for r in group if len(set(r["versions"]) - {-1}) > 1 and r["turns"] > 1]
    assert len(several) > 4, "episodes went on behind a reply"
    assert rows[0]["rollout/under_way"] > 0 and rows[-1]["async/staleness/max"] > 0
    assert all("environment/fault/differs" not in row for row in rows)


def test_a_killed_run_of_episodes_in_parts_goes_on_as_if_nothing_had_happened(make_talking):
    every = {"samples": 99, "samples_every": 1}
    settings = {"rollout": IN_PARTS, "guidance": {"n_prefix": 1}, "record": every}
    whole = make_talking(name="whole", train={"steps": 5}, **settings)
    rows = train_untimed(whole)
    train(make_talking(name="parts", train={"steps": 2}, **settings))
    again = train_untimed(replace(whole, name="parts"))
    assert_same_metrics(again, rows)  # log-probs of the engine round by who was drawn together
    assert any(row["rollout/continued_tokens"] > 0 for row in rows[2:])
    assert_same_weights(final_weights(replace(whole, name="parts")), final_weights(whole), tolerance=1e-4)
    drawn = [[(r["token_ids"], r["versions"]) for r in samples(cfg)] for cfg in (whole, replace(whole, name="parts"))]
    assert drawn[0] == drawn[1] and len(drawn[0]) > 8


def test_ranks_agree_on_episodes_in_parts(make_talking):
    settings = {"rollout": IN_PARTS, "train": {"steps": 4}}
    alone, together = make_talking(name="alone", **settings), make_talking(name="two", launch="torchrun", **settings)
    rows = train_untimed(alone)
    run_ranks(2, train, together)
    shared = [
        "critic/score/mean",
        "environment/turns",
        "rollout/under_way",
        "rollout/continued_tokens",
        "actor/pg_loss",
    ]
    for ours, theirs in zip(untimed_metrics(together), rows, strict=True):
        known = [k for k in shared if k in theirs]
        assert {k: ours[k] for k in known} == pytest.approx({k: theirs[k] for k in known}, rel=1e-4, abs=1e-5)
    assert_same_weights(final_weights(together), final_weights(alone), tolerance=1e-4)


def test_outcomes_that_do_not_fit_are_refused_in_one_line(make_talking):
    cfg = make_talking(rollout=IN_PARTS, train={"steps": 1})
    train(cfg)
    checkpoint = cfg.folder / "checkpoints" / "step-000001"
    tensors = Checkpoint(checkpoint).tensors()
    memory = under_prefix(tensors, "memory/")
    MemoryCheck(memory, checkpoint, 12, 1000, None).run()
    too_few = json.dumps([[None]] * len(memory["under_way/problems"])).encode()
    for odd in (b"[", b"[[]]", b"7", b"[[7]]", b'[[{"end": 3, "reward": "x"}]]', b"[" * 9999, too_few):
        memory["under_way/outcomes"] = torch.tensor(list(odd), dtype=torch.uint8)
        with pytest.raises(UserError, match="its memory/under_way/outcomes does not fit this run") as error:
            MemoryCheck(memory, checkpoint, 12, 1000, None).run()
        assert "\n" not in str(error.value)


def test_held_out_problems_are_played_too(make_talking, chats):
    cfg = make_talking(data={"eval": chats}, train={"steps": 1})
    (row,) = train_untimed(cfg)
    assert row["val-core/environment/turns"] > 1 and "val-core/accuracy" in row


def test_sft_learns_every_turn_of_the_teacher(make_talking):
    cfg = make_talking(train={"steps": 1})
    (batch,) = batches_of(cfg, method="sft")
    tokenizer = make_chat_tokenizer()
    for (sample,) in batch.samples.values():
        kept = tokenizer.decode(sample.token_ids[sample.sft_weights > 0], skip_special_tokens=False)
        assert kept == f"ab{END}abc{END}a{END}"


def gradient_by_hand(model, batch, temperature=1.0):
    """LUFFY's gradient of a step from the formula, in float64, token by token: Dr. GRPO's mean over all responses,
    divided by the longest; a teacher's tokens weigh p/(p + 0.1), replies nothing."""
    model = model.double()
    total, groups = 0.0, [batch.groups[i] for i in sorted(batch.groups)]
    longest, n = 48, sum(len(g.rollouts) for g in groups)
    for group in groups:
        rewards = torch.tensor([s.value for s in group.scores], dtype=torch.float64)
        for episode, advantage in zip(group.rollouts, rewards - rewards.mean(), strict=True):
            ids = torch.tensor([*episode.task.prompt_ids, *episode.token_ids.tolist()])
            logits = model(input_ids=ids[None]).logits[0, :-1]
            log_p = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][len(episode.task.prompt_ids) - 1 :]
            for author, value in zip(episode.authors.tolist(), log_p, strict=True):
                if author == Author.ENVIRONMENT:
                    continue
                p = value.exp()
                weight = p / (p + 0.1) if author == Author.TEACHER else (value - value.detach()).exp()
                total = total - advantage * weight / (longest * n)
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_gradient_of_several_turns_is_that_of_the_formula(make_talking, chat_model, monkeypatch):
    cfg = make_talking(
        train={"steps": 1}, guidance={"n_prefix": 1}, algorithm={"reject_extreme": False, "entropy_coef": 0.0},
        optim={"grad_clip": 0.0},
    )  # fmt: skip
    found = {}
    with Trainer(cfg) as trainer:
        optimizer = trainer.run.policy.optimizer

        original = type(optimizer).step

        def keep(self, *args, **kwargs):
            found.update({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})
            return original(self, *args, **kwargs)

        monkeypatch.setattr(type(optimizer), "step", keep)
        batch = training_step.take_step(trainer.run, 0)
    assert any((r.authors == Author.ENVIRONMENT).any() and r.prefix for g in batch.groups.values() for r in g.rollouts)
    expected = gradient_by_hand(AutoModelForCausalLM.from_pretrained(chat_model), batch)
    assert found.keys() and len(set(found) & set(expected)) > 5
    for name in set(found) & set(expected):
        torch.testing.assert_close(found[name].double(), expected[name], rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"offpolicy_guidance": {"enable": True, "model_path": "m"}}},
            "does not go with 'rollout.offpolicy_guidance.enable'",
        ),
        ({"data": {"style": "plain"}}, "needs a chat template: set data.style=chat"),
        ({"environment": {"max_tokens": 48}}, "leaves no room for them beside 'rollout.max_tokens'"),
        ({"environment": {"name": ""}}, "'environment.name' is missing"),
    ],
)
def test_what_does_not_go_with_environments_is_refused_in_one_line(make_talking, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_talking(**changes)
    assert "\n" not in str(error.value)


def test_an_evaluation_of_a_run_plays_its_environment(make_talking, chats, tmp_path):
    cfg = make_talking(train={"steps": 1})
    train(cfg)
    model = cfg.folder / "checkpoints" / "step-000001" / "model"
    said = []
    evaluate(
        {"model": str(model), "suite": chats, "out": tmp_path / "eval", "k": 2, "limit": 3, "max_tokens": 48},
        said.append,
    )
    assert f"environment {__name__}:Words" in said[0]
    rows = read_json_lines(tmp_path / "eval" / "items.jsonl")
    assert len(rows) == 6 and any(row["turns"] > 1 for row in rows)
    for row in rows:
        assert row["tokens"] <= 48 and row["end"] in ("answer", "tokens", "turns", "environment")
        assert row["response"] in row["conversation"].replace(END, "")
    options = {"n": 2, "max_tokens": 48, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, "style": "chat",
               "system_prompt": None, "dtype": "float32", "device": "cpu"}  # fmt: skip
    said = list(
        generate_texts(str(model), [Problem("p", "go 1", "")], **options, environment=environment_of(str(model)))
    )
    assert len(said) == 2 and any(Author.ENVIRONMENT in row["authors"] for row in said)
    with pytest.raises(UserError, match="holds an evaluation with environment="):
        evaluate({"model": str(model), "suite": chats, "out": tmp_path / "eval", "k": 2, "limit": 3, "max_tokens": 48,
                  "environment": EnvironmentConfig(name=f"{__name__}:Words", max_turns=2)}, said.append)  # fmt: skip


def test_prepare_traces_plays_a_teacher_and_its_traces_can_be_trained_on(make_talking, chat_model, chats, tmp_path):
    """The model is asked to reach an odd number of letters, and where it does, its episode is a trace."""
    cfg = make_talking(train={"steps": 1})
    teacher, settings = local_teacher(
        chat_model, {"max_tokens": 48, "temperature": 1.0}, None, "cpu", environment=cfg.environment, style="chat"
    )  # fmt: skip
    out = tmp_path / "traces.parquet"
    card = prepare_traces(chats, out, teacher, "teacher", settings, n=4, reward="numeric", workers=1)
    assert card["settings"]["environment"]["name"] == f"{__name__}:Words"
    assert (
        card["counts"]["samples"] == 48 and card["counts"]["samples_kept"] > 0 and card["counts"]["samples_cut_off"] > 0
    )
    problems = load_problems(out)
    traces = [trace for problem in problems for trace in problem.traces]
    assert len(traces) == card["counts"]["samples_kept"] and all(trace.teacher == "teacher" for trace in traces)
    for trace in traces:
        assert [m.role for m in trace.messages] == ["assistant", "user", "assistant", "user", "assistant"]
        for said, answer in zip(trace.messages[::2], trace.messages[1::2], strict=False):
            assert answer.content == f"{len(said.content)} letters"
    train(make_talking(name="after", data={"train": str(out)}, train={"steps": 1}, guidance={"n_prefix": 1}))


class Flaky(Words):
    """Does not begin for odd seeds; a reward that is no number for every fifth."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.seed = seed
        if seed % 2:
            raise ValueError("no place left")

    def step(self, text: str):
        said, reward, done = super().step(text)
        return said, float("nan") if self.seed % 5 == 0 and done else reward, done


class Costs(Words):
    """A reward that is never above 0."""

    def step(self, text: str):
        said, reward, done = super().step(text)
        return said, reward - 1.0, done


def test_rewards_of_an_environment_below_success_are_warned_about(make_talking):
    settings = {"environment": {"name": f"{__name__}:Costs", "arguments": {}}, "reward": {"success": 1.0}}
    with Trainer(make_talking(**settings)) as trainer:
        trainer.step()
        told = [one for one in trainer.notices if "no sample counts as solved" in one]
    assert len(told) == 1 and "set reward.success to the best value of the environment" in told[0]


@pytest.mark.parametrize("how", ["fail", "leave_out"])
def test_episodes_that_never_begin_stop_nothing(make_talking, how):
    cfg = make_talking(
        environment={"name": f"{__name__}:Flaky", "arguments": {}, "on_failure": how}, batch={"problems": 6},
        guidance={"n_prefix": 1}, train={"steps": 2}, record={"samples": 6, "samples_every": 1},
    )  # fmt: skip
    rows = train_untimed(cfg)
    assert all(row["environment/fault/raised"] > 0 for row in rows)
    assert all(row["environment/end/raised"] > 0 for row in rows)
    trained = [len({(r["problem"], r["sample"]) for r in samples(cfg) if r["step"] == step}) for step in (1, 2)]
    assert all((count == 24) == (how == "fail") for count in trained)
