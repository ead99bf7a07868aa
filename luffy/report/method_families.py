"""Families of methods, told by their settings, and methods in the order of what they reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luffy.report.curves import estimate
from luffy.report.methods import Method, Styled
from luffy.report.tables import evaluations

OWN = "Own samples"
TRACES = "A trace in the group"
GATED = "Traces or hints on demand"
MIXED = "SFT, alone or beside RL"
TAUGHT = "A second model"
FAMILIES = (OWN, TRACES, GATED, MIXED, TAUGHT)
SECOND_MODELS = (
    "rollout.offpolicy_guidance.model_path",
    "rollout.offpolicy_guidance.servers",
    "teacher.path",
    "teacher.servers",
)


def family_of(settings: Mapping[str, Any]) -> str:
    """The family of a method by its flat config (``Method.settings``)."""
    if any(settings.get(model) for model in SECOND_MODELS):
        return TAUGHT
    if settings.get("guidance.gate", "none") != "none":
        return GATED
    beside = settings.get("batch.expert_share") or settings.get("sft_steps.buffer")
    named = settings.get("algorithm.trace_term") == "sft" or settings.get("algorithm.credit") == "srft"
    if settings.get("command") == "sft" or named or beside:
        return MIXED
    return TRACES if settings.get("guidance.n_prefix") else OWN


def families(methods: Sequence[Styled]) -> dict[str, list[Styled]]:
    """The methods of each family that has any, in the order of FAMILIES."""
    found = {family: [m for m in methods if family_of(m[1].settings) == family] for family in FAMILIES}
    return {family: members for family, members in found.items() if members}


def by_accuracy(methods: Sequence[Styled]) -> list[Styled]:
    """The highest mean of the last held-out accuracies first; what was never evaluated last."""
    metrics = evaluations([run for _, method in methods for run in method.runs])
    return sorted(methods, key=lambda styled: [-final_mean(styled[1], metric) for metric, _ in metrics])


def final_mean(method: Method, metric: str) -> float:
    found = estimate(final_values(method, metric))
    return -1.0 if found is None else found.mean


def final_values(method: Method, metric: str) -> list[float]:
    """The last value of each run that recorded the metric."""
    return [value for run in method.runs if (value := run.last(metric)) is not None]
