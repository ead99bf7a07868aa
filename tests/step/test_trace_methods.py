"""RL-PLUS, SRFT, Prefix-RFT and UFT: the gradient of the published objective, on a group computed by hand; runs."""

from dataclasses import replace

import pytest
import torch
from builders import make_group, make_rollout
from ranks import run_ranks
from trainings import samples, train, untimed_metrics

from luffy.config import load_config, read_recipe
from luffy.learn.credit import ScoredTokens, credit
from luffy.learn.objective import Objective
from luffy.learn.packing import pack
from luffy.train.loop import Trainer

L = 56  # rollout.max_tokens of the tiny size


def own_and_published_gradients(method, lengths, teachers, rewards, published):
    """Of the log-probs of a group's tokens: by the trainer's objective, and by ``published(log_p, old, ref, entropy)``,
    which gets a list with a tensor for each response. No entropy bonus; old and current policies differ."""
    cfg = load_config(f"tiny/{method}", ["algorithm.entropy_coef=0"])
    g = torch.Generator().manual_seed(1)
    draw = lambda n, low, high: low + (high - low) * torch.rand(n, generator=g)  # noqa: E731
    log_p = [draw(n, -3, -0.1).requires_grad_(True) for n in lengths]
    old = [(p + draw(len(p), -0.6, 0.6)).detach().clamp(max=-0.01) for p in log_p]
    ref, entropy = [draw(n, -3, -0.1) for n in lengths], [draw(n, 0, 2) for n in lengths]
    tokens = [ScoredTokens(*scored) for scored in zip(old, ref, entropy, strict=True)]
    rollouts = tuple(make_rollout(n, t) for n, t in zip(lengths, teachers, strict=True))
    (own,) = credit([make_group(rewards, rollouts)], [tokens], cfg.algorithm)
    (batch,) = pack(own, 1000, cfg.algorithm.loss_reduction, cfg.rollout.max_tokens)
    laid = [log_p[i] for i in batch.order]
    loss, _ = Objective.of(cfg)(batch, torch.cat(laid), torch.cat([entropy[i] for i in batch.order]))
    expected = published(log_p, old, ref, entropy)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4) or method == "rl_plus"  # f is shifted elsewhere
    return torch.autograd.grad(loss, log_p), torch.autograd.grad(expected, log_p)


def clipped(log_p, old, advantage):
    """PPO's term."""
    r = torch.exp(log_p - old)
    return -torch.minimum(advantage * r, advantage * r.clamp(0.8, 1.2))


def test_rl_plus():
    def published(log_p, old, ref, entropy):
        trace, *own = range(4)
        p = log_p[trace].exp()
        ratio = 2 * p / (old[trace].exp() + 0.5 * (old[trace].exp() + 1))
        total = (-0.75 * (1 - p.detach()).sqrt() * ratio).sum()
        return (total + sum((0.25 * torch.exp(log_p[i] - old[i])).sum() for i in own)) / (4 * L)

    ours, expected = own_and_published_gradients("rl_plus", [5, 3, 4, 2], [5, 0, 0, 0], [1.0, 0.0, 0.0, 0.0], published)
    torch.testing.assert_close(ours, expected)


def test_srft():
    def published(log_p, old, ref, entropy):
        trace, right, wrong = log_p
        p = trace.exp()
        rl = (-(1 / 3) * p / (p + 0.1)).sum()  # 1 less the mean of 1, 1, 0
        rl = rl - (0.1 * entropy[1].mean().exp() * (right - old[1])).sum() + (wrong - old[2]).sum()
        return rl / (3 * L) - 0.5 * torch.exp(-entropy[0].mean()) * trace.mean()

    ours, expected = own_and_published_gradients("srft", [5, 3, 4], [5, 0, 0], [1.0, 1.0, 0.0], published)
    torch.testing.assert_close(ours, expected)


def test_prefix_rft():
    """Ten tokens of a trace, of which the two of highest entropy count, and three that continue them."""

    def published(log_p, old, ref, entropy):
        top = entropy[0][:10].topk(2).indices
        counted = torch.cat([top, torch.arange(10, 13)])
        rl = clipped(log_p[0][counted], old[0][counted], 2 / 3).sum()
        return (rl + sum(clipped(log_p[i], old[i], -1 / 3).sum() for i in (1, 2))) / (3 * L)

    ours, expected = own_and_published_gradients("prefix_rft", [13, 4, 6], [10, 0, 0], [1.0, 0.0, 0.0], published)
    torch.testing.assert_close(ours, expected)
    assert ours[0][:10].count_nonzero() <= 2 and ours[0].count_nonzero() > 0


