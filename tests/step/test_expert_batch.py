"""CHORD's expert batch: problems in an order of their own, with a whole trace each and no own sample."""

import json
from dataclasses import replace

import pytest
import torch
from builders import write_rows

from luffy.errors import ConfigError, DataError, TrainingStopped, UserError
from luffy.step import training_step
from luffy.train.loop import Trainer

SETTINGS = {
    "reward": {"kind": "loop_rewards:length_parity"},
    "guidance": {"n_prefix": 0},
    "algorithm": {"credit": "lone_trace_sft", "entropy_coef": 0.0},
    "batch": {"problems": 8, "expert_share": 0.25},
}


def expert_config(make_config, **changes):
    settings = {section: {**SETTINGS.get(section, {}), **changes.get(section, {})} for section in SETTINGS | changes}
    return make_config(**settings)


def split(batch):
    """Kept groups of traces alone, and all others, rejected ones too."""
    groups = [*batch.groups.values(), *batch.rejected.values()]
    return [g for g in groups if g.has_traces_alone], [g for g in groups if not g.has_traces_alone]


def test_a_quarter_of_the_problems_has_a_trace_alone(make_config):
    """16 of the 24 problems have a trace; two a step pass once over them in eight steps."""
    taught, rolled_out = [], []
    with Trainer(expert_config(make_config, train={"steps": 8})) as trainer:
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


@pytest.mark.parametrize(("reshape", "mu"), [("logp", 0.9), ("chord_phi", 0.1)])
def test_the_gradient_is_that_of_chord(make_config, reshape, mu):
    """(1 - mu) of the RL batch's gradient and mu of the traces' mean of -phi log p, with phi = 1 or p (1 - p)."""
    cfg = expert_config(make_config, algorithm={"sft_reshape": reshape, "mix": {"start": mu}})
    with Trainer(cfg) as trainer:
        policy, model, kept = trainer.run.policy, trainer.run.model, {}
        masters = policy.optimizer.masters
        policy.optimizer.step = lambda lr, norm: kept.update({name: m.grad.clone() for name, m in masters.items()})
        batch = trainer.step()
        whole = dict(kept)
        assert batch.metrics["method/mix_coef"].value == mu
        samples = [s for group in batch.samples.values() for s in group]
        own = [replace(s, rl_weights=torch.ones_like(s.rl_weights)) for s in samples if not s.off_policy.any()]
        policy.update(own, 1.0)
        model.set_attn_implementation("sdpa")
        traces = [s for s in samples if s.off_policy.all()]
        assert len(traces) == 2 and len(own) + len(traces) == len(samples)
        for trace in traces:
            ids = torch.tensor([[*trace.prompt_ids, *trace.token_ids.tolist()]])
            log_p = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[len(trace.prompt_ids) - 1 :]
            p = log_p.detach().exp()
            phi = p * (1 - p) if reshape == "chord_phi" else torch.ones_like(p)
            (-(phi * log_p).sum() / sum(len(t.token_ids) for t in traces)).backward()
        for name, gradient in whole.items():
            expected = (1 - mu) * kept[name] + mu * masters[name].grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_step_that_stops_draws_the_same_again(make_config, monkeypatch):
    def stop(*_):
        raise TrainingStopped("stopped")

    with Trainer(expert_config(make_config)) as trainer:
        trainer.step()
        before = trainer.run.memory.state_dict()["experts"].tolist()
        with monkeypatch.context() as patch, pytest.raises(TrainingStopped):
            patch.setattr(training_step, "play", stop)
            trainer.step()
        after = trainer.run.memory.experts.state_dict()
        assert before == [after["epoch"], after["position"]] == trainer.run.memory.state_dict()["experts"].tolist()


def test_what_an_expert_batch_cannot_do_is_refused(make_config, tmp_path, sums):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'batch\.expert_share' \(0\.25\)"):
        expert_config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match=r"'batch\.expert_share' \(0\.01\) of 'batch\.problems' \(8\) is 0 problems"):
        expert_config(make_config, batch={"expert_share": 0.01})
    with pytest.raises(ConfigError, match="'replay.share' .* exceed 1"):
        expert_config(make_config, replay={"share": 0.8})
    with pytest.raises(ConfigError, match="'guidance.gate' .trace_on_failure. decides by on-policy samples"):
        expert_config(make_config, guidance={"gate": "trace_on_failure"})
    with pytest.raises(ConfigError, match="set rollout.temperature=1"):
        expert_config(make_config, rollout={"temperature": 0.7})
    with pytest.raises(
        UserError, match=r"'algorithm\.credit' \(group_baseline\).*set algorithm\.credit=lone_trace_sft"
    ):
        Trainer(expert_config(make_config, algorithm={"credit": "group_baseline"}))
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    write_rows(bare, rows)
    with pytest.raises(DataError, match="has a trace"):
        Trainer(expert_config(make_config, data={"train": str(bare)}))
