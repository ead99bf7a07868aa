"""Two engines generate alone, and their texts are aligned by position: the approximate kind of overrides.

Where the second model's token differs from the policy's at the same position, the second model's is taken and marked.
After the first difference the policy's log-probs belong to another text, so the behaviour is not exact. The engines
need only generate. See `luffy.rollout.overrides.speculative` for the exact rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from luffy.rollout.engine import Engine, OnProgress
from luffy.rollout.overrides.pair import OverridingPair, at_temperature
from luffy.types import Completion, Request


class AlignedEngine(OverridingPair):
    """``second_temperature``: of the second model; None: the request's."""

    def __init__(self, draft: Engine, second: Engine, second_temperature: float | None = None) -> None:
        super().__init__(draft, second)
        self.second_temperature = second_temperature

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        drafts = self.draft.generate(requests, progress)
        texts = self.second.generate([at_temperature(request, self.second_temperature) for request in requests])
        return [align(draft, second) for draft, second in zip(drafts, texts, strict=True)]


def align(draft: Completion, second: Completion) -> Completion:
    """The second model's text; a token the draft has at the same position is the draft's. Beyond the draft's end every
    token is an override, and the policy's log-prob of it is unknown: the second model's stands in."""
    length, shared = second.token_ids.numel(), min(draft.token_ids.numel(), second.token_ids.numel())
    overrides = torch.ones(length, dtype=torch.bool)
    overrides[:shared] = draft.token_ids[:shared] != second.token_ids[:shared]
    own = second.log_probs.clone()
    own[:shared] = torch.where(overrides[:shared], own[:shared], draft.log_probs[:shared])
    return Completion(
        token_ids=second.token_ids,
        log_probs=own,
        finish=second.finish,
        overrides=overrides,
        behavior_log_probs=own,
        guidance_log_probs=second.log_probs,
    )
