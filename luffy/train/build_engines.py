"""From a config to engines: every engine of a run is built here (docs/engines.md).

The policy's engine has a name, `rollout.engine`; `engine` registers one. `Engines` says on which copy of the policy's
weights it runs, and in which process. A second model that overrides tokens is put beside it (docs/overrides.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from luffy.config import Config, OffPolicyGuidanceConfig
from luffy.config.checks import ENGINE_NAMES
from luffy.distributed.group_engine import GroupEngine, leads
from luffy.distributed.replica import Replica, StaleReplica
from luffy.distributed.world import World
from luffy.models.forward import causal_lm, text_config
from luffy.registry import Registry
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.rollout.overrides.aligned import AlignedEngine
from luffy.rollout.overrides.coupled import CoupledEngine
from luffy.rollout.overrides.speculative import SpeculativeEngine
from luffy.rollout.overrides.turns import TurnsEngine, check_log_probs, check_takes_turns
from luffy.rollout.vllm.colocated import VllmEngine, executor_argument
from luffy.rollout.vllm.http_client import Server, key_from
from luffy.rollout.vllm.remote import RemoteEngine
from luffy.rollout.vllm.transfer import FolderTransfer, NcclTransfer, Transfer
from luffy.train.overrides import load_second_model, rule_at, scores_of, second_servers
from luffy.train.vllm_settings import VLLM_SLOTS, context_of, transfer_of, vllm_arguments, weight_folder

# Of the unused GPU memory when a rollout begins that an update will run beside: gradients, moments and activations
# need the rest, and at the first step none of them is there yet.
SHARE_BESIDE_AN_UPDATE = 0.4

Warn = Callable[[str], None]
BeforeStep = Callable[[int], None]
EngineBuilder = Callable[[Config, nn.Module, str, Warn], Engine]
ENGINES: Registry[EngineBuilder] = Registry("engine")


def engine(name: str) -> Callable[[EngineBuilder], EngineBuilder]:
    """A decorator that registers ``build(cfg, model, device, warn) -> Engine`` for ``rollout.engine``.

    ``model`` is the policy on ``device``; ``warn`` takes a line for the user. ``sync`` of the engine is called before
    its first ``generate``.
    """
    ENGINE_NAMES.add(name)
    return ENGINES.register(name)


def build_engine(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """The policy's engine, by its name."""
    return ENGINES.find(cfg.rollout.engine, "rollout.engine")(cfg, model, device, warn)


