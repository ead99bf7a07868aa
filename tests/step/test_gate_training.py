"""Runs with a gate: the step has further rounds."""

import json
from dataclasses import replace

import pytest
from builders import write_rows
from fake_servers import KEY, FakeServer
from kills import copied_at
from ranks import run_ranks
from trainings import assert_same_metrics, samples, train, untimed_metrics

from luffy.errors import ConfigError, DataError, UserError
from luffy.guidance.gate import Gate, SecondRound
from luffy.models.load import load_model
from luffy.report.samples import sample_cards
from luffy.rollout.native import NativeEngine
from luffy.step.gating import hinted_task
from luffy.train.loop import Trainer


def gate_config(make_config, name="run", **changes):
    settings = {"guidance": {"n_prefix": 0, "gate": "trace_on_failure"}, "train": {"steps": 2, "save_every": 2}}
    return make_config(name=name, record={"samples": 6, "samples_every": 1}, **(settings | changes))


def test_traces_go_where_the_policy_fails(make_config):
    """Every third problem has no trace."""
    cfg = gate_config(make_config)
    train(cfg)
    for row in untimed_metrics(cfg):
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
    cfg = gate_config(
        make_config, guidance={"n_prefix": 0, "gate": f"{__name__}:half_of_the_trace"}, train={"steps": 1}
    )
    train(cfg)
    found = [r for r in samples(cfg) if int(r["problem"][1:]) % 3 != 2]
    assert found and all(0 < r["off_policy_tokens"] < r["length"] and r["sample"] < 3 for r in found)


def keep_trace_alone(first):
    """Drop the own samples, keep the trace."""
    traces = first.group.task.demonstrations
    return SecondRound((), (first.sample(0, traces[0]),)) if traces else None


@pytest.mark.parametrize(("credit", "learns"), [("lone_trace_sft", True), ("group_baseline", False)])
def test_a_trace_alone_is_kept_where_the_credit_function_learns_from_it(make_config, credit, learns):
    guidance = {"n_prefix": 0, "gate": f"{__name__}:keep_trace_alone"}
    cfg = gate_config(make_config, guidance=guidance, algorithm={"credit": credit}, train={"steps": 1})
    train(cfg)
    (row,), found = untimed_metrics(cfg), [r for r in samples(cfg) if r["finish"] == "trace"]
    assert row["batch/gated"] == len(found) == 4
    assert all((r["advantages"] is not None) is learns for r in found)  # null: the group was rejected
    assert ("actor/sft_loss" in row) is learns


def several_rounds(first):
    """As many rounds as the problem's number says, 3 at most: the likeliest trace, then hints, or else own samples."""
    if first.round > int(first.group.task.problem.id[1:]) % 4:
        return None
    kept, traces = tuple(range(1, len(first.group.rollouts))), first.group.task.demonstrations
    if not traces:
        return SecondRound(kept, (first.sample(0),))
    if first.round > 1:
        return SecondRound(kept, (first.sample(0, task=first.hint(first.round)),))
    likeliest = max(range(len(traces)), key=lambda i: first.answer_probs[i])
    return SecondRound(kept, (first.sample(0, traces[likeliest]),))


SEVERAL_ROUNDS = Gate(several_rounds, rounds=None, uses_hints=True, answer_probs=True)


@pytest.fixture
def two_teachers(sums, tmp_path):
    """Sums with two traces where there is one, one longer than the other."""
    path = tmp_path / "two.jsonl"
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    for row in rows:
        row["traces"] += [f"0+{trace}" for trace in row["traces"]]
    write_rows(path, rows)
    return path


def several(make_config, path, name, **changes):
    guidance = {"n_prefix": 0, "gate": f"{__name__}:SEVERAL_ROUNDS", "hint_text": " {solution}"}
    settings = {
        "guidance": guidance,
        "data": {"train": str(path), "max_prompt_tokens": 24},
        "rollout": {"max_tokens": 18},
        "algorithm": {"reject_extreme": False},
    }
    return gate_config(make_config, name, **(settings | changes))


def rows_of_samples(cfg):
    return [(r["step"], r["problem"], r["sample"], r["prompt"], r["token_ids"], r["advantages"]) for r in samples(cfg)]


