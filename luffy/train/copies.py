"""Which engine rolls out, on which copy of the policy's weights, and in which process.

One process, rollout and update by turns: the engine runs on the policy's own weights. Otherwise there are copies: a
whole one where the weights are sharded, and a second one where a rollout goes on while the first is renewed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from luffy.config import Config
from luffy.distributed.group_engine import GroupEngine, leads
from luffy.distributed.replica import Replica, Twin
from luffy.distributed.world import World
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.train.engines import build_engine
from luffy.train.overrides import BeforeStep, build_rollout_engine

# Of the unused GPU memory when a rollout begins that an update will run beside: gradients, moments and activations
# need the rest, and at the first step none of them is there yet.
SHARE_BESIDE_AN_UPDATE = 0.4


class Engines:
    """``current`` has the policy's newest weights; ``for_rollouts`` is the same, or lags behind it."""

    def __init__(
        self, cfg: Config, method: str, model: nn.Module, device: str, world: World, warn: Callable[[str], None]
    ) -> None:
        """``model`` is still whole: copies are made before it is sharded. SFT rolls nothing out; its evaluations run
        on the native engine."""
        lags = method == "rl" and cfg.async_.max_staleness > 0
        self.cfg, self.device, self.world = cfg, device, world
        self.group_size = cfg.parallel.rollout_group if world.joined else 1
        self.leads = leads(world, self.group_size)
        self.replica: Replica | None = None
        self.twin: Twin | None = None
        if world.joined or lags:
            # An engine spread over the GPUs of a group has shards of its own: their source can wait on the host.
            spread = method == "rl" and cfg.rollout.engine == "vllm" and self.group_size > 1
            self.replica = Replica(model, "cpu" if spread else device, holds=self.leads)
            model = self.replica.model
        self._own: Engine | None = None
        if self.leads:
            native = method == "sft" or lags
            self._own = (
                NativeEngine(model, max_slots=cfg.rollout.slots) if native else build_engine(cfg, model, device, warn)
            )
        self.current = self._shared(self._own)
        if lags and self.replica is not None and self.leads:
            self.twin = self.replica.twin()

    def for_rollouts(self, tokenizer: Any, total_steps: int) -> tuple[Engine, BeforeStep]:
        if self._own is None:
            return self._shared(None), lambda step: None
        own = self._own
        if self.twin is not None:
            own = NativeEngine(self.twin.model, max_slots=self.cfg.rollout.slots, memory_share=SHARE_BESIDE_AN_UPDATE)
        engine, before_step = build_rollout_engine(self.cfg, own, tokenizer, self.device, total_steps)
        return self._shared(engine), before_step

    def _shared(self, engine: Engine | None) -> Engine:
        if self.group_size == 1:
            assert engine is not None
            return engine
        return GroupEngine(engine, self.world, self.group_size)

    def renew(self, model: nn.Module) -> None:
        """The copy becomes what the policy is now."""
        if self.replica is not None:
            self.replica.refresh(model)

    def catch_up(self) -> None:
        """The copy that lags becomes what the renewed one is now."""
        if self.twin is not None:
            self.twin.catch_up()
