"""From a config to engines: every engine of a run is built here (docs/engines.md).

The policy's engine has a name, `rollout.engine`; `engine` registers one. `Engines` says on which copy of the policy's
weights it runs, and in which process. A second model that overrides tokens is put beside it (docs/overrides.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config import Config
from luffy.config.knobs import VLLM_LORA_RANKS, OffPolicyGuidanceConfig
from luffy.config.parts import ENGINES
from luffy.core.override_rules import Rule
from luffy.distributed.group_engine import GroupEngine, leads
from luffy.distributed.replica import Replica, StaleReplica
from luffy.distributed.world import World
from luffy.errors import ConfigError
from luffy.learn.packing import pack
from luffy.learn.scorer import TokenScorer
from luffy.models.forward import causal_lm, evaluating, max_positions, text_config
from luffy.models.load import (
    check_fits,
    check_same_tokenizer,
    drop_padding_tokens,
    gguf_file,
    load_model,
    load_tokenizer,
    read_model_config,
    token_count,
)
from luffy.models.machine import pick_device
from luffy.registry import NoSettings
from luffy.rollout.engine import Engine
from luffy.rollout.native import Drafts, NativeEngine
from luffy.rollout.overrides.aligned import AlignedEngine
from luffy.rollout.overrides.coupled import CoupledEngine, Score
from luffy.rollout.overrides.speculative import SpeculativeEngine
from luffy.rollout.overrides.turns import TurnsEngine, check_log_probs, check_takes_turns
from luffy.rollout.policy_weights import check_adapters_alone
from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments, executor_argument
from luffy.rollout.vllm.http_client import VLLM_SLOTS, Server, key_from
from luffy.rollout.vllm.remote import RemoteEngine
from luffy.rollout.vllm.served_model import ServedModel
from luffy.rollout.vllm.server_process import become_server, server_command, server_environment
from luffy.rollout.vllm.transfer import AdapterTransfer, FolderTransfer, NcclTransfer, Transfer
from luffy.types import Request, Sample

# Of the unused GPU memory when a rollout begins that an update will run beside: gradients, moments and activations
# need the rest, and at the first step none of them is there yet.
SHARE_BESIDE_AN_UPDATE = 0.4
SECTION = "rollout.offpolicy_guidance"

Warn = Callable[[str], None]
BeforeStep = Callable[[int], None]
BuildEngine = Callable[..., Engine]


def engine(name: str, settings: type = NoSettings, **facts: bool) -> Callable[[BuildEngine], BuildEngine]:
    """Register ``build(cfg, model, device, warn) -> Engine`` for ``rollout.engine``.

    ``model`` is the policy on ``device``; ``warn`` prints a line. ``sync`` is called before the first ``generate``.
    Settings are a fifth argument.
    """
    return ENGINES.register(name, settings=settings, **facts)


def build_engine(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """The policy's engine, by its name."""
    builder = ENGINES.find(cfg.rollout.engine, "rollout.engine")
    built: Engine = builder(cfg, model, device, warn, *builder.settings_for(cfg.rollout.engine))
    return built


