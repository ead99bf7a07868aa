"""What a step would take on GPUs that need not be there, by the cost model (`luffy.distributed.cost`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luffy.config import Config
from luffy.distributed import cost
from luffy.errors import UserError
from luffy.models.forward import key_value_shape
from luffy.train.estimate import Work
from luffy.types import Request

SHORT = 0.25  # mean length of responses as a share of their limit, where most of them end early


@dataclass(frozen=True)
class GpuCost:
    """Seconds of a step on ``gpus``: with short responses and with all of full length. SFT has one figure."""

    gpus: int
    fast: float
    slow: float


def gpu_named(name: str) -> cost.Gpu:
    if name.lower() not in cost.GPUS:
        raise UserError(f"--gpu {name}: the cost model knows {', '.join(cost.GPUS)}")
    return cost.GPUS[name.lower()]


def gpu_cost(cfg: Config, work: Work, requests: Sequence[Request], gpu: cost.Gpu) -> GpuCost | None:
    """None where weights, optimizer and one sequence do not fit. ``work`` has every response at full length."""
    gpus = 1 if cfg.launch == "local" else cfg.parallel.workers
    if cost.places(step_plan(cfg, work, requests, 1.0, gpus), gpu) < 1:
        return None
    slow = _seconds(cfg, work, requests, 1.0, gpus, gpu)
    return GpuCost(gpus, _seconds(cfg, work, requests, SHORT, gpus, gpu) if requests else slow, slow)


def _seconds(cfg: Config, work: Work, requests: Sequence[Request], share: float, gpus: int, gpu: cost.Gpu) -> float:
    """Rollout, old and reference log-probs (a forward pass each: a third of an update), updates and weight sync."""
    plan = step_plan(cfg, work, requests, share, gpus)
    not_made = (1 - share) * sum(request.sampling.max_tokens for request in requests)
    tokens = sum(one.computed for one in work.every_pass) - not_made
    scored = (bool(requests) and cfg.batch.updates > 1) + bool(requests and cfg.algorithm.kl_coef)
    trained = cost.update(plan, gpu, tokens).seconds * (1 + scored / 3)
    made = cost.rollout(plan, gpu).seconds if requests else 0.0
    return made + trained + cost.weight_sync(plan, gpu).seconds


def step_plan(cfg: Config, work: Work, requests: Sequence[Request], share: float, gpus: int) -> cost.StepPlan:
    """``share``: mean length of the responses, of their limit. Without requests: sequences as long as those of the
    update in the mean."""
    c = work.config
    passes = work.every_pass
    trained = sum(one.attended for one in passes) / max(sum(one.sequences for one in passes), 1)
    kv_heads, width = key_value_shape(c)
    prompts = {request.prompt_ids for request in requests}
    return cost.StepPlan(
        cost.Model("", work.parameters, c.num_hidden_layers, c.hidden_size, kv_heads * width),
        gpus=gpus,
        problems=max(len(prompts), 1),
        samples=len(requests) // max(len(prompts), 1),
        prompt=round(sum(map(len, prompts)) / max(len(prompts), 1)),
        response=max(round(share * max((r.sampling.max_tokens for r in requests), default=trained)), 1),
        longest=1 / share,
        width=cfg.parallel.rollout_group,
        hybrid=cfg.parallel.shard == "hybrid",
        micro_batch=cfg.batch.tokens,
    )
