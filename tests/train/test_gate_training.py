"""Runs with a gate: the step has a second round."""

import json

import pytest
from ranks import figures, run_ranks, samples, train

from luffy.errors import ConfigError, DataError
from luffy.guidance.gate import SecondRound
from luffy.train.loop import Trainer


def config(make_config, name="run", **changes):
    settings = {"guidance": {"n_prefix": 0, "gate": "trace_on_failure"}, "train": {"steps": 2, "save_every": 2}}
    return make_config(name=name, record={"samples": 6, "samples_every": 1}, **(settings | changes))


def test_traces_go_where_the_policy_fails(make_config):
    """Every third problem has no trace."""
    cfg = config(make_config)
    train(cfg)
    for row in figures(cfg):
        groups = {}
        for sample in samples(cfg):
            if sample["step"] == row["step"]:
                groups.setdefault(sample["problem"], []).append(sample)
        traced = {problem: [r for r in group if r["finish"] == "trace"] for problem, group in groups.items()}
        for problem, group in groups.items():
            failed = not any(r["reward"] for r in group if r["finish"] != "trace")
            assert len(group) == 4 and len(traced[problem]) == (failed and int(problem[1:]) % 3 != 2)
            assert all(r["reward"] == 1.0 for r in traced[problem])
        assert row["batch/gated"] == sum(map(len, traced.values())) > 0
        assert row["batch/rejected"] == sum(len({r["reward"] for r in group}) == 1 for group in groups.values())
        assert row["actor/off_pg_loss"] != 0


def half_of_the_trace(first):
    """Redo a failed group with samples that start from half of the trace."""
    traces = first.group.task.demonstrations
    if not traces:
        return None
    return SecondRound((), tuple(first.sample(i, traces[0], len(traces[0].token_ids) // 2) for i in range(3)))


def test_a_group_is_done_again_from_a_longer_prefix(make_config):
    cfg = config(make_config, guidance={"n_prefix": 0, "gate": f"{__name__}:half_of_the_trace"}, train={"steps": 1})
    train(cfg)
    found = [r for r in samples(cfg) if int(r["problem"][1:]) % 3 != 2]
    assert found and all(0 < r["off_policy_tokens"] < r["length"] and r["sample"] < 3 for r in found)


def trace_alone(first):
    """Drop the own samples, keep the trace."""
    traces = first.group.task.demonstrations
    return SecondRound((), (first.sample(0, traces[0]),)) if traces else None


@pytest.mark.parametrize(("credit", "learns"), [("lone_trace_sft", True), ("group_baseline", False)])
def test_a_trace_alone_is_kept_where_the_credit_function_learns_from_it(make_config, credit, learns):
    guidance = {"n_prefix": 0, "gate": f"{__name__}:trace_alone"}
    cfg = config(make_config, guidance=guidance, algorithm={"credit": credit}, train={"steps": 1})
    train(cfg)
    (row,), found = figures(cfg), [r for r in samples(cfg) if r["finish"] == "trace"]
    assert row["batch/gated"] == len(found) == 4
    assert all((r["advantages"] is not None) is learns for r in found)  # null: the group was rejected
    assert ("actor/sft_loss" in row) is learns


def test_the_number_of_ranks_changes_nothing(make_config):
    alone, many = config(make_config, "alone"), config(make_config, "many")
    train(alone)
    run_ranks(2, train, many)
    pick = lambda cfg: [(r["step"], r["problem"], r["sample"], r["token_ids"], r["advantages"]) for r in samples(cfg)]  # noqa: E731
    assert pick(many) == pick(alone)
    assert [r["batch/gated"] for r in figures(many)] == [r["batch/gated"] for r in figures(alone)]


def test_what_a_gate_cannot_do_is_refused(make_config, tmp_path, sums):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'guidance\.gate' \(trace_on_failure\)"):
        config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match=r"'guidance\.gate' must be one of none, trace_on_failure.*did you mean"):
        make_config(guidance={"gate": "trace_on_fail"})
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    bare.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has a trace"):
        Trainer(config(make_config, data={"train": str(bare)}))
