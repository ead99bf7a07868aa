"""Every knob: a typed field with its meaning and its bounds beside its default."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from luffy.config.parts import BASELINES, CREDIT, ENGINES, SFT_WEIGHTS, TRACKERS
from luffy.core.losses import ON_POLICY_TERMS, Estimator, PolicyLoss
from luffy.core.reduce import Reduction
from luffy.core.shaping import SHAPES, Shape
from luffy.errors import ConfigError
from luffy.guidance import GATES, ORDERS, SCHEDULES, RatioSchedule
from luffy.rewards.kinds import REWARDS, HttpRewardConfig
from luffy.rewards.verifier import Verifier, build_verifier
from luffy.schema import Chosen, choose_parts, knob
from luffy.types import Sampling


@dataclass(frozen=True)
class LoraConfig:
    rank: int = knob(16, "rank of the adapters; without model.lora all weights are trained", ge=1)
    alpha: float = knob(32.0, "the update is alpha / rank * B A", gt=0)
    dropout: float = knob(0.0, "dropout before the adapters", ge=0, le=1)
    target_modules: str | tuple[str, ...] = knob(
        "all-linear", "modules: a list, a regular expression of whole names, or 'all-linear'"
    )
    quantize: Literal["nf4"] | None = knob(
        None, "nf4: the decoder's frozen linear layers in four bits (QLoRA; needs the qlora extra)"
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
    path: str = knob("", "policy: Hugging Face folder, hub id, or .gguf file", required=True)
    tokenizer: str | None = knob(None, "tokenizer's folder or hub id; null: the model's")
    reference: str | None = knob(None, "reference model (KL term, SFT weights); null: the policy at the start")
    dtype: Literal["float32", "bfloat16"] = knob("float32", "dtype of weights; the optimizer keeps float32 masters")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "auto: the GPU, if there is one")
    gradient_checkpointing: Literal["auto"] | bool = knob(
        "auto",
        "recompute activations: less memory, more time; auto: if they would not fit",
    )
    lora: LoraConfig | None = knob(None, "train low-rank adapters instead of all weights (needs the peft extra)")
    trust_remote_code: bool = knob(False, "run the model's Python code: read it first")

    @property
    def four_bits(self) -> bool:
        """Whether the frozen weights below adapters are in four bits."""
        return self.lora is not None and self.lora.quantize is not None


@dataclass(frozen=True)
class DataConfig:
    train: str | tuple[str, ...] = knob(
        "", "file, folder, hub id, reasoning_gym:FAMILY, or a list (docs/data.md)", required=True
    )
    eval: str | tuple[str, ...] | None = knob(None, "held-out problems; null: no evaluation")
    eval_also: dict[str, str] = knob(
        factory=dict, help="further held-out sets, e.g. {ood: ood.jsonl}: metrics val-ood/*"
    )
    eval_traces: str | tuple[str, ...] | None = knob(
        None,
        "held-out problems with traces, whose loss is val-traces/loss",
    )
    split: str = knob("train", "split of a folder or hub id for training")
    eval_split: str = knob("test", "split for evaluation")
    format: Literal["auto", "luffy", "verl", "openr1", "gsm8k", "completion", "messages", "sharegpt", "alpaca"] = knob(
        "auto", "schema of the rows; auto: by the columns"
    )
    columns: dict[str, str] = knob(factory=dict, help="column names, e.g. {prompt: instruction, answer: meta.label}")
    turns: Literal["last", "all"] = knob(
        "last", "assistant turns of a chat that are its trace (docs/data.md#chats-and-tools)"
    )
    bad_rows: Literal["error", "skip"] = knob("error", "malformed rows stop the run, or are skipped and counted")
    strip_calculator: bool = knob(True, "remove GSM8K's <<...>> calculator marks")
    limit: int | None = knob(None, "use only the first training problems", ge=1)
    style: Literal["chat", "paper", "paper_simple", "plain"] = knob(
        "chat", "how a question becomes a prompt (docs/data.md#prompt-styles)"
    )
    system_prompt: str | None = knob(None, "system message (styles chat and paper)")
    chat_template: str | None = knob(None, "Jinja chat template, text or file; null: the tokenizer's")
    date: str | None = knob(None, "date that templates print (Llama 3), e.g. 2026-01-31; null: the run's first day")
    special_tokens: Literal["text", "control"] = knob(
        "text", "special tokens spelled out in prompts and traces: as text, or as tokens"
    )
    max_prompt_tokens: int = knob(1024, "longest prompt", ge=1)
    overlong_prompt: Literal["error", "drop"] = knob("error", "longer prompts stop the run, or are dropped and counted")
    overlong_trace: Literal["drop", "truncate", "error"] = knob("drop", "traces longer than rollout.max_tokens")


@dataclass(frozen=True)
class RewardConfig:
    kind: Chosen = knob(
        "math",
        "math, numeric, gsm8k, choice, format, reasoning_gym, http, an address, or custom (docs/rewards.md)",
        parts=REWARDS,
    )
    weights: dict[str, float] = knob(factory=dict, help="weighted sum instead of kind, e.g. {math: 1, format: 0.1}")
    workers: int | None = knob(
        None, "verifier processes; null: 2, with a GPU half of the cores (2 to 8 per rank)", ge=1
    )
    timeout_s: float = knob(8.0, "longer verifications are killed and get 0", gt=0)
    concurrency: int = knob(16, "samples at once of an async function, per worker", ge=1)
    http: HttpRewardConfig = knob(factory=HttpRewardConfig, help="how a server is asked for scores (docs/rewards.md)")
    answer_in_thought: bool = knob(False, "read answers inside <think>...</think> too")
    prompt_opens_thought: bool = knob(True, "after a prompt that ends with <think>, no answer before </think>")
    success: float = knob(1.0, "smallest reward of a correct response")
    failure: float = knob(0.0, "largest reward of a failed response")
    cut_off: Literal["score", "failure"] = knob(
        "score", "a response cut off at a limit: scored as any other, or at most reward.failure"
    )

    def __post_init__(self) -> None:
        choose_parts(self, "reward")

    @property
    def name(self) -> str:
        """What tells these rewards from others: a kind or an address, or several with their weights."""
        if self.weights:
            return " + ".join(f"{weight:g} {kind}" for kind, weight in self.weights.items())
        return self.http.url or "http" if self.kind == "http" else self.kind.shown

    @property
    def weight_of(self) -> dict[str, float]:
        """The weight of each kind in the sum; one kind alone has 1."""
        return self.weights or {self.kind: 1.0}

    def verifier(self, workers: int | None = None) -> Verifier:
        """What scores responses by these settings; ``workers`` instead of as many as they say (2 if they do not)."""
        return build_verifier(
            self.kind, self.weights or None, workers or self.workers or 2, self.timeout_s, self.answer_in_thought,
            self.concurrency, self.http, self.prompt_opens_thought,
            self.failure if self.cut_off == "failure" else None,
        )  # fmt: skip

    def solved(self, score: float) -> bool:
        return score >= self.success

    def failed(self, score: float) -> bool:
        return score <= self.failure


@dataclass(frozen=True)
class GuidanceConfig:
    n_prefix: int = knob(1, "samples of each group that start from a trace", ge=0)
    strategy: Chosen = knob(
        "fixed",
        "schedule of the prefix ratio (docs/methods/prefixes.md#prefix-ratios)",
        parts=SCHEDULES,
    )
    min_ratio: float = knob(1.0, "smallest fraction of the trace", ge=0, le=1)
    max_ratio: float = knob(1.0, "largest fraction of the trace", ge=0, le=1)
    prefix_steps: float | None = knob(None, "steps of the schedule; below 1 a fraction of all; null: all", gt=0)
    shared: bool = knob(False, "one ratio for all prefixed samples of a problem")
    cut_at: tuple[str, ...] = knob((), "a prefix ends at its last token with one of these texts")
    trace_choice: Chosen = knob(
        "random", "random, round_robin, shortest, best_reward (docs/methods/prefixes.md#trace-choice)", parts=ORDERS
    )
    gate: Chosen = knob(
        "none",
        "none, trace_on_failure, trace_alone, likeliest_traces, hinted_group, lowest_hint, shortest_hint, "
        "own_under_plan, micro_groups, or custom (docs/methods/gates.md#further-rounds)",
        parts=GATES,
    )
    gate_from: int = knob(0, "first step (from 0) at which the gate acts", ge=0)
    hint_text: str = knob("\n\nHere is a hint:\n{solution}", "text of a hint, after the question")

    def __post_init__(self) -> None:
        choose_parts(self, "guidance")
        if "{solution}" not in self.hint_text:
            raise ConfigError(f"'guidance.hint_text' must contain {{solution}}, got {self.hint_text!r}")


@dataclass(frozen=True)
class OffPolicyGuidanceConfig:
    enable: bool = knob(True, "false: ignore this section")
    model_path: str = knob("", "guide model's folder or hub id")
    servers: tuple[str, ...] = knob(
        (),
        "addresses of `luffy serve` with the guide model, instead of model_path",
    )
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "dtype of its weights; null: model.dtype")
    tensor_parallel_size: int = knob(1, "GPUs of the guide model; 1 with model_path", ge=1)
    rule: Literal["speculative", "threshold", "mixture", "aligned"] = knob(
        "speculative", "which tokens it overrides (docs/overrides.md#the-rules)"
    )
    k: int = knob(4, "tokens the policy proposes at once", ge=1)
    tau: float = knob(0.1, "threshold: override proposals less probable than this", ge=0, le=1)
    tau_end: float | None = knob(None, "threshold: tau after tau_steps; null: constant", ge=0, le=1)
    tau_steps: int | None = knob(None, "steps from tau to tau_end; null: all", ge=1)
    eps: float = knob(0.5, "mixture: fraction of the guide model's tokens", ge=0, le=1)
    eps_end: float | None = knob(None, "mixture: eps after eps_steps; null: constant", ge=0, le=1)
    eps_steps: int | None = knob(None, "steps from eps to eps_end; null: all", ge=1)
    max_overrides: int | None = knob(None, "overrides per response; then the policy continues alone", ge=0)
    temperature: float | None = knob(None, "the guide model's; null: rollout.temperature", gt=0)

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
        "folder or hub id, or self: the policy at the start (docs/methods/distillation.md#a-teacher)",
    )
    servers: tuple[str, ...] = knob((), "addresses of vLLM servers with the teacher, instead of path")
    average: float = knob(
        0.0,
        "with self: rate of the moving average of the policy's weights; 0: constant",
        ge=0,
        le=1,
    )
    dtype: Literal["float32", "bfloat16"] | None = knob(None, "dtype of its weights; null: model.dtype")
    shown: Literal["nothing", "solution", "sibling"] = knob(
        "nothing",
        "in its prompt: nothing, a trace, or another correct response of the group",
    )
    hint_text: str = knob(
        "\n\nHere is a correct solution:\n{solution}\n\nNow solve the problem yourself, step by step.",
        "text around the solution, after the question",
    )

    @property
    def is_there(self) -> bool:
        return self.path is not None or bool(self.servers)

    @property
    def is_self(self) -> bool:
        """The policy's own weights, of the start or averaged."""
        return self.path == "self"


VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what its max_lora_rank may be

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
    **dict.fromkeys(("enable_lora", "max_lora_rank"), "rollout.vllm.adapters"),
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
    servers: tuple[str, ...] = knob((), "addresses of `luffy serve`; empty: vLLM in the trainer's process (colocated)")
    api_key_env: str = knob("LUFFY_VLLM_KEY", "environment variable with the servers' key")
    tensor_parallel_size: int = knob(1, "GPUs of one copy of the model", ge=1)
    memory_fraction: float = knob(
        0.4,
        "fraction of the GPU for vLLM; if colocated, freed during the update",
        gt=0,
        le=1,
    )
    max_context: int | None = knob(None, "tokens of prompt and response; null: as data and rollout allow", ge=1)
    transfer: Literal["auto", "memory", "folder", "nccl"] = knob(
        "auto",
        "how weights get there; auto: memory if colocated, nccl from a GPU to servers, else folder",
    )
    shared_folder: str | None = knob(None, "folder of transfers, seen by all; null: in the run folder")
    adapters: Literal["merged", "alone"] = knob(
        "merged", "push LoRA adapters merged into the weights, or alone (docs/engines.md#adapters-alone)"
    )
    nccl_host: str = knob("127.0.0.1", "the trainer's address as servers see it, for NCCL")
    request_seeds: bool = knob(
        True,
        "a seed per request: the same samples in any batch; false is faster",
    )
    timeout_s: float = knob(600.0, "a server that takes longer for a response or push is lost", gt=0)
    args: dict[str, Any] = knob(factory=dict, help="other engine arguments, e.g. {enforce_eager: true}")

    def __post_init__(self) -> None:
        for name, value in self.args.items():
            _check_vllm_argument(name, value)
        if self.transfer == "nccl" and self.adapters == "alone":
            raise ConfigError("'rollout.vllm.adapters' alone go through a folder; set rollout.vllm.transfer=folder")
        wrong = {"memory": bool(self.servers), "nccl": not self.servers}
        if wrong.get(self.transfer, False) or (self.transfer == "memory" and self.tensor_parallel_size > 1):
            raise ConfigError(
                f"'rollout.vllm.transfer' {self.transfer} is for "
                f"{'servers' if self.transfer == 'nccl' else 'one GPU without servers'}; use auto or folder"
            )


