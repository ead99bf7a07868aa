"""The teacher: whose weights, under which prompt, and what a checkpoint keeps of it."""

import json
import re
import shutil
import signal

import pytest
import torch
from builders import make_group, make_rollout, make_task, make_tokenizer, write_rows
from children import exit_code_in_child
from fake_servers import KEY, FakeScorer
from kills import killed_at
from trainings import train, untimed_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from luffy.data import Encoder
from luffy.dry_run import dry_run
from luffy.dry_run import memory as memory_model
from luffy.errors import ConfigError, DataError, UserError
from luffy.learn.credit import uncredited
from luffy.learn.policy import Policy
from luffy.learn.teacher import Teacher, TeacherPrompts
from luffy.run_folder.checkpoint import Checkpoint
from luffy.run_folder.recorder import read_json_lines
from luffy.schema import to_dict
from luffy.step import training_step
from luffy.step.crediting import score_tokens
from luffy.step.rejection import settle
from luffy.train.loop import Trainer
from luffy.types import NO_LIMIT, Demonstration

DISTILL = {"credit": "distill", "reject_extreme": False, "entropy_coef": 0.0}

# Traces and rewards, so that a policy moves that its teacher alone would leave where it is.
MOVING = {"algorithm": DISTILL | {"distill_reward": 1.0}, "guidance": {"n_prefix": 1}, "optim": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory):
    """Another model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def teacher_config(make_config, teacher, name="run", **changes):
    settings = {"algorithm": DISTILL, "guidance": {"n_prefix": 0}, "train": {"steps": 2, "save_every": 1}}
    named = teacher | {"path": str(teacher["path"])}
    return make_config(name=name, teacher=named, **settings | changes)


def log_probs_of(model, prompt_ids, token_ids, temperature):
    ids = torch.tensor([[*prompt_ids, *token_ids.tolist()]])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0] / temperature, -1)[len(prompt_ids) - 1 : -1]
    return rows.gather(-1, token_ids[:, None])[:, 0]


def scored_by_teacher(trainer):
    """Each response of a step's batch with its tokens, scored."""
    batch, stages = training_step.begin(trainer.run, 0)
    assert (next(stages), next(stages)) == ("gated", "rejected")
    settle(trainer.run, batch)
    tokens = score_tokens(trainer.run, batch)
    return [
        pair for i, group in enumerate(batch.groups.values()) for pair in zip(group.rollouts, tokens[i], strict=True)
    ]


def test_another_model_scores_every_token_at_the_temperature_of_the_rollouts(make_config, tiny_model, other_model):
    cfg = teacher_config(make_config, {"path": other_model}, rollout={"temperature": 0.7}, batch={"tokens": 64})
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model, other_model)]
    with Trainer(cfg) as trainer:
        found = scored_by_teacher(trainer)
    assert len(found) == 24
    for rollout, tokens in found:
        for model, ours in zip(models, (tokens.old, tokens.teacher), strict=True):
            expected = log_probs_of(model, rollout.task.prompt_ids, rollout.token_ids, 0.7)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_the_policy_of_the_start_is_at_first_the_policy_and_then_not(make_config):
    cfg = teacher_config(make_config, {"path": "self"}, **MOVING)
    with Trainer(cfg) as trainer:
        trainer.train()
    first, second = read_json_lines(cfg.folder / "metrics.jsonl")
    assert first["method/teacher_gap"] == pytest.approx(0.0, abs=1e-6) and first["method/teacher_share"] == 1.0
    assert second["method/teacher_gap"] < -1e-4  # the policy's own tokens are likelier under the policy
    assert not any(name.endswith("/teacher") for name in Checkpoint(newest_checkpoint(cfg)).tensors())


