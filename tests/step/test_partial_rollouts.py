"""Partial rollouts: responses that take several steps, whose groups wait for them."""

import json
from dataclasses import replace

import pytest
import torch
from builders import write_rows
from trainings import final_weights, samples, train_untimed

from luffy.errors import ConfigError, UserError
from luffy.step.memory import FINISHES, InFlight, MethodMemory, problems_of, state_of
from luffy.train.loop import Trainer

FROZEN = 1e-30  # a learning rate that moves no weight
BUDGET = 5  # of 16 tokens at most: a response takes up to 4 steps


def partial_config(make_config, name, budget=BUDGET, lr=2e-2, steps=6, **changes):
    extra = {"optim": {"lr": lr}, "train": {"steps": steps, "save_every": 2, "keep": 9}}
    rollout = {"max_tokens_per_step": budget, "n": 2}
    return make_config(name=name, rollout=rollout, record={"samples": 30, "samples_every": 1}, **extra, **changes)


def responses_by_group(cfg):
    """(problem, step): the responses of each group, in their order."""
    found = {}
    for row in samples(cfg):
        found.setdefault((row["problem"], row["step"]), []).append(row)
    return found


def test_a_response_that_is_continued_is_the_one_that_was_never_cut(make_config):
    """Under the same weights. The first problems of both runs are the same, and no group is missing."""
    whole, parts = (
        partial_config(make_config, "whole", None, FROZEN, steps=2),
        partial_config(make_config, "parts", lr=FROZEN, steps=5),
    )
    train_untimed(whole), train_untimed(parts)
    found = {}
    for (problem, _), rows in responses_by_group(parts).items():
        found.setdefault(problem, [r["token_ids"] for r in rows])  # the first time it was drawn
    expected = {problem: [r["token_ids"] for r in rows] for (problem, _), rows in responses_by_group(whole).items()}
    assert len(expected) == 12 and expected == {problem: found[problem] for problem in expected}
    lengths = {step: [len(r["token_ids"]) for r in rows if r["finish"] != "trace"] for (_, step), rows in responses_by_group(parts).items()}  # fmt: skip
    assert len(lengths) > 2 and all(max(own) <= BUDGET * step for step, own in lengths.items())


def test_groups_are_whole_and_none_waits_longer_than_its_tokens(make_config):
    cfg = partial_config(make_config, "run", steps=8)
    rows = train_untimed(cfg)
    assert all(len(group) == 2 for group in responses_by_group(cfg).values())
    assert all(sum(r["finish"] == "trace" for r in group) <= 1 for group in responses_by_group(cfg).values())
    assert any(r["finish"] == "trace" for group in responses_by_group(cfg).values() for r in group)
    # 6 problems a step come in; those that are not learnt from are under way
    learnt = 0
    for step, row in enumerate(rows):
        learnt += row["rollout/whole_groups"]
        assert row["rollout/under_way"] == 6 * (step + 1) - learnt
        assert row.get("rollout/age/max", 0) <= 3  # 16 tokens take 4 steps
    assert rows[0]["rollout/continued_tokens"] == 0 < rows[1]["rollout/continued_tokens"]
    assert max(row.get("rollout/age/max", 0) for row in rows) == 3


def test_every_token_has_the_version_that_drew_it_and_is_corrected_for_it(make_config):
    cfg = partial_config(make_config, "run")
    rows = train_untimed(cfg)
    lags = []
    for row in samples(cfg):
        own = [v for v, off in zip(row["versions"], row["off_policy"], strict=True) if not off]
        pieces = [own[i : i + BUDGET] for i in range(0, len(own), BUDGET)]
        assert all(len(set(piece)) == 1 for piece in pieces)  # a budget's tokens are of one version
        assert [piece[0] for piece in pieces] == list(range(own[0], own[0] + len(pieces))) if own else row["finish"]
        assert all(v == -1 for v, off in zip(row["versions"], row["off_policy"], strict=True) if off)
        assert row["policy_version"] == (own[-1] if own else row["step"] - 1)
        lags += [(row["step"], row["step"] - 1 - v) for v in own]
    for step, row in enumerate(rows, start=1):
        of_step = [lag for at, lag in lags if at == step]
        if of_step:
            assert row["async/staleness/max"] == max(of_step)
            assert row["async/staleness/mean"] == pytest.approx(sum(of_step) / len(of_step))
    assert rows[0].get("async/weight_max", 1) == pytest.approx(1, abs=1e-4)
    assert any(row.get("async/weight_max", 1) > 1.01 and row["async/ess"] < 0.999 for row in rows[1:])


