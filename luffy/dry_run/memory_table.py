"""``luffy memory``: the memory that a run needs, without its model and data.

The memory model (`luffy.dry_run.memory`) is asked for a model of a known shape and for prompts and responses as
long as the recipe allows. Neither model nor data are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.config.knobs import LoraConfig
from luffy.dry_run.memory import GIB, Estimate, planned_sample
from luffy.dry_run.models import OtherModels, bare_model, model_of_config, model_shape
from luffy.dry_run.place import Place
from luffy.dry_run.work import work_of
from luffy.errors import UserError
from luffy.models.load import DtypeName
from luffy.models.shapes import SHAPES, nearest_shape, shape_config
from luffy.types import Request, Sampling

SIZES = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-3b", "qwen2-7b", "qwen2-14b", "qwen2-32b", "qwen2-72b")
PROMPT, RESPONSE, PROBLEMS, SLOTS = 1024, 2048, 64, 64  # of the table


def estimate_memory(cfg: Config, method: str, shape: str | None, place: Place) -> Estimate:
    """The bytes of a recipe if all prompts and responses are of full length; ``shape`` instead of its model's."""
    model = model_shape(cfg, _without_weights(cfg.model.path, "model.path", cfg, shape))
    prompts = [(number,) * cfg.data.max_prompt_tokens for number in range(cfg.batch.problems)]
    own = cfg.rollout.n - cfg.guidance.n_prefix if method == "rl" else 0
    shared = prompts[: -(-len(prompts) // cfg.parallel.workers)]  # of one process
    requests = [Request(prompt, 0, Sampling(cfg.longest_response)) for prompt in shared for _ in range(own)]
    samples = cfg.rollout.n if method == "rl" else 1
    planned = [[planned_sample(p, cfg.longest_response)] * samples for p in prompts]
    work = work_of(cfg, model, planned, 0.0, place.on_gpu)
    return Estimate.of(cfg, method, work, requests, _others(cfg, method), place)


def _others(cfg: Config, method: str) -> OtherModels:
    if method != "rl":
        return OtherModels()
    knobs, teacher = cfg.rollout.overrides, None if cfg.teacher.is_self else cfg.teacher.path
    second = knobs.model_path if knobs is not None and not knobs.servers else None
    return OtherModels(
        None if second is None else _without_weights(second, "rollout.offpolicy_guidance.model_path", cfg),
        None if teacher is None else _without_weights(teacher, "teacher.path", cfg),
    )


def _without_weights(path: str, knob: str, cfg: Config, shape: str | None = None) -> Any:
    """The model of a folder on this machine, else one of the shape that its name tells."""
    if shape is None and Path(path).is_dir():
        return bare_model(path, knob, cfg)
    return model_of_config(shape_config(shape or shape_of(path, knob)))


def shape_of(path: str, knob: str = "model.path") -> str:
    """The known shape that is closest to the size in a model's name."""
    found = nearest_shape(path)
    if found is None:
        raise UserError(
            f"'{knob}' {path}: its name tells no size near one of {', '.join(SHAPES)}; name a shape with --shape, or "
            "give a folder of this machine"
        )
    return found


def estimate_lines(cfg: Config, method: str, shape: str | None, gpu: str) -> list[str]:
    """The lines of ``luffy memory RECIPE``."""
    place = place_on(gpu)
    if shape is not None and shape not in SHAPES:
        raise UserError(f"--shape {shape} is unknown: use one of {', '.join(SHAPES)}")
    found = estimate_memory(cfg, method, shape, place)
    local = shape is None and Path(cfg.model.path).is_dir()
    taken = "" if local else f", taken as {shape or shape_of(cfg.model.path)}"
    samples = (
        f"{cfg.batch.problems} problems x {cfg.rollout.n} samples" if method == "rl" else f"{cfg.batch.problems} traces"
    )
    return [
        f"model      {cfg.model.path or '(none)'}{taken}: {found.work.parameters / 1e6:,.0f} M parameters, "
        f"{cfg.model.dtype}; nothing was downloaded",
        f"step       {samples}, prompts of {cfg.data.max_prompt_tokens:,} and responses of {cfg.rollout.max_tokens:,} "
        "tokens, the longest that the recipe allows",
        f"memory     {found.line()}",
    ]


def place_on(gpu: str) -> Place:
    """A GPU to compare with."""
    return Place.with_gpu(gpu, f"an {gpu.upper()}")


# ---- the table


@dataclass(frozen=True)
class Column:
    """A way to train: its heading, its command, its changes of the recipe, and whether several GPUs can."""

    head: str
    method: str
    model: dict[str, Any]
    kl_coef: float = 0.0
    several: bool = True


COLUMNS = (
    Column("SFT", "sft", {}),
    Column("RL, LUFFY", "rl", {}),
    Column("with a reference model", "rl", {}, kl_coef=0.001),
    Column("RL, LoRA", "rl", {"lora": LoraConfig()}),
    Column("RL, 4-bit LoRA", "rl", {"lora": LoraConfig(quantize="nf4")}, several=False),
)


def table_config(column: Column, gpus: int) -> Config:
    """The config of a cell."""
    plain = Config()
    dtype: DtypeName = "float32" if column.model and gpus > 1 else "bfloat16"  # sharded: one dtype
    return replace(
        plain,
        model=replace(plain.model, dtype=dtype, gradient_checkpointing=True, **column.model),
        data=replace(plain.data, max_prompt_tokens=PROMPT),
        rollout=replace(plain.rollout, max_tokens=RESPONSE, slots=SLOTS),
        batch=replace(plain.batch, problems=PROBLEMS),
        algorithm=replace(plain.algorithm, kl_coef=column.kl_coef),
        launch="local" if gpus == 1 else "torchrun",
        parallel=replace(plain.parallel, workers=gpus),
    )


def table_lines(gpu: str, gpus: Sequence[int] = (1, 8), sizes: Sequence[str] = SIZES) -> list[str]:
    """A Markdown table for each number of GPUs: GiB at the peak in each, by model and way to train."""
    place, lines = place_on(gpu), []
    for count in gpus:
        whose = "one GPU" if count == 1 else f"each of {count} GPUs"
        lines += [
            "",
            f"GiB at the peak in {whose}; **bold**: more than an {gpu.upper()} has ({place.total / GIB:.0f}).",
            "",
        ]
        columns = [column for column in COLUMNS if column.several or count == 1]
        lines.append("| shape | parameters | " + " | ".join(column.head for column in columns) + " |")
        lines.append("|---|---:|" + "---:|" * len(columns))
        for size in sizes:
            found = [estimate_memory(table_config(c, count), c.method, size, place) for c in columns]
            needed = [max(one.totals.values()) for one in found]
            cells = [f"{n / GIB:,.0f}" if n <= place.free else f"**{n / GIB:,.0f}**" for n in needed]
            lines.append(f"| {size} | {found[0].work.parameters / 1e9:.2f} B | " + " | ".join(cells) + " |")
    return lines[1:]
