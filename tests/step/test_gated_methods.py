"""The methods that are a gate: the gradient of a group by hand, and what their rounds do in a run."""

import json
import math
from dataclasses import replace

import pytest
import torch
from builders import TASK, make_group, make_rollout, write_rows
from trainings import samples, train, untimed_metrics
from transformers import AutoModelForCausalLM

from luffy.config import Config, load_config
from luffy.learn.credit import ScoredTokens, credit
from luffy.learn.objective import Objective
from luffy.learn.packing import pack
from luffy.schema import build, to_dict
from luffy.step.gating import last_place
from luffy.train.loop import Trainer

P = 0.04  # of every token


def token_gradients(recipe, found):
    """Minus the gradient of the loss in log p, token by token of each response, before it is divided by the number of
    responses and the response budget (RL) or by the number of tokens (SFT)."""
    cfg = load_config(f"tiny/{recipe}")
    (made,) = credit([found], [[ScoredTokens()] * len(found.rollouts)], cfg.algorithm)
    (batch,) = pack(made, 1000, cfg.algorithm.loss_reduction, cfg.rollout.max_tokens)
    log_prob = torch.full((len(batch.targets),), math.log(P), requires_grad=True)
    loss, _ = Objective.of(cfg)(batch, log_prob, torch.zeros(len(batch.targets)), None)
    loss.backward()
    in_sft = bool((batch.sft_weights != 0).any())
    scale = len(log_prob) if in_sft else len(made) * cfg.rollout.max_tokens
    pieces = dict(zip(batch.order, (-scale * log_prob.grad).split(batch.response_lengths), strict=True))
    return [pieces[i].tolist() for i in range(len(made))]


def same(tokens):
    """The value that all tokens have."""
    (value,) = {round(t, 6) for t in tokens}
    return value


def test_hpt_is_sft_where_nothing_was_right_and_rl_elsewhere():
    assert same(token_gradients("hpt", make_group([1.0], [make_rollout(5, prefix=5, finish="trace")]))[0]) == 1
    found = token_gradients("hpt", make_group([1.0] + [0.0] * 7))
    assert [same(t) for t in found] == pytest.approx([7 / 8] + [-1 / 8] * 7)


def test_ghpo_divides_by_the_standard_deviation_of_the_hinted_group():
    found = token_gradients("ghpo", make_group([1.0, 1.0] + [0.0] * 6))
    std = math.sqrt((2 * 0.75**2 + 6 * 0.25**2) / 7)
    assert [same(t) for t in found] == pytest.approx([0.75 / std] * 2 + [-0.25 / std] * 6, rel=1e-4)


def test_scaf_counts_the_hinted_success_in_the_group():
    hinted = replace(make_rollout(), task=replace(TASK, prompt_ids=(9, 5, 6), hint=2))
    found = token_gradients("scaf", make_group([0.0] * 7 + [1.0], [*[make_rollout()] * 7, hinted]))
    assert [same(t) for t in found] == pytest.approx([-1 / 8] * 7 + [7 / 8])


def test_ampo_has_the_shape_of_luffy_on_two_traces():
    traces = [make_rollout(4, prefix=4, finish="trace") for _ in range(2)]
    found = token_gradients("ampo", make_group([0.0] * 6 + [1.0, 1.0], [*[make_rollout()] * 6, *traces]))
    shaped = 0.75 * 0.1 * P / (P + 0.1) ** 2
    assert [same(t) for t in found] == pytest.approx([-0.25] * 6 + [shaped] * 2, abs=1e-6)


def test_trapo_weighs_a_prefix_by_p_and_its_continuation_by_the_advantage():
    prefixed = [
        make_rollout(8, prefix=2),
        make_rollout(8, prefix=2),
        make_rollout(8, prefix=4),
        make_rollout(8, 8, finish="trace"),
    ]
    found = token_gradients("trapo", make_group([0.0] * 7 + [1.0], [*[make_rollout()] * 4, *prefixed]))
    assert [same(t) for t in found[:4]] == pytest.approx([-1 / 8] * 4)
    for tokens, teacher in zip(found[4:], (2, 2, 4, 8), strict=True):
        assert tokens == pytest.approx([P / 0.1] * teacher + [-1 / 8] * (8 - teacher), abs=1e-6)


@pytest.mark.parametrize(
    ("words", "text", "found"),
    [
        ("88", "-2=88 #### 88", "88"),  # the last one
        ("88", "#### 88.", "88"),
        ("8", "8+8=16", "8"),
        ("7", "8+8=16", None),
        ("", "8+8=16", None),
    ],
)
def test_the_last_place_of_an_answer(words, text, found):
    letters = [ord(c) for c in text]
    place = last_place(letters, words, lambda ids: "".join(map(chr, ids)))
    assert place == (None if found is None else (text.rindex(found), text.rindex(found) + len(found)))