@dataclass(frozen=True)
class DraftsConfig:
    when: Literal["never", "auto", "always"] = knob(
        "never",
        "speculative decoding while few responses are running (docs/engines.md#drafts); auto: if measured faster",
    )
    tokens: int = knob(8, "tokens of a response that a pass verifies; half with many responses", ge=2, le=64)
    memory_mb: int = knob(256, "host memory for drafts", ge=1)


@dataclass(frozen=True)
class RolloutConfig:
    n: int = knob(8, "samples per problem, traces included", ge=1)
    temperature: float = knob(1.0, "temperature of samples and log-probs", gt=0)
    top_p: float = knob(1.0, "nucleus sampling; 1: off", gt=0, le=1)
    top_k: int = knob(0, "sample among the k most likely tokens; 0: off", ge=0)
    max_tokens: int = knob(2048, "longest response", ge=1)
    max_tokens_per_step: int | None = knob(
        None,
        "longer responses continue in the next step (docs/scaling.md#responses-of-unequal-length)",
        ge=1,
    )
    slots: int | None = knob(
        None,
        "sequences decoded at once; null: 256, with the native engine on a GPU up to 1024",
        ge=1,
    )
    engine: Chosen = knob(
        "native",
        "native, vllm, or custom (docs/engines.md)",
        parts=ENGINES,
    )
    precision: Literal["model", "fp8"] = knob(
        "model",
        "precision of linear layers in the native engine (docs/engines.md#fp8)",
    )
    drafts: DraftsConfig = knob(factory=DraftsConfig)
    offpolicy_guidance: OffPolicyGuidanceConfig | None = knob(
        None, "overrides of tokens by a guide model (docs/overrides.md); null: none"
    )
    vllm: VllmConfig = knob(factory=VllmConfig)

    def __post_init__(self) -> None:
        choose_parts(self, "rollout")

    @property
    def overrides(self) -> OffPolicyGuidanceConfig | None:
        """The token overrides that are switched on."""
        g = self.offpolicy_guidance
        return g if g is not None and g.enable else None


