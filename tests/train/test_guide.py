"""Token-level guidance in the trainer: bit for bit nothing when absent, its metrics and errors when there."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from luffy.config import load_config
from luffy.errors import ConfigError, UserError
from luffy.report.recorder import read_json_lines
from luffy.train.loop import Trainer


@pytest.fixture(scope="module")
def stronger(tiny_model, tmp_path_factory):
    """Another random model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("guide")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def run(cfg):
    with Trainer(cfg) as trainer:
        trainer.train()
    untimed = lambda k: k != "time" and not k.startswith(("timing_s/", "perf/"))  # noqa: E731
    rows = [{k: v for k, v in r.items() if untimed(k)} for r in read_json_lines(cfg.folder / "metrics.jsonl")]
    return rows, AutoModelForCausalLM.from_pretrained(cfg.folder / "checkpoints" / "latest" / "model").state_dict()


def test_absent_or_switched_off_equals_the_plain_run_bit_for_bit(make_config, stronger):
    plain, off = (
        make_config(name="plain"),
        make_config(name="off", rollout={"offpolicy_guidance": {"model_path": str(stronger), "enable": False}}),
    )
    (rows, weights), (off_rows, off_weights) = run(plain), run(off)
    assert rows == off_rows and not [k for k in rows[0] if k.startswith("guidance/")]
    assert all(torch.equal(weights[n], off_weights[n]) for n in weights)


@pytest.mark.parametrize("rule", ["speculative", "threshold", "mixture", "aligned"])
def test_every_rule_trains_beside_trace_prefixes(make_config, stronger, rule):
    guide = {"model_path": str(stronger), "rule": rule, "tau": 0.3, "eps": 0.5}
    cfg = make_config(
        rollout={"offpolicy_guidance": guide},
        guidance={"n_prefix": 1, "strategy": "fixed", "min_ratio": 0.5, "max_ratio": 0.5},
        algorithm={"reject_extreme": False},
    )
    rows, _ = run(cfg)
    for r in rows:
        assert 0 < r["guidance/token_ratio"] < 1 and 0 < r["guidance/sequence_ratio"] <= 1
        assert r["guidance/weight_max"] <= 10.0 and 0 < r["guidance/ess"] <= 1
        assert r["guidance/missing_log_prob_ratio"] == 0.0
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    assert any(any(s["overrides"]) for s in samples) and any(any(s["off_policy"]) for s in samples)
    assert not any(o and t for s in samples for o, t in zip(s["overrides"], s["off_policy"], strict=True))


def test_mixture_without_guidance_tokens_has_weight_one(make_config, stronger):
    guide = {"model_path": str(stronger), "rule": "mixture", "eps": 0.0}
    rows, weights = run(make_config(name="eps0", rollout={"offpolicy_guidance": guide}))
    assert all(r["guidance/token_ratio"] == 0.0 for r in rows)
    assert all(r["guidance/weight_mean"] == pytest.approx(1.0, abs=1e-5) for r in rows)
    plain_rows, plain = run(make_config(name="plain"))
    assert [r["critic/score/mean"] for r in rows] == [r["critic/score/mean"] for r in plain_rows]
    assert all(torch.allclose(weights[n], plain[n], atol=1e-5) for n in plain)


def test_the_eps_schedule_fades_out(make_config, stronger):
    guide = {"model_path": str(stronger), "rule": "mixture", "eps": 1.0, "eps_end": 0.0, "eps_steps": 3}
    rows, _ = run(make_config(rollout={"offpolicy_guidance": guide}))
    ratios = [r["guidance/token_ratio"] for r in rows]
    assert ratios[0] == 1.0 and ratios == sorted(ratios, reverse=True) and ratios[3] == 0.0


def test_several_optimizer_steps_and_the_literal_objective(make_config, stronger):
    guide = {"model_path": str(stronger), "rule": "mixture", "eps": 0.5, "max_overrides": 2}
    common = {"rollout": {"offpolicy_guidance": guide}, "batch": {"mini_batch": 2}, "optim": {"lr": 1e-2}}
    decoupled, _ = run(make_config(name="decoupled", **common))
    literal, _ = run(make_config(name="literal", algorithm={"importance_objective": "literal"}, **common))
    assert decoupled[0]["actor/pg_loss"] != literal[0]["actor/pg_loss"]
    samples = read_json_lines(make_config(name="decoupled").folder / "samples.jsonl")
    assert max(sum(s["overrides"]) for s in samples) == 2


def test_resume_is_exact_under_guidance(make_config, stronger):
    guide = {"model_path": str(stronger), "rule": "mixture", "eps": 0.8, "eps_end": 0.2}
    whole, _ = run(make_config(name="whole", rollout={"offpolicy_guidance": guide}))
    guide = {**guide, "eps_steps": 4}
    run(make_config(name="halves", rollout={"offpolicy_guidance": guide}, train={"steps": 2}))
    halves, _ = run(make_config(name="halves", rollout={"offpolicy_guidance": guide}))
    assert halves == whole


def test_another_tokenizer_is_refused_before_the_first_step(make_config, stronger, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(stronger, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match="tokenizer|vocab"):
        Trainer(make_config(rollout={"offpolicy_guidance": {"model_path": str(other)}}))


def test_a_guidance_context_too_short_is_refused(make_config, stronger, tmp_path):
    import json

    short = tmp_path / "short"
    shutil.copytree(stronger, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    with pytest.raises(UserError, match="20"):
        Trainer(make_config(rollout={"offpolicy_guidance": {"model_path": str(short)}}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.offpolicy_guidance.rule=mixture"], "model_path' is empty"),
        (["rollout.offpolicy_guidance.model_path=x", "rollout.top_p=0.9"], "rollout.top_p=1"),
        (
            ["rollout.offpolicy_guidance.model_path=x", "rollout.offpolicy_guidance.tensor_parallel_size=2"],
            "one device",
        ),
        (["rollout.offpolicy_guidance.rule=mixtur"], "did you mean 'mixture'"),
        (["algorithm.importance_clamp_min=3", "algorithm.importance_clamp_max=2"], "exceeds"),
    ],
)
def test_bad_settings(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_aligned_refuses_what_it_cannot_honour(make_config, stronger):
    guide = {"model_path": str(stronger), "rule": "aligned", "max_overrides": 2}
    with pytest.raises(UserError, match="aligned"):
        Trainer(make_config(rollout={"offpolicy_guidance": guide}))
