"""Keys of older versions: in recipes, on the command line and in the saved configs of older runs."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from luffy.config import PACKAGE, Config, load_config, to_yaml
from luffy.config.legacy import PARTS, SETTINGS_OF_PARTS
from luffy.run_folder.runs import read_config
from luffy.schema import build, describe

# config.yaml of runs of all methods at size tiny, before parts had settings: one complete, the others by their changes.
SAVED = json.loads(
    (Path(__file__).parents[1] / "saved_configs.json").read_text().replace("package:", f"{PACKAGE}/")
)  # fmt: skip
SFT_MODEL = "runs/tiny-sft/checkpoints/latest/model"
SECOND_RUN = {"name": "tiny-sft-rl", "model.path": SFT_MODEL, "prepare": {SFT_MODEL: "luffy sft tiny/sft"}}
SECOND_MODEL = {"guided": ["rollout.offpolicy_guidance.model_path=second"]}


def saved_config(method):
    """The config.yaml that a run of a method had."""
    values, changes = copy.deepcopy(SAVED["complete"]), SAVED["changes"][method]
    for key in changes["gone"]:
        section, _, name = key.rpartition(".")
        inner = values
        for part in section.split(".") if section else ():
            inner = inner[part]
        inner.pop(name)
    for key, value in changes["set"].items():
        inner, (*sections, name) = values, key.split(".") if not key.startswith("prepare.") else key.split(".", 1)
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[name] = value
    return values


@pytest.mark.parametrize("method", SAVED["changes"])
def test_a_saved_config_of_an_older_run_is_the_config_of_today(method, tmp_path):
    saved = saved_config(method)
    if method == "sft_rl":  # it was the second of two runs before recipes had stages
        today = load_config("tiny/on_policy", SECOND_RUN)
    else:
        today = load_config(f"tiny/{method}", SECOND_MODEL.get(method, []))
    assert build(Config, saved) == today
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(saved))
    (tmp_path / "new.yaml").write_text(to_yaml(today))
    assert load_config(tmp_path / "old.yaml") == load_config(tmp_path / "new.yaml") == today
    assert read_config(tmp_path / "old.yaml") == read_config(tmp_path / "new.yaml")  # a resume has changed nothing


CHOSEN = {  # a part that has the setting, and another value of it
    "algorithm.off_policy_reshape_weight": ("algorithm.off_policy_reshape", "logp", 2.0),
    "algorithm.off_policy_reshape_pow_exp": ("algorithm.off_policy_reshape", "rl_plus", 0.25),
    "algorithm.off_policy_reshape_gamma": ("algorithm.off_policy_reshape", "trapo", 0.5),
    "algorithm.on_policy_reshape_weight": ("algorithm.on_policy_reshape", "p_logp", 2.0),
    "algorithm.on_policy_reshape_pow_exp": ("algorithm.on_policy_reshape", "pow", 0.25),
    "algorithm.distill_reward": ("algorithm.credit", "distill", 0.5),
    "guidance.gate_solved": ("guidance.gate", "trace_alone", 2),
    "guidance.gate_samples": ("guidance.gate", "lowest_hint", 3),
    "guidance.gate_shares": ("guidance.gate", "hinted_group", [0.1, 0.2, 0.3]),
    "guidance.gate_sizes": ("guidance.gate", "micro_groups", [1, 1, 1]),
    "guidance.gate_scores": ("guidance.gate", "micro_groups", [0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("old", SETTINGS_OF_PARTS)
def test_an_old_key_is_the_setting_of_the_part(old, tmp_path):
    key, name, value = CHOSEN[old]
    setting = SETTINGS_OF_PARTS[old][0][1]
    expected = load_config(None, {key: {"name": name, setting: value}})
    section, _, last = old.partition(".")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump({section: {key.partition(".")[2]: name, last: value}}))
    assert load_config(recipe) == expected
    assert load_config(None, [f"{key}={name}", f"{old}={value}"]) == expected
    assert load_config(None, [f"{old}={value}", f"{key}={name}"]) == expected  # the order did not matter
    assert load_config(None, [f"{old}={value}", f"{key}={name}", f"{key}.{setting}={value}"]) == expected


def test_an_old_key_that_the_part_does_not_read_changes_nothing():
    assert load_config(None, ["guidance.gate_samples=5", "algorithm.distill_reward=1"]) == load_config(None)


def test_gamma_in_the_name_of_the_shape():
    for recipe in ({"algorithm": {"off_policy_reshape": "p_div_p_0.3", "off_policy_reshape_gamma": 0.1}},
                   {"algorithm": {"off_policy_reshape": {"name": "p_div_p", "gamma": 0.3}}}):  # fmt: skip
        assert load_config(recipe).algorithm.off_policy_reshape.shown == "p_div_p (gamma 0.3)"
    assert (
        load_config(None, ["algorithm.off_policy_reshape.gamma=0.2"]).algorithm.off_policy_reshape.settings.gamma == 0.2
    )
    shape = load_config("tiny/luffy", ["algorithm.off_policy_reshape_gamma=0.4"]).algorithm.off_policy_reshape
    assert shape == "p_div_p" and shape.settings.gamma == 0.4


def test_the_old_command_line_works_with_the_recipes_of_today():
    assert load_config("tiny/scaf").guidance.gate.settings.samples == 4
    assert load_config("tiny/scaf", ["guidance.gate_samples=2"]).guidance.gate.settings.samples == 2
    assert load_config("tiny/trapo", ["guidance.gate_sizes=[1, 2, 3]"]).guidance.gate.settings.sizes == (1, 2, 3)


def test_parts_are_laid_over_each_other_layer_by_layer(tmp_path):
    (tmp_path / "below.yaml").write_text("guidance: {gate: {name: lowest_hint, samples: 4, fractions: [0.5]}}\n")
    above = tmp_path / "above.yaml"
    for text, expected in {
        "{samples: 2}": "lowest_hint (fractions (0.5,), samples 2)",
        "{name: lowest_hint, samples: 2}": "lowest_hint (fractions (0.5,), samples 2)",
        "lowest_hint": "lowest_hint (fractions (0.5,), samples 4)",
        "hinted_group": "hinted_group (fractions (0.25, 0.5, 0.75))",
        "{name: likeliest_traces, samples: 3}": "likeliest_traces (samples 3)",
        "none": "none",
    }.items():
        above.write_text(f"base: below.yaml\nguidance: {{gate: {text}}}\n")
        assert load_config(above).guidance.gate.shown == expected


def test_every_key_that_chooses_a_part_is_in_the_table():
    assert {doc.path for doc in describe(Config) if doc.kind == "part"} == set(PARTS)
