"""A reward that takes a batch, in training and in its evaluations; and what a run does when all its calls fail."""

import pytest

from luffy.errors import TrainingStopped
from luffy.report.recorder import read_json_lines
from luffy.train.loop import Trainer


@pytest.fixture(autouse=True)
def own_forms(monkeypatch, request, tmp_path):
    monkeypatch.syspath_prepend(request.config.rootpath / "tests" / "rewards")
    monkeypatch.setenv("REWARD_IS_BROKEN", str(tmp_path / "broken"))


def figures(cfg):
    untimed = lambda name: name != "time" and not name.startswith(("timing_s/", "perf/"))  # noqa: E731
    return [{k: v for k, v in row.items() if untimed(k)} for row in read_json_lines(cfg.folder / "metrics.jsonl")]


def train(cfg, **options):
    with Trainer(cfg, **options) as trainer:
        trainer.train()
    return figures(cfg)


def test_a_batch_function_trains_as_the_same_function_of_a_sample(make_config, sums):
    settings = {"data": {"eval": str(sums)}, "eval": {"every": 2, "limit": 3}, "train": {"steps": 2}}
    kinds = {"sample": "loop_rewards:length_parity", "batch": "own_forms:even_length"}
    rows = [train(make_config(name=name, reward={"kind": kind}, **settings)) for name, kind in kinds.items()]
    assert rows[0] == rows[1] and {row["critic/rewards/mean"] for row in rows[0][1:]} - {0.0, 1.0}
    assert all(row.get("batch/verifier_failures", 0) == 0 for row in rows[0])


@pytest.mark.parametrize("when", ["step", "evaluation"])
def test_a_run_whose_reward_fails_altogether_stops_and_goes_on_as_if_it_had_not(make_config, sums, tmp_path, when):
    settings = {
        "reward": {"kind": "own_forms:broken_where_told"},
        "data": {"eval": str(sums)},
        "eval": {"every": 2, "limit": 3},
        "train": {"steps": 3, "save_every": 3},
    }
    undisturbed, broken = (make_config(name=name, **settings) for name in ("undisturbed", "broken"))
    expected = train(undisturbed)
    mark, at = tmp_path / "broken", "step 2" if when == "step" else "the evaluation after step 2"

    def break_it(step, _):
        if when == "step" and step == 1:
            mark.touch()

    with Trainer(broken, on_step=break_it) as trainer:
        if when == "evaluation":
            trainer.run.engines.current.sync = lambda version: mark.touch() if version == 2 else None
        with pytest.raises(
            TrainingStopped, match=f"stopped at {at}: every call of the reward failed.*the judge is out"
        ):
            trainer.train()
    mark.unlink()
    found: dict[int, dict] = {}
    for row in train(broken):
        found[row["step"]] = found.get(row["step"], {}) | row
    assert list(found.values()) == expected
