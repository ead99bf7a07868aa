"""Accuracy on held-out problems with the run's own engine and verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from luffy.config import EvalConfig, RewardConfig
from luffy.guidance.plan import seed_of
from luffy.metrics import Mean, Metric
from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.types import Completion, Group, Request, Rollout, Sampling, Score, Task


def evaluate(
    tasks: Sequence[Task],
    engine: Engine,
    verifier: Verifier,
    tokenizer: Any,
    cfg: EvalConfig,
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    seed: int,
    reward: RewardConfig,
    name: str = "core",
    progress: Callable[[int, int], None] | None = None,
    seen: Callable[[list[Group]], None] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, Metric]:
    """``val-<name>/accuracy`` is the mean over problems of the mean over ``n`` samples; seeds do not change
    from one evaluation to the next. ``seen`` is handed what was generated, a group a problem. Of several processes
    each takes every ``ranks``-th problem."""
    sampling = Sampling(cfg.max_tokens or max_tokens, cfg.temperature, cfg.top_p, 0, eos_ids)
    requests = [
        Request(task.prompt_ids, seed_of(f"eval:{name}:{seed}:{i}:{k}"), sampling)
        for i, task in enumerate(tasks)
        if i % ranks == rank
        for k in range(cfg.n)
    ]
    completions = engine.generate(requests, progress)
    texts = decode(tokenizer, [c.token_ids for c in completions])
    mine = tasks[rank::ranks]
    problems = [task.problem for task in mine for _ in range(cfg.n)]
    scores = verifier.score(list(zip(problems, texts, strict=True)))
    if seen is not None:
        seen(_groups(mine, completions, scores, cfg.n))
    return {
        f"val-{name}/accuracy": Mean.of(reward.solved(s.value) for s in scores),
        f"val-{name}/score": Mean.of(s.value for s in scores),
        f"val-{name}/response_length": Mean.of(c.token_ids.numel() for c in completions),
        f"val-{name}/truncated": Mean.of(c.finish == "length" for c in completions),
    }


def _groups(tasks: Sequence[Task], completions: Sequence[Completion], scores: Sequence[Score], n: int) -> list[Group]:
    rollouts = [_rollout(tasks[i // n], completion) for i, completion in enumerate(completions)]
    places = [slice(n * i, n * (i + 1)) for i in range(len(tasks))]
    return [Group(task, tuple(rollouts[at]), tuple(scores[at])) for task, at in zip(tasks, places, strict=True)]


def _rollout(task: Task, completion: Completion) -> Rollout:
    nowhere = torch.zeros(completion.token_ids.numel(), dtype=torch.bool)
    own = completion.log_probs.float().cpu()
    return Rollout(task, completion.token_ids.cpu(), nowhere, own, own, nowhere, completion.finish)