def test_a_step_in_which_no_group_is_finished_changes_nothing(make_config):
    cfg = partial_config(make_config, "run", budget=1, steps=3, guidance={"n_prefix": 0})
    with Trainer(cfg) as trainer:
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
        batch = trainer.step()
        assert batch.size == batch.metrics["rollout/whole_groups"].value == 0
        assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        assert trainer.progress.step == 1 and len(trainer.run.memory.in_flight) == 6


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(make_config):
    whole, parts = partial_config(make_config, "whole"), partial_config(make_config, "parts", steps=2)
    rows = train_untimed(whole)
    train_untimed(parts)
    assert train_untimed(partial_config(make_config, "parts")) == rows
    for a, b in zip(
        final_weights(whole).values(), final_weights(partial_config(make_config, "parts")).values(), strict=True
    ):
        assert torch.equal(a, b)
    assert [json.dumps(row) for row in samples(whole)] == [json.dumps(row) for row in samples(parts)]


def test_unfinished_responses_are_not_left_behind_unsaid(make_config):
    train_untimed(partial_config(make_config, "run", steps=2))
    with pytest.raises(UserError, match=r"problems with unfinished responses; set rollout\.max_tokens_per_step \(16 "):
        train_untimed(partial_config(make_config, "run", None))
    rows = train_untimed(partial_config(make_config, "run", 16, steps=3))
    assert rows[2]["rollout/under_way"] == 0 and rows[2]["rollout/whole_groups"] > 6
    train_untimed(partial_config(make_config, "run", None, steps=4))  # nothing is under way any more


def two_traces(tmp_path):
    """Problems of which every other one has a long trace before its short one."""
    rows = [
        {"id": f"{i}", "prompt": f"{i}+1", "answer": f"{i + 1}", "traces": ["0=0 0=0 0=0", f"{i}+1={i + 1}"]}
        for i in range(8)
    ]
    for row in rows[::2]:
        del row["traces"]
    write_rows(tmp_path / "two.jsonl", rows)
    return {"data": {"train": str(tmp_path / "two.jsonl")}, "guidance": {"min_ratio": 0.5, "max_ratio": 0.5}}


@pytest.mark.parametrize(("before", "after", "overlong"), [(10, 16, "drop"), (16, 10, "drop"), (10, 4, "truncate")])
def test_responses_behind_a_trace_are_left_out_where_traces_change(make_config, tmp_path, before, after, overlong):
    extra = two_traces(tmp_path)
    extra["data"]["overlong_trace"] = overlong

    def limited(name, tokens, steps, budget=1):
        cfg = partial_config(make_config, name, budget, steps=steps, **extra)
        return replace(cfg, rollout=replace(cfg.rollout, max_tokens=tokens))

    train_untimed(limited("run", before, 2))
    with Trainer(limited("run", after, 3, 20)) as trainer:
        memory, tasks = trainer.run.memory.in_flight, trainer.run.tasks
        assert memory and not any(tasks[problem.row].demonstrations for problem in memory)
        (notice,) = [n for n in trainer.notices if "unfinished responses" in n]
        assert f"problems with unfinished responses of {trainer.saver.store.folder}" in notice
        assert f"(rollout.max_tokens {before} -> {after}" in notice
        trainer.train()


