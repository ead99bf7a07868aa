"""`parallel.gather`: the same gradients and log-probs with fewer collectives, as many on every rank as the cost model says."""

import sys
from pathlib import Path

import pytest
import torch
from builders import make_samples
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.count_collectives import CollectiveCounter, predicted
from luffy.config import Config
from luffy.distributed.shard import gathered_bytes, units, whole
from luffy.distributed.world import World
from luffy.learn import activations
from luffy.learn.activations import GradientCheckpointing
from luffy.learn.optim import Optimizer
from luffy.learn.policy import Policy
from luffy.schema import build, to_dict
from luffy.train.weights import load_policy

CASES = {
    "two ranks": (2, {}, {}),
    "four ranks, one without a sample": (4, {}, {}),
    "hybrid": (4, {}, {"shard": "hybrid", "shard_size": 2}),
    "one rank": (1, {}, {}),
    "bfloat16": (2, {"model": {"dtype": "bfloat16"}}, {}),
    "adapters": (2, {"model": {"lora": {"rank": 4}}}, {}),
    "recomputed": (2, {"model": {"gradient_checkpointing": True}}, {}),
    "passes without gradients in the update": (2, {"algorithm": {"all_max_clip": 0.9, "off_normalize": True}}, {}),
}
FAST = ("two ranks", "four ranks, one without a sample", "hybrid")


def updates(cfg, world):
    """Two updates, tokens scored before, between and after: gradients, log-probs, and what was counted of the first."""
    torch.manual_seed(0)  # of adapters
    policy = Policy(load_policy(cfg.model, "cpu"), cfg, world=world)
    shares = max(world.size - 1, 1) if world.size == 4 else world.size
    mine = make_samples(9)[world.rank :: shares] if world.rank < shares else []
    kept, step, scored, counter, passes = [], Optimizer.step, [], CollectiveCounter(), []
    totals = Policy._totals

    def keep(self, lr, norm):
        kept.append({name: m.grad.clone() for name, m in self.masters.items()})
        step(self, lr, norm)

    def noting(self, *args):
        found = totals(self, *args)
        passes.append(found.passes)
        return found

    Optimizer.step, Policy._totals = keep, noting
    try:
        for number in range(2):
            scored += policy.log_probs(mine)
            if number == 0:
                for unit in units(policy.scorer):
                    unit.reshard()  # scoring leaves the root gathered
                with counter.watching():
                    policy.update(mine, 0.05)
            else:
                policy.update(mine, 0.05)
        scored += policy.log_probs(mine)
    finally:
        Optimizer.step, Policy._totals = step, totals
    counted = {(key.kind, key.ranks): (n, counter.received[key]) for key, n in counter.number.items()}
    said = predicted(policy, passes[:1], cfg.parallel.gather == "mini_batch") if world.size > 1 else {}
    gradients = [{name: whole(gradient) for name, gradient in one.items()} for one in kept]
    return gradients, scored, counted, said, passes[0]


def both_ways(cfg, world):
    parallel = to_dict(cfg.parallel)
    ways = [build(Config, to_dict(cfg) | {"parallel": parallel | {"gather": g}}) for g in ("micro_batch", "mini_batch")]
    return [updates(way, world) for way in ways]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_the_same_gradients_with_fewer_collectives(make_config, name):
    torch.set_num_threads(1)
    count, changes, parallel = CASES[name]
    cfg = make_config(batch={"tokens": 32}, optim={"lr": 0.05, "eps": 1e-3}, **changes)
    many = build(Config, to_dict(cfg) | {"launch": "torchrun", "parallel": {**parallel, "workers": count}})
    ranks = run_ranks(count, both_ways, many, fresh="shard" in parallel)
    for (gradients, scored, *_), (once, rescored, *_) in ranks:
        for ours, theirs in zip(once, gradients, strict=True):
            assert max(gradient.abs().max() for gradient in theirs.values()) > 0.01
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rescored, scored, rtol=1e-5, atol=1e-5)
    if name != "bfloat16":
        expected, *_ = updates(cfg, World())
        torch.testing.assert_close(ranks[0][1][0], expected, rtol=1e-5, atol=1e-6)
    if count > 1:
        check_counts(name, ranks)


def check_counts(name, ranks):
    for way in (0, 1):
        counted, said, passes = zip(*(rank[way][2:] for rank in ranks), strict=True)
        assert passes[0] >= 2 and all(other == passes[0] for other in passes)
        numbers = [{key: number for key, (number, _) in one.items()} for one in counted]
        assert all(other == numbers[0] for other in numbers)  # also on the rank that has nothing to do
        for (phase, kind), (number, size) in said[0].items():
            of_kind = [found for (k, _), found in counted[0].items() if k == kind]
            if phase != "update" or name in ("adapters", "passes without gradients in the update"):
                continue
            norm = 1 if kind == "all-reduce" else 0  # the gradient norm's own
            assert sum(n for n, _ in of_kind) == number + norm, (name, way, kind)
            # Shards of tensors whose first dimension the ranks do not divide are padded.
            assert size <= sum(b for _, b in of_kind) <= 1.15 * size + 1000 * norm, (name, way, kind)
    micro, mini = ({kind: n for (kind, _), (n, _) in rank[2].items()} for rank in ranks[0])
    assert mini["all-gather"] < micro["all-gather"] and mini["reduce-scatter"] < micro["reduce-scatter"]


def test_auto_gathers_once_if_it_fits(make_config, monkeypatch):
    """On the CPU never; on a GPU if weights, gradients and activations fit and nothing else takes memory meanwhile."""
    joined = World(joined=True)
    samples, bins = make_samples(3), [[[0], [1]], [[2]]]

    def kept(device, unused, world=joined, **changes):
        cfg = make_config(launch="torchrun", **changes)
        policy = Policy(load_policy(cfg.model, "cpu"), cfg)
        checkpointing = GradientCheckpointing(policy.model, cfg.model.gradient_checkpointing)
        found = activations.Gathering(cfg, world, torch.device(device), checkpointing)
        monkeypatch.setattr("luffy.learn.activations.unused_bytes", lambda device: unused)
        return found.of_update(policy.scorer, samples, bins), found.of_scoring(policy.scorer)

    plenty = 1 << 40
    weights = gathered_bytes(load_policy(make_config().model, "cpu"), "float32", gradients=False)
    assert kept("cuda", plenty) == (2 * weights, weights)
    assert kept("cuda", 6 << 30) == (0, 0) and kept("cuda", (6 << 30) + weights + 1000) == (0, weights)
    assert kept("cpu", plenty) == (0, 0)
    assert kept("cuda", plenty, world=World()) == (0, 0)
    assert kept("cuda", plenty, parallel={"cpu_offload": True}) == (0, 0)
    assert kept("cuda", plenty, parallel={"gather": "micro_batch"}) == (0, 0)
    assert kept("cuda", plenty, **{"async": {"max_staleness": 1}}) == (0, 0)
    assert kept("cpu", 0, parallel={"gather": "mini_batch"}) == (2 * weights, weights)
