"""Arms differ in what was asked for, and an arm has nothing of another method."""

import pytest

from luffy.compare.arms import arms_of, method_values, restored
from luffy.compare.held_out import Split
from luffy.config import load_config


@pytest.fixture
def split(tmp_path):
    return Split(*(tmp_path / f"{name}.jsonl" for name in ("train", "validation", "test")), {})


def test_seeds_and_rates_follow_the_recipes(tmp_path, split):
    data = {"data.train": "mine.jsonl", "data.limit": 7, "data.eval_also": {"more": "more.jsonl"}}
    cfg = load_config("tiny/luffy", {"seed": 5, "optim.lr": 2e-4, **data})
    arms = arms_of(cfg, ["luffy"], [], 2, split, tmp_path)
    assert [(arm.seed, arm.cfg.seed) for arm in arms] == [(5, 5), (6, 6)] * 2
    assert [arm.lr for arm in arms] == [arm.cfg.optim.lr for arm in arms] == pytest.approx([2e-4, 2e-4, 6e-4, 6e-4])
    assert {(arm.cfg.data.train, arm.cfg.data.limit) for arm in arms} == {(str(split.train), None)}
    assert not arms[0].cfg.data.eval_also and arms[0].cfg.folder == tmp_path / "luffy-lr0.0002-s5"
    again = restored(cfg, arms[-1], "again")
    assert (again["seed"], again["name"], again["optim"]["lr"]) == (5, "again", arms[-1].lr)
    assert again["data"]["limit"] == 7 and again["out"] == cfg.out


def test_another_method_has_nothing_of_the_recipes_own():
    plain = method_values(load_config("tiny/luffy"), "on_policy")
    for recipe in ("tiny/chord", "tiny/guided", "tiny/exgrpo", "tiny/relift", "tiny/sft_rl"):
        values = method_values(load_config(recipe), "on_policy")
        assert values["batch"]["expert_share"] == 0.0 and values["rollout"]["offpolicy_guidance"] is None
        for section in ("guidance", "teacher", "replay", "sft_steps", "stages"):
            assert values[section] == plain[section], section