def build_native(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    return NativeEngine(model, cfg.rollout.slots, precision=cfg.rollout.precision, drafts=drafts_of(cfg))


def drafts_of(cfg: Config) -> Drafts | None:
    """What the native engine takes drafts from, where the config has any."""
    knobs = cfg.rollout.drafts
    return None if knobs.when == "never" else Drafts(knobs.tokens, knobs.memory_mb, always=knobs.when == "always")


def build_evaluating(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """The engine for held-out problems."""
    return NativeEngine(model, max_slots=cfg.rollout.slots)


def build_vllm(cfg: Config, model: nn.Module, device: str, warn: Warn) -> Engine:
    """vLLM in this process or on servers; it has no weights before its first ``sync``."""
    v = cfg.rollout.vllm
    transfer_kind, alone = transfer_of(cfg, device), v.adapters == "alone"
    if not v.servers:
        folder = weight_folder(cfg) if transfer_kind == "folder" else None
        arguments = executor_argument(cfg.parallel.rollout_group) | vllm_arguments(cfg, causal_lm(model).config)
        return VllmEngine.of_policy(model, arguments, push_folder=folder, seeded=v.request_seeds, adapters_alone=alone)
    key = key_from(v.api_key_env)
    transfer: Transfer
    if alone:
        check_adapters_alone(model)
        transfer = AdapterTransfer(weight_folder(cfg))
    else:
        transfer = NcclTransfer(v.nccl_host) if transfer_kind == "nccl" else FolderTransfer(weight_folder(cfg))
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
    """Do nothing: no rule of token overrides changes with the step."""


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
    """The second model as an engine of its own, and the size of its vocabulary. A UserError if its tokenizer,
    vocabulary or context does not fit the policy's."""
    if knobs.servers:
        v = cfg.rollout.vllm
        key = key_from(v.api_key_env)
        servers = [Server(url, key, v.timeout_s, f"{SECTION}.servers") for url in knobs.servers]
        slots = cfg.rollout.slots or VLLM_SLOTS
        served = ServedModel(servers, tokenizer, cfg.longest, slots=slots, seeded=v.request_seeds, warn=warn)
        return served, served.vocabulary
    second = load_second_model(cfg, knobs, tokenizer, device)
    return NativeEngine(second, max_slots=cfg.rollout.slots), text_config(second.config).vocab_size


def load_second_model(cfg: Config, knobs: OffPolicyGuidanceConfig, tokenizer: Any, device: str) -> PreTrainedModel:
    """The second model, frozen, without rows of padding: it must not write tokens that the policy cannot read. A
    UserError if its tokenizer, vocabulary or context does not fit the policy's."""
    check_same_tokenizer(tokenizer, load_tokenizer(knobs.model_path, cfg.model.trust_remote_code))
    model = load_model(knobs.model_path, knobs.dtype or cfg.model.dtype, device, cfg.model.trust_remote_code)
    check_fits(f"{SECTION}.model_path={knobs.model_path}", model.config, tokenizer, cfg.longest)
    drop_padding_tokens(model, token_count(tokenizer))
    model.requires_grad_(False).eval()
    return model


def scores_of(model: nn.Module, temperature: float, budget: int) -> Score:
    """Log-probs of given tokens under ``model``, from forward passes over at most ``budget`` tokens."""
    scorer, device = TokenScorer(model), next(model.parameters()).device

    def score(requests: Sequence[Request], token_ids: Sequence[Tensor]) -> list[Tensor]:
        samples = []
        for request, ids in zip(requests, token_ids, strict=True):
            nothing = torch.zeros(ids.numel())
            samples.append(Sample(request.given_ids, ids, nothing.to(torch.int8), *[nothing] * 5))
        found = [torch.empty(0)] * len(samples)
        with torch.no_grad(), evaluating(model):
            for batch in pack(samples, budget, None, 1, share=scorer.shares_prompts):
                log_probs = scorer(batch.to(device), temperature).log_prob
                for i, part in zip(batch.order, log_probs.cpu().split(batch.response_lengths), strict=True):
                    found[i] = part
        return found

    return score


def rule_at(knobs: OffPolicyGuidanceConfig, step: int, total_steps: int) -> Rule:
    """The rule of a step: tau and eps may have schedules."""
    return Rule(knobs.rule, tau=knobs.tau_at(step, total_steps), eps=knobs.eps_at(step, total_steps))


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
                drafts=drafts_of(self.cfg),
            )
        engine, before_step = with_overrides(self.cfg, own, tokenizer, self.device, total_steps, self.warn)
        return self._shared(engine), before_step

    def _shared(self, engine: Engine | None) -> Engine:
        if self.group_size == 1:
            assert engine is not None
            return engine
        return GroupEngine(engine, self.world, self.group_size)

    def renew(self, model: nn.Module) -> None:
        """Copy the policy's current weights to the replica."""
        if self.replica is not None:
            self.replica.refresh(model)

    def catch_up(self) -> None:
        """Copy the replica's weights to the stale one."""
        if self.stale_replica is not None:
            self.stale_replica.catch_up()


def vllm_arguments(cfg: Config, model_config: Any) -> dict[str, Any]:
    v = cfg.rollout.vllm
    return engine_arguments(
        dtype=cfg.model.dtype,
        slots=cfg.rollout.slots or VLLM_SLOTS,
        max_context=context_of(cfg, model_config),
        width=v.tensor_parallel_size,
        memory_fraction=v.memory_fraction,
        args={"trust_remote_code": cfg.model.trust_remote_code, **adapter_arguments(cfg), **v.args},
    )


def adapter_arguments(cfg: Config) -> dict[str, Any]:
    """vLLM's arguments with which it computes one adapter beside its weights, and remembers the one before."""
    if cfg.rollout.vllm.adapters == "merged":
        return {}
    assert cfg.model.lora is not None  # see the config's checks
    if cfg.model.dtype == "float32" and pick_device(cfg.model.device) == "cuda":
        raise ConfigError(
            "vLLM's CUDA kernels for adapters need model.dtype=bfloat16; set that, or rollout.vllm.adapters=merged"
        )
    rank = next(rank for rank in VLLM_LORA_RANKS if rank >= cfg.model.lora.rank)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 2}


