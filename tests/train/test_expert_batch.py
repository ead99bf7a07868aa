"""CHORD's expert batch: problems in an order of their own, with a whole trace each and no own sample."""

import json

import pytest
import torch

from luffy.errors import ConfigError, DataError, TrainingStopped, UserError
from luffy.train import loop
from luffy.train.loop import Trainer

SETTINGS = {
    "reward": {"kind": "loop_rewards:length_parity"},
    "guidance": {"n_prefix": 0},
    "algorithm": {"credit": "lone_trace_sft", "entropy_coef": 0.0},
    "batch": {"problems": 8, "expert_share": 0.25},
}


def config(make_config, **changes):
    settings = {section: {**SETTINGS.get(section, {}), **changes.get(section, {})} for section in SETTINGS | changes}
    return make_config(**settings)


def split(batch):
    """Kept groups of traces alone, and all others, rejected ones too."""
    groups = [*batch.groups.values(), *batch.rejected.values()]
    return [g for g in groups if g.has_traces_alone], [g for g in groups if not g.has_traces_alone]


def test_a_quarter_of_the_problems_has_a_trace_alone(make_config):
    """16 of the 24 problems have a trace; two a step pass once over them in eight steps."""
    taught, rolled_out = [], []
    with Trainer(config(make_config, train={"steps": 8})) as trainer:
        for _ in range(8):
            batch = trainer.step()
            experts, own = split(batch)
            assert [len(g.rollouts) for g in experts] == [1, 1] and [len(g.rollouts) for g in own] == [4] * 6
            taught += [g.task.problem.id for g in experts]
            rolled_out += [g.task.problem.id for g in own]
            places = [i for i, g in batch.groups.items() if g.has_traces_alone]
            assert batch.size < 8 or places == [2, 6]  # evenly among the others
            for i in places:
                (sample,) = batch.samples[i]
                assert sample.sft_weights.eq(1).all() and sample.rl_weights.eq(0).all() and sample.off_policy.all()
    assert sorted(taught) == sorted(f"p{i}" for i in range(24) if i % 3 != 2)
    assert sorted(rolled_out) == sorted([f"p{i}" for i in range(24)] * 2)  # the epochs of the others are their own


def test_the_update_is_that_of_rl_plus_that_of_sft(make_config):
    """One gradient of both terms, each over its own tokens: hand-made from two batches apart."""
    cfg = config(make_config, algorithm={"sft_coef": 0.5})
    with Trainer(cfg) as trainer:
        policy, kept = trainer.run.policy, {}
        policy.optimizer.step = lambda lr, norm: kept.update(
            {n: m.grad.clone() for n, m in policy.optimizer.masters.items()}
        )
        batch = trainer.step()
        whole, parts = dict(kept), []
        groups = list(batch.samples.values())
        for own in (True, False):
            policy.update([s for group in groups for s in group if (s.rl_weights.sum() > 0) == own], 1.0)
            parts.append(dict(kept))
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, parts[0][name] + parts[1][name], rtol=1e-4, atol=1e-7)
        traces = [s for group in groups for s in group if s.sft_weights.sum() > 0]
        likelihood = float(sum(log_probs.sum() for log_probs in policy.log_probs(traces)))
        tokens = sum(s.token_ids.numel() for s in traces)
        assert policy.update(traces, 1.0)["actor/loss"].value == pytest.approx(-0.5 * likelihood / tokens, rel=1e-5)


def test_a_step_that_stops_draws_the_same_again(make_config, monkeypatch):
    def stop(*_):
        raise TrainingStopped("stopped")

    with Trainer(config(make_config)) as trainer:
        trainer.step()
        before = trainer.run.memory.state_dict()["experts"].tolist()
        with monkeypatch.context() as patch, pytest.raises(TrainingStopped):
            patch.setattr(loop, "respond", stop)
            trainer.step()
        after = trainer.run.memory.experts.state_dict()
        assert before == [after["epoch"], after["position"]] == trainer.run.memory.state_dict()["experts"].tolist()


def test_what_an_expert_batch_cannot_do_is_refused(make_config, tmp_path, sums):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'batch\.expert_share' \(0\.25\)"):
        config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match=r"'batch\.expert_share' \(0\.01\) of 'batch\.problems' \(8\) is 0 problems"):
        config(make_config, batch={"expert_share": 0.01})
    with pytest.raises(ConfigError, match="'replay.share' .* exceed 1"):
        config(make_config, replay={"share": 0.8})
    with pytest.raises(ConfigError, match="'guidance.gate' .trace_on_failure. decides by own samples"):
        config(make_config, guidance={"gate": "trace_on_failure"})
    with pytest.raises(ConfigError, match="set rollout.temperature=1"):
        config(make_config, rollout={"temperature": 0.7})
    with pytest.raises(
        UserError, match=r"'algorithm\.credit' \(group_baseline\).*set algorithm\.credit=lone_trace_sft"
    ):
        Trainer(config(make_config, algorithm={"credit": "group_baseline"}))
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    bare.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has a trace"):
        Trainer(config(make_config, data={"train": str(bare)}))
