"""More processes than problems: the one without a problem goes through the same steps with nothing in its hands."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_tokenizer

from luffy.config import to_yaml
from luffy.models.load import decode
from luffy.rewards import build_verifier
from luffy.run_folder.recorder import read_json_lines
from luffy.step.groups import score
from luffy.train.loop import Trainer

ROOT = Path(__file__).parent.parent.parent


def test_decoding_gives_one_text_for_each_response():
    tokenizer = make_tokenizer()
    assert decode(tokenizer, []) == []
    assert decode(tokenizer, [[], [4, 13, 5, 1]]) == ["", "1+2"]


def test_no_rollouts_make_no_groups():
    with build_verifier("numeric") as verifier:
        assert score([], verifier, make_tokenizer()) == []


def test_a_rank_without_a_held_out_problem_counts_nothing(make_config, sums):
    with Trainer(make_config(data={"eval": str(sums)}, eval={"n": 2, "limit": 1})) as trainer:
        held_out = replace(trainer.held_out, world=replace(trainer.run.world, rank=1, size=2))
        ((name, tasks),) = held_out.sets.items()
        metrics, groups = held_out.evaluate_set(name, tasks, 0, trainer.cfg.eval, lambda done, total: None)
    assert groups == [] and not any(metric.measured for metric in metrics.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["train", "sft"])
def test_two_processes_train_and_evaluate_on_one_problem(make_config, sums, tmp_path, method):
    one = tmp_path / "one.jsonl"
    one.write_text(sums.read_text().splitlines()[0] + "\n")
    cfg = make_config(
        launch="torchrun", parallel={"workers": 2, "timeout_s": 60}, data={"train": str(one), "eval": str(one)},
        batch={"problems": 1}, eval={"every": 0}, train={"steps": 2}, algorithm={"reject_extreme": False},
    )  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "luffy", method, str(recipe)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "actor/loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "val-core/accuracy" in row] == [2]
