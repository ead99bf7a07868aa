"""Every knob: a typed field with its meaning and its bounds beside its default."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from luffy.core.kl import Estimator
from luffy.core.losses import PolicyLoss
from luffy.core.reduce import Reduction
from luffy.core.shaping import Shape
from luffy.errors import ConfigError
from luffy.guidance.gate import GATES, GateSettings
from luffy.guidance.ratios import SCHEDULES, RatioSchedule
from luffy.guidance.trace_choice import TraceChoice
from luffy.rewards.http_settings import HttpRewardConfig
from luffy.rewards.verifier import Verifier, build_verifier
from luffy.schema import check_known, knob
from luffy.types import Sampling


@dataclass(frozen=True)
class LoraConfig:
    rank: int = knob(16, "rank of the adapters; without a section model.lora all weights are trained", ge=1)
    alpha: float = knob(32.0, "scale of the adapters: the update is alpha / rank * B A", gt=0)
    dropout: float = knob(0.0, "dropout on the adapters' input; 0 keeps old and new log-probs comparable", ge=0, le=1)
    target_modules: str | tuple[str, ...] = knob(
        "all-linear", "module names to adapt: a list, a regular expression of whole names, or 'all-linear'"
    )

    def __post_init__(self) -> None:
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ConfigError(
                    f"'model.lora.target_modules' {self.target_modules!r} is no regular expression ({error}); "
                    "give one, a list of names, or all-linear"
                ) from None


@dataclass(frozen=True)
class ModelConfig:
    path: str = knob("", "Hugging Face folder or hub id of the policy (safetensors), or a .gguf file", required=True)
    tokenizer: str | None = knob(None, "folder or hub id of the tokenizer when it is not with the model")
    reference: str | None = knob(None, "reference model of the KL term; null: the policy as it was at the start")
    dtype: Literal["float32", "bfloat16"] = knob(
        "float32", "dtype of the weights; with bfloat16 the optimizer keeps float32 master weights"
    )
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "auto takes the GPU when there is one")
    gradient_checkpointing: Literal["auto"] | bool = knob(
        "auto",
        "recompute activations in the backward pass: less memory, more time; auto: where they would not fit on a GPU",
    )
    lora: LoraConfig | None = knob(None, "train low-rank adapters instead of all weights (needs the peft extra)")
    trust_remote_code: bool = knob(False, "run Python code that comes with the model; off unless you read it")


@dataclass(frozen=True)
class DataConfig:
    train: str | tuple[str, ...] = knob(
        "", "JSONL or parquet file, dataset folder, hub id, or a list of them", required=True
    )
    eval: str | tuple[str, ...] | None = knob(None, "held-out problems, same forms; null: no evaluation")
    eval_also: dict[str, str] = knob(
        factory=dict, help="further held-out sets by name, e.g. {ood: ood.jsonl}: metrics val-ood/*"
    )
    split: str = knob("train", "split to take from a dataset folder or hub id for training")
    eval_split: str = knob("test", "split to take from a dataset folder or hub id for evaluation")
    format: Literal["auto", "luffy", "verl", "openr1", "gsm8k", "completion", "messages", "sharegpt", "alpaca"] = knob(
        "auto", "schema of the rows; auto recognises it by the columns"
    )
    columns: dict[str, str] = knob(
        factory=dict, help="own column names, e.g. {prompt: instruction, answer: label}; dotted for nested"
    )
    bad_rows: Literal["error", "skip"] = knob("error", "a malformed row stops the run, or is skipped and counted")
    strip_calculator: bool = knob(True, "remove GSM8K's <<...>> calculator marks from its solutions")
    limit: int | None = knob(None, "use only this many training problems, the first ones", ge=1)
    style: Literal["chat", "paper", "paper_simple", "plain"] = knob(
        "chat", "how a question becomes a prompt (docs/data.md); paper, paper_simple: appendix C.2 of the paper"
    )
    system_prompt: str | None = knob(None, "system message in front of the question (styles chat and paper)")
    chat_template: str | None = knob(None, "Jinja chat template, as text or a file, instead of the tokenizer's")
    date: str | None = knob(None, "date that templates print (Llama 3), e.g. 2026-01-31; null: the day the run started")
    special_tokens: Literal["text", "control"] = knob(
        "text", "special tokens spelled out in prompts and traces are plain text, or special tokens"
    )
    max_prompt_tokens: int = knob(1024, "longest prompt", ge=1)
    overlong_prompt: Literal["error", "drop"] = knob(
        "error", "a longer prompt stops the run, or is dropped and counted"
    )
    overlong_trace: Literal["drop", "truncate", "error"] = knob(
        "drop", "a trace longer than rollout.max_tokens; drops and cuts are counted"
    )


@dataclass(frozen=True)
class RewardConfig:
    kind: str = knob(
        "math",
        "math, numeric, gsm8k, choice, format; http, or a server's address; your own by name or module:function",
    )
    weights: dict[str, float] = knob(
        factory=dict, help="weighted sum of kinds, e.g. {math: 1, format: 0.1}; overrides kind"
    )
    workers: int | None = knob(
        None, "verifier processes; null: 2, beside a GPU half of the cores shared by its processes, 2 to 8 each", ge=1
    )
    timeout_s: float = knob(8.0, "a verification running longer is killed, scores 0 and is counted", gt=0)
    concurrency: int = knob(16, "samples that an async function scores at once, in each worker", ge=1)
    http: HttpRewardConfig = knob(factory=HttpRewardConfig, help="how a server is asked for scores (docs/rewards.md)")
    answer_in_thought: bool = knob(
        False, "read answers inside <think>...</think> too; false: only after the last closed thought"
    )
    prompt_opens_thought: bool = knob(
        True, "a prompt that ends with <think> opens a thought: no answer before </think>; false: ignore the prompt"
    )
    success: float = knob(1.0, "a response that scores this or more has solved its problem")
    failure: float = knob(0.0, "a response that scores this or less has failed")

    @property
    def name(self) -> str:
        """What tells these rewards from others: a kind or an address, or several with their weights."""
        if self.weights:
            return " + ".join(f"{weight:g} {kind}" for kind, weight in self.weights.items())
        return self.http.url or self.kind if self.kind == "http" else self.kind

    @property
    def weight_of(self) -> dict[str, float]:
        """The weight of each kind in the sum; one kind alone has 1."""
        return self.weights or {self.kind: 1.0}

    def verifier(self, workers: int | None = None) -> Verifier:
        """What scores responses by these settings; ``workers`` instead of as many as they say (2 if they do not)."""
        return build_verifier(
            self.kind, self.weights or None, workers or self.workers or 2, self.timeout_s, self.answer_in_thought,
            self.concurrency, self.http, self.prompt_opens_thought,
        )  # fmt: skip

    def solved(self, score: float) -> bool:
        return score >= self.success

    def failed(self, score: float) -> bool:
        return score <= self.failure


@dataclass(frozen=True)
class GuidanceConfig:
    n_prefix: int = knob(1, "samples of each group that start from a teacher's trace (of rollout.n in all)", ge=0)
    strategy: str = knob(
        "fixed",
        "how the prefix ratio is drawn: fixed, random, linear, linear_max, reverse_linear, cosine, cosine_min, "
        "binomial, or your own (docs/methods.md#prefix-ratios)",
    )
    min_ratio: float = knob(1.0, "smallest share of the trace", ge=0, le=1)
    max_ratio: float = knob(1.0, "largest share of the trace", ge=0, le=1)
    prefix_steps: float | None = knob(
        None, "steps of the schedule; below 1 a share of all training steps; null: the whole training", gt=0
    )
    shared: bool = knob(False, "one ratio for all prefix samples of a problem instead of one each")
    cut_at: tuple[str, ...] = knob(
        (), "a prefix ends at its last token that contains one of these texts; empty: anywhere"
    )
    trace_choice: TraceChoice = knob("random", "which traces of a problem that has several")
    gate: str = knob(
        "none",
        "further rounds for some problems: trace_on_failure, trace_alone, likeliest_traces, hinted_group, lowest_hint, "
        "micro_groups, or your own (docs/methods.md#further-rounds)",
    )
    gate_from: int = knob(0, "steps before the gate begins to act", ge=0)
    gate_solved: int = knob(0, "trace_alone: acts where at most this many own samples are right", ge=0)
    gate_samples: int = knob(
        1, "likeliest_traces: own samples that traces replace; lowest_hint: samples made with each hint", ge=1
    )
    gate_shares: tuple[float, ...] = knob(
        (0.25, 0.5, 0.75), "shares of a trace, round by round: shown as a hint, or in micro_groups as a prefix"
    )
    gate_sizes: tuple[int, ...] = knob(
        (2, 1, 1), "micro_groups: samples added in each round; the first rollout.n come first"
    )
    gate_scores: tuple[float, ...] = knob(
        (0.5, 2 / 3, 1.0), "micro_groups: a round has a prefix where the mean score so far is below this"
    )
    hint_text: str = knob("\n\nHere is a hint:\n{solution}", "how a hint follows the question; {solution} is its text")

    def gate_settings(self) -> GateSettings:
        return GateSettings(self.gate_solved, self.gate_samples, self.gate_shares, self.gate_sizes, self.gate_scores)

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in self.gate_shares):
            raise ConfigError(f"'guidance.gate_shares' must be above 0 and at most 1, got {list(self.gate_shares)}")
        if not all(size >= 1 for size in self.gate_sizes):
            raise ConfigError(f"'guidance.gate_sizes' must be 1 or more, got {list(self.gate_sizes)}")
        if "{solution}" not in self.hint_text:
            raise ConfigError(f"'guidance.hint_text' must contain {{solution}}, got {self.hint_text!r}")
        check_known("guidance.gate", self.gate, ("none", *GATES))
        check_known("guidance.strategy", self.strategy, ("fixed", *SCHEDULES))


@dataclass(frozen=True)
class OffPolicyGuidanceConfig:
    enable: bool = knob(True, "false: as if the section were not there")
    model_path: str = knob(
        "", "the second model: a folder or hub id with the policy's tokenizer; empty: the one of servers"
    )
    servers: tuple[str, ...] = knob(
        (),
        "addresses of servers that `luffy serve` started with the second model, instead of a path, for rule mixture, "
        "speculative or aligned (key: rollout.vllm.api_key_env)",
    )
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "dtype of its weights; null: model.dtype")
    tensor_parallel_size: int = knob(
        1, "GPUs of the second model: 1 with model_path; servers have their own rollout.vllm.tensor_parallel_size", ge=1
    )
    rule: Literal["speculative", "threshold", "mixture", "aligned"] = knob(
        "speculative", "which tokens the second model overrides (docs/overrides.md); aligned is approximate"
    )
    k: int = knob(4, "tokens the policy proposes before the second model reads them", ge=1)
    tau: float = knob(0.1, "threshold: override where the second model gives the proposal less than this", ge=0, le=1)
    tau_end: float | None = knob(None, "threshold: tau at the end of tau_steps, linearly; null: constant", ge=0, le=1)
    tau_steps: int | None = knob(None, "steps of the tau schedule; null: the whole training", ge=1)
    eps: float = knob(0.5, "mixture: share of tokens drawn from the second model", ge=0, le=1)
    eps_end: float | None = knob(None, "mixture: eps at the end of eps_steps, linearly; null: constant", ge=0, le=1)
    eps_steps: int | None = knob(None, "steps of the eps schedule; null: the whole training", ge=1)
    max_overrides: int | None = knob(None, "overrides per response, then the policy continues alone", ge=0)
    temperature: float | None = knob(None, "temperature of the second model; null: rollout.temperature", gt=0)

    def tau_at(self, step: int, total_steps: int) -> float:
        return _linear(self.tau, self.tau_end, step / (self.tau_steps or total_steps))

    def eps_at(self, step: int, total_steps: int) -> float:
        return _linear(self.eps, self.eps_end, step / (self.eps_steps or total_steps))


def _linear(start: float, end: float | None, done: float) -> float:
    """From start to end, then constant; without an end, constant."""
    return start if end is None else start + (end - start) * min(done, 1.0)


@dataclass(frozen=True)
class TeacherConfig:
    path: str | None = knob(
        None,
        "model that scores own tokens for algorithm.credit=distill: a folder or hub id with the policy's tokenizer, or "
        "self (the policy at the start); null: none, or the one of teacher.servers",
    )
    servers: tuple[str, ...] = knob(
        (), "addresses of vLLM servers with the teacher, instead of a path (key: rollout.vllm.api_key_env)"
    )
    average: float = knob(
        0.0,
        "with path self: rate of the exponential average of the policy's weights (SDFT 0.01, SDPO 0.05); 0: constant",
        ge=0,
        le=1,
    )
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "dtype of its weights; null: model.dtype")
    shown: Literal["nothing", "solution", "sibling"] = knob(
        "nothing",
        "what follows the question in its prompt: nothing, a trace, or another right response of the group",
    )
    hint_text: str = knob(
        "\n\nHere is a correct solution:\n{solution}\n\nNow solve the problem yourself, step by step.",
        "how it is shown; {solution} is its text",
    )

    @property
    def is_there(self) -> bool:
        return self.path is not None or bool(self.servers)

    @property
    def is_self(self) -> bool:
        """The policy's own weights, of the start or averaged."""
        return self.path == "self"


