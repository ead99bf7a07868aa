import dataclasses

import pytest
import torch
from builders import make_samples
from trainings import assert_same_weights
from transformers import AutoModelForCausalLM

import luffy
from luffy.learn.policy import NonFiniteUpdate, Policy
from luffy.models.load import load_model
from luffy.run_folder.timing import Stopwatch


def weights_after(cfg, samples, lr=0.01):
    policy = Policy(load_model(cfg.model.path, cfg.model.dtype, "cpu"), cfg)
    metrics = policy.update(samples, lr)
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}, metrics


SGD_LIKE = {"eps": 1.0, "grad_clip": 0}  # Adam divides tiny gradients by their own size: rounding would be magnified


@pytest.mark.parametrize(
    "reduction", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("off_normalize", [False, True])
def test_update_does_not_depend_on_micro_batches_or_order(make_config, reduction, off_normalize):
    algorithm = {"loss_reduction": reduction, "off_normalize": off_normalize, "remove_clip": False}
    samples = make_samples()
    results = [
        weights_after(make_config(algorithm=algorithm, optim=SGD_LIKE, batch={"tokens": tokens}), chosen)
        for tokens, chosen in [(1000, samples), (32, samples), (40, samples[::-1])]
    ]
    for weights, metrics in results[1:]:
        assert_same_weights(weights, results[0][0], tolerance=1e-6)
        for name in ("actor/loss", "actor/pg_loss", "actor/off_pg_loss", "actor/entropy_loss", "actor/off_ratio_mean"):
            assert metrics[name].value == pytest.approx(results[0][1][name].value, rel=1e-4, abs=1e-6)


def test_update_is_the_public_loss_on_padded_tensors(make_config):
    """The trainer's packed step against the public [B, T] function on transformers' own forward pass."""
    cfg = make_config(
        algorithm={"loss_reduction": "token-mean", "remove_clip": False, "entropy_coef": 0.0}, optim=SGD_LIKE
    )
    samples = make_samples()
    ours, metrics = weights_after(cfg, samples)

    model = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    width = max(s.token_ids.numel() for s in samples)
    pad = lambda rows: torch.stack([torch.nn.functional.pad(r.float(), (0, width - len(r))) for r in rows])  # noqa: E731
    rows = []
    for s in samples:
        ids = torch.cat([torch.tensor(s.prompt_ids), s.token_ids])
        log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        rows.append(log_p[len(s.prompt_ids) - 1 : -1].gather(1, s.token_ids[:, None]).squeeze(1))
    out = luffy.compute_token_on_off_policy_loss(
        pad([s.old_log_probs for s in samples]), pad(rows), pad([s.advantages for s in samples]),
        pad([torch.ones_like(s.token_ids) for s in samples]), 0.2, 1.2, pad([s.off_policy for s in samples]).bool(), 0.2,
        off_policy_reshape="p_div_p_0.1",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1.0, weight_decay=0.0)
    out["pg_loss"].backward()
    optimizer.step()
    assert metrics["actor/pg_loss"].value == pytest.approx(out["pg_loss"].item(), rel=1e-5)
    for public, name in [("off_pg_loss", "off_pg_loss"), ("on_pg_loss", "on_pg_loss"), ("on_pg_clipfrac", "pg_clipfrac"),
                         ("ppo_kl", "ppo_kl"), ("off_policy_prob", "off_policy_prob"), ("off_ratio_mean", "off_ratio_mean"),
                         ("on_policy_prob", "on_policy_prob")]:  # fmt: skip
        assert metrics[f"actor/{name}"].value == pytest.approx(out[public].item(), rel=1e-4, abs=1e-7), public
    assert_same_weights(ours, dict(model.named_parameters()), tolerance=1e-6)


def test_the_entropy_of_own_tokens_leaves_the_traces_out(make_config):
    samples = make_samples()
    cfg = make_config(optim=SGD_LIKE)
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    entropies = []
    for s in samples:
        ids = torch.cat([torch.tensor(s.prompt_ids), s.token_ids])
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)[len(s.prompt_ids) - 1 : -1]
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    entropy, own = torch.cat(entropies), ~torch.cat([s.off_policy for s in samples])
    assert own.any() and not own.all()
    _, metrics = weights_after(cfg, samples)
    assert metrics["actor/own_entropy"].value == pytest.approx(entropy[own].mean().item(), rel=1e-5)
    assert metrics["actor/entropy_loss"].value == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert metrics["actor/own_entropy"].value != pytest.approx(metrics["actor/entropy_loss"].value, rel=1e-3)


def test_all_max_clip_divides_by_the_kept_tokens_like_the_public_function(make_config):
    samples = make_samples()
    cfg = make_config(
        algorithm={"loss_reduction": "token-mean", "entropy_coef": 0.0, "all_max_clip": 0.08}, optim=SGD_LIKE
    )
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    log_prob = torch.cat(policy.log_probs(samples))
    streams = [torch.cat([getattr(s, n) for s in samples]) for n in ("old_log_probs", "advantages", "off_policy")]
    old, advantages, off = (x[None] for x in streams)
    out = luffy.compute_token_on_off_policy_loss(
        old, log_prob[None], advantages, torch.ones_like(old), 0.2, 1.2, off, 0.2, all_max_clip=0.08,
        off_policy_reshape="p_div_p_0.1", loss_remove_clip=True,
    )  # fmt: skip
    assert 0 < (log_prob.exp() > 0.08).sum() < log_prob.numel()
    assert policy.update(samples, 0.01)["actor/pg_loss"].value == pytest.approx(out["pg_loss"].item(), rel=1e-4)


