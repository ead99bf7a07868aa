"""Groups of a step: their rewards, which of them carry a signal, and what they say about the policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from luffy.config import RewardConfig
from luffy.conversations import Conversations, replayed
from luffy.distributed.world import World
from luffy.errors import AllStopped
from luffy.guidance import given
from luffy.metrics import Max, Mean, Metric, Sum, spread
from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.rewards.kinds import built_in
from luffy.rewards.verifier import GO_ON, why_every_call_failed, why_nothing_was_scored
from luffy.types import Episode, Group, Score, Task


def score(rollouts: Sequence[tuple[Episode, ...]], verifier: Verifier, tokenizer: Any) -> list[Group]:
    """Rewards of all responses; a trace goes through the same verifier, so a wrong one earns its 0."""
    return grouped(rollouts, _judged(list(chain(*rollouts)), verifier, tokenizer), verifier)


def trace_scores(
    task: Task, verifier: Verifier, tokenizer: Any, conversations: Conversations | None = None
) -> list[Score]:
    """The scores of a task's traces; an environment with a reward of its own is played through them."""
    traces = [given(task, trace) for trace in task.demonstrations]
    if not traces or conversations is None or not conversations.counts_reward:
        return verified([(task, trace.answer_ids.tolist()) for trace in traces], verifier, tokenizer)
    played = replayed(conversations, traces)
    (group,) = scored_by_both([tuple(played)], verifier, tokenizer, conversations)
    return list(group.scores)


def scored_by_both(
    episodes: Sequence[tuple[Episode, ...]], verifier: Verifier, tokenizer: Any, conversations: Conversations
) -> list[Group]:
    """Groups of played episodes: what the verifier says of the last turn, and what the environment has to say."""
    every = list(chain(*episodes))
    judged = _judged(every, verifier, tokenizer) if conversations.asks_verifier else [Score(0.0)] * len(every)
    scores = [conversations.score(one.outcome, score) for one, score in zip(every, judged, strict=True)]
    return grouped(episodes, scores, verifier)


def _judged(rollouts: Sequence[Episode], verifier: Verifier, tokenizer: Any) -> list[Score]:
    return verified([(rollout.task, rollout.answer_ids.tolist()) for rollout in rollouts], verifier, tokenizer)


def verified(responses: Sequence[tuple[Task, Sequence[int]]], verifier: Verifier, tokenizer: Any) -> list[Score]:
    """The scores of responses, each with its task and its token ids."""
    texts = decode(tokenizer, [ids for _, ids in responses])
    return verifier.score(
        [(task.problem, text, ids, task.in_thought) for (task, ids), text in zip(responses, texts, strict=True)]
    )


def grouped(rollouts: Sequence[tuple[Episode, ...]], scores: Iterable[Score], verifier: Verifier) -> list[Group]:
    """Groups of the rollouts, with their scores in the same order; those of responses that were cut off may be less."""
    following = iter(scores)
    return [
        Group(group[0].task, group, tuple(verifier.at_its_end(next(following), one.finish) for one in group))
        for group in rollouts
    ]


def stop_if_nothing_was_scored(groups: Iterable[Group], world: World, where: str) -> None:
    """A few failed verifications cost their samples; where all of them failed, on every rank, raises AllStopped. Of a
    single problem only failed calls do: another failure may be the problem's own."""
    of_problems = [group.scores for group in groups]
    scores = [score for group in of_problems for score in group]
    own = (why_nothing_was_scored(scores), why_every_call_failed(scores)) if scores else ("", "")
    problems, samples, nothing, calls = zip(*world.gather((len(of_problems), len(scores), *own)), strict=True)
    reasons = nothing if sum(problems) > 1 else calls
    if all(reason is not None for reason in reasons) and any(reasons):
        raise AllStopped(
            f"stopped at {where}: the reward failed on all {sum(samples)} samples, first: "
            f"{next(filter(None, reasons))}; {GO_ON}"
        )


def why_none_is_solved(
    groups: Iterable[Group], cfg: RewardConfig, world: World, environments: bool = False
) -> str | None:
    """A warning for a custom reward, or that of ``environments``, that solves nothing although it tells samples apart
    or passes ``reward.failure``: its best value may lie below ``reward.success``. Built-in rewards reach it, which
    the config is checked for. All ranks must call this."""
    values = [s.value for group in groups for s in group.scores if s.is_verdict]
    found = [value for part in world.gather((min(values), max(values)) if values else ()) for value in part]
    if not found or (not environments and all(kind in built_in() for kind in cfg.weight_of)):
        return None
    low, best = min(found), max(found)
    if cfg.solved(best) or low == best <= cfg.failure:
        return None
    nothing = f", and reward.failure={cfg.failure:g} is not passed: every group is rejected" if cfg.failed(best) else ""
    whose = "the environment" if environments else f"reward {cfg.name}"
    return (
        f"no sample counts as solved: the best one scores {best:g}, below reward.success={cfg.success:g}{nothing}; set "
        f"reward.success to the best value of {whose}, and reward.failure to its worst"
    )


def is_extreme(group: Group, cfg: RewardConfig) -> bool:
    """All solved or all failed: there is nothing to prefer."""
    return all_solved(group, cfg) or all_failed(group, cfg)


