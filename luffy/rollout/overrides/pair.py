"""Pairs of models for token overrides, and checks of what they need; every error names the setting to change."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from luffy.errors import UserError
from luffy.metrics import Metric
from luffy.models.forward import causal_lm, head_weight_bias, max_positions, text_config
from luffy.rollout.engine import Engine
from luffy.types import Request


class OverridingPair(Engine):
    """Two engines: ``second`` may override tokens of ``draft``, the policy, and never changes. Sync, sleep and metrics
    are the draft's."""

    def __init__(self, draft: Engine, second: Engine) -> None:
        self.draft, self.second = draft, second

    def sync(self, version: int) -> None:
        self.draft.sync(version)

    def sleep(self) -> None:
        self.draft.sleep()

    def metrics(self) -> dict[str, Metric]:
        return self.draft.metrics()


def at_temperature(request: Request, temperature: float | None) -> Request:
    """The request at another temperature; None: unchanged."""
    if temperature is None:
        return request
    return replace(request, sampling=replace(request.sampling, temperature=temperature))


def check_settings(k: int, max_overrides: int | None, second_temperature: float | None) -> None:
    if k < 1:
        raise UserError(f"k is {k}: the draft proposes at least 1 token in a round")
    if max_overrides is not None and max_overrides < 0:
        raise UserError(f"max_overrides is {max_overrides}: use 0 or more, or None for no limit")
    if second_temperature is not None and not 0.0 < second_temperature < float("inf"):
        raise UserError(f"second_temperature is {second_temperature}: use a positive number")


def check_pair(model: nn.Module, second_model: nn.Module, max_context: int) -> None:
    """Refuse models whose tokens or contexts do not fit each other."""
    draft, second = (text_config(causal_lm(each).config) for each in (model, second_model))
    if draft.vocab_size < second.vocab_size:
        raise UserError(
            f"the policy has a vocabulary of {draft.vocab_size} tokens, the second model of {second.vocab_size}:"
            " if both have the same tokenizer, cut the second model's with luffy.models.drop_padding_tokens"
        )
    longest = max_positions(second)
    if longest < max_context:
        raise UserError(
            f"the second model takes {longest} tokens, less than the context of"
            f" {max_context}: set max_context to at most {longest}"
        )


def check_same_device(model: nn.Module, second_model: nn.Module) -> None:
    devices = [head_weight_bias(m)[0].device for m in (model, second_model)]
    if devices[0] != devices[1]:
        raise UserError(f"the policy lies on {devices[0]}, the second model on {devices[1]}: move one of them")


def check_exact(request: Request) -> None:
    """Refuse sampling under which the behaviour would not be the distribution that is reported."""
    sampling = request.sampling
    if sampling.temperature == 0:
        raise UserError(
            "temperature is 0: under overrides tokens must be drawn from a distribution; sample with a positive"
            " temperature, or decode greedily without overrides"
        )
    if sampling.is_filtered:
        raise UserError(
            f"top_p is {sampling.top_p} and top_k is {sampling.top_k}: under overrides the probability of every token"
            " must be exact, so leave both off (top_p 1, top_k 0)"
        )