def test_a_gate_asks_again_until_it_has_enough(make_config, two_teachers):
    cfg = several(make_config, two_teachers, "run", train={"steps": 1})
    train(cfg)
    (figure,), found = untimed_metrics(cfg), samples(cfg)
    problems = {r["problem"]: int(r["problem"][1:]) for r in found}
    assert figure["batch/gated"] == sum(n % 4 > 0 for n in problems.values())
    assert figure["method/gated_share"] == pytest.approx(figure["batch/gated"] / 6)
    for problem, number in problems.items():
        group = [r for r in found if r["problem"] == problem]
        traced = number % 3 != 2 and number % 4 > 0
        assert len(group) == 4 and sum(r["finish"] == "trace" for r in group) == traced
        own = group[0]["prompt"] if number % 4 < 3 else None
        hinted = [r["prompt"] for r in group if own is not None and r["prompt"] != own]
        assert len(hinted) == (traced and number % 4 == 2)
        assert all(prompt.startswith(f"{own} ") for prompt in hinted)
    level_2 = sum(n % 3 != 2 and n % 4 >= 2 for n in problems.values())
    assert figure["method/hint_2_share"] == pytest.approx(level_2 / 6)
    assert figure["method/hints_too_long"] == 0 and 0 <= figure["method/hinted_solved"] <= 1


def test_the_number_of_ranks_changes_nothing(make_config, two_teachers):
    alone, many = (several(make_config, two_teachers, name) for name in ("alone", "many"))
    train(alone)
    run_ranks(2, train, many)
    assert rows_of_samples(many) == rows_of_samples(alone)
    assert_same_metrics(untimed_metrics(many), untimed_metrics(alone))


def test_what_a_kill_between_rounds_leaves_is_resumed_and_equals_undisturbed(make_config, two_teachers):
    every = {"steps": 2, "save_every": 1}
    undisturbed, killed = (several(make_config, two_teachers, name, train=every) for name in ("undisturbed", "killed"))
    with copied_at(NativeEngine, "generate", 7, undisturbed.folder, killed.folder):  # four calls a step
        train(undisturbed)
    assert [figure["step"] for figure in untimed_metrics(killed)] == [1]
    train(killed)
    assert rows_of_samples(killed) == rows_of_samples(undisturbed)
    assert [r["actor/grad_norm"] for r in untimed_metrics(killed)] == [
        r["actor/grad_norm"] for r in untimed_metrics(undisturbed)
    ]


def test_a_gate_works_with_oversampling_and_with_a_second_model(make_config, two_teachers, tiny_model):
    full = {"reject_extreme": True, "oversample_rounds": 3}
    over = several(make_config, two_teachers, "over", train={"steps": 1}, algorithm=full, reward={"kind": "loop_rewards:length_parity"})  # fmt: skip
    train(over)
    (figure,) = untimed_metrics(over)
    assert figure["batch/gated"] > 0 and len({r["problem"] for r in samples(over) if r["advantages"]}) == 6
    guided = {"model_path": str(tiny_model), "rule": "mixture", "eps": 0.5}
    rollout = {"max_tokens": 18, "offpolicy_guidance": guided}
    pair = several(make_config, two_teachers, "pair", train={"steps": 1}, rollout=rollout)
    train(pair)
    (figure,) = untimed_metrics(pair)
    assert figure["batch/gated"] > 0 and figure["guidance/token_ratio"] > 0 and figure["method/hint_2_share"] > 0


def test_the_memory_takes_in_what_the_policy_did_before_a_gate_dropped_it(make_config):
    """Every third problem has no trace; of the others the gate keeps no own sample."""
    guidance = {"n_prefix": 0, "gate": f"{__name__}:keep_trace_alone"}
    parity, begun = {"kind": "loop_rewards:length_parity"}, {"share": 0.5, "start": 0.0}
    with Trainer(gate_config(make_config, guidance=guidance, reward=parity, replay=begun)) as trainer:
        trainer.train()
        assert any(row % 3 != 2 for row in trainer.run.memory.replay.problems)


def test_a_hint_that_does_not_fit_is_not_shown(make_config, two_teachers):
    small = {"train": str(two_teachers), "max_prompt_tokens": 5}
    guidance = {"n_prefix": 0, "gate": "hinted_group", "hint_text": " {solution}"}
    cfg = several(make_config, two_teachers, "run", data=small, guidance=guidance, train={"steps": 1})
    train(cfg)
    (figure,) = untimed_metrics(cfg)
    assert figure["method/hints_too_long"] > 0 and figure["batch/gated"] == 0
    too_long = set()
    with Trainer(cfg) as trainer:
        for _ in range(2):  # a search may come to it in every round, and it is counted once
            assert hinted_task(trainer.run, trainer.run.tasks[0], 3, too_long, "2 2 2 2 2 2", 1) is None
    assert too_long == {(3, 1)}