@engine("native")
def build_native(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    return NativeEngine(model, max_slots=cfg.rollout.slots, precision=cfg.rollout.precision)


def build_evaluating(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """For what is never trained on."""
    return NativeEngine(model, max_slots=cfg.rollout.slots)


@engine("vllm")
def build_vllm(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """It has no weights before its first ``sync``."""
    v = cfg.rollout.vllm
    transfer_kind = transfer_of(cfg, device)
    if not v.servers:
        folder = weight_folder(cfg) if transfer_kind == "folder" else None
        arguments = executor_argument(cfg.parallel.rollout_group) | vllm_arguments(cfg, causal_lm(model).config)
        return VllmEngine.of_policy(model, arguments, push_folder=folder, seeded=v.request_seeds)
    key = key_from(v.api_key_env)
    nccl = transfer_kind == "nccl"
    transfer: Transfer = NcclTransfer(v.nccl_host) if nccl else FolderTransfer(weight_folder(cfg))
    return RemoteEngine(
        model,
        [Server(url, key, v.timeout_s) for url in v.servers],
        transfer,
        max_context=context_of(cfg, causal_lm(model).config),
        slots=cfg.rollout.slots or VLLM_SLOTS,
        seeded=v.request_seeds,
        warn=warn,
    )


def no_schedule(step: int) -> None:
    """Where no rule of overriding tokens changes with the step."""


def with_overrides(
    cfg: Config, policy: Engine, tokenizer: Any, device: str, total_steps: int, warn: Warn
) -> tuple[Engine, BeforeStep]:
    """The engine that rolls out, and what to call with each step before it so that the rule's schedule moves.

    ``policy`` is the policy's own engine, and the one returned where no second model overrides tokens. Beside the
    native engine a second model in this process decides token by token; any other engine, and a server, shows only what
    it drew, and the two take turns where the rule allows it.
    """
    knobs = cfg.rollout.overrides
    if knobs is None:
        return policy, no_schedule
    if not isinstance(policy, NativeEngine):
        check_takes_turns(knobs.rule, type(policy).__name__)
        check_log_probs(policy, cfg.sampling)
    limits: dict[str, Any] = {"max_overrides": knobs.max_overrides, "second_temperature": knobs.temperature}
    rule = rule_at(knobs, 0, total_steps) if knobs.rule != "aligned" else None
    pair: SpeculativeEngine | TurnsEngine
    if rule is not None and isinstance(policy, NativeEngine) and not knobs.servers:
        second = load_second_model(cfg, knobs, tokenizer, device)
        share = policy.memory_share
        sizes: dict[str, Any] = {"max_slots": cfg.rollout.slots, "max_context": cfg.longest, "memory_share": share}
        pair = SpeculativeEngine(policy.model, second, rule, k=knobs.k, **limits, **sizes)
    else:
        other, vocabulary = _second_engine(cfg, knobs, tokenizer, device, warn)
        if rule is None:
            return AlignedEngine(policy, other, knobs.temperature), no_schedule
        if rule.name == "speculative" and isinstance(policy, NativeEngine):
            score = scores_of(policy.model, cfg.rollout.temperature, cfg.batch.tokens)
            return CoupledEngine(policy, other, score, **limits), no_schedule
        pair = TurnsEngine(policy, other, rule, second_vocabulary=vocabulary, **limits)

    def before_step(step: int) -> None:
        pair.rule = rule_at(knobs, step, total_steps)

    return pair, before_step


def _second_engine(
    cfg: Config, knobs: OffPolicyGuidanceConfig, tokenizer: Any, device: str, warn: Warn
) -> tuple[Engine, int]:
    """The second model as an engine of its own, and how many tokens it can read."""
    if knobs.servers:
        served = second_servers(cfg, knobs, tokenizer, warn)
        return served, served.vocabulary
    second = load_second_model(cfg, knobs, tokenizer, device)
    return NativeEngine(second, max_slots=cfg.rollout.slots), text_config(second.config).vocab_size


class Engines:
    """The engines of a run. ``current`` has the policy's newest weights; ``for_rollouts`` is the same, or is stale.

    In one process that rolls out and updates by turns, the engine runs on the policy's own weights. Otherwise there are
    replicas: one where the weights are sharded, and a second one where a rollout goes on while the first is refreshed.
    """

    def __init__(self, cfg: Config, method: str, model: nn.Module, device: str, world: World, warn: Warn) -> None:
        """``model`` is still whole: replicas are made before it is sharded. SFT rolls nothing out; its evaluations run
        on the native engine."""
        stale = method == "rl" and cfg.async_.max_staleness > 0
        self.cfg, self.device, self.world, self.warn = cfg, device, world, warn
        self.group_size = cfg.parallel.rollout_group if world.joined else 1
        self.leads = leads(world, self.group_size)
        self.replica: Replica | None = None
        self.stale_replica: StaleReplica | None = None
        if world.joined or stale:
            # An engine spread over the GPUs of a group has shards of its own: their source can wait on the host.
            spread = method == "rl" and cfg.rollout.engine == "vllm" and self.group_size > 1
            self.replica = Replica(model, "cpu" if spread else device, holds=self.leads)
            model = self.replica.model
        self._own: Engine | None = None
        if self.leads:
            build = build_evaluating if method == "sft" or stale else build_engine
            self._own = build(cfg, model, device, warn)
        self.current = self._shared(self._own)
        if stale and self.replica is not None and self.leads:
            self.stale_replica = StaleReplica(self.replica.model)

    def for_rollouts(self, tokenizer: Any, total_steps: int) -> tuple[Engine, BeforeStep]:
        """The engine that rolls out, and what to call before each step (`with_overrides`)."""
        if self._own is None:
            return self._shared(None), no_schedule
        own, slots = self._own, self.cfg.rollout.slots
        if self.stale_replica is not None:
            own = NativeEngine(
                self.stale_replica.model,
                max_slots=slots,
                memory_share=SHARE_BESIDE_AN_UPDATE,
                precision=self.cfg.rollout.precision,
            )
        engine, before_step = with_overrides(self.cfg, own, tokenizer, self.device, total_steps, self.warn)
        return self._shared(engine), before_step

    def _shared(self, engine: Engine | None) -> Engine:
        if self.group_size == 1:
            assert engine is not None
            return engine
        return GroupEngine(engine, self.world, self.group_size)

    def renew(self, model: nn.Module) -> None:
        """The replica gets the policy's weights of now."""
        if self.replica is not None:
            self.replica.refresh(model)

    def catch_up(self) -> None:
        """The stale replica gets the weights of the refreshed one."""
        if self.stale_replica is not None:
            self.stale_replica.catch_up()