def test_uft():
    def published(log_p, old, ref, entropy):
        hints = torch.cat([p[:3] for p in log_p])
        total = 0
        for p, o, r, advantage in zip(log_p, old, ref, [0.75, -0.25, -0.25, -0.25], strict=True):
            gap = (r - p)[3:]
            total = total + (clipped(p[3:], o[3:], advantage) + 0.001 * (gap.exp() - 1 - gap)).sum()
        return total / (4 * L) - 0.001 * hints.mean()

    ours, expected = own_and_published_gradients("uft", [5, 4, 7, 6], [3, 3, 3, 3], [1.0, 0.0, 0.0, 0.0], published)
    torch.testing.assert_close(ours, expected)


def method_config(make_config, method, name="run"):
    recipe = {key: part for key, part in read_recipe(f"methods/{method}").items() if key != "name"}
    return make_config(
        **{
            **recipe,
            "name": f"{name}-{method}",
            "reward": {"kind": "loop_rewards:length_parity"},
            "batch": {"mini_batch": 3},
            "train": {"steps": 2, "save_every": 1},
            "record": {"samples": 6, "samples_every": 1},
        }
    )


METHODS = ["rl_plus", "srft", "prefix_rft", "uft"]


@pytest.mark.parametrize("method", ["srft", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "srft")])
def test_left_after_a_step_and_resumed_equals_undisturbed(make_config, method):
    cfg, again = (method_config(make_config, method, name) for name in ("whole", "again"))
    train(cfg)
    with Trainer(again) as trainer:
        for step, _ in trainer.steps():
            if step == 1:
                break
    train(again)
    assert untimed_metrics(again) == untimed_metrics(cfg) and samples(again) == samples(cfg)
    for row in untimed_metrics(cfg):
        in_rl = method != "uft"
        assert ("method/trace_weight_mean" in row) is in_rl and ("actor/sft_loss" in row) is (method in ("srft", "uft"))


def prefixes(cfg, steps):
    """Lengths of the prefixes that a run of 500 steps plans for the guided problems, by step, problem and sample."""
    with Trainer(cfg) as trainer:
        guided = [task for task in trainer.run.tasks if task.demonstrations]
        planner = replace(trainer.run.planner, schedule=cfg.schedule(500))
        plans = [planner.plan(guided, step, [0] * len(guided)) for step in steps]
    return [[[(p.prefix, len(guided[i].demonstrations[0].token_ids)) for p in group] for i, group in enumerate(plan)]
            for plan in plans]  # fmt: skip


def test_uft_hints_are_fifths_for_all_samples_of_a_problem_and_end(make_config):
    first, later, *ended = prefixes(method_config(make_config, "uft"), (0, 299, 300, 499))
    for group in first + later:
        assert len(group) == 4 and len(set(group)) == 1
        hint, length = group[0]
        assert hint in [int(0.95 * k / 5 * length) for k in range(6)] and hint < length
    mean = lambda step: sum(hint / length for (hint, length), *_ in step) / len(step)  # noqa: E731
    assert mean(first) > 0.7 and mean(later) < 0.2
    assert all(hint == 0 for step in ended for group in step for hint, _ in group)


def test_prefix_rft_prefixes_get_shorter(make_config):
    first, half, last = prefixes(method_config(make_config, "prefix_rft"), (0, 250, 500))
    for step, low in ((first, 0.95), (half, 0.5), (last, 0.05)):
        for group in step:
            (prefix, length), *own = group
            assert int(low * length) <= prefix <= 0.95 * length and all(other == 0 for other, _ in own)
    assert len({prefix for (prefix, _), *_ in last}) > 3


def train_all(configs, world):
    for cfg in configs:
        train(cfg, world)


@pytest.mark.slow
def test_the_number_of_ranks_changes_nothing(make_config):
    """SRFT needs entropies of every response; Prefix-RFT and UFT draw prefixes, and UFT has all three terms."""
    alone, many = (
        [method_config(make_config, m, name) for m in ("srft", "prefix_rft", "uft")] for name in ("alone", "many")
    )
    train_all(alone, None)
    run_ranks(2, train_all, many)
    for one, two in zip(alone, many, strict=True):
        pick = lambda cfg: [(r["step"], r["problem"], r["sample"], r["token_ids"]) for r in samples(cfg)]  # noqa: E731
        assert pick(two) == pick(one)
        for a, b in zip(untimed_metrics(one), untimed_metrics(two), strict=True):
            assert b["actor/loss"] == pytest.approx(a["actor/loss"], rel=1e-3, abs=1e-6)
            assert b["actor/grad_norm"] == pytest.approx(a["actor/grad_norm"], rel=1e-3)
            assert b.get("method/trace_weight_mean", 0) == pytest.approx(a.get("method/trace_weight_mean", 0), rel=1e-4)
