"""Settings that must reach the place where they act: each would go unnoticed if it were ignored."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from builders import make_group, make_rollout, make_samples, make_tokenizer, write_rows
from trainings import samples, train_rows
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from luffy.dry_run import dry_run
from luffy.errors import UserError
from luffy.learn.policy import Policy
from luffy.models.load import load_model
from luffy.step.groups import staleness_metrics
from luffy.train.loop import Trainer


@pytest.fixture
def other_model(tiny_model, tmp_path):
    config = LlamaConfig.from_pretrained(tiny_model)
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def log_probs(model, prompt, response):
    ids = torch.tensor([*prompt, *response])
    with torch.no_grad():
        table = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
    return table[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_kl_is_taken_against_the_reference_model(make_config, other_model, where):
    """On the first step, against transformers' own forward pass of both models."""
    cfg = make_config(
        model={"reference": str(other_model)},
        algorithm={"kl_coef": 0.01, "kl_in": where, "kl_estimator": "k3", "reject_extreme": False},
        record={"samples": 6},
        train={"steps": 1},
    )
    (row,) = train_rows(cfg)
    policy, reference = (AutoModelForCausalLM.from_pretrained(p) for p in (cfg.model.path, other_model))
    tokenizer, parts = make_tokenizer(), []
    for sample in samples(cfg):
        prompt = tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]
        gap = log_probs(policy, prompt, sample["token_ids"]) - log_probs(reference, prompt, sample["token_ids"])
        parts.append(torch.exp(-gap) - 1 + gap)
    expected = float(torch.cat(parts).mean())
    assert expected > 0.05
    assert row["actor/kl_loss" if where == "loss" else "critic/kl"] == pytest.approx(expected, rel=1e-3)


def test_a_reference_that_does_not_fit_is_refused(make_config, other_model):
    cfg = make_config(model={"reference": str(other_model)}, algorithm={"kl_coef": 0.01})

    def refused(what):
        for begin in (Trainer, lambda cfg: dry_run(cfg, "rl")):
            with pytest.raises(UserError, match=what):
                begin(cfg)

    tokenizer = json.loads((other_model / "tokenizer.json").read_text())
    letters = tokenizer["model"]["vocab"]
    letters["1"], letters["2"] = letters["2"], letters["1"]
    (other_model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(r"the tokenizers differ: token id \d+ is '1' for the policy and '2' for the reference \(model\.reference=")
    make_tokenizer().save_pretrained(other_model)
    model = AutoModelForCausalLM.from_pretrained(other_model)
    model.config.max_position_embeddings = 20
    model.save_pretrained(other_model)
    refused(r"model\.reference=.* takes 20 tokens, but data\.max_prompt_tokens")
    model.config.max_position_embeddings = 128
    model.resize_token_embeddings(10)
    model.save_pretrained(other_model)
    refused(r"model\.reference=.* has 10 tokens, fewer than the tokenizer's 18")


def test_a_reference_may_end_responses_otherwise_or_lack_a_tokenizer(make_config, other_model):
    cfg = make_config(model={"reference": str(other_model)}, algorithm={"kl_coef": 0.01}, train={"steps": 1})
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "#"
    tokenizer.save_pretrained(other_model)
    Trainer(cfg).close()
    for file in other_model.glob("tokenizer*"):
        file.unlink()
    Trainer(cfg).close()
    tokenizer.add_special_tokens({"pad_token": "<new>"})  # that the policy does not know either
    tokenizer.save_pretrained(other_model.parent / "padded")
    Trainer(replace(cfg, model=replace(cfg.model, tokenizer=str(other_model.parent / "padded")))).close()


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_a_token_that_the_model_does_not_know_is_found_before_the_first_step(make_config, tmp_path, method):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["x"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"id": str(i), "prompt": f"{i}+1", "answer": f"{i + 1}", "traces": [f"{i + 1}"]} for i in range(8)]

    def config(**changes):
        write_rows(tmp_path / "rows.jsonl", rows)
        data, model = {"train": str(tmp_path / "rows.jsonl")}, {"tokenizer": str(tmp_path / "tokenizer")}
        return make_config(data=data, model=model, train={"steps": 1}, **changes)

    def refused(what):
        for begin in (Trainer, dry_run):
            with pytest.raises(UserError, match=rf"a {what} of problem '5' has token id 18, .* vocabulary of 18"):
                begin(config(), method)

    train_rows(config(name="without"), method)
    rows[5]["traces"] = ["6x"]
    refused("trace")
    if method == "rl":  # a trace that nobody asks for does no harm
        train_rows(config(name="unused", guidance={"n_prefix": 0}), method)
    rows[5] |= {"traces": ["6"], "prompt": "5+x"}
    refused("prompt")