def context_of(cfg: Config, model_config: Any) -> int:
    """Tokens of the longest prompt and response of the run, or `rollout.vllm.max_context`."""
    longest = max(cfg.longest_response, cfg.eval.max_tokens or 0)
    needed = cfg.data.max_prompt_tokens + longest
    wanted = cfg.rollout.vllm.max_context
    if wanted is not None and wanted < needed:
        raise ConfigError(
            f"'rollout.vllm.max_context' ({wanted}) is less than data.max_prompt_tokens + the longest response "
            f"({needed}); raise it"
        )
    return min(wanted or needed, max_positions(model_config))


def transfer_of(cfg: Config, device: str) -> str:
    v = cfg.rollout.vllm
    if v.servers:
        return transfer_to_servers(cfg, device)
    if v.transfer != "auto":
        return v.transfer
    spread = v.tensor_parallel_size > 1 or v.args.get("pipeline_parallel_size", 1) > 1
    return "folder" if spread or cfg.parallel.rollout_group > 1 else "memory"


def transfer_to_servers(cfg: Config, device: str) -> str:
    """How weights reach a server; the trainer and the server each derive it from the config."""
    v = cfg.rollout.vllm
    if v.transfer != "auto":
        return v.transfer
    return "nccl" if device == "cuda" and v.adapters == "merged" else "folder"


def weight_folder(cfg: Config) -> Path:
    return Path(cfg.rollout.vllm.shared_folder or cfg.folder / "weights")


def serve(cfg: Config, host: str, port: int) -> None:
    """Become a vLLM server for the runs of a config: same model, context and engine arguments. Does not return."""
    if gguf_file(cfg.model.path) is not None:
        raise ConfigError("'model.path' is a GGUF file; vLLM serves a Hugging Face folder (luffy prepare model)")
    config = read_model_config(cfg.model.path, "model.path", cfg.model.trust_remote_code)
    if cfg.model.four_bits and getattr(config, "quantization_config", None) is not None:
        raise ConfigError("'model.path' has quantized weights, and a push has whole ones; serve the original model")
    arguments = vllm_arguments(cfg, config)
    transfer = transfer_to_servers(cfg, pick_device("auto"))
    command = server_command(cfg.model.path, arguments, host, port, transfer)
    become_server(command, server_environment(key_from(cfg.rollout.vllm.api_key_env)))
