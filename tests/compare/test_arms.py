"""Arms differ in what was asked for, and an arm has nothing of another method."""

import pytest

from luffy.compare.arms import arms_of, method_values, restored
from luffy.compare.held_out import Split
from luffy.config import load_config
from luffy.config.recipes import config_of


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


@pytest.mark.parametrize("method", ["chord", "exgrpo", "relift", "sft_rl", "act_guide"])
def test_another_method_has_nothing_of_the_recipes_own(method):
    plain = method_values(load_config("tiny/luffy"), "on_policy")
    own = config_of(method_values(load_config("tiny/luffy"), method))
    values = method_values(own, "on_policy")
    for section in ("guidance", "teacher", "replay", "sft_steps", "stages", "batch"):
        assert values[section] == plain[section], section


def test_another_method_has_no_second_model():
    assert method_values(load_config("tiny/guided"), "on_policy")["rollout"]["offpolicy_guidance"] is None


def test_a_recipe_with_stages_is_no_on_policy_one():
    cfg = load_config("tiny/sft_rl", {"stages": {"sft": {"patience": 5}}})
    alone, staged = (method_values(cfg, method) for method in ("on_policy", "sft_rl"))
    assert alone["stages"] == {} and staged["stages"]["sft"]["patience"] == 5
    assert alone["algorithm"]["entropy_coef"] == staged["algorithm"]["entropy_coef"] == cfg.algorithm.entropy_coef
