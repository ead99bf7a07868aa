"""A reward that takes a batch, in training and in its evaluations; and what a run does when all its calls fail."""

import pytest
from trainings import train_untimed

from luffy.errors import TrainingStopped
from luffy.rewards.kinds import reward
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer


def test_a_batch_function_trains_as_the_same_function_of_a_sample(make_config, sums, monkeypatch, request):
    monkeypatch.syspath_prepend(request.config.rootpath / "tests" / "rewards")
    settings = {"data": {"eval": str(sums)}, "eval": {"every": 2, "limit": 3}, "train": {"steps": 2}}
    kinds = {"sample": "loop_rewards:length_parity", "batch": "own_forms:even_length"}
    rows = [train_untimed(make_config(name=name, reward={"kind": kind}, **settings)) for name, kind in kinds.items()]
    assert rows[0] == rows[1] and {row["critic/rewards/mean"] for row in rows[0][1:]} - {0.0, 1.0}
    assert all(row.get("batch/verifier_failures", 0) == 0 for row in rows[0])


def breakable_config(make_config, sums, name):
    return make_config(
        name=name,
        reward={"kind": "breakable"},
        data={"eval": str(sums)},
        eval={"every": 2, "limit": 3},
        train={"steps": 3, "save_every": 3},
    )


@pytest.mark.parametrize(("rounds", "samples"), [(0, 24), (1, 48)])
def test_a_function_that_raises_on_every_sample_stops_the_step(make_config, rounds, samples):
    cfg = make_config(reward={"kind": "loop_rewards:always_raises"}, algorithm={"oversample_rounds": rounds})
    told = rf"at step 1: the reward failed on all {samples} samples, first: reward loop_rewards:always_raises: error on"
    with Trainer(cfg) as trainer, pytest.raises(TrainingStopped, match=rf"{told} problem p\d+ \(KeyError: 'verdict'\)"):
        trainer.train()


def test_a_function_that_raises_on_some_samples_trains_on(make_config):
    rows = train_untimed(make_config(reward={"kind": "loop_rewards:raises_on_odd_lengths"}, train={"steps": 2}))
    assert [row["batch/verifier_failures"] for row in rows] == [row["batch/verifier_error"] for row in rows]
    assert all(0 < row["batch/verifier_error"] < 24 for row in rows)


def test_a_problem_that_cannot_be_scored_stops_no_step_of_it_alone(make_config):
    alone = {"batch": {"problems": 1}, "train": {"steps": 2}}
    rows = train_untimed(make_config(reward={"kind": "loop_rewards:always_raises"}, **alone))
    assert all(row["batch/verifier_error"] == row["batch/verifier_failures"] > 0 for row in rows)


broken = []


@pytest.fixture(scope="module")
def undisturbed(make_config_in, sums, tmp_path_factory):
    @reward("breakable")  # in this process, as it is nobody's attribute
    def breakable(completions, **kwargs):
        if broken:
            raise RuntimeError("the judge is out")
        return [float(len(text) % 2) for text in completions]

    return train_untimed(breakable_config(make_config_in(tmp_path_factory.mktemp("undisturbed")), sums, "undisturbed"))


@pytest.mark.parametrize("where", ["step 2", "the evaluation after step 2"])
def test_a_run_whose_reward_fails_altogether_stops_and_goes_on_as_if_it_had_not(make_config, sums, undisturbed, where):
    cfg = breakable_config(make_config, sums, "broken")
    with Trainer(cfg, on_step=lambda step, _: where == "step 2" and broken.append(step)) as trainer:
        if where != "step 2":
            trainer.run.engines.current.sync = lambda version: broken.append(version) if version == 2 else None
        with pytest.raises(TrainingStopped, match=f"at {where}: the reward failed on all .*the judge is out"):
            trainer.train()
    broken.clear()
    found = {}
    for row in train_untimed(cfg):
        found[row["step"]] = found.get(row["step"], {}) | row
    assert list(found.values()) == undisturbed


BELOW = (
    "no sample counts as solved: the best one scores {}, below reward.success=1{}; set reward.success to the best value"
)
REJECTED = ", and reward.failure=0 is not passed: every group is rejected"


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ({"kind": "loop_rewards:half_of_parity"}, BELOW.format("0.5", "")),
        ({"kind": "loop_rewards:loss_of_parity"}, BELOW.format("0", REJECTED)),
        ({"weights": {"loop_rewards:half_of_parity": 1.0, "format": 0.1}}, BELOW.format("0.5", "")),
        ({"kind": "loop_rewards:half_of_parity", "success": 0.5}, None),
        ({"kind": "loop_rewards:loss_of_parity", "success": 0.0, "failure": -1.0}, None),
        ({"kind": "loop_rewards:always_wrong"}, None),  # all alike: the policy may simply be wrong
        ({"kind": "loop_rewards:length_parity"}, None),
        ({"kind": "numeric"}, None),  # a built-in one reaches its best, whatever a weak policy does
    ],
)
def test_a_reward_below_its_success_is_warned_about_once_at_the_first_step(make_config, settings, best):
    with Trainer(make_config(reward=settings)) as trainer:
        before = len(trainer.notices)
        trainer.step()
        warnings = [w for w in trainer.notices[before:] if "counts as solved" in w]
        trainer.step()
    assert len(warnings) == (best is not None) == len([w for w in trainer.notices if "counts as solved" in w])
    assert all(w.startswith(f"step 1: {best}") for w in warnings)


def test_every_reward_of_a_weighted_sum_is_in_metrics_and_samples(make_config, sums):
    parity = "loop_rewards:length_parity"
    cfg = make_config(
        reward={"weights": {"numeric": 1.0, parity: 0.5}},
        data={"eval": str(sums)},
        eval={"every": 1, "limit": 3},
        train={"steps": 1},
        record={"samples": 6, "samples_every": 1},
    )
    row = train_untimed(cfg)[-1]
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    assert len(samples) == 24
    for sample in samples:
        assert sample["components"][parity] == len(sample["response"]) % 2
        assert sample["reward"] == sample["components"]["numeric"] + 0.5 * sample["components"][parity]
    own = [sample["components"] for sample in samples if not sample["off_policy_tokens"]]
    for name in ("numeric", parity):
        assert row[f"critic/component/{name}"] == pytest.approx(sum(c[name] for c in own) / len(own))
    total = row["critic/component/numeric"] + 0.5 * row[f"critic/component/{parity}"]
    assert total == pytest.approx(row["critic/rewards/mean"])
    held_out = row["val-core/component/numeric"] + 0.5 * row[f"val-core/component/{parity}"]
    assert held_out == pytest.approx(row["val-core/score"])
    assert all(sample["components"] for sample in read_json_lines(cfg.folder / "eval_samples.jsonl"))


def test_one_reward_alone_has_no_components(make_config):
    cfg = make_config(train={"steps": 1})
    row = train_untimed(cfg)[-1]
    assert not any("component" in key for key in row)
    assert not any("components" in sample for sample in read_json_lines(cfg.folder / "samples.jsonl"))
