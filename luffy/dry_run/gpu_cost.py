"""What a step would take on GPUs that need not be there, by the cost model (`luffy.dry_run.cost`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from luffy.config import Config
from luffy.dry_run import cost
from luffy.dry_run.memory_model import Work
from luffy.errors import UserError
from luffy.models.forward import key_value_shape
from luffy.types import Request

TIMED_ENGINES = ("native", "vllm")  # whose rollouts the cost model stands for
SHORT = 0.25  # mean length of responses as a share of their limit, where most of them end early


@dataclass(frozen=True)
class StepTime:
    """Seconds; sending the weights to the engine counts as update."""

    rollout: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.update


def gpu_named(name: str) -> cost.Gpu:
    if name.lower() not in cost.GPUS:
        raise UserError(f"--gpu {name}: the cost model knows {', '.join(cost.GPUS)}")
    return cost.GPUS[name.lower()]


def times_on_gpus(cfg: Config, work: Work, requests: Sequence[Request], gpu: cost.Gpu) -> list[StepTime]:
    """With short responses and with all of full length; SFT has one. Empty where weights, optimizer and one sequence of
    full length do not fit. Rollouts of an engine that is not known take no time."""
    if cost.places(step_plan(cfg, work, requests), gpu) < 1:
        return []
    plans = [step_plan(cfg, work, requests, share) for share in ((SHORT, 1.0) if requests else (1.0,))]
    plans = [replace(plan, gathered_once=gathers_once(cfg, plan, gpu)) for plan in plans]
    return [
        StepTime(
            rollout=cost.rollout(plan, gpu).seconds if requests and cfg.rollout.engine in TIMED_ENGINES else 0.0,
            update=cost.update(plan, gpu).seconds + cost.weight_sync(plan, gpu).seconds,
        )
        for plan in plans
    ]


def gathers_once(cfg: Config, plan: cost.StepPlan, gpu: cost.Gpu) -> bool:
    """Whether the run would gather weights once per mini-batch (`parallel.gather`)."""
    if cfg.parallel.gather == "auto":
        return not cfg.parallel.cpu_offload and cfg.async_.max_staleness == 0 and cost.fits_gathered(plan, gpu)
    return cfg.parallel.gather == "mini_batch"


def step_plan(cfg: Config, work: Work, requests: Sequence[Request], share: float = 1.0) -> cost.StepPlan:
    """``share``: mean length of the responses, of their limit, which ``work`` takes them to have. Without requests:
    sequences as long as those of the update in the mean."""
    c = work.config
    passes = work.every_pass
    trained = sum(one.attended for one in passes) / max(sum(one.sequences for one in passes), 1)
    kv_heads, width = key_value_shape(c)
    prompts = {request.prompt_ids for request in requests}
    return cost.StepPlan(
        cost.Model("", work.parameters, c.num_hidden_layers, c.hidden_size, kv_heads * width, outside_layers(c)),
        gpus=cfg.parallel.workers,
        problems=max(len(prompts), 1),
        samples=len(requests) // max(len(prompts), 1),
        prompt=round(sum(map(len, prompts)) / max(len(prompts), 1)),
        response=max(round(share * max((r.sampling.max_tokens for r in requests), default=trained)), 1),
        longest=1 / share,
        width=cfg.parallel.rollout_group,
        hybrid=cfg.parallel.shard == "hybrid",
        micro_batch=cfg.batch.tokens,
        updates=cfg.batch.updates,
        adapters=work.lora_rank is not None,
        offloaded=cfg.optim.offload,
        recomputed=work.recomputed_share,
        scored=work.scored,
        trained_tokens=work.tokens - (1 - share) * sum(request.sampling.max_tokens for request in requests),
    )


def outside_layers(config: Any) -> int:
    """Parameters of embeddings and head; the last norm is too small to count."""
    return int(config.vocab_size * config.hidden_size * (1 if getattr(config, "tie_word_embeddings", False) else 2))
