"""The whole path on a GPU: engine, packed update, checkpoint and resume, in float32 and bfloat16."""

from dataclasses import replace

import pytest
import torch
from builders import make_samples
from trainings import train_rows
from transformers import AutoModelForCausalLM

from luffy.learn.packing import cut
from luffy.learn.policy import Policy
from luffy.models.load import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_luffy_trains_and_resumes(make_config, dtype, lora):
    model = {"device": "cuda", "dtype": dtype, "lora": lora, "gradient_checkpointing": True}
    cfg = make_config(model=model, batch={"mini_batch": 3}, algorithm={"kl_coef": 0.01}, optim={"lr": 1e-2})
    rows = train_rows(cfg)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all(r["rollout/logprob_diff_mean"] < (1e-4 if dtype == "float32" else 0.05) for r in rows)
    longer = make_config(
        model=model, batch={"mini_batch": 3}, algorithm={"kl_coef": 0.01}, optim={"lr": 1e-2}, train={"steps": 6}
    )
    assert [r["step"] for r in train_rows(longer)] == [1, 2, 3, 4, 5, 6]
    saved = longer.folder / "checkpoints" / "step-000006" / "model"
    assert AutoModelForCausalLM.from_pretrained(saved).dtype == getattr(torch, dtype)


def test_sft_on_the_gpu_learns(make_config):
    cfg = make_config(
        model={"device": "cuda", "dtype": "bfloat16"}, optim={"lr": 1e-2}, train={"steps": 40}, batch={"problems": 16}
    )
    rows = train_rows(cfg, "sft")
    assert rows[-1]["actor/sft_loss"] < 0.5 * rows[0]["actor/sft_loss"]


def pairs_of_long_samples():
    """Two samples a prompt, every third longer than 100 tokens, none short enough to lie in 32 tokens with another."""
    samples = make_samples(8, more=(110, 16, 16))
    return [replace(sample, prompt_ids=samples[i - i % 2].prompt_ids) for i, sample in enumerate(samples)]


def gradients_on(cfg, device, dtype):
    policy = Policy(load_model(cfg.model.path, dtype, device), cfg)
    kept = {}
    policy.optimizer.step = lambda lr, norm: kept.update(  # keep the gradient instead of taking the step
        {n: m.grad.detach().float().cpu().clone() for n, m in policy.optimizer.masters.items()}
    )
    policy.update(pairs_of_long_samples(), 0.01)
    return kept


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.08)])
def test_packed_gradients_with_shared_prompts_equal_those_of_each_sample(make_config, dtype, tolerance):
    """bfloat16 on a CPU is off by 0.04 too."""
    alone, packed = (make_config(batch={"tokens": tokens}) for tokens in (32, 1024))
    samples = pairs_of_long_samples()
    assert sorted(cut(samples, alone.batch.tokens)) == [[[i]] for i in range(8)]
    assert [sorted(map(sorted, bin_)) for bin_ in cut(samples, packed.batch.tokens)] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    ]
    assert max(map(len, samples)) > 100
    exact = gradients_on(alone, "cpu", "float32")
    ours = gradients_on(packed, "cuda", dtype)
    for name, value in exact.items():
        error = (ours[name] - value).norm() / value.norm().clamp(min=1e-8)
        assert error < tolerance, (name, error)
