"""The rule `speculative` for a second model that shows only what it drew, next to a policy that scores any token.

Under the rule a token y is the policy's with probability min(d(y), g(y)) and an override with probability (g - d)+(y);
both together are g(y). So the second model may write first: y from g, then y counts as the policy's with probability
min(1, d(y) / g(y)) and as an override otherwise. Tokens and overrides are distributed as under the native rule, the
behaviour is g(y), and neither whole distribution is needed. After the last override that a response may have, the
policy continues alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luffy.rollout.engine import Engine, OnProgress
from luffy.rollout.overrides.pair import OverridingPair, at_temperature, check_exact
from luffy.rollout.overrides.verify import ACCEPT_STREAM, uniforms
from luffy.rollout.sampling import SamplingRows
from luffy.types import Completion, Request

Score = Callable[[Sequence[Request], Sequence[Tensor]], list[Tensor]]


class CoupledEngine(OverridingPair):
    """``score(requests, token_ids)`` gives the policy's log-probs [T] of tokens that continue each request, at its
    temperature. ``second_temperature``: of the second model; None: the request's."""

    def __init__(
        self,
        draft: Engine,
        second: Engine,
        score: Score,
        max_overrides: int | None = None,
        second_temperature: float | None = None,
    ) -> None:
        super().__init__(draft, second)
        self.score = score
        self.max_overrides = max_overrides
        self.second_temperature = second_temperature

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        if not requests:
            return []
        for request in requests:
            check_exact(request)
        asked = [at_temperature(request, self.second_temperature) for request in requests]
        texts = self.second.generate(asked, progress)
        own = self.score(requests, [text.token_ids for text in texts])
        made = [self._marked(*each) for each in zip(requests, texts, own, strict=True)]
        return self._continued(requests, texts, made)

    def _marked(self, request: Request, text: Completion, own: Tensor) -> Completion:
        """The second model's text up to the last override that the response may have."""
        seeds = SamplingRows.of([request], torch.device("cpu")).seeds
        positions = request.start + torch.arange(own.numel())
        kept = uniforms(seeds ^ ACCEPT_STREAM, positions[None])[0] < (own - text.log_probs).clamp(max=0.0).exp()
        spent = (~kept).cumsum(dim=0) - (~kept).long()  # overrides before each token
        limit = own.numel() if self.max_overrides is None else int((spent < self.max_overrides).sum())
        drawn_with = text.log_probs[:limit]
        return Completion(
            token_ids=text.token_ids[:limit],
            log_probs=own[:limit],
            finish=text.finish,
            overrides=~kept[:limit],
            behavior_log_probs=drawn_with,
            guidance_log_probs=drawn_with,
        )

    def _continued(
        self, requests: Sequence[Request], texts: Sequence[Completion], made: list[Completion]
    ) -> list[Completion]:
        """The policy continues the responses that were cut."""
        cut = [i for i, text in enumerate(texts) if made[i].token_ids.numel() < text.token_ids.numel()]
        asked = [_continuing(requests[i], made[i].token_ids.tolist()) for i in cut]
        for i, rest in zip(cut, self.draft.generate(asked) if asked else [], strict=True):
            made[i] = _joined(made[i], rest)
        return made


def _continuing(request: Request, written: list[int]) -> Request:
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(written))
    return replace(request, sampling=sampling, prefix_ids=(*request.prefix_ids, *written))


def _joined(begun: Completion, rest: Completion) -> Completion:
    """``rest`` is the policy's own: it overrides nothing, and the second model's log-probs of it are unknown."""
    assert begun.overrides is not None and begun.behavior_log_probs is not None
    return Completion(
        token_ids=torch.cat([begun.token_ids, rest.token_ids]),
        log_probs=torch.cat([begun.log_probs, rest.log_probs]),
        finish=rest.finish,
        overrides=torch.cat([begun.overrides, torch.zeros_like(rest.token_ids, dtype=torch.bool)]),
        behavior_log_probs=torch.cat([begun.behavior_log_probs, rest.log_probs]),
        guidance_log_probs=torch.cat([begun.behavior_log_probs, torch.full_like(rest.log_probs, torch.nan)]),
    )