def test_tokens_of_several_letters_are_taken_whole():
    pieces = ["12", " #", "## 4", "2.", "00"]
    assert last_place(range(5), "42", lambda ids: "".join(pieces[i] for i in ids)) == (2, 4)


def recipe_in(make_config, name, **changes):
    """What a tiny recipe says about its method, on the tests' own model and data."""
    cfg = load_config(f"tiny/{name}")
    plain = make_config()
    record = {"tensorboard": False, "samples_every": 1, "samples": 6}
    sections = {s: to_dict(cfg)[s] for s in ("guidance", "algorithm")} | {"record": record} | changes
    values = to_dict(plain) | sections
    values["rollout"] = to_dict(plain)["rollout"] | {"n": cfg.rollout.n, "max_tokens": 20}
    return build(Config, values | {"name": name})


@pytest.fixture
def teachers(sums, tmp_path):
    """Sums with three traces, one of them wrong."""
    path = tmp_path / "teachers.jsonl"
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    for row in rows:
        answer = row["answer"]
        row["traces"] = [f"#### {answer}", f"{row['prompt']}={answer}\n#### {answer}", "#### 99"]
    write_rows(path, rows)
    return path


def test_ampo_ranks_the_traces_by_the_probability_of_the_answer_under_the_policy(make_config, teachers):
    data = to_dict(make_config())["data"] | {"train": str(teachers), "max_prompt_tokens": 24}
    guidance = to_dict(load_config("tiny/ampo"))["guidance"] | {"gate": {"name": "likeliest_traces", "samples": 1}}
    cfg = recipe_in(make_config, "ampo", data=data, guidance=guidance, train={"steps": 1, "threads": 1})
    with Trainer(cfg) as trainer:
        run = trainer.run
        tasks = {run.tasks[i].problem.id: run.tasks[i] for i in range(len(run.tasks))}
        trainer.train()
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    best = {name: max((answer_prob(model, task, k), k) for k in range(2))[1] for name, task in tasks.items()}
    traced = [r for r in samples(cfg) if r["finish"] == "trace"]
    assert len({best[row["problem"]] for row in traced}) == 2
    for row in traced:
        assert row["token_ids"] == list(tasks[row["problem"]].demonstrations[best[row["problem"]]].token_ids)
    (figure,) = untimed_metrics(cfg)
    assert figure["batch/gated"] == len(traced)


def answer_prob(model, task, k):
    """Of the answer's only letter, the last before the end token, by the model's own forward pass."""
    ids = torch.tensor([[*task.prompt_ids, *task.demonstrations[k].token_ids]])
    with torch.no_grad():
        probs = model(ids).logits.softmax(-1)[0]
    return float(probs[-3, ids[0, -2]])


def test_hpt_and_trapo_in_a_run(make_config, sums):
    cfg = recipe_in(make_config, "hpt", train={"steps": 1, "threads": 1})
    train(cfg)
    (figure,) = untimed_metrics(cfg)
    assert figure["method/gated_share"] > 0 and figure["actor/sft_loss"] > 0
    cfg = recipe_in(make_config, "trapo", train={"steps": 1, "threads": 1})
    train(cfg)
    groups = {}
    for row in samples(cfg):
        groups.setdefault(row["problem"], []).append(row)
    assert groups and all(len(rows) == 8 for rows in groups.values())
    for rows in groups.values():
        taught = [row["off_policy_tokens"] for row in rows]
        assert taught[:4] == [0] * 4
        if any(
            taught
        ):  # nothing was solved: a quarter, half (cut at a space, of which there is none) and all of a trace
            assert taught[4:7] == [0, 0, 0] and taught[7] == rows[7]["length"]


SETTINGS = {
    "SuperRL": ("tiny/hpt", {"guidance.gate_solved": 0}),
    "SAGE": ("tiny/scaf", {"guidance.gate_from": 0, "data.columns": {"prompt": "prompt", "answer": "answer", "hints": "written"}}),
    "QuestA": ("tiny/on_policy", {"data.train": ["plain.jsonl", "with_half_of_the_solution.jsonl"]}),
    "POPE": ("tiny/on_policy", {"data.train": ["hard.jsonl", "hard_with_a_prefix.jsonl", "plain.jsonl"]}),
}  # fmt: skip


@pytest.mark.parametrize("method", SETTINGS)
def test_methods_that_are_settings_alone(method):
    recipe, overrides = SETTINGS[method]
    cfg = load_config(recipe, overrides)
    assert cfg.guidance.gate == load_config(recipe).guidance.gate