@dataclass(frozen=True)
class EnvironmentConfig:
    name: str = knob("", "built-in name, file.py:Class or module:Class (docs/environments.md)")
    arguments: dict[str, Any] = knob(factory=dict, help="its settings, or arguments of the class")
    max_turns: int = knob(8, "turns of the policy in an episode", ge=1)
    max_tokens: int | None = knob(
        None,
        "tokens after the prompt, replies included; null: twice rollout.max_tokens",
        ge=1,
    )
    max_reply_chars: int = knob(4000, "longer answers of a tool are cut", ge=1)
    timeout_s: float = knob(30.0, "a call that takes longer ends its episode", gt=0)
    at_once: int = knob(64, "environments open at once, per process", ge=1)
    calls: Literal["auto", "hermes", "llama3", "mistral", "json"] = knob(
        "auto", "how the policy writes calls (docs/environments.md); auto: as its chat template"
    )
    on_bad_call: Literal["answer", "end"] = knob(
        "answer", "a failed call: the policy sees an error, or the episode ends",
    )  # fmt: skip
    on_failure: Literal["fail", "leave_out"] = knob(
        "fail", "an episode whose environment fails gets reward.failure, or is left out"
    )
    reward: Literal["auto", "verifier", "environment", "sum"] = knob(
        "auto", "the verifier's score, the environment's, or their sum; auto: the environment's if any",
    )  # fmt: skip
    weight: float = knob(1.0, "weight of the environment's reward in the sum")

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("'environment.name' is missing: name a built-in one, file.py:Class or module:Class")