# Engine arguments of vLLM that luffy sets itself, and the knob that decides each.
VLLM_OWN_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_num_seqs": "rollout.slots",
    "max_model_len": "rollout.vllm.max_context",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.vllm.memory_fraction",
    "api_key": "rollout.vllm.api_key_env",
    "weight_transfer_config": "rollout.vllm.transfer",
    "config": "rollout.vllm.args",  # a file of arguments
    **dict.fromkeys(("logprobs_mode", "enable_sleep_mode", "load_format", "worker_extension_cls"), ""),
}


def _check_vllm_argument(name: str, value: Any) -> None:
    """`luffy serve` makes a flag of it, so other spellings of the same flag count: with dashes, negated, cut short."""
    if not re.fullmatch(r"[a-zA-Z][\w.-]*", name, re.ASCII):
        raise ConfigError(f"'rollout.vllm.args': {name!r} is no argument of vLLM; use a name such as enforce_eager")
    flag = name.lower().replace("-", "_").removeprefix("no_").partition(".")[0]
    own = next((own for own in VLLM_OWN_ARGUMENTS if own.startswith(flag)), None)
    if own is not None:
        instead = VLLM_OWN_ARGUMENTS[own]
        advice = f"set {instead} instead" if instead else "luffy depends on its own value"
        raise ConfigError(f"'rollout.vllm.args.{name}' cannot be set there: {advice}")
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and text.startswith("-"):
            raise ConfigError(f"'rollout.vllm.args.{name}': {text!r} would be read as a flag; do not begin it with '-'")


