"""Optimizer state in host memory takes the steps of the usual optimizer, and resumes from its checkpoints."""

import pytest
import torch
from builders import make_samples

from luffy.learn.activations import GradientCheckpointing, activation_bytes, layer_values
from luffy.learn.optim import OffloadedOptimizer, Optimizer
from luffy.learn.policy import Policy
from luffy.models.load import load_model


def policy_with(make_config, offload, dtype="float32", **optim):
    cfg = make_config(optim={"lr": 1e-2, "weight_decay": 0.1, "offload": offload, **optim})
    return Policy(load_model(cfg.model.path, dtype), cfg)


def policy_weights(policy):
    return {n: p.detach().float().clone() for n, p in policy.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_the_same_steps(make_config, dtype, grad_clip):
    plain, offloaded = (policy_with(make_config, offload, dtype, grad_clip=grad_clip) for offload in (False, True))
    assert isinstance(plain.optimizer, Optimizer) and isinstance(offloaded.optimizer, OffloadedOptimizer)
    start = policy_weights(plain)
    for _ in range(3):
        norms = [p.update(make_samples(), 1e-2)["actor/grad_norm"].value for p in (plain, offloaded)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for name, value in policy_weights(plain).items():
        torch.testing.assert_close(
            policy_weights(offloaded)[name], value, rtol=1e-2, atol=1e-5 if dtype == "float32" else 1e-2
        )
    assert any((start[n] - v).abs().max() > 1e-3 for n, v in policy_weights(offloaded).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload_first", [False, True])
def test_a_checkpoint_of_one_resumes_in_the_other(make_config, dtype, offload_first):
    first = policy_with(make_config, offload_first, dtype)
    first.update(make_samples(), 1e-2)
    state = {name: tensor.clone() for name, tensor in first.optimizer.tensors()}
    second = policy_with(make_config, not offload_first, dtype)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_tensors(state)
    first.update(make_samples(), 1e-2)
    second.update(make_samples(), 1e-2)
    for name, value in policy_weights(first).items():
        torch.testing.assert_close(
            policy_weights(second)[name], value, rtol=1e-2, atol=1e-5 if dtype == "float32" else 1e-2
        )
    assert {n for n, _ in second.optimizer.tensors()} == state.keys()


def test_a_fresh_offloaded_optimizer_has_no_moments_to_save(make_config):
    names = {name.rpartition("/")[2] for name, _ in policy_with(make_config, True).optimizer.tensors()}
    assert names == set()
    assert {n.rpartition("/")[2] for n, _ in policy_with(make_config, True, "bfloat16").optimizer.tensors()} == {
        "master"
    }


def test_auto_checkpoints_only_what_would_not_fit(make_config, monkeypatch):
    model = load_model(make_config().model.path)
    config = model.config
    assert layer_values(config) == (4 * 32 + 2 * 32 + 3 * 64, 2 * 16)
    assert activation_bytes(config, 10, 30, 4) == 2 * 4 * (10 * 384 + 30 * 32)
    auto = GradientCheckpointing(model, "auto")
    assert not auto.prepare(10**9, 10**9, torch.device("cpu"))  # the host has no such limit
    needed = 1.25 * activation_bytes(config, 1000, 2000, 4) + (6 << 30)
    monkeypatch.setattr("luffy.learn.activations.unused_bytes", lambda device: needed)
    assert not auto.prepare(1000, 2000, torch.device("cuda"))
    for tokens, attended in ((1001, 2000), (1000, 2001)):  # copies of a shared prompt's keys count as well
        assert auto.prepare(tokens, attended, torch.device("cuda")) and model.is_gradient_checkpointing
    assert not auto.prepare(999, 2000, torch.device("cuda")) and not model.is_gradient_checkpointing
    assert GradientCheckpointing(model, True).prepare(1, 1, torch.device("cpu"))
    assert not GradientCheckpointing(model, False).prepare(10**9, 10**9, torch.device("cuda"))
