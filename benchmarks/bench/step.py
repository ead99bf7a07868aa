"""A whole training step, by the trainer itself: plan, rollout, reward, credit, packing, update, record."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.kernels import profiled
from bench.limits import Response, peak_gib, reset_peak, roofline_seconds, update_flops
from bench.models import random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from luffy.config import Config
from luffy.models.load import DTYPES, DtypeName
from luffy.models.machine import Machine, synchronize
from luffy.rollout import NativeEngine
from luffy.schema import build
from luffy.step.run_state import StepBatch
from luffy.train.loop import Trainer
from luffy.train.recording import Records, throughput

ON_DEVICE = ("rollout", "old_log_probs", "update")  # phases whose time is the model's; the rest of a step is outside


def write_inputs(folder: Path, shape: str, dtype: DtypeName, device: str, problems: int, prompt_tokens: int) -> None:
    """A random model, a tokenizer with one token per word, and prompts of exactly so many words. What ends a response
    is a token of the tokenizer that the model has no row for: none ends early, whichever system reads this."""
    model = random_model(shape, dtype, device)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    vocabulary = {f"w{i}": i for i in range(model.config.vocab_size)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="w0", unk_token="w0")
    # In a folder of its own: beside the model, `transformers` would take it for that model's usual kind.
    tokenizer.save_pretrained(folder / "tokenizer")
    with (folder / "train.jsonl").open("w") as file:
        for i in range(problems):
            words = " ".join(f"w{3 + (7 * i + 13 * j) % (len(vocabulary) - 4)}" for j in range(prompt_tokens))
            file.write(json.dumps({"prompt": words, "answer": "1"}) + "\n")


def step_config(
    folder: Path, problems: int, samples: int, new_tokens: int, dtype: DtypeName, device: str, overrides: dict[str, Any]
) -> Config:
    settings: dict[str, Any] = {
        "name": "bench",
        "out": str(folder / "runs"),
        "model": {
            "path": str(folder / "model"),
            "tokenizer": str(folder / "tokenizer"),
            "dtype": dtype,
            "device": device,
        },
        "data": {"train": str(folder / "train.jsonl"), "style": "plain", "max_prompt_tokens": 4096},
        "reward": {"kind": "bench.rewards:coin"},
        "rollout": {"n": samples, "max_tokens": new_tokens},
        "guidance": {"n_prefix": 0},
        "batch": {"problems": problems},
        "algorithm": {"reject_extreme": False, "entropy_coef": 0.0},
        "train": {"steps": 1000, "save_every": 1000},
        "record": {"tensorboard": False, "samples_every": 0},
    }
    for section, values in overrides.items():
        settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
    return build(Config, settings)


def bench_step(
    shape: str, dtype: DtypeName, device: str, problems: int, samples: int, prompt_tokens: int, new_tokens: int,
    steps: int = 2, overrides: dict[str, Any] | None = None, profile: bool = False, warm_up: bool = True,
) -> tuple[Machine, list[dict[str, Any]]]:  # fmt: skip
    """``steps`` timed steps after one that warms up; with ``profile``, one more to see how long the GPU was idle."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, shape, dtype, device, problems * (steps + 2), prompt_tokens)
        cfg = step_config(folder, problems, samples, new_tokens, dtype, device, overrides or {})
        machine = Machine.measure(torch.device(device), DTYPES[dtype])
        with Trainer(cfg) as trainer:
            return machine, timed_steps(trainer, machine, steps, profile, warm_up)


def timed_steps(
    trainer: Trainer, machine: Machine, steps: int, profile: bool = False, warm_up: bool = True
) -> list[dict[str, Any]]:
    device = trainer.run.policy.device
    rows = []
    with trainer.recording() as records:

        def measured() -> dict[str, Any]:
            seconds, batch, values = one_step(trainer, records, device)
            return figures(trainer, responses(batch), machine, seconds, values)

        if warm_up:
            measured()
        for _ in range(steps):
            reset_peak(device)
            rows.append(measured() | {"peak_gib": peak_gib(device)})
        if profile and device.type == "cuda":
            seconds = min(row["seconds"] for row in rows)
            rows[-1]["gpu_idle_share"] = _idle_share(lambda: one_step(trainer, records, device)[0], seconds, device)
    return rows


def one_step(trainer: Trainer, records: Records, device: torch.device) -> tuple[float, StepBatch, dict[str, float]]:
    """Seconds of a step with all that a run does for it, writing its figures down included; the step, its figures."""
    synchronize(device)
    started = time.perf_counter()
    batch = trainer.step(records)
    values = records.log(batch.metrics, throughput(batch.metrics, time.perf_counter() - started))
    synchronize(device)
    return time.perf_counter() - started, batch, values


def responses(batch: StepBatch) -> list[Response]:
    return [
        Response(len(group.task.prompt_ids), rollout.token_ids.numel())
        for group in batch.groups.values()
        for rollout in group.rollouts
    ]


def figures(
    trainer: Trainer, responses: Sequence[Response], machine: Machine, seconds: float, values: Mapping[str, float]
) -> dict[str, Any]:
    """MFU and speed of the update are over its packing too, as `luffy bench update` has them; for the share outside the
    model packing is outside."""
    named = {k.removeprefix("timing_s/"): v for k, v in values.items() if k.startswith("timing_s/")}
    phases = {phase: taken for phase, taken in named.items() if phase != "step"}
    engine = trainer.run.engines.current
    assert isinstance(engine, NativeEngine)
    rollout, update = phases["rollout"], phases["update"] + phases["pack"]
    tokens, computed = values["perf/update_tokens"], values["perf/computed_tokens"]
    new = sum(response.new for response in responses)
    return {
        "seconds": seconds, "phases": phases, "new_tokens": new, "update_tokens": tokens, "computed_tokens": computed,
        "tokens_per_second": tokens / seconds, "rollout_tokens_per_second": new / rollout,
        "update_tokens_per_second": tokens / update,
        "mfu": update_flops(trainer.model, computed) / update / machine.flops,
        "roofline_share": roofline_seconds(trainer.model, responses, machine, engine.max_slots) / rollout,
        "outside": 1 - sum(phases.get(phase, 0.0) for phase in ON_DEVICE) / seconds,
    }  # fmt: skip


def _idle_share(step: Callable[[], float], seconds: float, device: torch.device) -> tuple[float, float]:
    """The share of a step in which no kernel ran, from below and from above. The profiler slows the host, so the share
    of the profiled step is too high. That of ``seconds``, which a step takes without it, is too low where the profiler
    makes the kernels themselves longer."""
    took = []
    events = profiled(lambda: took.append(step()), device)
    busy = covered(sorted((event.time_range.start, event.time_range.end) for event in events)) / 1e6
    high = 1 - busy / took[0]
    return min(max(1 - busy / seconds, 0.0), high), high


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals, sorted by their start."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