def in_accuracy_band(group: Group, cfg: RewardConfig, low: float, high: float) -> bool:
    """Whether the fraction of correct on-policy samples lies in [low, high]; True without on-policy samples."""
    own = [cfg.solved(s.value) for r, s in zip(group.rollouts, group.scores, strict=True) if r.is_on_policy]
    return not own or low <= sum(own) / len(own) <= high


def all_solved(group: Group, cfg: RewardConfig) -> bool:
    return all(cfg.solved(s.value) for s in group.scores)


def all_failed(group: Group, cfg: RewardConfig) -> bool:
    return all(cfg.failed(s.value) for s in group.scores)


def group_metrics(groups: Sequence[Group], cfg: RewardConfig) -> dict[str, Metric]:
    """What the rollouts of a step say, before any is rejected."""
    pairs = _pairs(groups)
    guided = [(r, s) for r, s in pairs if not r.is_on_policy]
    answered = [g for g in groups if not g.has_traces_alone]
    return {
        **spread("critic/score", (s.value for _, s in pairs)),
        "batch/solve_all": Sum(sum(all_solved(g, cfg) for g in answered)),
        "batch/solve_none": Sum(sum(all_failed(g, cfg) for g in answered)),
        "batch/off_solved": Mean.of(cfg.solved(s.value) for _, s in guided),
        "batch/avg_prefix_ratio": Mean.of(r.prefix_ratio for r, _ in guided),
        **failure_metrics("batch", [s for _, s in pairs]),
    }


def failure_metrics(prefix: str, scores: Sequence[Score]) -> dict[str, Metric]:
    """Verifications that failed: all of them, and by status those that there are."""
    failed = Counter(s.status for s in scores if not s.is_verdict)
    by_status: dict[str, Metric] = {f"{prefix}/verifier_{status}": Sum(count) for status, count in failed.items()}
    return {f"{prefix}/verifier_failures": Sum(failed.total(), len(scores))} | by_status


def component_metrics(prefix: str, scores: Sequence[Score]) -> dict[str, Metric]:
    """Mean score of each reward in a weighted sum, before its weight."""
    names = dict.fromkeys(name for score in scores for name in score.components)
    return {
        f"{prefix}/component/{name}": Mean.of(s.components[name] for s in scores if name in s.components)
        for name in names
    }


def own_metrics(groups: Sequence[Group], cfg: RewardConfig) -> dict[str, Metric]:
    """What the policy can do by itself: of the groups as they were first sampled, before a gate changed any."""
    own = [(r, s) for r, s in _pairs(groups) if r.is_own]
    return {
        **spread("critic/rewards", (s.value for _, s in own)),
        "batch/on_solved": Mean.of(cfg.solved(s.value) for _, s in own),
        **component_metrics("critic", [s for _, s in own]),
        **spread("response_length", [r.length for r, _ in own]),
        "response_length/clip_ratio": Mean.of(r.finish == "length" for r, _ in own),
    }


def _pairs(groups: Sequence[Group]) -> list[tuple[Episode, Score]]:
    return [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, Metric]:
    """How many versions behind the policy that made each of its tokens was."""
    versions = [r.versions for g in groups for r in g.rollouts]
    lags = [step - v[v >= 0] for v in versions]
    return {
        "async/staleness/mean": Mean(sum(int(lag.sum()) for lag in lags), sum(lag.numel() for lag in lags)),
        "async/staleness/max": Max(max((int(lag.max()) for lag in lags if lag.numel()), default=-math.inf)),
    }


def override_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """How much of the responses a second model wrote, over the tokens the engine made."""
    rollouts = [r for g in groups for r in g.rollouts if r.finish != "trace"]
    made = sum(r.drawn for r in rollouts)
    put_in = sum(int(r.overrides.sum()) for r in rollouts)
    missing = sum(
        int((r.overrides & r.guidance_log_probs.isnan()).sum()) for r in rollouts if r.guidance_log_probs is not None
    )
    return {
        "guidance/token_ratio": Mean(put_in, made),
        "guidance/sequence_ratio": Mean.of(bool(r.overrides.any()) for r in rollouts),
        "guidance/missing_log_prob_ratio": Mean(missing, put_in),
    }


def environment_metrics(groups: Iterable[Group]) -> dict[str, Metric]:
    """What the policy did in its environments, in episodes that it wrote at least the end of; nothing without any."""
    every = [rollout for group in groups for rollout in group.rollouts if rollout.outcome is not None]
    own = [(r, r.outcome) for r in every if r.outcome is not None and r.finish != "trace"]
    if not every:
        return {}
    ends = Counter(outcome.end for _, outcome in own)
    faults = Counter(kind for _, outcome in own for kind in outcome.faults)
    rewards = [outcome.reward for _, outcome in own if outcome.reward is not None]
    return {
        "environment/turns": Mean.of(outcome.turns for _, outcome in own),
        "environment/calls": Mean.of(outcome.calls for _, outcome in own),
        "environment/called": Mean.of(outcome.calls > 0 for _, outcome in own),
        "environment/reply_tokens": Mean.of(r.token_ids.numel() - r.length for r, _ in own),
        **({"environment/reward": Mean.of(rewards)} if rewards else {}),
        **{f"environment/end/{end}": Mean(count, len(own)) for end, count in ends.items()},
        **{f"environment/fault/{kind}": Sum(count) for kind, count in faults.items()},
        "environment/traces_left_out": Sum(sum(r.outcome.trace_left_out for r in every if r.outcome is not None)),
    }