def test_recorded_teacher_probabilities_are_the_public_target_probs(make_config):
    samples = [
        dataclasses.replace(s, behavior_log_probs=torch.linspace(-3, -0.1, len(s.token_ids))) for s in make_samples()
    ]
    cfg = make_config(
        algorithm={"loss_reduction": "token-mean", "entropy_coef": 0.0, "teacher_probs": "recorded"}, optim=SGD_LIKE
    )
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    log_prob = torch.cat(policy.log_probs(samples))[None]
    names = ("old_log_probs", "advantages", "off_policy", "behavior_log_probs")
    old, advantages, off, teacher = (torch.cat([getattr(s, n) for s in samples])[None] for n in names)
    out = luffy.compute_token_on_off_policy_loss(
        old, log_prob, advantages, torch.ones_like(old), 0.2, 1.2, off, 0.2, off_policy_reshape="p_div_p_0.1",
        target_probs=teacher.exp(), loss_remove_clip=True,
    )  # fmt: skip
    metrics = policy.update(samples, 0.01)
    assert metrics["actor/off_ratio_mean"].value == pytest.approx(out["off_ratio_mean"].item(), rel=1e-4)
    assert metrics["actor/pg_loss"].value == pytest.approx(out["pg_loss"].item(), rel=1e-4)


def test_weight_decay_shrinks_matrices_and_spares_norms(make_config):
    cfg = make_config(optim={"weight_decay": 0.5})
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    for group in policy.optimizer.adam.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] == 0.5) for p in group["params"])
    assert {g["weight_decay"] for g in policy.optimizer.adam.param_groups} == {0.5, 0.0}


def test_gradient_checkpointing_changes_nothing(make_config):
    from luffy.train.weights import load_policy

    def run(checkpointing):
        cfg = make_config(model={"gradient_checkpointing": checkpointing}, optim=SGD_LIKE)
        policy = Policy(load_policy(cfg.model, "cpu"), cfg)
        policy.update(make_samples(), 0.01)
        return dict(policy.model.named_parameters())

    assert_same_weights(run(True), run(False), tolerance=1e-6)


def test_sft_term_is_the_public_sft_loss(make_config):
    samples = []
    for s in make_samples():
        everywhere = torch.ones_like(s.rl_weights)
        samples.append(dataclasses.replace(s, rl_weights=1 - everywhere, sft_weights=everywhere, old_log_probs=None))
    cfg = make_config()
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    log_probs = torch.cat(policy.log_probs(samples))
    expected = luffy.compute_sft_pure_loss(log_probs, torch.ones_like(log_probs)).item()
    metrics = policy.update(samples, 0.01)
    assert metrics["actor/loss"].value == pytest.approx(expected, rel=1e-5)
    assert metrics["actor/sft_loss"].value == pytest.approx(expected, rel=1e-5)


def test_bfloat16_model_learns_through_float32_masters(make_config):
    """A learning rate far below bfloat16's resolution: without master weights nothing would ever move."""
    cfg = make_config(model={"dtype": "bfloat16"}, optim={"lr": 1e-5, "grad_clip": 0})
    model = load_model(cfg.model.path, "bfloat16", "cpu")
    policy = Policy(model, cfg)
    before = {n: m.detach().clone() for n, m in policy.optimizer.masters.items()}
    for _ in range(3):
        policy.update(make_samples(), 1e-5)
    moved = max((policy.optimizer.masters[n] - before[n]).abs().max().item() for n in before)
    assert moved == pytest.approx(3e-5, rel=0.1)
    assert all(p.dtype == torch.bfloat16 and m.dtype == torch.float32
               for p, m in zip(policy.optimizer.parameters.values(), policy.optimizer.masters.values(), strict=True))  # fmt: skip
    for name, p in policy.optimizer.parameters.items():
        torch.testing.assert_close(p.float(), policy.optimizer.masters[name].bfloat16().float(), rtol=0, atol=0)


def test_a_non_finite_gradient_leaves_the_weights_alone(make_config):
    cfg = make_config()
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    samples = make_samples()
    samples[3].advantages[1] = float("nan")
    with pytest.raises(NonFiniteUpdate, match="nan"):
        policy.update(samples, 0.01)
    assert_same_weights(before, dict(policy.model.named_parameters()), tolerance=0)
    policy.update(make_samples(), 0.01)  # the bad gradient is gone


def test_log_probs_at_the_sampling_temperature_in_sample_order(make_config):
    cfg = make_config(rollout={"temperature": 0.7}, batch={"tokens": 40})
    policy = Policy(load_model(cfg.model.path, "float32", "cpu"), cfg)
    reference = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    samples = make_samples()
    for s, log_prob in zip(samples, policy.log_probs(samples), strict=True):
        ids = torch.cat([torch.tensor(s.prompt_ids), s.token_ids])
        log_p = torch.log_softmax(reference(ids[None]).logits[0].float() / 0.7, -1)
        expected = log_p[len(s.prompt_ids) - 1 : -1].gather(1, s.token_ids[:, None]).squeeze(1)
        torch.testing.assert_close(log_prob, expected.detach(), rtol=1e-4, atol=1e-5)


def test_packing_is_timed_as_such(make_config):
    """Cutting a mini-batch, counting it and laying it out, all inside the update of whoever times that."""
    cfg, opened = make_config(), []
    policy = Policy(load_model(cfg.model.path, cfg.model.dtype, "cpu"), cfg, watch=Stopwatch(opened.append))
    policy.update(make_samples(), 1e-3)
    assert opened == ["pack", "pack", "pack"]
