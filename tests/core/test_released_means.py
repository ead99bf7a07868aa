"""The `paper/*_released` recipes: the coefficients of the authors' scripts in the terms of our means.

Their loss is a sum over micro-batches, averaged over GPUs; the policy-gradient term is a sum over tokens divided by the
padded width, SFT and entropy are means over a micro-batch. It is built here from the public functions.
"""

import random

import pytest
import torch

from luffy import compute_sft_pure_loss, compute_token_on_off_policy_loss
from luffy.config import load_config
from luffy.core.reduce import Counts, divided, sequence_denominators

GPUS, OF_A_GPU, WIDTH, BUDGET = 8, 64, 8192, 32768  # of the scripts; samples of a mini-batch on a GPU
ENTROPY, SFT = 0.001, 1.0
RANKS, MICRO_BATCHES, ROWS, T = 2, 3, 4, 6  # of the small batch below; every row is full


def small_batch():
    """[ranks, micro-batches, rows, T]; the first row of all micro-batches but the last of a rank is a trace."""
    torch.manual_seed(0)
    shape = (RANKS, MICRO_BATCHES, ROWS, T)
    log_prob = (-3 * torch.rand(shape)).requires_grad_()
    entropy = torch.rand(shape).requires_grad_()
    advantages = torch.randn(RANKS, MICRO_BATCHES, ROWS, 1).expand(shape)
    traces = torch.zeros(shape, dtype=torch.bool)
    traces[:, :-1, 0] = True
    return log_prob, entropy, advantages, traces


def rl_terms(log_prob, advantages, traces, width):
    """The policy-gradient term of rows, a sum over tokens divided by the width."""
    mask = torch.ones_like(log_prob)
    out = compute_token_on_off_policy_loss(
        log_prob.detach(), log_prob, advantages, mask, 0.2, 1.0, traces, 0.2,
        off_policy_reshape="p_div_p_0.1", loss_remove_token_mean=True, loss_remove_clip=True,
    )  # fmt: skip
    return out["pg_loss"] * log_prob.shape[-1] / width


def released_loss(log_prob, entropy, advantages, traces, with_sft):
    total = 0.0
    for rank in range(RANKS):
        for m in range(MICRO_BATCHES):
            lp, adv, off = log_prob[rank, m], advantages[rank, m], traces[rank, m]
            rows = ~off.any(-1) if with_sft else torch.ones(ROWS, dtype=torch.bool)
            loss = rl_terms(lp[rows], adv[rows], off[rows], WIDTH) - ENTROPY * entropy[rank, m].mean()
            if with_sft and off.any():
                loss = loss + SFT * compute_sft_pure_loss(lp[off.any(-1)], torch.ones(1, T))
            total = total + loss
    return total / RANKS


def gradients_or_none(loss, *of):
    return torch.autograd.grad(loss, of, allow_unused=True)


@pytest.mark.parametrize("with_sft", [False, True])
def test_the_arithmetic_of_the_recipes(with_sft):
    """Gradients of their loss are those of ours times samples / GPUs, with the coefficients that the recipes derive."""
    log_prob, entropy, advantages, traces = small_batch()
    theirs = gradients_or_none(released_loss(log_prob, entropy, advantages, traces, with_sft), log_prob, entropy)
    flat = [x.reshape(-1, T) for x in (log_prob, entropy, advantages, traces)]
    off = flat[3].any(-1)
    in_rl = [torch.zeros(T) if with_sft and is_trace else torch.ones(T) for is_trace in off]
    over = sequence_denominators(in_rl, "seq-mean-token-sum-norm", WIDTH, Counts.of(in_rl))
    samples = Counts.of(in_rl).sequences
    assert samples == (20 if with_sft else 24)
    kept = ~off if with_sft else torch.ones_like(off)
    rl = rl_terms(flat[0][kept], flat[2][kept], flat[3][kept], 1.0) / over[0]
    entropy_coef = ENTROPY * WIDTH / (ROWS * T)  # tokens of a micro-batch
    everywhere = divided([torch.ones(T)] * len(off), over)  # theirs has the tokens of traces too
    ours = rl - entropy_coef * (flat[1].reshape(-1) * everywhere).sum()
    if with_sft:
        in_sft = [1 - weights for weights in in_rl]
        over = sequence_denominators(in_sft, "token-mean", WIDTH, Counts.of(in_sft))
        sft_coef = SFT * RANKS * (MICRO_BATCHES - 1) / samples  # micro-batches with a trace
        ours = ours - sft_coef * (flat[0].reshape(-1) * divided(in_sft, over)).sum()
    for a, b in zip(theirs, gradients_or_none(ours, log_prob, entropy), strict=True):
        torch.testing.assert_close(a, b * samples / RANKS)


def micro_batches(lengths):
    """As verl cuts the samples of a GPU: as few as the budget allows, of nearly equal size."""
    bins = [[0, []] for _ in range(-(-sum(length for length, _ in lengths) // BUDGET))]
    for length, is_trace in sorted(lengths, reverse=True):
        smallest = min(bins, key=lambda b: b[0])
        smallest[0] += length
        smallest[1].append(is_trace)
    return [traces for _, traces in bins]


def test_the_weight_of_the_sft_term_at_the_papers_size():
    """512 samples of about 3,800 tokens, an eighth of them traces, anywhere: the share of micro-batches with a trace."""
    draw = random.Random(0)
    found = []
    for _ in range(20):
        for _ in range(GPUS):
            lengths = [(draw.randint(1900, 5700), i % 8 == 0) for i in range(OF_A_GPU)]
            found.append(sum(any(traces) for traces in micro_batches(lengths)))
    released = GPUS * sum(found) / len(found) / (GPUS * OF_A_GPU * 7 / 8)
    cfg = load_config("paper/rl_sft_loss_released").algorithm
    assert cfg.sft_coef == pytest.approx(released, rel=0.15)
    size = 3800
    assert cfg.sft_coef == pytest.approx(size / BUDGET * 8 / 7 * (1 - (7 / 8) ** (BUDGET / size)), rel=0.02)
    assert cfg.remove_clip and cfg.trace_term == "sft"


def test_what_the_released_recipes_change():
    for name, samples in {"luffy": 512, "on_policy": 512, "sft_rl": 512, "rl_sft_loss": 448}.items():
        written, released = load_config(f"paper/{name}"), load_config(f"paper/{name}_released")
        assert (written.algorithm.entropy_coef, released.algorithm.entropy_coef) == (0.01, ENTROPY * WIDTH / BUDGET)
        assert released.optim.grad_clip == pytest.approx(GPUS / samples, rel=1e-4)
        assert released.optim.eps == pytest.approx(1e-8 * GPUS / samples, rel=1e-4)
        assert released.optim.weight_decay == 0.01 and not released.algorithm.reject_extreme
        same = ("model", "data", "reward", "guidance", "rollout", "batch", "train", "eval", "launch", "parallel")
        assert all(getattr(written, section) == getattr(released, section) for section in same)
        assert released.name == f"{written.name}-released"
