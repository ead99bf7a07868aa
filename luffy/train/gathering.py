"""Gathering sharded weights once per mini-batch (`parallel.gather`): when it is done, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from luffy.config import Config
from luffy.distributed.shard import gathered_bytes
from luffy.distributed.world import World
from luffy.train.activations import GradientCheckpointing
from luffy.train.packing import Bin, family_of
from luffy.train.scorer import TokenScorer
from luffy.types import Sample


class Gathering:
    """One process's part of the decision. Processes may have unequal room, so the caller takes the smallest answer:
    all of them must gather in the same passes."""

    def __init__(self, cfg: Config, world: World, device: torch.device, checkpointing: GradientCheckpointing) -> None:
        self._wanted, self._dtype = cfg.parallel.gather, cfg.model.dtype
        self._device, self._checkpointing = device, checkpointing
        self._never = not world.joined or self._wanted == "micro_batch" or cfg.parallel.cpu_offload
        # Rollouts in another thread take and give back memory meanwhile: what is free now says little.
        self._may_measure = device.type == "cuda" and cfg.async_.max_staleness == 0

    def of_update(self, scorer: TokenScorer, samples: Sequence[Sample], bins: Sequence[Bin]) -> int:
        """Bytes of weights and gradients to keep during the passes of a mini-batch; 0: gather in every pass."""
        if self._never:
            return 0
        wanted = gathered_bytes(scorer, self._dtype, gradients=True)
        if self._wanted == "mini_batch":
            return wanted
        largest = max((_tokens(samples, bin_) for bin_ in bins), default=(0, 0))
        fits = self._may_measure and self._checkpointing.leaves_room(*largest, self._device, wanted)
        return wanted if fits else 0

    def of_scoring(self, scorer: TokenScorer) -> int:
        """The same for passes without gradients; another model than the policy may compute in float32."""
        if self._never:
            return 0
        policy = scorer.model is self._checkpointing.model
        wanted = gathered_bytes(scorer, self._dtype if policy else "float32", gradients=False)
        if self._wanted == "mini_batch":
            return wanted
        fits = self._may_measure and self._checkpointing.leaves_room(0, 0, self._device, wanted)
        return wanted if fits else 0


def _tokens(samples: Sequence[Sample], bin_: Bin) -> tuple[int, int]:
    """Computed and attended tokens of a micro-batch: a prompt once, and once per sample."""
    families = [family_of(samples, members) for members in bin_]
    attended = sum(family.prompt * len(family.responses) + sum(family.responses) for family in families)
    return sum(family.tokens for family in families), attended