@dataclass(frozen=True)
class VllmConfig:
    servers: tuple[str, ...] = knob(
        (), "addresses of servers that `luffy serve` started; empty: vLLM in the trainer's own process (colocated)"
    )
    api_key_env: str = knob("LUFFY_VLLM_KEY", "environment variable with the servers' key; the key is written nowhere")
    tensor_parallel_size: int = knob(1, "GPUs that one copy of the model is spread over", ge=1)
    memory_fraction: float = knob(
        0.4,
        "share of the GPU for vLLM's weights and KV cache; if colocated, freed during the update",
        gt=0,
        le=1,
    )
    max_context: int | None = knob(
        None, "tokens of prompt and response; null: data.max_prompt_tokens + the longest response", ge=1
    )
    transfer: Literal["auto", "memory", "folder", "nccl"] = knob(
        "auto",
        "how weights get there. auto: in memory when colocated on one GPU, NCCL from a GPU to servers, else a folder",
    )
    shared_folder: str | None = knob(None, "where folder transfers are written, seen by all; null: in the run's folder")
    nccl_host: str = knob("127.0.0.1", "address of the trainer as servers see it, for NCCL transfers")
    request_seeds: bool = knob(
        True,
        "a seed for every request: the same samples in any batch; false is faster on a GPU",
    )
    timeout_s: float = knob(600.0, "a server that takes longer for one response or one push counts as lost", gt=0)
    args: dict[str, Any] = knob(factory=dict, help="any other engine argument of vLLM, e.g. {enforce_eager: true}")

    def __post_init__(self) -> None:
        for name, value in self.args.items():
            _check_vllm_argument(name, value)
        wrong = {"memory": bool(self.servers), "nccl": not self.servers}
        if wrong.get(self.transfer, False) or (self.transfer == "memory" and self.tensor_parallel_size > 1):
            raise ConfigError(
                f"'rollout.vllm.transfer' {self.transfer} is for "
                f"{'servers' if self.transfer == 'nccl' else 'one GPU without servers'}; use auto or folder"
            )