def test_staleness_is_the_step_less_the_version_that_made_the_token():
    rollouts = [make_rollout(4, policy_version=5), make_rollout(4, prefix=2, policy_version=3)]
    groups = [make_group([1.0, 0.0], rollouts)]
    metrics = staleness_metrics(groups, step=6)
    assert metrics["async/staleness/mean"].value == pytest.approx((4 * 1 + 2 * 3) / 6)
    assert metrics["async/staleness/max"].value == 3
    assert not staleness_metrics([], step=6)["async/staleness/max"].measured


def test_the_learning_rate_of_a_step_is_the_schedules(make_config):
    cfg = make_config(
        optim={"lr": 1e-3, "warmup": 2, "schedule": "linear"}, algorithm={"reject_extreme": False}, train={"steps": 4}
    )
    assert [row["actor/lr"] for row in train_rows(cfg)] == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_an_update_moves_the_weights_by_its_own_learning_rate(make_config):
    """Adam's first step moves a weight by the learning rate, whatever its gradient."""
    cfg = make_config(optim={"lr": 1.0, "weight_decay": 0.0, "eps": 1e-12, "grad_clip": 0})
    policy = Policy(load_model(cfg.model.path), cfg)
    for lr in (1e-3, 1e-5):
        before = [p.detach().clone() for p in policy.model.parameters()]
        policy.update(make_samples(), lr)
        moved = max(float((a.detach() - b).abs().max()) for a, b in zip(policy.model.parameters(), before, strict=True))
        assert 0.3 * lr < moved < 1.5 * lr


@pytest.mark.parametrize("method", ["rl", "sft"])
def test_a_problem_seen_again_is_guided_by_its_next_trace(make_config, tmp_path, method):
    data = tmp_path / "data.jsonl"
    rows = [
        {"id": f"p{i}", "prompt": f"{i}+0", "answer": str(i), "traces": [str(t) * 3 for t in range(3)]} for i in (1, 2)
    ]
    write_rows(data, rows)
    cfg = make_config(
        data={"train": str(data)}, guidance={"trace_choice": "round_robin"}, batch={"problems": 2},
        record={"samples": 2}, train={"steps": 4},
    )  # fmt: skip
    train_rows(cfg, method)
    traces = defaultdict(list)
    for sample in samples(cfg):
        if sample["finish"] == "trace":
            traces[sample["prompt"]].append(sample["response"])
    assert dict(traces) == {"1+0": ["000", "111", "222", "000"], "2+0": ["000", "111", "222", "000"]}


def test_prefixes_shrink_over_prefix_steps(make_config):
    guidance = {"strategy": "linear", "prefix_steps": 2, "max_ratio": 1.0, "min_ratio": 0.0}
    cfg = make_config(guidance=guidance, train={"steps": 4}, algorithm={"reject_extreme": False})
    ratios = [row.get("batch/avg_prefix_ratio") for row in train_rows(cfg)]
    assert ratios[0] == 1.0 and 0.4 <= ratios[1] <= 0.5 and ratios[2:] == [None, None]
    whole = make_config(guidance={**guidance, "prefix_steps": None})
    assert (cfg.schedule(4).prefix_steps, whole.schedule(4).prefix_steps) == (2, 4)
    assert make_config(guidance={**guidance, "prefix_steps": 0.6}).schedule(500).prefix_steps == pytest.approx(300)


def test_held_out_samples_of_one_problem_differ(make_config, sums):
    cfg = make_config(data={"eval": str(sums)}, eval={"n": 6, "temperature": 1.0, "limit": 4}, record={"samples": 4})
    with Trainer(cfg) as trainer:
        trainer.train()
    responses = defaultdict(set)
    for sample in samples(cfg, "eval_samples.jsonl"):
        responses[sample["step"], sample["problem"]].add(tuple(sample["token_ids"]))
    assert len(responses) >= 4 and all(len(drawn) > 1 for drawn in responses.values())
