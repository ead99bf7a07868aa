"""Kinds of parts whose functions lie above the config: what is known about them before any is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from luffy.registry import Part, Registry, in_module

Need = Literal["log_probs", "entropy", "teacher"]


@dataclass(frozen=True)
class Baseline(Part):
    """Which responses of a group make its baseline. ``needs_own``: on-policy samples alone: a group must have one."""

    needs_own: bool = False


@dataclass(frozen=True)
class CreditFunction(Part):
    """From the rewards of a group to the credit of its responses; ``credit_function`` explains the fields."""

    needs: tuple[Need, ...] = ()
    lone_traces: bool = False
    needs_contrast: bool = True
    uses_rewards: bool = True
    sft_term: bool = True
    follows_trace_term: bool = False
    scales: bool = False

    def __call__(self, group: Any, cfg: Any) -> Any:
        """With the settings that the config has for it, or its defaults when another part calls it."""
        chosen = cfg.credit if cfg.credit.part is self else ""
        return self.function(group, cfg, *self.settings_for(chosen))


@dataclass(frozen=True)
class SftWeight(Part):
    """A weight of tokens in the SFT term, from ``SftTokens``. ``needs_reference``: it reads log-probs under the
    reference model; ``top``: the entropy of so many likeliest tokens."""

    needs_reference: bool = False
    top: int = 0


@dataclass(frozen=True)
class EngineBuilder(Part):
    """Builds the engine of ``rollout.engine``. ``own_weights``: it runs on the policy's weights in this process, which
    fp8, rollouts ahead of the update and partial rollouts need; ``whole_distribution``: it knows the probability of
    every token, not of those alone that it drew."""

    own_weights: bool = False
    whole_distribution: bool = True


@dataclass(frozen=True)
class TrackerBuilder(Part):
    """Builds a tracker of ``record.trackers``. ``package``: what must be installed; ``optional``: a run goes on without
    it; ``title``: what messages call it; ``fault``: says what else is missing."""

    package: str = ""
    optional: bool = False
    title: str = ""
    fault: Callable[[], str | None] | None = None


BASELINES: Registry[Baseline] = Registry("baseline", Baseline, home="luffy.learn.credit")
CREDIT: Registry[CreditFunction] = Registry(
    "credit function", CreditFunction, home="luffy.learn.credit luffy.learn.estimators"
)
SFT_WEIGHTS: Registry[SftWeight] = Registry("SFT weight", SftWeight, home="luffy.learn.objective")
ENGINES: Registry[EngineBuilder] = Registry("engine", EngineBuilder)
TRACKERS: Registry[TrackerBuilder] = Registry("tracker", TrackerBuilder, home="luffy.run_folder.trackers")

ENGINES.register("native", own_weights=True)(in_module("luffy.train.build_engines:build_native"))
ENGINES.register("vllm", whole_distribution=False)(in_module("luffy.train.build_engines:build_vllm"))