@dataclass(frozen=True)
class RolloutConfig:
    n: int = knob(8, "samples of each problem in all, traces included", ge=1)
    temperature: float = knob(1.0, "sampling temperature; log-probs are taken at it", gt=0)
    top_p: float = knob(1.0, "nucleus sampling; 1 is off", gt=0, le=1)
    top_k: int = knob(0, "sample among the k most likely tokens; 0 is off", ge=0)
    max_tokens: int = knob(2048, "longest response", ge=1)
    max_tokens_per_step: int | None = knob(
        None,
        "most tokens of a response in one step; an unfinished one continues in the next, and its group waits for it "
        "(docs/scaling.md); null: no such limit",
        ge=1,
    )
    slots: int | None = knob(
        None,
        "sequences decoded at once; null: 256 on a CPU and in vLLM, 1024 on a GPU (fewer when memory is short)",
        ge=1,
    )
    engine: str = knob(
        "native",
        "engine of luffy train: native (the policy itself), vllm (a copy of it), or your own (docs/engines.md)",
    )
    precision: Literal["model", "fp8"] = knob(
        "model",
        "linear layers of the native engine: the policy's own weights, or a copy quantized before every rollout",
    )
    offpolicy_guidance: OffPolicyGuidanceConfig | None = knob(
        None, "overrides of tokens by a second model during rollout (docs/overrides.md); null: none"
    )
    vllm: VllmConfig = knob(factory=VllmConfig)

    @property
    def overrides(self) -> OffPolicyGuidanceConfig | None:
        """The token overrides that are switched on."""
        g = self.offpolicy_guidance
        return g if g is not None and g.enable else None