@dataclass(frozen=True)
class MixConfig:
    start: float = knob(0.5, "mu at the start: the SFT term's fraction of the loss", ge=0, le=1)
    end: float | None = knob(None, "mu after steps, along a cosine; null: constant", ge=0, le=1)
    steps: int | None = knob(None, "steps from start to end, after the warm-up; null: all", ge=1)
    warmup: int = knob(0, "steps over which mu rises from 0", ge=0)

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
    credit: Chosen = knob(
        "group_baseline",
        "advantages and weights of tokens: group_baseline, rloo, maxrl, per_turn, lone_trace_sft (trace-only "
        "groups go into the SFT term), srft, distill, iw_opd, rlsd, or custom",
        parts=CREDIT,
    )
    advantage: Chosen = knob(
        "grpo",
        "baseline: all samples (grpo, paper Eq. 4) or on-policy ones (grpo_split)",
        parts=BASELINES,
    )
    normalize_std: bool = knob(False, "divide advantages by the group's standard deviation")
    loss_reduction: Reduction = knob(
        "seq-mean-token-sum-norm", "denominator of the loss (docs/methods/loss.md#loss-reductions)"
    )
    on_policy_term: Chosen = knob(
        "ppo",
        "ppo (clipped ratio), gspo (one ratio per response), cispo (clipped ratio as weight of log p)",
        parts=ON_POLICY_TERMS,
    )
    remove_clip: bool = knob(True, "do not clip the on-policy ratio (best row of the paper's Table 4)")
    clip_ratio: float = knob(0.2, "lower clip: 1 - this", ge=0, le=1)
    clip_ratio_high: float | None = knob(None, "upper clip: 1 + this; null: clip_ratio", ge=0)
    off_policy_reshape: Chosen = knob(
        "p_div_p",
        "shape f of off-policy tokens (docs/methods/loss.md#shaping-functions), or custom",
        parts=SHAPES,
    )
    on_policy_reshape: Chosen = knob(
        "no_reshape",
        "shape of the on-policy ratio",
        parts=SHAPES,
    )
    off_max_clip: float | None = knob(None, "upper bound of the off-policy ratio", gt=0)
    off_min_clip: float | None = knob(None, "lower bound of the off-policy ratio", ge=0)
    off_normalize: bool = knob(False, "divide the off-policy ratio by its mean over the mini-batch")
    all_max_clip: float | None = knob(None, "drop tokens whose probability exceeds this", gt=0, le=1)
    teacher_probs: Literal["one", "recorded"] = knob(
        "one", "teacher's probability in the off-policy ratio: 1 (paper), or recorded (no reshape)"
    )
    importance_clamp_min: float = knob(0.0, "smallest importance weight (overrides, stale rollouts)", ge=0)
    importance_clamp_max: float = knob(10.0, "largest importance weight", gt=0)
    importance_detach: bool = knob(True, "no gradient through importance weights")
    importance_objective: Literal["decoupled", "literal"] = knob(
        "decoupled", "how importance weights enter (docs/overrides.md#the-update)"
    )
    importance_level: Literal["token", "sequence"] = knob(
        "token", "weight of a token: its own, or the product over its response"
    )
    mismatch_correction: Literal["off", "truncated", "masked"] = knob(
        "off",
        "weights p_old / p_engine on on-policy tokens (docs/engines.md#training-inference-mismatch)",
    )
    mismatch_cap: float = knob(2.0, "bound of mismatch_correction", gt=1)
    trace_ratio: Literal["shaped", "ppo"] = knob("shaped", "off-policy tokens: f(p), or p / p_old with the clip")
    trace_advantage: Literal["group", "constant", "relu"] = knob(
        "group",
        "advantage of off-policy tokens: their response's, 1, or its positive part",
    )
    trace_entropy_share: float = knob(
        1.0,
        "fraction of off-policy tokens in the RL term: those of highest entropy",
        gt=0,
        le=1,
    )
    prefix_alpha: float = knob(1.0, "weight of the advantage on off-policy tokens")
    prefix_beta: float = knob(1.0, "weight of the advantage on on-policy tokens")
    entropy_coef: float = knob(0.001, "weight of the entropy bonus (the paper's text: 0.01)", ge=0)
    kl_coef: float = knob(0.0, "weight of the KL term; 0 loads no reference model", ge=0)
    kl_estimator: Estimator = knob("k3", "estimator of the KL term")
    kl_in: Literal["loss", "reward"] = knob("loss", "where the KL term goes")
    trace_term: Literal["rl", "sft", "none"] = knob("rl", "term of off-policy tokens; none: context only")
    sft_coef: float = knob(1.0, "weight of the SFT term", ge=0)
    sft_reshape: Chosen = knob("logp", "shape in the SFT term; logp: plain SFT", parts=SHAPES)
    sft_weight: Chosen = knob(
        "none",
        "weight of a token in the SFT term: none, eaft (entropy), iw_sft (p / p_ref of the trace)",
        parts=SFT_WEIGHTS,
    )
    sft_anchor: float = knob(0.0, "weight of KL(reference || policy) on tokens of the SFT term (ASFT)", ge=0)
    mix: MixConfig | None = knob(None, "loss (1 - mu) RL + mu * sft_coef * SFT; null: RL + sft_coef * SFT")
    reject_extreme: bool = knob(True, "drop all-correct and all-incorrect groups")
    min_accuracy: float = knob(0.0, "drop groups with a smaller fraction of correct on-policy samples", ge=0, le=1)
    max_accuracy: float = knob(1.0, "drop groups with a larger fraction", ge=0, le=1)
    oversample_rounds: int = knob(0, "extra batches to fill up after rejection", ge=0)

    def __post_init__(self) -> None:
        choose_parts(self, "algorithm")
        self.policy_loss()
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

    @property
    def sft_reads_reference(self) -> bool:
        return self.sft_anchor > 0 or self.sft_weight.part.needs_reference

    def sft_shape(self) -> Shape:
        return Shape(self.sft_reshape)

    def policy_loss(self) -> PolicyLoss:
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return PolicyLoss(
            clip_low=1.0 - self.clip_ratio,
            clip_high=1.0 + high,
            remove_clip=self.remove_clip,
            on_shape=Shape(self.on_policy_reshape),
            off_shape=Shape(self.off_policy_reshape),
            off_max_clip=self.off_max_clip,
            off_min_clip=self.off_min_clip,
            off_normalize=self.off_normalize,
            off_ppo=self.trace_ratio == "ppo",
            all_max_clip=self.all_max_clip,
            on_term=self.on_policy_term,
        )