def newest_checkpoint(cfg):
    return max((cfg.folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_average_follows_the_policy_and_leaves_its_weights_alone(make_config, tiny_model, lora):
    model = {"path": str(tiny_model), "device": "cpu", "lora": lora}
    cfg = teacher_config(make_config, {"path": "self", "average": 0.25}, model=model, **MOVING)
    with Trainer(cfg) as trainer:
        parameters = trainer.run.policy.optimizer.parameters
        averages = {name: p.detach().clone() for name, p in parameters.items()}
        for _ in range(2):
            trainer.step()
            for name, parameter in parameters.items():
                averages[name] = 0.75 * averages[name] + 0.25 * parameter.detach()
        kept = trainer.run.teacher.average.tensors()
        assert kept.keys() == {f"{name}/teacher" for name in parameters}
        for name, average in averages.items():
            torch.testing.assert_close(kept[f"{name}/teacher"], average, atol=1e-6, rtol=1e-6)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        found = scored_by_teacher(trainer)
        assert all(torch.equal(parameters[name], value) for name, value in before.items())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(averages[name])
        for rollout, tokens in found:
            (expected,) = trainer.run.policy.log_probs([uncredited(rollout)])
            torch.testing.assert_close(tokens.teacher, expected, atol=1e-5, rtol=1e-5)
            assert float((tokens.teacher - tokens.old).abs().max()) > 1e-4


def train_until_third_update(cfg):
    """In a child: SIGKILL in the third update."""
    with killed_at(Policy, "update", 3):
        train(cfg)


@pytest.mark.slow
def test_a_killed_run_with_an_averaged_teacher_resumes_to_the_bit(make_config):
    torch.set_num_threads(1)
    runs = [
        teacher_config(
            make_config, {"path": "self", "average": 0.3, "shown": "sibling", "hint_text": "#{solution}#"}, name,
            **MOVING | {"train": {"steps": 3, "save_every": 2}},
        )
        for name in ("undisturbed", "killed")
    ]  # fmt: skip
    train(runs[0])
    assert exit_code_in_child(train_until_third_update, runs[1]) == -signal.SIGKILL
    train(runs[1])
    rows = [untimed_metrics(cfg.folder) for cfg in runs]
    assert rows[0] == rows[1] and 0 < rows[0][0]["method/teacher_share"] <= 1
    ours, theirs = (Checkpoint(newest_checkpoint(cfg)).tensors() for cfg in runs)
    assert any(name.endswith("/teacher") for name in ours)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


# What the teacher is shown.

TRACE = Demonstration((4, 10, 1), None)
IDS = [(3, 1), (4, 1), (5, 1), (6, 1)]


def group_of(scores, traces=(TRACE,)):
    task = make_task((4, 13, 4), traces)
    return make_group(scores, [make_rollout(ids, task=task) for ids in IDS], task)


def prompts_of(make_config, shown, group):
    tokenizer = make_tokenizer()
    knobs = teacher_config(make_config, {"path": "self", "shown": shown, "hint_text": "={solution}="}).teacher
    encoder = Encoder(tokenizer, style="plain", max_prompt_tokens=4)
    prompts = TeacherPrompts(knobs, encoder, tokenizer, lambda value: value >= 1)
    return prompts, [None if ids is None else tokenizer.decode(ids) for ids in prompts.of(group)]


def test_what_the_teacher_is_shown(make_config):
    group = group_of([0.0, 1.0, 0.0, 1.0])
    assert prompts_of(make_config, "nothing", group)[1] == ["1+1"] * 4
    assert prompts_of(make_config, "solution", group)[1] == ["1+1=17="] * 4
    assert prompts_of(make_config, "solution", group_of([1.0] * 4, traces=()))[1] == [None] * 4
    assert prompts_of(make_config, "sibling", group)[1] == ["1+1=1=", "1+1=3=", "1+1=3=", "1+1=1="]
    assert prompts_of(make_config, "sibling", group_of([0.0] * 4))[1] == [None] * 4
    alone = prompts_of(make_config, "sibling", group_of([0.0, 1.0, 0.0, 0.0]))[1]
    assert alone == ["1+1=1=", None, "1+1=1=", "1+1=1="]  # never a response itself


def test_a_response_behind_too_long_a_prompt_has_no_teacher(make_config):
    group = group_of([0.0] * 4)
    prompts, _ = prompts_of(make_config, "solution", group)
    seen = []

    def log_probs(samples):
        seen.extend(samples)
        return [torch.full((s.token_ids.numel(),), -1.0) for s in samples]

    for longest, known in ((9, True), (8, False), (NO_LIMIT, True)):  # 1+1=17= and two tokens
        scores = Teacher(log_probs, prompts, longest).score([group])
        assert [s is not None for s in scores] == [known] * 4
    assert {s.prompt_ids for s in seen} == {prompts.of(group)[0]}


def test_a_teacher_that_does_not_fit_is_refused(make_config, other_model, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(other_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"token id 18 is missing for the policy and 'extra' for the teacher \(teacher"):
        Trainer(teacher_config(make_config, {"path": folder}))
    shutil.copytree(other_model, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(other_model)
    model.config.max_position_embeddings = 20
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"teacher\.path=.* takes 20 tokens, but data\.max_prompt_tokens"):
        Trainer(teacher_config(make_config, {"path": folder}))


def test_settings_that_do_not_go_together(make_config):
    with pytest.raises(UserError, match=r"algorithm\.credit=distill needs a teacher: set teacher\.path"):
        Trainer(make_config(algorithm=DISTILL))
    with pytest.raises(UserError, match=r"teacher\.servers\) is not used by algorithm\.credit=group_baseline"):
        Trainer(make_config(teacher={"path": "self"}))
    for teacher, message in (
        ({"average": 0.1}, "no teacher: give teacher.path"),
        ({"path": "m", "average": 0.1}, r"'teacher.average' \(0.1\).*set teacher.path=self"),
        ({"path": "self", "servers": ["http://a:1"]}, "'teacher.path' is self, and 'teacher.servers'"),
        ({"path": "self", "average": 0.1, "dtype": "bfloat16"}, r"'teacher.dtype' \(bfloat16\)"),
        ({"path": "self", "shown": "solution", "hint_text": "Look!"}, "'teacher.hint_text' must contain"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(teacher=teacher)
    with pytest.raises(ConfigError, match=r"temperature 1, and 'rollout.temperature' is 0.7"):
        make_config(teacher={"servers": ["http://a:1"]}, rollout={"temperature": 0.7})


def test_a_teacher_that_is_shown_a_solution_needs_traces(make_config, sums, tmp_path):
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    write_rows(bare, rows)
    cfg = teacher_config(make_config, {"path": "self", "shown": "solution"}, data={"train": str(bare)})
    for begin in (Trainer, lambda cfg: dry_run(cfg, "rl")):
        with pytest.raises(DataError, match=r"has a trace; .*, or set teacher\.shown=sibling to train without traces"):
            begin(cfg)
    Trainer(teacher_config(make_config, {"path": "self", "shown": "sibling"}, data={"train": str(bare)})).close()


def test_a_dry_run_counts_the_teacher(make_config, other_model, monkeypatch):
    monkeypatch.setattr(memory_model, "GIB", 1)  # bytes

    def counted(**changes):
        (line,) = [line for line in dry_run(make_config(**changes), "rl") if line.startswith("memory")]
        found = re.search(r" teacher ([\d.]+)[ ,]", line)
        return float(found[1]) if found else 0.0

    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(other_model).parameters())
    distill = {"algorithm": DISTILL, "guidance": {"n_prefix": 0}}
    assert counted() == 0
    assert counted(teacher={"path": str(other_model)}, **distill) == 4 * weights
    assert counted(teacher={"path": "self"}, **distill) == 4 * weights
    assert counted(teacher={"path": "self", "average": 0.1}, **distill) == 4 * weights
    with pytest.raises(UserError, match=r"'teacher\.path' /nowhere: no such folder"):
        counted(teacher={"path": "/nowhere"}, **distill)


def test_a_run_with_a_teacher_on_a_server_is_the_run_with_its_model(make_config, other_model, monkeypatch):
    monkeypatch.setenv("LUFFY_VLLM_KEY", KEY)
    model = AutoModelForCausalLM.from_pretrained(other_model)
    server = FakeScorer(model, AutoTokenizer.from_pretrained(other_model), max_context=128)
    runs = [teacher_config(make_config, {"path": other_model}, "model")]
    runs.append(make_config(**to_dict(runs[0]) | {"name": "served", "teacher": {"servers": [server.url]}}))
    try:
        for cfg in runs:
            train(cfg)
        short = make_config(
            **to_dict(runs[1]) | {"name": "short", "rollout": {"max_tokens": 112}, "batch": {"tokens": 128}}
        )
        with pytest.raises(UserError, match=r"teacher\.servers score 127 tokens at most, but .* = 128"):
            Trainer(short)
    finally:
        server.http.shutdown()
        server.http.server_close()
    assert server.scored == 48
    for ours, theirs in zip(*(read_json_lines(cfg.folder / "metrics.jsonl") for cfg in runs), strict=True):
        for name in ("method/teacher_gap", "actor/loss", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
