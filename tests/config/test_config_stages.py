"""Stages in recipes: their bases, their overrides, and what is refused."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import luffy
from luffy.config import Config, check_made_for, load_config, to_yaml
from luffy.config.stages import StageKnobs, stages_of
from luffy.errors import ConfigError
from luffy.schema import build

PAGE = (Path(luffy.__file__).parents[1] / "docs" / "stages.md").read_text(encoding="utf-8")
RECIPE = """
base: [sizes/tiny, methods/on_policy]
stages:
  - {name: sft, base: methods/sft, until: flat_loss, patience: 2, seconds: 90, eval: {hold_out: 8}, optim: {lr: 1e-3}}
  - {name: opd, base: [methods/opd, mine.yaml], teacher: {path: self, shown: solution}}
  - {name: rl, train: {steps: 5}}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("optim: {lr: 7e-5}\n")
    (tmp_path / "road.yaml").write_text(RECIPE)
    return tmp_path / "road.yaml"


def test_a_stage_is_laid_over_its_base_and_the_run(recipe):
    cfg = load_config(recipe, ["stages.opd.optim.lr=8e-5", "stages.rl.algorithm.credit=rloo", "optim.grad_clip=0.5"])
    sft, opd, rl = stages_of(cfg)
    assert [(s.name, s.number, s.method) for s in (sft, opd, rl)] == [
        ("sft", 1, "sft"),
        ("opd", 2, "rl"),
        ("rl", 3, "rl"),
    ]
    assert (sft.cfg.optim.lr, sft.cfg.eval.hold_out, sft.cfg.made_for, sft.by_loss) == (1e-3, 8, "sft", True)
    assert (opd.cfg.optim.lr, opd.cfg.algorithm.credit, opd.cfg.teacher.path) == (8e-5, "distill", "self")
    assert stages_of(load_config(recipe))[1].cfg.optim.lr == 7e-5
    assert (rl.cfg.algorithm.credit, rl.cfg.train.steps, rl.cfg.teacher.path) == ("rloo", 5, None)
    assert {s.cfg.optim.grad_clip for s in (sft, opd, rl)} == {0.5} and all(not s.cfg.stages for s in (sft, opd, rl))
    assert sft.ending == "ends after 60 steps, or 2 evaluations without a better held-out loss, or 90 seconds"


def test_the_saved_config_is_the_same_recipe(recipe):
    cfg = load_config(recipe)
    assert build(Config, yaml.safe_load(to_yaml(cfg))) == cfg
    assert stages_of(load_config(yaml.safe_load(to_yaml(cfg)))) == stages_of(cfg)


def test_a_recipe_changes_or_removes_a_stage_of_its_base(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: tiny/sft_rl\nstages: {sft: {patience: 9}, more: {}}\n")
    assert [(s.name, s.knobs.patience) for s in stages_of(load_config(mine))] == [("sft", 9), ("rl", 3), ("more", 3)]
    assert load_config("tiny/sft_rl", ["stages={}"]).stages == {} == load_config("tiny/sft_rl", {"stages": None}).stages


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"a": {"optim": {"lrr": 1}}}, "stage 'a': unknown key 'optim.lrr'"),
        ({"a": {"until": "flat"}}, "stage 'a': 'until' must be one of steps, flat_loss, flat_accuracy"),
        ({"a": {"until": "flat_loss"}}, "needs held-out traces; set eval.hold_out"),
        ({"a": {"until": "flat_accuracy", "eval": {"every": 0}}}, "'eval.every' is 0"),
        ({"a": {"until": "flat_accuracy", "data": {"eval": None}}}, "stage 'a': 'data.eval_also' names further"),
        ({"a": {"hand_on": "best", "train": {"keep_best": False}}}, "set train.keep_best=true"),
        ({"a": {"seed": 3}}, "'seed' is the same in all stages"),
        ({"a": {"model": {"path": "elsewhere"}}}, "'model.path' is that of the run"),
        ({"a b": {}}, "a name has letters"),
        ({"a": 5}, "must be a mapping"),
        ([{"name": "a"}, {"name": "a"}], "each with a 'name' of its own"),
        (7, "'stages' must be a mapping"),
        ({"a": {"base": "methods/nothing"}}, "no recipe 'methods/nothing'"),
    ],
)  # fmt: skip
def test_mistakes_name_the_stage_and_the_remedy(stages, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config("tiny/on_policy", {"stages": stages})


def test_sft_refuses_stages_and_rl_stages_must_learn():
    with pytest.raises(ConfigError, match=r"has stages \(sft, rl\): luffy train makes them all"):
        check_made_for(load_config("tiny/sft_rl"), "sft")
    check_made_for(load_config("tiny/sft_rl"), "rl")
    with pytest.raises(ConfigError, match="no step would have an update"):
        check_made_for(load_config("tiny/sft_rl", ["stages.rl.rollout.n=1"]), "rl")


def test_the_page_has_every_setting_of_a_stage_with_its_default():
    rows = dict(re.findall(r"^\|`(\w+)`\|([^|]+)\|", PAGE, re.MULTILINE))
    assert set(rows) == {field.name for field in fields(StageKnobs)}
    told = {name: text.strip("` ") for name, text in rows.items()}
    for field in fields(StageKnobs):
        if field.default not in (None, 0.0):
            assert told[field.name] == str(field.default)