def test_what_a_gate_cannot_do_is_refused(make_config, tmp_path, sums):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'guidance\.gate' \(trace_on_failure\)"):
        gate_config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match=r"'guidance\.gate' must be one of none, trace_on_failure.*did you mean"):
        make_config(guidance={"gate": "trace_on_fail"})
    for guidance, message in (
        ({"gate": "micro_groups", "gate_sizes": [2]}, r"'guidance\.gate\.sizes' has 1, .*give as many of each"),
        ({"gate": "likeliest_traces", "gate_samples": 3, "n_prefix": 1}, r"replaces 3 of the 3 on-policy samples"),
        (
            {"gate": {"name": "hinted_group", "fractions": [0.0]}},
            r"'guidance\.gate\.fractions' must be above 0 and at most 1",
        ),
        ({"gate": {"name": "micro_groups", "sizes": [0]}}, r"'guidance\.gate\.sizes' must be 1 or more"),
        ({"hint_text": "Think."}, r"'guidance\.hint_text' must contain \{solution\}"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(guidance=guidance)
    with pytest.raises(
        ConfigError,
        match=r"replaces 1 of the 1 on-policy samples .* grpo_split needs one that is left; raise rollout\.n",
    ):
        make_config(guidance={"gate": "trace_on_failure", "n_prefix": 3}, algorithm={"advantage": "grpo_split"})
    with pytest.raises(ConfigError, match=r"gate trace_alone.*set rollout\.temperature=1"):
        make_config(guidance={"gate": "trace_alone"}, rollout={"temperature": 0.7})
    with pytest.raises(
        UserError, match=r"'guidance\.gate' \(trace_alone\) leaves; set algorithm\.credit=lone_trace_sft"
    ):
        Trainer(make_config(guidance={"gate": "trace_alone"}))
    bare = tmp_path / "bare.jsonl"
    rows = [json.loads(line) | {"traces": []} for line in sums.read_text().splitlines()]
    write_rows(bare, rows)
    for gate in ("trace_on_failure", "hinted_group"):
        with pytest.raises(DataError, match="has a trace"):
            Trainer(gate_config(make_config, data={"train": str(bare)}, guidance={"n_prefix": 0, "gate": gate}))


def test_a_row_may_give_the_hints_itself(make_config, tmp_path, sums):
    path = tmp_path / "hinted.jsonl"
    rows = [json.loads(line) | {"traces": [], "hints": ["0", "0+0", "#"]} for line in sums.read_text().splitlines()]
    write_rows(path, rows)
    guidance = {"n_prefix": 0, "gate": "hinted_group", "hint_text": "={solution}"}
    cfg = gate_config(make_config, data={"train": str(path)}, guidance=guidance, train={"steps": 1})
    train(cfg)
    found = {(r["prompt"].partition("=")[2], r.get("hint", 0)) for r in samples(cfg)}
    assert found <= {("", 0), ("0", 1), ("0+0", 2), ("#", 3)} and ("#", 3) in found  # the last level: nothing helped
    hinted = next(r for r in samples(cfg) if r.get("hint") == 3)
    card = sample_cards([hinted], 1, 1.0)
    assert "hint of level 3" in card and f'title="{hinted["prompt"]}"' in card
    (figure,) = untimed_metrics(cfg)
    assert figure["method/hint_3_share"] > 0
    rows[0]["hints"] = [7]
    write_rows(path, rows)
    with pytest.raises(DataError, match="column 'hints': expected a list of texts"):
        Trainer(cfg)


def test_servers_answer_every_round(make_config, two_teachers, monkeypatch):
    """Over the protocol of vLLM's servers, with a server that holds the model."""
    monkeypatch.setenv("LUFFY_VLLM_KEY", KEY)
    changes = {"train": {"steps": 1}, "rollout": {"max_tokens": 18, "engine": "vllm"}}
    cfg = several(make_config, two_teachers, "servers", algorithm={"reject_extreme": False}, **changes)
    server = FakeServer(load_model(cfg.model.path), max_context=64, tokens=10)
    cfg = replace(cfg, rollout=replace(cfg.rollout, vllm=replace(cfg.rollout.vllm, servers=(server.url,))))
    try:
        train(cfg)
    finally:
        server.http.shutdown()
    (figure,) = untimed_metrics(cfg)
    assert figure["batch/gated"] > 0 and figure["method/hint_2_share"] > 0
