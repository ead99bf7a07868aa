"""LUFFY with vLLM's engines, end to end; `make test-vllm`. GSM8K itself where LUFFY_DATA names it, else rows like its."""

import json
import os
from pathlib import Path

import pytest
import vllm_engines

from luffy.config import Config
from luffy.run_folder.recorder import read_json_lines
from luffy.schema import build
from luffy.train.loop import Trainer

SMOLLM2, DATA = os.environ.get("LUFFY_SMOLLM2"), os.environ.get("LUFFY_DATA")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not SMOLLM2, reason="LUFFY_SMOLLM2 names no folder or .gguf of SmolLM2-135M"),
]


def training_rows(folder):
    if DATA:
        return Path(DATA) / "gsm8k" / "train.jsonl"
    path = folder / "train.jsonl"
    with path.open("w") as file:
        for i in range(40):
            boxes, pens = 2 + i % 7, 3 + i % 5
            question = f"A shop has {boxes} boxes of {pens} pens. It sells {i % 4} pens. How many pens are left?"
            working = f"There are {boxes}*{pens}=<<{boxes}*{pens}={boxes * pens}>>{boxes * pens} pens at first."
            answer = (
                f"{working}\nAfter selling {i % 4} there are {boxes * pens - i % 4} left.\n#### {boxes * pens - i % 4}"
            )
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    return path


def colocated_config(folder, name, lora=None, lr=1e-5, **rollout):
    return build(
        Config,
        {
            "name": name,
            "out": str(folder),
            "model": {"path": SMOLLM2, "device": "cpu", "lora": lora},
            "data": {"train": str(training_rows(folder)), "limit": 40, "max_prompt_tokens": 256},
            "reward": {"kind": "gsm8k", "workers": 1},
            "rollout": {"n": 3, "max_tokens": 96, "slots": 16, **rollout},
            "algorithm": {"reject_extreme": False, "mismatch_correction": "truncated"},
            "optim": {"lr": lr},
            "batch": {"problems": 2, "tokens": 1024},
            "train": {"steps": 5, "save_every": 5},
            "record": {"tensorboard": False, "samples_every": 5},
        },
    )  # fmt: skip


def train_five_steps(cfg):
    with Trainer(cfg) as trainer:
        trainer.train()
        assert trainer.run.engines.current.version == 5
    return read_json_lines(cfg.folder / "metrics.jsonl")


def check_mismatch(rows):
    """Weights move at every step, so an engine that missed one push would show in the next step's difference."""
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["rollout/logprob_diff_mean"] < 1e-3 and row["rollout/logprob_diff_max"] < 1e-2
        assert row["rollout/ess"] > 0.9999 and row["rollout/weight_mean"] == pytest.approx(1.0, abs=1e-3)
        assert row["actor/off_pg_loss"] != 0 and row["actor/grad_norm"] > 0
    assert all("timing_s/sync" in row and "timing_s/sleep" in row for row in rows)


def test_five_steps_of_luffy_colocated(tmp_path):
    check_mismatch(
        train_five_steps(colocated_config(tmp_path, "colocated", engine="vllm", vllm={"args": vllm_engines.ARGUMENTS}))
    )


def test_five_steps_with_adapters_alone(tmp_path):
    vllm = {"args": vllm_engines.ARGUMENTS, "adapters": "alone"}
    cfg = colocated_config(tmp_path, "adapters", lora={"rank": 4}, lr=1e-3, engine="vllm", vllm=vllm)
    check_mismatch(train_five_steps(cfg))
