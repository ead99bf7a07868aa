"""Checks across sections: settings that are right one by one and wrong together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from luffy.config.knobs import VLLM_LORA_RANKS, AlgorithmConfig, Knobs, OffPolicyGuidanceConfig, RewardConfig
from luffy.config.legacy import with_current_keys
from luffy.errors import ConfigError
from luffy.rewards.kinds import REWARDS

OF_TRACES_IN_RL = ("trace_ratio", "trace_advantage", "trace_entropy_share", "prefix_alpha")


def check(config: Knobs) -> None:
    """Raise a ConfigError that names the knobs in conflict and what to set instead."""
    _check_name(config.name)
    for across in (
        _check_engine,
        _check_reward,
        _check_guidance,
        _check_gate,
        _check_credit,
        _check_teacher,
        _check_clip,
        _check_trace_terms,
        _check_overrides,
        _check_batch,
        _check_eval_sets,
        _check_replay,
        _check_experts,
        _check_sft_steps,
        _check_async,
        _check_partial_rollouts,
        _check_environment,
        _check_mismatch,
        _check_launch,
    ):
        across(config)


def _check_name(name: str) -> None:
    parts = Path(name).parts
    if not name or Path(name).is_absolute() or ".." in parts or parts == () or "\0" in name:
        raise ConfigError(f"'name' must be a relative folder name without '..', got {name!r}")


def _check_engine(c: Knobs) -> None:
    if c.rollout.drafts.when != "never":
        if not c.rollout.engine.part.own_weights:
            raise ConfigError(
                f"'rollout.drafts' is the native engine's and 'rollout.engine' is {c.rollout.engine}; leave it out "
                "(vLLM: rollout.vllm.args={speculative_config: {method: ngram, num_speculative_tokens: 5}})"
            )
        if c.rollout.overrides is not None:
            raise ConfigError("'rollout.drafts' does not go with token overrides; set rollout.drafts.when=never")
    if c.rollout.vllm.adapters == "alone" and (c.model.lora is None or c.model.lora.rank > VLLM_LORA_RANKS[-1]):
        raise ConfigError(
            "'rollout.vllm.adapters' is alone, which needs model.lora with a rank of at most "
            f"{VLLM_LORA_RANKS[-1]}; set it to merged"
        )
    if c.rollout.precision != "fp8":
        return
    if not c.rollout.engine.part.own_weights:
        raise ConfigError(
            f"'rollout.precision' is the native engine's and 'rollout.engine' is {c.rollout.engine}; leave it out "
            "(vLLM: rollout.vllm.args={quantization: fp8})"
        )
    if c.model.lora is not None or c.rollout.overrides is not None:
        other = "token overrides compare exact probabilities" if c.model.lora is None else "adapters are not quantized"
        raise ConfigError(f"'rollout.precision' is fp8, but {other}; set rollout.precision=model")


def _check_reward(c: Knobs) -> None:
    if c.reward.failure > c.reward.success:
        raise ConfigError(
            f"'reward.failure' ({c.reward.failure}) exceeds 'reward.success' ({c.reward.success}): a response would "
            f"have solved its problem and failed; lower reward.failure"
        )
    asks_server = "http" in c.reward.weight_of
    if asks_server and c.reward.http.url is None:
        raise ConfigError("'reward.kind' http needs 'reward.http.url', such as http://127.0.0.1:9000/score")
    if c.reward.http.url is not None and not asks_server:
        raise ConfigError(f"'reward.http.url' ({c.reward.http.url}) is not asked: set reward.kind=http")
    if c.environment is None or c.environment.reward == "verifier":
        _check_success(c.reward)


def _check_success(reward: RewardConfig) -> None:
    """What a sum of rewards of 0 or 1 can reach is known."""
    weights = reward.weight_of
    if not all(REWARDS.known(kind).binary for kind in weights):
        return
    best = math.fsum(weight for weight in weights.values() if weight > 0)
    if best < reward.success:
        raise ConfigError(
            f"the best response scores {best} ({reward.name}), below 'reward.success' ({reward.success}): none "
            f"would have solved its problem; set reward.success={best}"
        )
    blind = [kind for kind in weights if not REWARDS.known(kind).judges_answer]  # a wrong answer may score
    unjudged = math.fsum(weights[kind] for kind in blind if weights[kind] > 0)
    if unjudged and reward.success <= unjudged < best:
        raise ConfigError(
            f"a wrong answer in the right format scores {unjudged} ({reward.name}), 'reward.success' "
            f"({reward.success}) or more: it would have solved its problem; set reward.success={best}, or lower "
            f"the weight"
        )


def _require_likelihood(c: Knobs, who: str) -> None:
    """An SFT term needs temperature 1."""
    if c.rollout.temperature != 1.0:
        raise ConfigError(
            f"{who} scores traces at 'rollout.temperature' ({c.rollout.temperature}), which is not their likelihood; "
            f"set rollout.temperature=1"
        )


def _check_guidance(c: Knobs) -> None:
    g, n = c.guidance, c.rollout.n
    if g.n_prefix > n:
        raise ConfigError(
            f"'guidance.n_prefix' ({g.n_prefix}) exceeds 'rollout.n' ({n}), the TOTAL number of samples; "
            f"raise rollout.n or lower guidance.n_prefix"
        )
    if g.min_ratio > g.max_ratio:
        raise ConfigError(f"'guidance.min_ratio' ({g.min_ratio}) exceeds 'guidance.max_ratio' ({g.max_ratio})")
    if g.shared and g.strategy.part.spreads and g.n_prefix > 1 and g.min_ratio < g.max_ratio:
        raise ConfigError(
            f"'guidance.shared' gives the {g.n_prefix} guided samples of a problem one ratio, and 'guidance.strategy' "
            f"{g.strategy} spreads theirs from {g.min_ratio} to {g.max_ratio}; set guidance.min_ratio={g.max_ratio}, "
            f"another strategy, or guidance.shared=false"
        )
    whole = (g.strategy, g.min_ratio, g.max_ratio) == ("fixed", 1.0, 1.0)
    if g.n_prefix == n and (c.algorithm.advantage.part.needs_own or (whole and c.algorithm.trace_term != "rl")):
        raise ConfigError(
            f"with guidance.n_prefix = rollout.n = {n} no on-policy sample is left, which "
            f"advantage {c.algorithm.advantage} or trace_term {c.algorithm.trace_term} needs; lower guidance.n_prefix"
        )
    if c.algorithm.trace_term == "sft":
        _require_likelihood(c, "trace_term sft")


def _check_gate(c: Knobs) -> None:
    gate, own = c.guidance.gate, c.rollout.n - c.guidance.n_prefix
    if gate.part.leaves_a_trace_alone:
        _require_likelihood(c, f"gate {gate}")
    in_need = [f"gate {gate}"] * gate.part.needs_own
    in_need += [f"advantage {c.algorithm.advantage}"] * c.algorithm.advantage.part.needs_own
    if in_need and gate.fact("replaces") >= max(own, 1):
        raise ConfigError(
            f"gate {gate} replaces {gate.fact('replaces')} of the {own} on-policy samples of a group (rollout.n less "
            f"guidance.n_prefix), and {in_need[0]} needs one that is left; raise rollout.n"
        )


def _check_credit(c: Knobs) -> None:
    a = c.algorithm
    if not a.credit.fact("needs_contrast") and a.reject_extreme:
        raise ConfigError(
            f"'algorithm.credit' ({a.credit}) learns from groups with equal rewards too, and "
            f"'algorithm.reject_extreme' drops them; set algorithm.reject_extreme=false"
        )
    if a.mix is not None and not a.credit.part.sft_term and a.trace_term != "sft":
        raise ConfigError(
            f"'algorithm.mix' weighs the RL term against the SFT term, in which 'algorithm.credit' ({a.credit}) has no "
            f"token; set algorithm.trace_term=sft, algorithm.credit=lone_trace_sft or algorithm.mix=null"
        )
    if a.credit.part.scales and a.normalize_std:
        raise ConfigError(
            f"'algorithm.credit' ({a.credit}) divides the advantages itself, and 'algorithm.normalize_std' would do it "
            f"again; set algorithm.normalize_std=false"
        )
    if a.credit.part.scales and a.kl_coef and a.kl_in == "reward":
        raise ConfigError(
            f"'algorithm.credit' ({a.credit}) divides by the mean reward, and 'algorithm.kl_in' reward may make it "
            f"negative; set algorithm.kl_in=loss"
        )
    if not a.credit.fact("uses_rewards") and a.kl_coef and a.kl_in == "reward":
        raise ConfigError(
            f"'algorithm.kl_in' reward subtracts the KL term ('algorithm.kl_coef' {a.kl_coef}) from the rewards, but "
            f"'algorithm.credit' {a.credit.shown} uses no reward; set algorithm.kl_in=loss"
        )


def _check_teacher(c: Knobs) -> None:
    t = c.teacher
    if t.path is not None and t.servers:
        raise ConfigError(
            f"'teacher.path' is {t.path}, and 'teacher.servers' have a model of their own; give one of them"
        )
    if not t.is_there and (t.average or t.shown != "nothing"):
        raise ConfigError("settings of 'teacher' are there but no teacher: give teacher.path or teacher.servers")
    if t.average and not t.is_self:
        raise ConfigError(
            f"'teacher.average' ({t.average}) averages the policy's own weights; set teacher.path=self, or "
            f"teacher.average=0"
        )
    if t.servers and c.rollout.temperature != 1.0:
        raise ConfigError(
            f"vLLM gives log-probs of a prompt at temperature 1, and 'rollout.temperature' is {c.rollout.temperature}; "
            f"set rollout.temperature=1, or teacher.path instead of teacher.servers"
        )
    if t.dtype is not None and (t.servers or t.average):
        raise ConfigError(
            f"'teacher.dtype' ({t.dtype}) is for a model that is loaded beside the policy: servers have their own, "
            f"and an average is kept in float32; leave it out"
        )
    if t.shown != "nothing" and "{solution}" not in t.hint_text:
        raise ConfigError(f"'teacher.hint_text' must contain {{solution}}, got {t.hint_text!r}")


def _check_clip(c: Knobs) -> None:
    low, high = c.algorithm.off_min_clip, c.algorithm.off_max_clip
    if low is not None and high is not None and low > high:
        raise ConfigError(f"'algorithm.off_min_clip' ({low}) exceeds 'algorithm.off_max_clip' ({high}); lower it")
    term = c.algorithm.on_policy_term
    if c.algorithm.on_policy_reshape != "no_reshape" and not term.part.shapes:
        raise ConfigError(
            f"'algorithm.on_policy_term' {term} has a ratio of its own, and 'algorithm.on_policy_reshape' "
            f"({c.algorithm.on_policy_reshape}) would change nothing; set algorithm.on_policy_reshape=no_reshape"
        )
    if c.algorithm.on_policy_reshape == "logp" and not c.algorithm.remove_clip:
        raise ConfigError(
            "'algorithm.on_policy_reshape' logp starts at 0, far below the clip at 1 - clip_ratio, so half the tokens "
            "would have no gradient; set algorithm.remove_clip=true"
        )


def _check_trace_terms(c: Knobs) -> None:
    a = c.algorithm
    if a.teacher_probs == "recorded" and a.off_policy_reshape.part.compared:
        raise ConfigError(
            f"'algorithm.teacher_probs' recorded takes the plain ratio p / q instead of 'algorithm.off_policy_reshape' "
            f"({a.off_policy_reshape}), which compares probabilities by itself; set algorithm.teacher_probs=one"
        )
    shaped = {
        "off_max_clip": a.off_max_clip, "off_min_clip": a.off_min_clip, "off_normalize": a.off_normalize or None,
        "teacher_probs": None if a.teacher_probs == "one" else a.teacher_probs,
    }  # fmt: skip
    if a.trace_ratio == "ppo" and (given := [name for name, value in shaped.items() if value is not None]):
        raise ConfigError(
            f"'algorithm.trace_ratio' ppo gives teacher tokens the ratio and clip of own tokens, and algorithm."
            f"{given[0]} would change nothing; leave it out or set algorithm.trace_ratio=shaped"
        )
    if a.trace_term != "rl" and a.credit.part.follows_trace_term:
        given = [name for name in OF_TRACES_IN_RL if getattr(a, name) != getattr(AlgorithmConfig, name)]
        if given:
            raise ConfigError(
                f"'algorithm.trace_term' {a.trace_term} takes teacher tokens out of the RL term, and algorithm."
                f"{given[0]} ({getattr(a, given[0])}) would change nothing; leave it out or set algorithm.trace_term=rl"
            )


def _check_overrides(c: Knobs) -> None:
    overrides = c.rollout.overrides
    if overrides is None:
        return
    if not overrides.model_path and not overrides.servers:
        raise ConfigError(
            "'rollout.offpolicy_guidance.model_path' is empty; name the second model, or its servers in "
            "rollout.offpolicy_guidance.servers"
        )
    if overrides.servers:
        _check_second_servers(c, overrides)
    elif overrides.tensor_parallel_size != 1:
        raise ConfigError(
            f"'rollout.offpolicy_guidance.tensor_parallel_size' is {overrides.tensor_parallel_size}, but a second "
            f"model in this process runs on one device; set it to 1, or serve the model (luffy serve RECIPE "
            f"model.path=GUIDE rollout.vllm.tensor_parallel_size={overrides.tensor_parallel_size}) and name the "
            f"address in rollout.offpolicy_guidance.servers"
        )
    if overrides.rule == "aligned" and overrides.max_overrides is not None:
        raise ConfigError(
            "'rollout.offpolicy_guidance.max_overrides' cannot be honoured by rule aligned, which takes whole texts of "
            "the second model; leave it out or choose another rule"
        )
    if overrides.rule in ("speculative", "threshold") and not c.rollout.engine.part.whole_distribution:
        raise ConfigError(
            f"'rollout.offpolicy_guidance.rule' ({overrides.rule}) needs the policy's whole distribution, and vLLM "
            "gives the log-probs of its own tokens alone; set its rule to mixture or aligned, or rollout.engine=native"
        )
    if c.rollout.top_p != 1.0 or c.rollout.top_k != 0:
        raise ConfigError(
            "token overrides need the exact probability of every token: set rollout.top_p=1 and rollout.top_k=0"
        )


def _check_second_servers(c: Knobs, overrides: OffPolicyGuidanceConfig) -> None:
    section = "rollout.offpolicy_guidance"
    if overrides.model_path:
        raise ConfigError(
            f"'{section}.model_path' is {overrides.model_path}, and '{section}.servers' have a model of their own; "
            f"give one of them"
        )
    if overrides.rule == "threshold":
        raise ConfigError(
            f"'{section}.rule' (threshold) needs the second model's whole distribution, and a server gives the "
            f"log-probs of its own tokens alone; set its rule to mixture or speculative, or model_path instead of "
            f"servers"
        )
    if overrides.tensor_parallel_size != 1 or overrides.dtype is not None:
        raise ConfigError(
            f"'{section}.tensor_parallel_size' and '{section}.dtype' are for a second model in this process; leave "
            f"them out and start the server with rollout.vllm.tensor_parallel_size and model.dtype (luffy serve)"
        )
    shared = sorted({url.rstrip("/") for url in overrides.servers} & {u.rstrip("/") for u in c.rollout.vllm.servers})
    if shared:
        raise ConfigError(
            f"{shared[0]} is in 'rollout.vllm.servers', which get the policy's weights, and in '{section}.servers'; "
            f"start another server for the second model"
        )


def _check_batch(c: Knobs) -> None:
    if c.batch.tokens < c.longest:
        raise ConfigError(
            f"'batch.tokens' ({c.batch.tokens}) cannot hold one sequence of data.max_prompt_tokens + "
            f"rollout.max_tokens = {c.longest} tokens; raise it or lower those"
        )
    if c.batch.mini_batch is not None and c.batch.mini_batch > c.batch.problems:
        raise ConfigError(f"'batch.mini_batch' ({c.batch.mini_batch}) exceeds 'batch.problems' ({c.batch.problems})")


def _check_eval_sets(c: Knobs) -> None:
    if c.data.eval_also and c.data.eval is None:
        raise ConfigError("'data.eval_also' names further sets, but 'data.eval', the first one, is empty")
    if "core" in c.data.eval_also:
        raise ConfigError("'data.eval_also.core' is the name of 'data.eval' itself (val-core/*); choose another")


def _check_together(what: str, others: Mapping[str, tuple[Any, Any]], off: str) -> None:
    """``others``: settings by name, with their value and the only one that goes with ``what``, which ``off`` ends."""
    for name, (value, needed) in others.items():
        if value != needed:
            shown = "null" if needed is None else str(needed).lower()
            raise ConfigError(f"{what}, which does not go with '{name}' ({value}); set {name}={shown} or {off}")


def _remembered(c: Knobs) -> dict[str, tuple[float, float]]:
    """What makes a method remember something from step to step, each with the value that turns it off."""
    return {
        "replay.share": (c.replay.share, 0),
        "batch.expert_share": (c.batch.expert_share, 0),
        "sft_steps.buffer": (c.sft_steps.buffer, 0),
    }


def _check_replay(c: Knobs) -> None:
    own = c.rollout.n - c.guidance.n_prefix
    if c.replay.share and own < 2:
        raise ConfigError(
            f"'replay.share' keeps problems that some on-policy samples solve and others do not, and a group has {own} "
            f"(rollout.n less guidance.n_prefix): raise rollout.n"
        )


def _check_experts(c: Knobs) -> None:
    b = c.batch
    if not b.expert_share:
        return
    if not 0 < b.experts < b.problems:
        raise ConfigError(
            f"'batch.expert_share' ({b.expert_share}) of 'batch.problems' ({b.problems}) is {b.experts} problems; some "
            f"must have a trace alone and some on-policy samples"
        )
    if c.replay.share + b.expert_share > 1:
        raise ConfigError(f"'replay.share' ({c.replay.share}) and 'batch.expert_share' ({b.expert_share}) exceed 1")
    if c.guidance.gate != "none":
        raise ConfigError(
            f"'guidance.gate' ({c.guidance.gate}) decides by on-policy samples, which problems of 'batch.expert_share' "
            f"({b.expert_share}) do not have; set one of them to none"
        )
    _require_likelihood(c, "'batch.expert_share'")


def _check_sft_steps(c: Knobs) -> None:
    if not c.sft_steps.buffer:
        return
    if c.optim.offload:
        raise ConfigError(
            f"'sft_steps.buffer' ({c.sft_steps.buffer}) has an optimizer of its own, which 'optim.offload' does not "
            f"keep in host memory; set optim.offload=false"
        )
    _require_likelihood(c, "'sft_steps.buffer'")


def _check_async(c: Knobs) -> None:
    r, steps = c.rollout, c.async_.max_staleness
    if not steps:
        return
    others = {
        "rollout.engine": ("native" if r.engine.part.own_weights else r.engine, "native"),
        "algorithm.oversample_rounds": (c.algorithm.oversample_rounds, 0),
        "guidance.gate": (c.guidance.gate, "none"),
        **_remembered(c),
    }
    what = f"'async.max_staleness' ({steps}) makes one batch of the native engine while the step before is under way"
    _check_together(what, others, "async.max_staleness=0")
    exact = {"rollout.top_p": (r.top_p, 1.0), "rollout.top_k": (r.top_k, 0)}
    what = f"'async.max_staleness' ({steps}) weighs rollouts by the exact probability of every token"
    _check_together(what, exact, "async.max_staleness=0")


def _check_partial_rollouts(c: Knobs) -> None:
    r = c.rollout
    if r.max_tokens_per_step is None:
        return
    others = {
        "rollout.engine": (r.engine, "native"),
        "rollout.top_p": (r.top_p, 1.0),
        "rollout.top_k": (r.top_k, 0),
        "rollout.offpolicy_guidance.enable": (r.overrides is not None, False),
        "async.max_staleness": (c.async_.max_staleness, 0),
        "algorithm.oversample_rounds": (c.algorithm.oversample_rounds, 0),
        "guidance.gate": (c.guidance.gate, "none"),
        **_remembered(c),
    }
    what = f"'rollout.max_tokens_per_step' ({r.max_tokens_per_step}) carries responses into the next step"
    _check_together(what, others, "rollout.max_tokens_per_step=null")


def _check_environment(c: Knobs) -> None:
    e = c.environment
    if e is None:
        return
    others = {"rollout.offpolicy_guidance.enable": (c.rollout.overrides is not None, False)}
    _check_together(f"'environment' ({e.name}) plays several turns", others, "environment=null")
    if c.data.style not in ("chat", "paper"):
        raise ConfigError(f"'environment' ({e.name}) needs a chat template: set data.style=chat, not {c.data.style}")
    if e.max_tokens is not None and e.max_tokens <= c.rollout.max_tokens:
        raise ConfigError(
            f"'environment.max_tokens' ({e.max_tokens}) counts replies too and leaves no room for them beside "
            f"'rollout.max_tokens' ({c.rollout.max_tokens}); raise it"
        )


def _check_mismatch(c: Knobs) -> None:
    corrected = {
        "token overrides": c.rollout.overrides is not None,
        "'async.max_staleness'": c.async_.max_staleness > 0,
        "'rollout.max_tokens_per_step'": c.rollout.max_tokens_per_step is not None,
    }
    under = next((name for name, there in corrected.items() if there), None)
    if under and c.algorithm.mismatch_correction != "off":
        raise ConfigError(
            f"under {under} the importance weights already divide by what the engine drew with, and their bound is "
            f"algorithm.importance_clamp_max; set algorithm.mismatch_correction=off"
        )


def _check_launch(c: Knobs) -> None:
    p = c.parallel
    if c.launch == "local" and p.cpu_offload:
        raise ConfigError(
            "'parallel.cpu_offload' is for shards, and launch=local has none; set optim.offload=true instead"
        )
    if c.launch == "local":
        others = {
            "parallel.workers": (p.workers, 1),
            "parallel.shard": (p.shard, "full"),
            "parallel.gather": (p.gather, "auto"),
        }
        _check_together("launch=local runs one process", others, "launch=torchrun or ray")
    if p.gather == "mini_batch" and p.cpu_offload:
        raise ConfigError(
            "'parallel.gather' (mini_batch) holds all weights on every GPU, and 'parallel.cpu_offload' keeps them off; "
            "set one of them only"
        )
    if p.workers % p.rollout_group:
        raise ConfigError(
            f"'parallel.rollout_group' ({p.rollout_group}) does not divide 'parallel.workers' ({p.workers})"
        )
    if c.launch != "local" and c.rollout.engine == "vllm" and c.rollout.vllm.servers and p.rollout_group != p.workers:
        raise ConfigError(
            "each group of processes would push its weights to the same 'rollout.vllm.servers'; set "
            f"parallel.rollout_group={p.workers}, so that one process speaks to them for all"
        )
    if p.shard_size is not None and p.shard != "hybrid":
        raise ConfigError(f"'parallel.shard_size' ({p.shard_size}) has a meaning only with parallel.shard=hybrid")
    if c.launch != "local" and c.optim.offload:
        raise ConfigError(
            f"'optim.offload' is for one process; with launch={c.launch} set parallel.cpu_offload=true instead"
        )
    if c.launch != "local" and c.model.four_bits:
        raise ConfigError(f"'model.lora.quantize' is for one process, and launch is {c.launch}; leave it out")
    if c.launch != "local" and c.model.lora is not None and c.model.dtype != "float32":
        raise ConfigError(
            "sharded layers hold weights of one dtype, and adapters learn in float32: with launch="
            f"{c.launch} and model.lora set model.dtype=float32"
        )


def check_learns(c: Knobs) -> None:
    """Raise a ConfigError where no step of RL could ever have a gradient, whatever is sampled, or a setting of the SFT
    term could never act."""
    if c.sft_steps.buffer:
        return
    _check_sft_term_has_tokens(c)
    if c.rollout.n == 1 and not c.guidance.gate.part.grows:
        _check_groups_of_one(c)
    _check_teacher_knows_more(c)


def _check_sft_term_has_tokens(c: Knobs) -> None:
    a = c.algorithm
    given = [f"sft_weight' ({a.sft_weight})"] * (a.sft_weight != "none")
    given += [f"sft_anchor' ({a.sft_anchor})"] * (a.sft_anchor > 0)
    if given and a.trace_term != "sft" and not a.credit.part.sft_term:
        raise ConfigError(
            f"'algorithm.{given[0]} is for the SFT term, in which 'algorithm.credit' ({a.credit}) has no token; set "
            f"algorithm.trace_term=sft, or train with luffy sft"
        )


def _check_groups_of_one(c: Knobs) -> None:
    a, g = c.algorithm, c.guidance
    traces = g.n_prefix or c.batch.expert_share or g.gate.part.uses_traces
    learns_from_one = traces and a.credit.part.sft_term and a.credit.fact("needs_contrast")
    if a.reject_extreme and not learns_from_one and c.environment is None and _scores_are_extreme(c.reward):
        raise ConfigError(
            f"'rollout.n' is 1, a group of one is all success or all failure by {c.reward.name}, and "
            "'algorithm.reject_extreme' drops those: no step would have an update; raise rollout.n or set "
            "algorithm.reject_extreme=false"
        )


def _scores_are_extreme(reward: RewardConfig) -> bool:
    """Whether every score is a success or a failure, because each reward of the sum gives 0 or 1."""
    weights = reward.weight_of
    if not all(REWARDS.known(kind).binary for kind in weights):
        return reward.success == reward.failure
    sums = (math.fsum(given) for given in product(*((0.0, weight) for weight in weights.values())))
    return all(reward.solved(score) or reward.failed(score) for score in sums)


def _check_teacher_knows_more(c: Knobs) -> None:
    a, t = c.algorithm, c.teacher
    if "teacher" not in a.credit.part.needs or a.credit.fact("uses_rewards") or a.trace_term == "sft":
        return
    if t.is_self and t.shown == "nothing" and not (a.kl_coef or a.entropy_coef):
        raise ConfigError(
            "'teacher.path' self with 'teacher.shown' nothing is the policy itself, so there is nothing to learn from "
            "it; set teacher.shown=solution or sibling, another teacher.path, or algorithm.credit.reward"
        )
    if t.shown == "sibling" and c.rollout.n == 1 and not c.guidance.gate.part.grows:
        raise ConfigError(
            "'teacher.shown' sibling shows another response of the group, and 'rollout.n' is 1; raise rollout.n, or "
            "set teacher.shown=solution"
        )


@dataclass(frozen=True)
class Config(Knobs):
    """The configuration of a run; its knobs agree with each other."""

    with_current_keys = staticmethod(with_current_keys)  # ``build`` reads saved configs of older runs too

    def __post_init__(self) -> None:
        check(self)
