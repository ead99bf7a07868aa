"""Every name that a run writes is on the page that explains them."""

import re
from pathlib import Path

import luffy
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer

PAGE = (Path(luffy.__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")

REMEMBERED = {
    "reward": {"kind": "loop_rewards:length_parity"},
    "algorithm": {"credit": "lone_trace_sft", "off_policy_reshape": "exgrpo", "mix": {"start": 0.5}},
    "batch": {"problems": 8, "expert_share": 0.25},
    "replay": {"share": 0.4, "start": 0.1},
    "sft_steps": {"buffer": 1},
}


def explained():
    """`a/b`, `c` before one colon means a/b and a/c."""
    names = set()
    for cell in re.findall(r"^- (`[^:]*):", PAGE, re.MULTILINE):
        group = ""
        for name in re.findall(r"`([^`]+)`", cell):
            group = name.rpartition("/")[0] or group
            names.add(name if "/" in name else f"{group}/{name}")
    return names


def test_what_runs_write_is_explained(make_config, sums):
    evaluated = {"data": {"eval": str(sums), "eval_also": {"again": str(sums)}}, "train": {"steps": 2, "save_every": 1}}
    runs = {
        "plain": ("rl", evaluated | {"record": {"samples_every": 1, "samples": 1}}),
        "kl": ("rl", {"algorithm": {"kl_coef": 0.1}, "batch": {"mini_batch": 3}}),
        "kl_reward": ("rl", {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}),
        "corrected": ("rl", {"algorithm": {"mismatch_correction": "truncated"}}),
        "stale": ("rl", {"async": {"max_staleness": 1}, "train": {"steps": 2}}),
        "in_parts": ("rl", {"rollout": {"max_tokens_per_step": 8}, "train": {"steps": 2}}),
        "gated": ("rl", {"guidance": {"n_prefix": 0, "gate": "hinted_group", "hint_text": "{solution}"}}),
        "remembered": ("rl", REMEMBERED | {"train": {"steps": 4}}),
        "taught": ("rl", {"algorithm": {"credit": "distill", "reject_extreme": False}, "teacher": {"path": "self"}}),
        "sft": ("sft", {}),
    }
    written = set()
    for name, (method, changes) in runs.items():
        cfg = make_config(**{"name": name, "train": {"steps": 1}} | changes)
        with Trainer(cfg, method) as trainer:
            trainer.train()
        written |= {key for row in read_json_lines(cfg.folder / "metrics.jsonl") for key in row}
    known = explained()
    unexplained = {re.sub(r"^val-\w+/", "val-core/", name) for name in written} - {"step", "time"} - known
    assert not unexplained
    assert {"method/replay_age", "method/sft_steps", "method/sft_buffer"} <= written
    assert {
        "actor/kl_loss",
        "critic/kl",
        "rollout/weight_max",
        "async/ess",
        "rollout/age/max",
        "val-again/score",
    } <= written
    assert "response_length/min" in known and "timing_s/old_log_probs" in known
