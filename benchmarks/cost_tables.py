"""The tables of docs/results/cost.md: steps of large runs by the cost model, and the model against what one H200 took.

python benchmarks/cost_tables.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from luffy.dry_run.cost import (
    Gpu,
    Model,
    StepPlan,
    fsdp_bytes,
    memory,
    places,
    rollout,
    synced_bytes,
    update,
    weight_sync,
)

GB = 1e9
STORAGE = 20 * GB  # bytes per second that a shared file system takes
HASH_RATE, HASH_CORES = 1.2 * GB, 16  # sha256 on one core, and the cores that the main process has


def checkpoint(plan: StepPlan, gpu: Gpu) -> dict[str, float]:
    """Bytes and seconds of a checkpoint: masters and two moments in fp32, and the model in bf16. Training waits for the
    copy to the host alone."""
    state, total = 12 * plan.model.parameters, 14 * plan.model.parameters
    return {
        "bytes": total,
        "copy to the host": (state / plan.shards + plan.model.weights) / gpu.host_link,
        "write": total / STORAGE,
        "hash": total / (HASH_RATE * min(HASH_CORES, plan.gpus)),
    }


def host_memory(plan: StepPlan, gpu: Gpu) -> float:
    """Bytes of a machine while it starts: every process reads the whole model before it keeps its shard."""
    return min(plan.gpus, gpu.per_machine) * plan.model.weights


def network_bound_below(gpu: Gpu) -> float:
    """Tokens of a micro-batch below which a model sharded over machines waits for the network, whatever its size;
    attention left out."""
    return (8 / gpu.network) / (6 / (gpu.flops * gpu.update_share))


QWEN_1_5B = Model("1.5B", 1.54e9, 28, 1536, 256, outside=0.23e9)
QWEN_7B = Model("7B", 7.6e9, 28, 3584, 512, outside=1.09e9)
QWEN_32B = Model("32B", 32.8e9, 64, 5120, 1024, outside=1.56e9)
LLAMA_70B = Model("70B", 70.6e9, 80, 8192, 1024, outside=2.10e9)
PLANS = (
    StepPlan(QWEN_7B, gpus=8, problems=128),
    StepPlan(QWEN_7B, gpus=8, problems=128, gathered_once=True),
    StepPlan(QWEN_32B, gpus=64, problems=512),
    StepPlan(QWEN_32B, gpus=64, problems=512, width=2),
    StepPlan(QWEN_32B, gpus=64, problems=512, width=4, hybrid=True),
    StepPlan(LLAMA_70B, gpus=256, problems=1024),
    StepPlan(LLAMA_70B, gpus=256, problems=1024, width=4),
    StepPlan(LLAMA_70B, gpus=256, problems=1024, width=8, hybrid=True),
)


def row(plan: StepPlan, gpu: Gpu) -> list[str]:
    name = f"{plan.model.name} on {plan.gpus}, {'hybrid' if plan.hybrid else 'full'}, {plan.width} a copy"
    name += ", gathered once" if plan.gathered_once else ""
    taken, held = memory(plan), places(plan, gpu)
    wanted = plan.responses / (plan.gpus / plan.width)
    room = [f"{taken / GB:,.0f} GB", f"{held:,.0f} of {wanted:,.0f}", f"{host_memory(plan, gpu) / GB:,.0f} GB"]
    if held < 1:
        return [name, *["does not fit"] + ["-"] * 6, *room]
    made, trained, synced = rollout(plan, gpu), update(plan, gpu), weight_sync(plan, gpu)
    saved = checkpoint(plan, gpu)
    return [
        name,
        f"{made:,.0f} s",
        f"{trained:,.0f} s, {sum(fsdp_bytes(plan)) / GB:,.0f} GB",
        f"{synced:,.1f} s, {synced_bytes(plan) / GB:,.0f} GB",
        f"{made + trained + synced:,.0f} s",
        f"{max(made, trained) + synced:,.0f} s",
        f"{saved['copy to the host']:,.1f} s",
        f"{max(saved['write'], saved['hash']):,.0f} s, {saved['bytes'] / GB:,.0f} GB",
        *room,
    ]


@dataclass(frozen=True)
class Measurement:
    """What one H200 took (docs/results/performance.md)."""

    what: str
    plan: StepPlan
    seconds: float
    rolls_out: bool = True
    updates: bool = True

    def predicted(self, gpu: Gpu) -> float:
        gpu = gpu if self.updates else replace(gpu, memory=math.inf)  # no optimizer was there
        made = rollout(self.plan, gpu) if self.rolls_out else 0.0
        return made + (update(self.plan, gpu) if self.updates else 0.0)


def _rolled_out(model: Model, prompts: int, tokens: int, speed: float) -> Measurement:
    plan = StepPlan(model, 1, prompts, samples=1, prompt=128, response=tokens, longest=1.0)
    what = f"{model.name} rollout, {prompts} x {tokens:,} tokens"
    return Measurement(what, plan, prompts * tokens / speed, updates=False)


def _updated(
    model: Model, problems: int, samples: int, prompt: int, tokens: int, seconds: float, adapters: bool = False
) -> Measurement:
    plan = StepPlan(model, 1, problems, samples, prompt, tokens, longest=1.0, adapters=adapters)
    what = f"{model.name} {'LoRA ' if adapters else ''}update, {plan.responses:,} x {tokens:,} tokens"
    return Measurement(what, plan, seconds, rolls_out=False)


MEASURED = (
    _rolled_out(QWEN_1_5B, 64, 256, 34_366),
    _rolled_out(QWEN_1_5B, 256, 512, 80_297),
    _rolled_out(QWEN_1_5B, 1024, 512, 99_696),
    _rolled_out(QWEN_1_5B, 64, 8192, 18_919),
    _rolled_out(QWEN_7B, 256, 256, 23_079),
    _updated(QWEN_1_5B, 32, 8, 121, 512, 2.51),
    _updated(QWEN_1_5B, 8, 1, 121, 8192, 1.53),
    _updated(QWEN_7B, 128, 8, 128, 1278, 114),
    Measurement("1.5B step, 256 x 512 tokens", StepPlan(QWEN_1_5B, 1, 32, 8, 121, 512, longest=1.0), 4.05),
    Measurement(
        "7B step, 1,024 x 1,278 tokens in the mean, 8,192 at most",
        StepPlan(QWEN_7B, 1, 128, 8, 128, 1278, longest=8192 / 1278),
        211,
    ),
    _updated(QWEN_1_5B, 32, 8, 121, 512, 2.18, adapters=True),
    _updated(QWEN_7B, 8, 8, 128, 1024, 3.85, adapters=True),
    _updated(QWEN_7B, 4, 1, 128, 8192, 2.23, adapters=True),
)


HEADER = (
    "plan", "rollout", "update", "sync", "step", "overlapped",
    "checkpoint: training waits", "checkpoint: in the background",
    "GPU memory taken", "sequences that fit, of those to make", "host memory at start",
)  # fmt: skip


def table(gpu: Gpu | None = None) -> str:
    return _lines([HEADER, *(row(plan, gpu or Gpu()) for plan in PLANS)])


def comparison(gpu: Gpu | None = None) -> str:
    """The model against the measurements that there are."""
    rows = []
    for m in MEASURED:
        said = m.predicted(gpu or Gpu())
        rows.append([m.what, f"{said:.2f} s", f"{m.seconds:.2f} s", f"{said / m.seconds - 1:+.0%}"])
    return _lines([("on one H200, 2026-11-16 and 17", "model", "measured", "off by"), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    print(table(), comparison(), sep="\n", end="")