def test_unfinished_responses_go_on_where_every_trace_keeps_its_number(make_config, tmp_path):
    extra = two_traces(tmp_path)
    train_untimed(partial_config(make_config, "run", 1, steps=2, **extra))
    longer = partial_config(make_config, "run", 20, steps=3, **extra)
    longer = replace(longer, rollout=replace(longer.rollout, max_tokens=20))
    with Trainer(longer) as trainer:
        assert any((problem.responses[:, 0] == 1).any() for problem in trainer.run.memory.in_flight)
        assert not any("left out" in notice for notice in trainer.notices)
    state = trainer.saver.store.folder / "step-000002" / "state.json"
    saved = json.loads(state.read_text())
    assert saved["traces"] == {"rollout.max_tokens": 16, "data.overlong_trace": "drop", "left_out": 0}


def fields(p):
    return p.row, p.visit, p.step, *(t.tolist() for t in (p.responses, p.token_ids, p.log_probs, p.versions))


def problem(row, visit, step, *responses, tokens=()):
    """``responses``: trace, prefix, seed, finish, number of drawn tokens; ``tokens``: id, log-prob, version."""
    rows = [(trace, prefix, seed, FINISHES.index(finish), drawn) for trace, prefix, seed, finish, drawn in responses]
    ids, log_probs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    streams = torch.tensor(ids).long(), torch.tensor(log_probs).float(), torch.tensor(versions).long()
    return InFlight(row, visit, step, torch.tensor(rows), *streams)


def test_the_record_of_unfinished_responses_survives_a_checkpoint(make_config):
    problems = [
        problem(3, 1, 9, (0, 5, 0, "trace", 0), (-1, 0, 2**62 + 1, None, 2), tokens=[(7, -0.5, 9), (8, -0.25, 10)]),
        problem(4, 0, 10, (1, 2, 77, "stop", 1), tokens=[(7, -0.5, 10)]),
    ]
    memory = MethodMemory(partial_config(make_config, "run"), 24)
    memory.in_flight = problems
    other = MethodMemory(partial_config(make_config, "run"), 24)
    other.load_state_dict(memory.state_dict())
    assert [fields(p) for p in other.in_flight] == [fields(p) for p in problems]
    assert (problems[0].unfinished, problems[0].continued_tokens, problems[1].unfinished) == (1, 2, 0)
    assert state_of([]) == {} and problems_of({}) == []
    assert len(problems_of(state_of([problem(1, 0, 0, (0, 5, 0, "trace", 0))]))) == 1  # without a token


def test_a_problem_in_flight_has_the_episodes_it_was_packed_from(make_config):
    with Trainer(partial_config(make_config, "run", steps=3)) as trainer:
        trainer.step()
        run = trainer.run
        for kept in run.memory.in_flight:
            episodes = kept.episodes(run.tasks[kept.row], run.planner)
            again = InFlight.of(kept.row, kept.visit, kept.step, episodes)
            assert fields(again) == fields(kept) and any(e.finish is None for e in episodes)
            for e in episodes:
                assert e.off_policy.tolist() == [i < e.prefix for i in range(e.length)]
                assert e.prefix + e.drawn == e.length == len(e.versions) and (e.versions >= 0).sum() == e.drawn


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("rollout", {"top_p": 0.9}), ("rollout", {"top_k": 5}), ("rollout", {"engine": "vllm"}),
        ("async", {"max_staleness": 1}), ("algorithm", {"oversample_rounds": 1}), ("replay", {"share": 0.5}),
        ("guidance", {"n_prefix": 0, "gate": "trace_on_failure"}), ("sft_steps", {"buffer": 3}),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with_is_refused(make_config, section, values):
    changes = {"rollout": {"max_tokens_per_step": 5}}
    changes[section] = {**changes.get(section, {}), **values}
    with pytest.raises(ConfigError, match=r"'rollout\.max_tokens_per_step' \(5\).*null"):
        make_config(**changes)
