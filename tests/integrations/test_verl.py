"""luffy's objective in the installed verl, on a CPU: through verl's own batch format, loss and advantage functions."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="needs verl: make test-verl")

import numpy as np
from builders import make_samples
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from luffy.errors import ConfigError
from luffy.integrations.verl import OFF_POLICY, mark_off_policy, register_luffy_loss
from luffy.learn.optim import Optimizer
from luffy.learn.policy import Policy
from luffy.models.load import load_model

WIDTH = 12  # longer than any response


def padded(rows, width, left=False):
    pads = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(row, pad) for row, pad in zip(rows, pads, strict=True)])


def verl_batch(samples):
    """The batch of verl's trainer before the update of the actor: left-padded prompts, right-padded responses."""
    prompts = [torch.tensor(sample.prompt_ids) for sample in samples]
    longest = max(map(len, prompts))
    ones = lambda rows: [torch.ones(len(row), dtype=torch.long) for row in rows]  # noqa: E731
    responses = [sample.token_ids for sample in samples]
    response_mask = padded(ones(responses), WIDTH)
    attention_mask = torch.cat([padded(ones(prompts), longest, left=True), response_mask], 1)
    old = padded([sample.old_log_probs for sample in samples], WIDTH)
    tensors = {
        "prompts": padded(prompts, longest, left=True),
        "responses": padded(responses, WIDTH),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "old_log_probs": mark_off_policy(old, padded([sample.off_policy for sample in samples], WIDTH)),
        "advantages": padded([sample.advantages for sample in samples], WIDTH),
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    return DataProto.from_dict(tensors)


def forward(model, data):
    """Log-probs and entropies as verl's engines give them: jagged, each entry of the token that follows."""
    log_probs, entropies = [], []
    for ids in data["input_ids"].unbind():
        log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        log_probs.append(log_p.gather(1, ids.roll(-1)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    jagged = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    return {"log_probs": jagged(log_probs), "entropy": jagged(entropies)}


def verl_update(path, samples, loss_mode, loss_agg_mode, weights=None, **actor):
    """Loss, gradients and metrics of a mini-batch in micro-batches of four and three samples."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4, loss_agg_mode=loss_agg_mode, **actor
    )
    object.__setattr__(config.policy_loss, "loss_mode", loss_mode)
    model = AutoModelForCausalLM.from_pretrained(path)
    total, found = 0.0, []
    tokens = sum(len(sample.token_ids) for sample in samples)
    for rows in (slice(0, 4), slice(4, len(samples))):
        batch = verl_batch(samples)[rows].to_tensordict()
        if weights is not None:
            batch["rollout_is_weights"] = weights[rows]
        data = left_right_2_no_padding(batch)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(samples))
        loss, metrics = ppo_loss(config, forward(model, data), data)
        loss.backward()
        total += float(loss)
        found.append({name: metric.values for name, metric in metrics.items() if hasattr(metric, "values")})
    return total, {name: p.grad for name, p in model.named_parameters()}, found


class RecordingOptimizer(Optimizer):
    def step(self, lr, grad_norm):
        self.recorded = {name: p.grad.clone() for name, p in self.parameters.items()}


def own_update(cfg, samples):
    policy = Policy(load_model(cfg.model.path), cfg)
    optimizer = RecordingOptimizer(policy.model, cfg.optim)
    metrics = policy.update(samples, 0.0, optimizer)
    return metrics["actor/loss"].value, optimizer.recorded, metrics


@pytest.mark.parametrize(
    "loss_agg_mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize(
    ("loss_mode", "algorithm"),
    [
        ("luffy", {}),
        ("luffy_clip", {"remove_clip": False}),
        ("mixed", {"remove_clip": False, "off_policy_reshape": "no_reshape"}),
    ],
)
def test_loss_and_gradients_are_those_of_luffys_own_trainer(make_config, loss_mode, algorithm, loss_agg_mode):
    """A whole trace, a prefix that the policy went on from, and own samples, of unequal lengths."""
    samples = make_samples()
    knobs = {"loss_reduction": loss_agg_mode, "entropy_coef": 0.01, "clip_ratio_high": 0.3, **algorithm}
    cfg = make_config(algorithm=knobs, rollout={"max_tokens": WIDTH, "temperature": 1.0})
    loss, gradients, metrics = own_update(cfg, samples)
    actor = {"entropy_coeff": 0.01, "clip_ratio_high": 0.3}
    theirs, their_gradients, _ = verl_update(cfg.model.path, samples, loss_mode, loss_agg_mode, **actor)
    assert (metrics["actor/pg_clipfrac"].value > 0) == (loss_mode != "luffy")
    assert theirs == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(their_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_metrics_are_of_the_right_tokens(make_config):
    samples = make_samples()
    cfg = make_config()
    _, _, (first, second) = verl_update(cfg.model.path, samples, "luffy", "token-mean")
    off = [int(sample.off_policy.sum()) for sample in samples]
    assert first["actor/off_policy_tokens"] == [sum(off[:4])] and second["actor/off_policy_tokens"] == [0]
    assert second["actor/off_pg_loss"] == [0] and second["actor/off_policy_prob"] == [0]
    assert first["actor/off_ratio_mean"][0] > first["actor/off_policy_prob"][0] > 0


def test_weights_of_the_engine_do_not_touch_the_traces(make_config):
    samples = make_samples()
    path = make_config().model.path
    off = padded([sample.off_policy for sample in samples], WIDTH)
    plain, none, twice = (
        verl_update(path, samples, "luffy", "token-mean", torch.where(off, torch.nan, weight))[0]
        for weight in (1.0, 0.0, 2.0)
    )  # what verl computes for a trace, here NaN, is meaningless
    without, _, _ = verl_update(path, samples, "luffy", "token-mean")
    alone = [replace(sample, advantages=sample.advantages * sample.off_policy) for sample in samples]
    assert none == pytest.approx(verl_update(path, alone, "luffy", "token-mean")[0], rel=1e-5)
    assert plain == without and twice - plain == pytest.approx(plain - none, rel=1e-4)


def rewarded(reward, own):
    """Two groups of four, four tokens each; the last of a group is a trace."""
    rewards = torch.zeros(8, 4)
    rewards[:, 3] = torch.tensor(reward)
    tensors = {"token_level_rewards": rewards, "response_mask": torch.ones(8, 4, dtype=torch.long)}
    if own is not None:
        tensors["reward_baselines"] = torch.tensor(own)
    return DataProto.from_dict(tensors, non_tensors={"uid": np.array(["a"] * 4 + ["b"] * 4, dtype=object)})


@pytest.mark.parametrize(
    ("by_std", "expected"),
    [(False, [0.5, -0.5, 0, 0.5, 0, 0, 0, 1]), (True, [1, -1, 0, 1, 0, 0, 0, 1])],
)
def test_the_baseline_of_own_samples(by_std, expected):
    """Own rewards 1, 0, 0.5 have mean 0.5 and standard deviation 0.5; equal ones count as 1."""
    data = rewarded([1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0] * 2)
    config = AlgoConfig(norm_adv_by_std_in_grpo=by_std)
    done = compute_advantage(data, "luffy_grpo_split", config=config, norm_adv_by_std_in_grpo=by_std)
    assert done.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(done.batch["advantages"][:, 0], done.batch["advantages"][:, 3])


def test_what_cannot_work_is_named():
    with pytest.raises(ConfigError, match="luffy_grpo_split needs 'uid' and, in the batch, 'reward_baselines'"):
        compute_advantage(rewarded([1.0] * 8, None), "luffy_grpo_split", config=AlgoConfig())
    with pytest.raises(ConfigError, match=r"prefix_mask has the shape \[2, 3\], old_log_probs \[2, 4\]"):
        mark_off_policy(torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="rl_plus needs the old log-probs of trace tokens"):
        register_luffy_loss("mine", off_policy_reshape="rl_plus")
    marked = mark_off_policy(torch.tensor([[-1.0, -0.0]]), torch.tensor([[1, 0]]))
    assert marked.tolist() == [[OFF_POLICY, 0.0]]


def test_the_names_are_registered_wherever_verl_is_imported():
    code = (
        "import verl; from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as a, POLICY_LOSS_REGISTRY as p;"
        "print({'luffy', 'luffy_clip', 'mixed'} <= set(p), 'luffy_grpo_split' in a)"
    )
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "luffy.integrations.verl"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_trainer_of_the_page_marks_the_batch(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text().partition("## verl")[2]
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"__name__": "example"}
    exec(compile(source, "<example>", "exec"), names)
    monkeypatch.setattr(names["RayPPOTrainer"], "_update_actor", lambda self, batch: batch)
    samples = make_samples()
    batch = verl_batch(samples)
    marked = batch.batch["old_log_probs"].clone()
    batch.batch["old_log_probs"] = padded([sample.old_log_probs for sample in samples], WIDTH)
    batch.batch["prefix_mask"] = padded([sample.off_policy for sample in samples], WIDTH)
    trainer = object.__new__(names["LuffyPPOTrainer"])
    assert torch.equal(trainer._update_actor(batch).batch["old_log_probs"], marked)
