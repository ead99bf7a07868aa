"""Every method works with an environment, or is refused in one line, as docs/environments.md says."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from builders import write_rows
from conversing import save_chat_model
from test_tool_training import TRACE
from trainings import train, untimed_metrics

from luffy.config import load_config
from luffy.config.legacy import merge
from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.errors import UserError
from luffy.trainer import train_stages

METHODS = sorted(path.stem for path in (BUILT_IN_RECIPES / "methods").glob("*.yaml"))
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talking")
    rows = [
        {"id": f"p{i}", "prompt": f"go {i}", "answer": "1", "traces": [TRACE, TRACE], "hints": ["a", "b", "c"]}
        for i in range(4)
    ]
    return {
        "model": {"path": save_chat_model(folder / "model"), "device": "cpu"},
        "data": {"train": str(write_rows(folder / "chats.jsonl", rows)), "style": "chat", "max_prompt_tokens": 160},
        "reward": {"kind": "numeric", "workers": 1},
        "rollout": {"n": 4, "max_tokens": 40, "slots": 24},
        "environment": {"name": "test_tool_training:Words", "max_turns": 3},
        "optim": {"lr": 1e-3},
        "batch": {"problems": 2, "tokens": 1024},
        "train": {"steps": 1, "save_every": 1, "threads": 1},
        "record": {"tensorboard": False, "samples_every": 0},
    }


NEEDS = {
    "chord": lambda model: {"batch": {"problems": 4}},  # a fifth of two is none
    "chord_phi": lambda model: {"batch": {"problems": 4}},
    "exgrpo": lambda model: {"train": {"steps": 3}, "replay": {"start": 0.0}},
    "relift": lambda model: {"train": {"steps": 2}, "sft_steps": {"buffer": 2}},
    "opd": lambda model: {"teacher": {"path": model}},
    "prefix_rl": lambda model: {"guidance": {"n_prefix": 4}},
    "psft": lambda model: {"batch": {"mini_batch": 2}},
    "iw_opd": lambda model: {"teacher": {"path": model}},
    "sft_rl": lambda model: {
        "stages": {"sft": {"eval": {"hold_out": 2}, "train": {"steps": 1}}, "rl": {"train": {"steps": 1}}}
    },
    "guided": lambda model: {"rollout": {"offpolicy_guidance": {"model_path": model}}},
}


def verdict(name, talking, folder):
    """ "yes", or the line that refuses the method."""
    own = NEEDS.get(name, lambda model: {})(talking["model"]["path"])
    recipe = folder / f"{name}.yaml"
    recipe.write_text(
        yaml.safe_dump({"base": [f"methods/{name}"], **merge(deepcopy(talking), own), "out": str(folder)})
    )
    try:
        cfg = load_config(str(recipe))
        train_stages(cfg) if cfg.stages else train(cfg, method=cfg.made_for)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    assert cfg.made_for == "sft" or untimed_metrics(cfg)[-1]["environment/turns"] >= 1
    return "yes"


def test_the_table_of_the_page(talking, tmp_path):
    found = {name: verdict(name, talking, tmp_path) for name in METHODS}
    for name, said in found.items():
        print(name, "|", said)
    (exceptions,) = re.findall(r"^Every recipe works with an environment, except (.*?):", PAGE.read_text(), re.M)
    assert {name for name, said in found.items() if said != "yes"} == set(re.findall(r"`(\w+)`", exceptions))