@dataclass(frozen=True)
class OptimConfig:
    lr: float = knob(1e-6, "peak learning rate", gt=0)
    betas: tuple[float, ...] = knob((0.9, 0.999), "AdamW's decay rates")
    eps: float = knob(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = knob(0.0, "decoupled, on matrices (not on biases and norms)", ge=0)
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "inverse"] = knob(
        "constant",
        "after the warm-up; inverse_sqrt, inverse: lr / sqrt(k), lr / k in its k-th step",
    )
    warmup: float = knob(0.0, "warm-up steps; below 1 a fraction of all", ge=0)
    min_lr_ratio: float = knob(0.0, "final fraction of lr (the limit of inverse ones)", ge=0, le=1)
    grad_clip: float = knob(1.0, "gradient-norm clip; 0: off", ge=0)
    offload: bool = knob(False, "optimizer state in host memory: 12 bytes per weight less on the GPU, slower")

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"'optim.betas' must be two numbers in [0, 1), got {list(self.betas)}")


@dataclass(frozen=True)
class BatchConfig:
    problems: int = knob(128, "problems per rollout batch (SFT: traces per batch)", ge=1)
    mini_batch: int | None = knob(
        None,
        "problems per optimizer step (docs/methods/loss.md#updates-of-a-batch); null: all",
        ge=1,
    )
    tokens: int = knob(16384, "tokens per micro-batch; a shared prompt counts once", ge=1)
    expert_share: float = knob(
        0.0,
        "fraction of problems in the expert batch (CHORD)",
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
        "fraction of problems from the replay buffer (ExGRPO)",
        ge=0,
        le=1,
    )
    start: float = knob(0.35, "replay starts once a larger fraction of on-policy samples is correct", ge=0, le=1)
    problems: int = knob(4096, "most problems in the buffer; the oldest leave first", ge=1)
    responses: int = knob(8, "most responses per problem: the newest correct ones", ge=1)