@dataclass(frozen=True)
class MixConfig:
    start: float = knob(0.5, "mu at the start: the share of the SFT term in the loss", ge=0, le=1)
    end: float | None = knob(None, "mu after steps, along a cosine; null: constant", ge=0, le=1)
    steps: int | None = knob(None, "steps from start to end, after the warm-up; null: all that are left", ge=1)
    warmup: int = knob(0, "first steps, over which mu rises from 0 to start", ge=0)

    def at(self, step: int, total_steps: int) -> float:
        """mu at a step, counted from 0."""
        if step < self.warmup:
            return self.start * step / self.warmup
        if self.end is None:
            return self.start
        done = min((step - self.warmup) / (self.steps or max(total_steps - self.warmup, 1)), 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class AlgorithmConfig:
    credit: str = knob(
        "group_baseline",
        "how rewards become advantages and weights of tokens: group_baseline, lone_trace_sft (the same, but a group of "
        "traces only goes into the SFT term), srft, distill (by section teacher), or your own (docs/extend.md)",
    )
    advantage: Literal["grpo", "grpo_split"] = knob(
        "grpo", "baseline of a group: all samples (paper Eq. 4), or only the on-policy ones"
    )
    normalize_std: bool = knob(False, "divide advantages by the group's standard deviation (Dr. GRPO does not)")
    loss_reduction: Reduction = knob(
        "seq-mean-token-sum-norm", "denominator of the loss; -norm divides by rollout.max_tokens (Dr. GRPO)"
    )
    remove_clip: bool = knob(True, "no clipping of the on-policy ratio (best row of the paper's Table 4)")
    clip_ratio: float = knob(0.2, "on-policy ratio clipped at 1 - this", ge=0, le=1)
    clip_ratio_high: float | None = knob(None, "and at 1 + this; null: the same (DAPO's clip-higher: 0.28)", ge=0)
    off_policy_reshape: str = knob(
        "p_div_p_0.1",
        "f(p) on teacher tokens: no_reshape, logp, p_logp, square_root, pow, p_div_p_<gamma>, chord_phi, trapo, "
        "rl_plus, exgrpo, or your own (docs/methods.md#shaping-functions)",
    )
    off_policy_reshape_weight: float = knob(1.0, "weight in logp and p_logp")
    off_policy_reshape_pow_exp: float = knob(0.5, "exponent of pow and of (1 - p) in rl_plus")
    off_policy_reshape_gamma: float = knob(0.1, "gamma of exgrpo and trapo", gt=0)
    on_policy_reshape: str = knob("no_reshape", "the same shapes on the policy's own ratio")
    on_policy_reshape_weight: float = knob(1.0, "weight in p_logp")
    on_policy_reshape_pow_exp: float = knob(0.5, "exponent of pow")
    off_max_clip: float | None = knob(None, "upper bound of the off-policy ratio", gt=0)
    off_min_clip: float | None = knob(None, "lower bound of the off-policy ratio", ge=0)
    off_normalize: bool = knob(False, "divide the off-policy ratio by its mean over the mini-batch")
    all_max_clip: float | None = knob(None, "drop tokens whose probability exceeds this", gt=0, le=1)
    teacher_probs: Literal["one", "recorded"] = knob(
        "one", "teacher's probability in the off-policy ratio: 1 (paper), or the recorded log-probs (then no reshape)"
    )
    importance_clamp_min: float = knob(0.0, "smallest importance weight, under token overrides or stale rollouts", ge=0)
    importance_clamp_max: float = knob(10.0, "largest importance weight, under token overrides or stale rollouts", gt=0)
    importance_detach: bool = knob(
        True, "no gradient through the importance weights; false has an effect only with one mini-batch a step"
    )
    importance_objective: Literal["decoupled", "literal"] = knob(
        "decoupled", "decoupled: ratio p/p_old, advantage times weight; literal: corrects twice, kept for comparison"
    )
    importance_level: Literal["token", "sequence"] = knob(
        "token", "weight of a token: its own, or the product over its response (unbiased, but of high variance)"
    )
    mismatch_correction: Literal["off", "truncated", "masked"] = knob(
        "off",
        "weights p_old / p_engine on own tokens: truncated at mismatch_cap, or masked beyond it or 1 / it",
    )
    mismatch_cap: float = knob(2.0, "the bound of mismatch_correction", gt=1)
    trace_ratio: Literal["shaped", "ppo"] = knob(
        "shaped", "teacher tokens under f(p) (off_policy_reshape), or as own tokens: p / p_old with the clip"
    )
    trace_advantage: Literal["group", "constant", "relu"] = knob(
        "group",
        "advantage of teacher tokens: their response's, 1, or their response's but not below 0",
    )
    trace_entropy_share: float = knob(
        1.0,
        "share of a response's teacher tokens in the RL term: those with the highest entropy",
        gt=0,
        le=1,
    )
    prefix_alpha: float = knob(1.0, "weight of the advantage on off-policy tokens")
    prefix_beta: float = knob(1.0, "weight of the advantage on the policy's own tokens")
    entropy_coef: float = knob(0.001, "weight of the entropy bonus (the paper's text: 0.01)", ge=0)
    kl_coef: float = knob(0.0, "weight of the KL term against the reference model; 0 loads none", ge=0)
    kl_estimator: Estimator = knob("k3", "estimator of the KL term")
    kl_in: Literal["loss", "reward"] = knob("loss", "where the KL term goes")
    trace_term: Literal["rl", "sft"] = knob(
        "rl", "teacher tokens are in the policy-gradient term, or only in the SFT term (RL with SFT loss)"
    )
    distill_reward: float = knob(
        0.0,
        "credit distill: weight of the group's advantage, added to the teacher's log q - log p; 0: no reward",
        ge=0,
    )
    sft_coef: float = knob(1.0, "weight of the SFT term", ge=0)
    sft_reshape: str = knob(
        "logp",
        "f in the SFT term: logp (plain SFT), or any shape of off_policy_reshape, with its gamma",
    )
    mix: MixConfig | None = knob(
        None, "loss (1 - mu) RL + mu * sft_coef * SFT, with mu constant or along a schedule; null: RL + sft_coef * SFT"
    )
    reject_extreme: bool = knob(True, "drop groups whose rewards are all success or all failure")
    min_accuracy: float = knob(
        0.0, "drop groups where a smaller share of the policy's own samples is right", ge=0, le=1
    )
    max_accuracy: float = knob(1.0, "drop groups where a larger share of them is right", ge=0, le=1)
    oversample_rounds: int = knob(0, "extra batches to draw until the batch is full again after rejection", ge=0)

    def __post_init__(self) -> None:
        self.policy_loss(), self.sft_shape()  # reshape names are checked here, once
        if self.importance_clamp_min > self.importance_clamp_max:
            raise ConfigError(
                f"'algorithm.importance_clamp_min' ({self.importance_clamp_min}) exceeds "
                f"'algorithm.importance_clamp_max' ({self.importance_clamp_max})"
            )
        if self.min_accuracy > self.max_accuracy:
            raise ConfigError(
                f"'algorithm.min_accuracy' ({self.min_accuracy}) exceeds 'algorithm.max_accuracy' "
                f"({self.max_accuracy}): no group would be left"
            )

    def sft_shape(self) -> Shape:
        return _shape("sft_reshape", self.sft_reshape, gamma=self.off_policy_reshape_gamma)

    def policy_loss(self) -> PolicyLoss:
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return PolicyLoss(
            clip_low=1.0 - self.clip_ratio,
            clip_high=1.0 + high,
            remove_clip=self.remove_clip,
            on_shape=_shape(
                "on_policy_reshape",
                self.on_policy_reshape,
                self.on_policy_reshape_weight,
                self.on_policy_reshape_pow_exp,
            ),
            off_shape=_shape(
                "off_policy_reshape",
                self.off_policy_reshape,
                self.off_policy_reshape_weight,
                self.off_policy_reshape_pow_exp,
                self.off_policy_reshape_gamma,
            ),
            off_max_clip=self.off_max_clip,
            off_min_clip=self.off_min_clip,
            off_normalize=self.off_normalize,
            off_ppo=self.trace_ratio == "ppo",
            all_max_clip=self.all_max_clip,
        )


def _shape(knob: str, name: str, weight: float = 1.0, pow_exp: float = 0.5, gamma: float = 0.1) -> Shape:
    try:
        return Shape(name, weight, pow_exp, gamma)
    except ValueError as error:
        raise ConfigError(f"'algorithm.{knob}': {error}") from None


@dataclass(frozen=True)
class OptimConfig:
    lr: float = knob(1e-6, "peak learning rate", gt=0)
    betas: tuple[float, ...] = knob((0.9, 0.999), "AdamW's decay rates")
    eps: float = knob(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = knob(0.0, "decoupled weight decay on matrices (not on biases and norms)", ge=0)
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "inverse"] = knob(
        "constant",
        "learning rate after the warm-up; inverse_sqrt and inverse: lr / sqrt(k) and lr / k in the k-th step after it "
        "(appendix B of the paper), whatever the number of steps",
    )
    warmup: float = knob(0.0, "warm-up: below 1 a share of all training steps, else their number", ge=0)
    min_lr_ratio: float = knob(
        0.0, "where linear and cosine end, and what the inverse ones approach, as a share of lr", ge=0, le=1
    )
    grad_clip: float = knob(1.0, "largest gradient norm; 0 is off", ge=0)
    offload: bool = knob(
        False, "master weights and moments in host memory: 12 bytes a weight less on the GPU, slower steps"
    )

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"'optim.betas' must be two numbers in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class BatchConfig:
    problems: int = knob(128, "problems per rollout batch (traces per batch in SFT)", ge=1)
    mini_batch: int | None = knob(
        None,
        "problems per optimizer step; a batch takes problems / mini_batch steps (rounded up), also if groups are "
        "rejected; null: the whole rollout batch",
        ge=1,
    )
    tokens: int = knob(16384, "tokens per micro-batch, packed without padding; a shared prompt counts once", ge=1)
    expert_share: float = knob(
        0.0,
        "share of a step's problems with one whole trace and no own samples (CHORD; needs "
        "algorithm.credit=lone_trace_sft)",
        ge=0,
        le=1,
    )

    @property
    def experts(self) -> int:
        """Problems of a rollout batch that have a trace alone."""
        return round(self.expert_share * self.problems)

    @property
    def updates(self) -> int:
        """Optimizer steps of a rollout batch, however many of its groups are kept."""
        return math.ceil(self.problems / (self.mini_batch or self.problems))


@dataclass(frozen=True)
class ReplayConfig:
    share: float = knob(
        0.0,
        "share of a step's problems that come from replay, each with one earlier success (ExGRPO); 0: none",
        ge=0,
        le=1,
    )
    start: float = knob(
        0.35, "replay starts after the step in which more than this share of own samples is right", ge=0, le=1
    )
    problems: int = knob(4096, "most problems in the replay; the one solved longest ago is dropped first", ge=1)
    responses: int = knob(8, "most responses of each problem in the replay: the newest right ones", ge=1)


@dataclass(frozen=True)
class SftStepsConfig:
    buffer: int = knob(
        0,
        "an SFT step after this many traces of problems that no own sample solved (ReLIFT); 0: none",
        ge=0,
    )
    lr: float | None = knob(None, "learning rate of these steps; null: optim.lr, without its schedule", gt=0)
    grad_clip: float = knob(1.0, "their largest gradient norm; 0 is off", ge=0)


@dataclass(frozen=True)
class TrainConfig:
    steps: int | None = knob(None, "training steps (rollout batches); null: take epochs", ge=1)
    epochs: float | None = knob(None, "passes over the data, when steps is null", gt=0)
    save_every: int = knob(50, "steps between checkpoints; the last step is always saved", ge=1)
    keep: int = knob(2, "checkpoints kept besides the best one", ge=1)
    keep_best: bool = knob(True, "save and keep the step that was best on data.eval; false: less to write")
    keep_optimizer: int | None = knob(
        None,
        "newest checkpoints that keep optimizer state, 6/7 of a checkpoint in bfloat16; a run cannot resume from older "
        "ones; null: all that are kept",
        ge=1,
    )
    max_bad_steps: int = knob(3, "stop after this many non-finite updates in a row; each is skipped", ge=1)
    threads: int | None = knob(
        None, "CPU threads of torch; null: OMP_NUM_THREADS, or one a core of the process at most", ge=1
    )


@dataclass(frozen=True)
class EvalConfig:
    every: int = knob(0, "steps between evaluations on data.eval, and one at start and end; 0: only at the end", ge=0)
    limit: int | None = knob(None, "evaluate only this many problems, the first ones", ge=1)
    n: int = knob(1, "samples per problem; the accuracy is their mean", ge=1)
    temperature: float = knob(0.6, "0 is greedy", ge=0)
    top_p: float = knob(1.0, "nucleus sampling; 1 is off", gt=0, le=1)
    max_tokens: int | None = knob(None, "longest response; null: rollout.max_tokens", ge=1)


@dataclass(frozen=True)
class RecordConfig:
    tensorboard: bool = knob(True, "write TensorBoard events (when the package is there)")
    wandb: bool = knob(False, "log to Weights & Biases (needs the wandb extra)")
    wandb_project: str = knob("luffy", "W&B project")
    samples_every: int = knob(10, "steps between records of samples.jsonl; 0: none", ge=0)
    samples: int = knob(4, "groups recorded at such a step, and held-out problems of each set at an evaluation", ge=1)


@dataclass(frozen=True)
class AsyncConfig:
    max_staleness: int = knob(
        0,
        "versions a rollout may lag behind the update: 0 takes turns, 1 or more overlaps them",
        ge=0,
    )


@dataclass(frozen=True)
class ParallelConfig:
    workers: int = knob(1, "processes in all, one a GPU (torchrun started by hand decides itself)", ge=1)
    shard: Literal["full", "hybrid"] = knob(
        "full", "weights and optimizer state over all processes, or over groups that each hold everything"
    )
    shard_size: int | None = knob(None, "processes of a group when shard is hybrid; null: those of one machine", ge=1)
    gather: Literal["auto", "micro_batch", "mini_batch"] = knob(
        "auto",
        "gather weights and reduce gradients in every micro-batch, or once per mini-batch (less traffic, more memory); "
        "auto: once if it fits on every GPU",
    )
    cpu_offload: bool = knob(False, "weights and optimizer state wait in host memory: less GPU memory, more time")
    rollout_group: int = knob(
        1, "processes that share one engine and its copy of the model, where one does not fit on each GPU", ge=1
    )
    timeout_s: float = knob(1800.0, "the run ends if a process keeps the others waiting this long", gt=0)
    check_gradients: bool = knob(
        True, "before the first step, compare the gradient of all processes with that of one on small batches"
    )


@dataclass(frozen=True)
class RayConfig:
    address: str | None = knob(None, "a running cluster (auto or host:port); null: start one on this machine")
    max_failures: int = knob(3, "restarts from the last checkpoint after lost workers or machines; -1: no limit", ge=-1)
    spread: bool = knob(False, "put workers on as many machines as there are, instead of as few")
    cpus_per_worker: float = knob(1.0, "CPU cores that Ray sets aside for a worker", gt=0)
    gpus_per_worker: float = knob(
        1.0,
        "part of a GPU that Ray sets aside for a worker; up to 0.5 several workers share one, for tests",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class Knobs:
    """All knobs of a run, each checked alone; `luffy.config.Config` is this with the checks across them."""

    name: str = knob("run", "folder of the run below out; a recipe file without a name takes its file name")
    out: str = knob("runs", "folder that holds runs")
    seed: int = knob(0, "seed of everything random", ge=0, le=2**63 - 1)
    plugins: tuple[str, ...] = knob(
        (), "your own modules or .py files, imported first; the recipe can name what they register (docs/extend.md)"
    )
    launch: Literal["local", "torchrun", "ray"] = knob(
        "local", "one process here, parallel.workers processes here, or workers that Ray places and restarts"
    )
    prepare: dict[str, str] = knob(
        factory=dict,
        help="commands that make the recipe's files, by path; a run that lacks a file stops and names its command",
    )
    made_for: Literal["rl", "sft"] = knob("rl", "sft: `luffy train` refuses the recipe; `luffy sft` takes any")
    model: ModelConfig = knob(factory=ModelConfig)
    data: DataConfig = knob(factory=DataConfig)
    reward: RewardConfig = knob(factory=RewardConfig)
    guidance: GuidanceConfig = knob(factory=GuidanceConfig)
    teacher: TeacherConfig = knob(factory=TeacherConfig)
    rollout: RolloutConfig = knob(factory=RolloutConfig)
    algorithm: AlgorithmConfig = knob(factory=AlgorithmConfig)
    optim: OptimConfig = knob(factory=OptimConfig)
    batch: BatchConfig = knob(factory=BatchConfig)
    replay: ReplayConfig = knob(factory=ReplayConfig)
    sft_steps: SftStepsConfig = knob(factory=SftStepsConfig)
    train: TrainConfig = knob(factory=TrainConfig)
    eval: EvalConfig = knob(factory=EvalConfig)
    record: RecordConfig = knob(factory=RecordConfig)
    async_: AsyncConfig = knob(factory=AsyncConfig)
    parallel: ParallelConfig = knob(factory=ParallelConfig)
    ray: RayConfig = knob(factory=RayConfig)

    @property
    def folder(self) -> Path:
        return Path(self.out) / self.name

    @property
    def may_be_stale(self) -> bool:
        """Whether a step may learn from tokens that older weights drew."""
        return self.async_.max_staleness > 0 or self.rollout.max_tokens_per_step is not None

    @property
    def loads_reference(self) -> bool:
        """Whether RL has a further model for the KL term; with LoRA the policy without its adapters may serve."""
        return self.algorithm.kl_coef > 0 and (self.model.lora is None or self.model.reference is not None)

    @property
    def longest(self) -> int:
        """Tokens that one sequence may have."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens

    @property
    def sampling(self) -> Sampling:
        r = self.rollout
        return Sampling(max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k)

    def schedule(self, total_steps: int) -> RatioSchedule:
        g = self.guidance
        steps = total_steps if g.prefix_steps is None else g.prefix_steps
        steps = steps * total_steps if steps < 1 else steps
        return RatioSchedule(g.strategy, g.min_ratio, g.max_ratio, steps, g.shared)
