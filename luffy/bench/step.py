"""A whole training step, by the trainer itself: plan, rollout, reward, credit, packing, update, record."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from luffy.bench.machine import Machine, peak_gib, reset_peak, synchronize
from luffy.bench.shapes import random_model
from luffy.config import Config
from luffy.models.load import DtypeName
from luffy.report.console import RunView
from luffy.report.recorder import Recorder
from luffy.schema import build
from luffy.train.loop import Trainer, read


def write_inputs(folder: Path, shape: str, dtype: DtypeName, device: str, problems: int, prompt_tokens: int) -> None:
    """A random model, a tokenizer with one token per word, and prompts of exactly so many words."""
    model = random_model(shape, dtype, device)
    model.save_pretrained(folder / "model")
    vocabulary = {f"w{i}": i for i in range(model.config.vocab_size)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    last = f"w{model.config.vocab_size - 1}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=last, pad_token="w0", unk_token="w0")
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
        "reward": {"kind": "luffy.bench.rewards:coin"},
        "rollout": {"n": samples, "max_tokens": new_tokens},
        "guidance": {"n_prefix": 0},
        "batch": {"problems": problems},
        "algorithm": {"reject_extreme": False, "entropy_coef": 0.0},
        "train": {"steps": 1000, "save_every": 1000},
        "record": {"tensorboard": False, "samples_every": 0},
    }
    for section, values in overrides.items():
        settings[section] = {**settings[section], **values} if isinstance(values, dict) else values
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
        machine = Machine.measure(torch.device(device), torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        with Trainer(cfg) as trainer:
            return machine, timed_steps(trainer, steps, profile, warm_up)


def timed_steps(trainer: Trainer, steps: int, profile: bool = False, warm_up: bool = True) -> list[dict[str, Any]]:
    device = torch.device(trainer.device)
    recorder = Recorder(trainer.cfg, -1, print)
    view = RunView("bench", trainer.total_steps, 0)
    rows = []
    try:
        if warm_up:
            trainer.step(view, recorder)
            trainer.watch.take()
        for _ in range(steps):
            reset_peak(device)
            rows.append(_one_step(trainer, view, recorder, device))
        if profile and device.type == "cuda":
            rows[-1]["gpu_idle_share"] = _idle_share(trainer, view, recorder, device)
    finally:
        recorder.close()
        view.close()
    return rows


def _one_step(trainer: Trainer, view: RunView, recorder: Recorder, device: torch.device) -> dict[str, Any]:
    synchronize(device)
    started = time.perf_counter()
    values = read(trainer.step(view, recorder))
    synchronize(device)
    seconds = time.perf_counter() - started
    phases = {k.removeprefix("timing_s/"): v for k, v in trainer.watch.take().items()}
    tokens = values["perf/update_tokens"]
    on_gpu = phases.get("rollout", 0.0) + phases.get("update", 0.0)
    return {
        "seconds": seconds, "phases": phases, "update_tokens": tokens, "tokens_per_second": tokens / seconds,
        "computed_tokens": values["perf/computed_tokens"], "host_share": 1 - on_gpu / seconds,
        "peak_gib": peak_gib(device),
    }  # fmt: skip


def _idle_share(trainer: Trainer, view: RunView, recorder: Recorder, device: torch.device) -> float:
    """The share of a step in which no kernel ran. Profiling slows the host, so this errs on the high side."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        row = _one_step(trainer, view, recorder, device)
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    return 1 - covered(spans) / 1e6 / row["seconds"]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals, sorted by their start."""
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
