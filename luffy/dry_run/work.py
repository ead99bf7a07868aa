"""The update of a batch, as the memory and cost models take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luffy.config import Config
from luffy.dry_run.memory import SIZES, Estimate, Work, passes_of, planned_sample
from luffy.dry_run.models import ModelShape, OtherModels, parameters_of
from luffy.dry_run.place import Place
from luffy.models.forward import text_config
from luffy.models.four_bit import BYTES
from luffy.step.crediting import needed_log_probs
from luffy.step.run_state import mini_batches
from luffy.types import Episode, Sample, Task


def estimate_of(
    cfg: Config,
    method: str,
    model: ModelShape,
    others: OtherModels,
    batch: list[Task],
    plan: list[tuple[Episode, ...]] | None,
    place: Place,
) -> Estimate:
    """What the first step needs."""
    scored = scoring_passes(cfg, model, others.teacher, len(batch)) if method == "rl" else 0.0
    requests = [request for group in plan or [] for p in group if (request := p.request) is not None]
    work = work_of(cfg, model, planned_samples(batch, plan), scored, place.on_gpu)
    return Estimate.of(cfg, method, work, requests, others, place)


def planned_samples(batch: list[Task], plan: list[tuple[Episode, ...]] | None) -> list[list[Sample]]:
    """The samples of each problem, every response of the engine as long as it may become."""
    if plan is None:
        return [[planned_sample(t.prompt_ids, max(len(d.token_ids) for d in t.demonstrations))] for t in batch]
    return [
        [planned_sample(p.task.prompt_ids, p.prefix + (p.sampling.max_tokens if p.sampling else 0)) for p in group]
        for group in plan
    ]


def work_of(cfg: Config, model: ModelShape, planned: Sequence[Sequence[Sample]], scored: float, on_gpu: bool) -> Work:
    """The update of these samples."""
    parts = mini_batches(planned, cfg.batch.updates * cfg.parallel.workers)  # of one process, at least one problem
    return Work(
        config=text_config(model.config),
        parameters=model.parameters,
        trained=model.trained,
        itemsize=SIZES[cfg.model.dtype],
        on_gpu=on_gpu,
        lora_rank=None if cfg.model.lora is None else cfg.model.lora.rank,
        checkpointing=cfg.model.gradient_checkpointing,
        passes=[passes_of(part, cfg.batch.tokens, model.shares) for part in parts],
        scored=scored,
        saved=saved_bytes(model, SIZES[cfg.model.dtype]),
    )


def saved_bytes(model: ModelShape, itemsize: int) -> float:
    """Bytes that four-bit weights save; the largest of them is unpacked for its product meanwhile."""
    return model.four_bit * (itemsize - BYTES) - model.largest * itemsize


def scoring_passes(cfg: Config, model: ModelShape, teacher: Any, problems: int) -> float:
    """Forward passes over a batch before its update, in passes of the policy: for old log-probs, by the reference, and
    by a teacher in this process (``teacher`` is None if it is the policy itself)."""
    old, reference = needed_log_probs(cfg, problems)
    passes = len(old) / problems + reference
    if cfg.teacher.path is not None:
        passes += 1.0 if teacher is None else parameters_of(teacher) / model.parameters
    return passes
