"""What a run over several processes must be able to do: the settings of each feature, and where it was seen to work.

The same features run over gloo (`make test-distributed`), over NCCL (`make test-nccl`) and under Ray (`make test-ray`). With
``LUFFY_SEEN=FILE`` each one that agreed with a run of one process adds a line to the file, from which
`tests/distributed/feature_table.py` makes the table of docs/results/scaling.md.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from luffy.schema import to_dict

# Adam divides by the root of the second moment: with its usual epsilon a gradient of 1e-9 that is rounded
# otherwise moves a weight by a whole learning rate. A larger one lets the comparison see the gradients.
SMOOTH = {"lr": 1e-2, "eps": 1e-3}
GUIDE = "the guide model"  # in place of its path


@dataclass(frozen=True)
class Feature:
    """``changes`` to the config of the run of one process; ``parallel`` of the other run."""

    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    parallel: dict[str, Any] = field(default_factory=dict)
    method: str = "rl"

    @property
    def is_hybrid(self) -> bool:
        return self.parallel.get("shard") == "hybrid"


PARITY = {"reward": {"kind": "loop_rewards:length_parity"}}
FEATURES = {
    "LUFFY, full sharding": Feature(),
    "several updates a step, KL, partial prefixes": Feature(
        {
            "batch": {"mini_batch": 2},
            "algorithm": {"kl_coef": 0.05, "remove_clip": False},
            "guidance": {"n_prefix": 2, "strategy": "random", "min_ratio": 0.2},
        }
    ),
    "token mean, likely tokens dropped, off-policy ratio normalised": Feature(
        {"algorithm": {"loss_reduction": "token-mean", "all_max_clip": 0.9, "off_normalize": True}}
    ),
    "RL with an SFT term, oversampling": Feature(
        {
            "algorithm": {"trace_term": "sft", "oversample_rounds": 3, "loss_reduction": "seq-mean-token-mean"},
            **PARITY,
        }
    ),
    "SFT": Feature(method="sft"),
    "recomputed activations": Feature({"model": {"gradient_checkpointing": True}}),
    "LoRA": Feature({"model": {"lora": {"rank": 4}}}),
    "hybrid sharding, rollout groups": Feature(
        ranks=4, parallel={"shard": "hybrid", "shard_size": 2, "rollout_group": 2}
    ),
    "cpu_offload": Feature(parallel={"cpu_offload": True}),
    "gathered once per mini-batch": Feature(
        {"batch": {"mini_batch": 3, "tokens": 48}, "algorithm": {"kl_coef": 0.05, "remove_clip": False}},
        parallel={"gather": "mini_batch"},
    ),
    "gathered once per mini-batch, hybrid sharding": Feature(
        {"batch": {"tokens": 48}}, ranks=4, parallel={"gather": "mini_batch", "shard": "hybrid", "shard_size": 2}
    ),
    "a gate with further rounds": Feature(
        {
            "guidance": {"n_prefix": 0, "gate": "lowest_hint", "hint_text": " {solution}"},
            "data": {"max_prompt_tokens": 24},
            "rollout": {"max_tokens": 18},
            "algorithm": {"reject_extreme": False},
        }
    ),  # fmt: skip
    "replay, expert batch, SFT steps between": Feature(
        {
            "guidance": {"n_prefix": 0},
            "algorithm": {"credit": "lone_trace_sft", "off_policy_reshape": "exgrpo"},
            "rollout": {"n": 3},
            "batch": {"problems": 8, "expert_share": 0.25, "mini_batch": 4},
            "replay": {"share": 0.4, "start": 0.3, "problems": 5},
            "sft_steps": {"buffer": 2},
            **PARITY,
        }
    ),
    "a teacher that scores": Feature(
        {
            "algorithm": {"credit": "distill", "distill_reward": 1.0, "reject_extreme": False},
            "teacher": {"path": "self", "average": 0.3, "shown": "sibling", "hint_text": "={solution}="},
        }
    ),
    "token overrides by a guide model": Feature(
        {
            "rollout": {"offpolicy_guidance": {"model_path": GUIDE, "rule": "threshold", "tau": 0.3}},
            "algorithm": {"reject_extreme": False},
        }
    ),
    "rollouts one version behind": Feature({"async": {"max_staleness": 1}}),
    "rollouts one version behind, rollout groups": Feature(
        {"async": {"max_staleness": 1}}, ranks=4, parallel={"rollout_group": 2}
    ),
    "partial rollouts": Feature({"rollout": {"max_tokens_per_step": 6, "n": 3}, "train": {"steps": 7}}),
}

# What a dry run with several processes refuses, and a part of the line that says why.
REFUSED = {
    "LoRA in bfloat16": (
        {"model": {"lora": {"rank": 4}, "dtype": "bfloat16"}},
        "adapters learn in float32",
    ),
    "gathered once per mini-batch, cpu_offload": (
        {"parallel": {"workers": 2, "gather": "mini_batch", "cpu_offload": True}},
        "set one of them only",
    ),
    "optim.offload": ({"optim": {"offload": True}}, "set parallel.cpu_offload=true instead"),
    "vLLM servers without a common rollout group": (
        {"rollout": {"engine": "vllm", "vllm": {"servers": ["http://127.0.0.1:9"]}}},
        "set parallel.rollout_group=2",
    ),
    "rollouts one version behind, with a gate": (
        {"async": {"max_staleness": 1}, "guidance": {"n_prefix": 0, "gate": "trace_on_failure"}},
        "set guidance.gate=none or async.max_staleness=0",
    ),
    "rollouts one version behind, with vLLM": (
        {"async": {"max_staleness": 1}, "rollout": {"engine": "vllm"}},
        "set rollout.engine=native or async.max_staleness=0",
    ),
    "partial rollouts, with vLLM": (
        {"rollout": {"engine": "vllm", "max_tokens_per_step": 6}},
        "set rollout.engine=native or rollout.max_tokens_per_step=null",
    ),
    "partial rollouts, with a gate": (
        {"rollout": {"max_tokens_per_step": 6}, "guidance": {"n_prefix": 0, "gate": "trace_on_failure"}},
        "set guidance.gate=none or rollout.max_tokens_per_step=null",
    ),
}


def base_config(make_config, sums, name, **changes):
    base = {
        "optim": SMOOTH,
        "train": {"steps": 3, "save_every": 3},
        "record": {"samples": 6, "samples_every": 1},
        "data": {"eval": str(sums)},
        "eval": {"limit": 5},
    }
    for section, entries in changes.items():
        base[section] = {**base.get(section, {}), **entries}
    return make_config(name=name, **base)


def configs(feature: Feature, make_config, sums, guide: Path, device: str = "cpu", launch: str = "torchrun"):
    """The run of one process and the same one over ``feature.ranks``."""
    changes = json.loads(json.dumps(feature.changes).replace(GUIDE, str(guide)))
    changes["model"] = {**changes.get("model", {}), "device": device}
    alone = base_config(make_config, sums, "alone", **changes)
    parallel = {**feature.parallel, "workers": feature.ranks, "timeout_s": 120}
    return alone, make_config(**to_dict(alone) | {"name": "many", "launch": launch, "parallel": parallel})


def make_guide(tiny_model: Path, folder: Path) -> Path:
    """Another random model with the tokenizer of the first."""
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def note_seen(feature: str, launch: str, ranks: str) -> None:
    """One line for the table, where it is being made."""
    if file := os.environ.get("LUFFY_SEEN"):
        row = {"feature": feature, "launch": launch, "ranks": ranks, "date": str(date.today())}
        with Path(file).open("a") as out:
            out.write(json.dumps(row) + "\n")