@dataclass(frozen=True)
class SftStepsConfig:
    buffer: int = knob(
        0,
        "traces of unsolved problems that make an SFT step (ReLIFT); 0: none",
        ge=0,
    )
    lr: float | None = knob(None, "learning rate of these steps; null: optim.lr, without its schedule", gt=0)
    grad_clip: float = knob(1.0, "their gradient-norm clip; 0: off", ge=0)


@dataclass(frozen=True)
class TrainConfig:
    steps: int | None = knob(None, "steps (rollout batches); null: take epochs", ge=1)
    epochs: float | None = knob(None, "passes over the data, if steps is null", gt=0)
    save_every: int = knob(50, "steps between checkpoints; the last step is always saved", ge=1)
    keep: int = knob(2, "checkpoints kept besides the best one", ge=1)
    keep_best: bool = knob(True, "save and keep the best step on data.eval")
    keep_optimizer: int | None = knob(
        None,
        "newest checkpoints that keep optimizer state; older ones cannot resume; null: all",
        ge=1,
    )
    max_bad_steps: int = knob(3, "non-finite updates (skipped) in a row that stop the run", ge=1)
    threads: int | None = knob(None, "CPU threads of torch; null: OMP_NUM_THREADS, or at most one per core", ge=1)


@dataclass(frozen=True)
class EvalConfig:
    every: int = knob(0, "steps between evaluations, and one at start and end; 0: only at the end", ge=0)
    limit: int | None = knob(None, "evaluate only the first problems", ge=1)
    n: int = knob(1, "samples per problem; the accuracy is their mean", ge=1)
    temperature: float = knob(0.6, "0: greedy", ge=0)
    top_p: float = knob(1.0, "nucleus sampling; 1: off", gt=0, le=1)
    max_tokens: int | None = knob(None, "longest response; null: rollout.max_tokens", ge=1)
    hold_out: int = knob(0, "problems taken out of data.train, whose traces' loss is val-traces/loss", ge=0)


@dataclass(frozen=True)
class RecordConfig:
    tensorboard: bool = knob(True, "write TensorBoard events, if installed")
    wandb: bool = knob(False, "log to Weights & Biases (extra wandb)")
    wandb_project: str = knob("luffy", "W&B project")
    trackers: tuple[Chosen, ...] = knob((), "further trackers by name (docs/extend.md#a-tracker)", parts=TRACKERS)
    samples_every: int = knob(10, "steps between records of samples.jsonl; 0: none", ge=0)
    samples: int = knob(4, "groups per record, and held-out problems per set and evaluation", ge=1)

    def __post_init__(self) -> None:
        choose_parts(self, "record")

    @property
    def chosen_trackers(self) -> tuple[Chosen, ...]:
        """Every tracker that is switched on, with its settings."""
        given = ["tensorboard"] * self.tensorboard
        wandb = [{"name": "wandb", "project": self.wandb_project}] * self.wandb
        return (*(TRACKERS.read(value, "record") for value in (*given, *wandb)), *self.trackers)


