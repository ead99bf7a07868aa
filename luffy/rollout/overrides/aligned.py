"""Two engines write alone, and their texts are aligned by position: the approximate kind of guidance.

Where the guidance model's token differs from the policy's at the same position, the guidance's is taken and marked.
After the first difference the policy's log-probs belong to another text, so the behaviour is not exact; what it asks
of an engine is only to generate. See ``luffy.rollout.overrides.speculative`` for the exact rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from luffy.rollout.engine import GuidedPair, Progress
from luffy.types import Completion, Request


class AlignedEngine(GuidedPair):
    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Completion]:
        drafts = self.draft.generate(requests, progress)
        guided = self.guidance.generate(requests)
        return [align(d, g) for d, g in zip(drafts, guided, strict=True)]


def align(draft: Completion, guidance: Completion) -> Completion:
    """The guidance's text; a token the draft has at the same place is the draft's. Beyond the draft's end every
    token is an override, and the policy's log-prob of it is unknown: the guidance's stands in."""
    length, shared = guidance.token_ids.numel(), min(draft.token_ids.numel(), guidance.token_ids.numel())
    overrides = torch.ones(length, dtype=torch.bool)
    overrides[:shared] = draft.token_ids[:shared] != guidance.token_ids[:shared]
    own = guidance.log_probs.clone()
    own[:shared] = torch.where(overrides[:shared], own[:shared], draft.log_probs[:shared])
    return Completion(
        token_ids=guidance.token_ids,
        log_probs=own,
        finish=guidance.finish,
        overrides=overrides,
        behavior_log_probs=own,
        guidance_log_probs=guidance.log_probs,
    )