@dataclass(frozen=True)
class AsyncConfig:
    max_staleness: int = knob(
        0,
        "versions a rollout may lag behind the update (docs/scaling.md#rollouts-that-overlap-the-update); 0: "
        "no overlap",
        ge=0,
    )


@dataclass(frozen=True)
class ParallelConfig:
    workers: int = knob(1, "processes, one per GPU (not used if you start torchrun by hand)", ge=1)
    shard: Literal["full", "hybrid"] = knob("full", "shard over all processes, or within groups")
    shard_size: int | None = knob(None, "processes of a group; null: those of one machine", ge=1)
    gather: Literal["auto", "micro_batch", "mini_batch"] = knob(
        "auto",
        "how often to gather weights and reduce gradients; auto: mini_batch if it fits",
    )
    cpu_offload: bool = knob(False, "shards in host memory: less GPU memory, more time")
    rollout_group: int = knob(1, "processes that share one engine and its copy of the model", ge=1)
    timeout_s: float = knob(1800.0, "the run ends if a process keeps the others waiting this long", gt=0)
    check_gradients: bool = knob(True, "first compare the gradient of all processes with that of one")


@dataclass(frozen=True)
class RayConfig:
    address: str | None = knob(None, "running cluster (auto or host:port); null: start one on this machine")
    max_failures: int = knob(3, "restarts after lost workers or machines; -1: no limit", ge=-1)
    spread: bool = knob(False, "put workers on many machines, not few")
    cpus_per_worker: float = knob(1.0, "CPU cores per worker", gt=0)
    gpus_per_worker: float = knob(
        1.0,
        "GPUs per worker; up to 0.5 several share one, for tests",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class Knobs:
    """All knobs of a run, each checked alone; `luffy.config.Config` is this with the checks across them."""

    name: str = knob("run", "run folder below out; default: the recipe file's name")
    out: str = knob("runs", "folder of runs")
    seed: int = knob(0, "seed of everything random", ge=0, le=2**63 - 1)
    plugins: tuple[str, ...] = knob((), "custom modules or .py files, imported first (docs/extend.md)")
    launch: Literal["local", "torchrun", "ray"] = knob(
        "local", "one process, parallel.workers processes on this machine, or Ray's workers"
    )
    prepare: dict[str, str] = knob(
        factory=dict,
        help="commands that make the recipe's files, by path",
    )
    made_for: Literal["rl", "sft"] = knob("rl", "sft: only `luffy sft` takes the recipe")
    stages: dict[str, Any] = knob(factory=dict, help="stages of the run, by name (docs/stages.md)")
    model: ModelConfig = knob(factory=ModelConfig)
    data: DataConfig = knob(factory=DataConfig)
    reward: RewardConfig = knob(factory=RewardConfig)
    guidance: GuidanceConfig = knob(factory=GuidanceConfig)
    teacher: TeacherConfig = knob(factory=TeacherConfig)
    rollout: RolloutConfig = knob(factory=RolloutConfig)
    environment: EnvironmentConfig | None = knob(
        None, "what answers the turns of an episode (docs/environments.md); null: one turn"
    )
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

    def loads_reference(self, method: str) -> bool:
        """Whether there is a further model for the KL term of RL or for the SFT term; with LoRA the policy without its
        adapters may serve."""
        is_read = self.algorithm.sft_reads_reference or (method == "rl" and self.algorithm.kl_coef > 0)
        return is_read and (self.model.lora is None or self.model.reference is not None)

    @property
    def longest(self) -> int:
        """Tokens that one sequence may have."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def longest_response(self) -> int:
        """Tokens behind a prompt, those of an environment included."""
        if self.environment is None:
            return self.rollout.max_tokens
        return self.environment.max_tokens or 2 * self.rollout.max_tokens

    @property
    def sampling(self) -> Sampling:
        r = self.rollout
        return Sampling(max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k)

    def schedule(self, total_steps: int) -> RatioSchedule:
        g = self.guidance
        steps = total_steps if g.prefix_steps is None else g.prefix_steps
        steps = steps * total_steps if steps < 1 else steps
        return RatioSchedule(g.strategy, g.min_ratio, g.max_ratio, steps, g.shared)
