"""`--dry-run`: check everything, build the first batch, and say what a step will do and need."""

from __future__ import annotations

import math
from contextlib import closing, suppress
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from luffy.config import Config
from luffy.core.logprobs import CPU_CHUNK_ROWS, GPU_CHUNK_BYTES
from luffy.data import ProblemSampler
from luffy.errors import UserError
from luffy.guidance import Planner
from luffy.models.forward import key_value_shape, use_luffy_attention
from luffy.models.load import DTYPES, check_local, decode, load_tokenizer, model_folder, slow_dtype
from luffy.report.recorder import check_trackers
from luffy.rewards import build_verifier
from luffy.rollout.native import default_slots
from luffy.rollout.overrides.pair_checks import check_same_tokenizer
from luffy.train import setup
from luffy.train.activations import activation_bytes
from luffy.train.batch import draw
from luffy.train.build import total_steps
from luffy.train.optim import lr_at
from luffy.train.overrides import check_second_fits
from luffy.train.run_state import Method
from luffy.train.trial import try_model
from luffy.train.vllm_settings import VLLM_SLOTS, context_of

GIB = 2**30
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
CACHES = ("KV cache", "second KV cache")
PROBLEMS_LOOKED_AT, TRACES_VERIFIED = 1000, 64
FEW_RIGHT = 0.8  # of them: fewer is worth a remark


def dry_run(cfg: Config, method: Method, trainings: int = 1) -> list[str]:
    """Lines to print; ``trainings`` like this one are made one after the other. Weights are not loaded: the model is
    built without memory to count its parameters."""
    notices = check_trackers(cfg)
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    encoder = setup.build_encoder(cfg, tokenizer)
    tasks = setup.load_training_tasks(cfg, encoder, sft=method == "sft")
    eval_tasks = setup.load_eval_tasks(cfg, encoder)
    model_config, parameters, trained = model_shape(cfg)
    setup.validate(cfg, method, model_config)
    try_model(model_config, cfg)
    device = setup.pick_device(cfg.model.device)
    notices += [remark for dtype in dtypes_of(cfg, method) if (remark := slow_dtype(dtype, device))][:1]
    second = check_other_models(cfg, method, tokenizer)
    traces = "not verified: no reward is needed"
    if method == "rl" or eval_tasks:
        traces = check_reward(cfg, method, tasks, tokenizer)
    held_out = ", ".join(f"{name} {len(items)}" for name, items in eval_tasks.items()) or "none"
    steps = total_steps(cfg, len(tasks))
    sampler = ProblemSampler(len(tasks), cfg.seed)
    rows, visits = draw(sampler, cfg.batch.problems)
    batch = [tasks[i] for i in rows]
    notices += setup.repeated_problems(cfg, len(tasks))
    several = "" if trainings == 1 else f", the first of {trainings} seeds"
    memory = memory_estimate(cfg, model_config, parameters, trained, method) | second_memory(cfg, second)
    lines = [
        f"run        {cfg.folder}  ({method}, {steps} steps, seed {cfg.seed}{several})",
        f"model      {cfg.model.path}  {parameters / 1e6:,.2f} M parameters, {cfg.model.dtype}",
        f"data       {', '.join(f'{k} {v}' for k, v in tasks.report.items())}; held out {held_out}",
        f"traces     {traces}",
        f"engine     {engine_line(cfg, method, model_config)}",
        f"step       {plan_line(cfg, method, batch, visits, steps)}",
        f"update     {update_line(cfg, steps)}",
        f"memory     {memory_line(cfg, memory)}",
        *(f"warning    {notice}" for notice in notices),
        "first prompt, as the model sees it:",
        encoder.render(batch[0].problem),
    ]
    return lines


def check_reward(cfg: Config, method: Method, tasks: setup.TaskSet, tokenizer: Any) -> str:
    """The reward of the run can be had, and what it says of the first traces, as the update would see them."""
    r = cfg.reward
    with closing(build_verifier(r.kind, r.weights or None, 1, r.timeout_s, r.answer_in_thought)) as verifier:
        if method == "sft":
            return "not verified: SFT learns from all of them"
        if cfg.guidance.n_prefix == 0:
            return "not used (guidance.n_prefix=0)"
        looked_at = (tasks[i] for i in range(min(len(tasks), PROBLEMS_LOOKED_AT)))
        some = list(islice(((t.problem, demo) for t in looked_at for demo in t.demonstrations), TRACES_VERIFIED))
        if not some:
            return f"none with the first {min(len(tasks), PROBLEMS_LOOKED_AT)} problems"
        texts = decode(tokenizer, [demo.token_ids for _, demo in some])
        scores = verifier.score([(problem, text) for (problem, _), text in zip(some, texts, strict=True)])
    right = sum(cfg.reward.solved(s.value) for s in scores)
    doubt = "" if right >= FEW_RIGHT * len(some) else "; LOOK AT THEM: only right ones teach (luffy prepare check)"
    reward = " + ".join(cfg.reward.weights) or cfg.reward.kind
    return f"{right} of the first {len(some)} are right by reward {reward}{doubt}"


def model_shape(cfg: Config) -> tuple[Any, int, int]:
    """Its config, its parameters, and how many of them are trained."""
    model = bare_model(cfg.model.path, "model.path", cfg)
    config, parameters = model.config, parameters_of(model)
    with suppress(UserError):  # a model that luffy's attention does not serve runs by its own, slower
        use_luffy_attention(model)
    if cfg.model.lora is not None:
        with torch.device("meta"):
            model = setup.add_adapters(model, cfg.model)
    return config, parameters, sum(p.numel() for p in model.parameters() if p.requires_grad)


def bare_model(path: str, knob: str, cfg: Config) -> Any:
    """Without memory for its weights."""
    trust = cfg.model.trust_remote_code
    config = read_model_config(str(model_folder(path)), knob, trust)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    model.tie_weights()
    return model


def dtypes_of(cfg: Config, method: Method) -> set[str]:
    """Of the policy's weights and, where there is one, the second model's."""
    knobs = cfg.rollout.overrides if method == "rl" else None
    return {cfg.model.dtype} | ({knobs.dtype or cfg.model.dtype} if knobs else set())


def parameters_of(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def read_model_config(path: str, knob: str, trust_remote_code: bool) -> Any:
    try:
        check_local(path, "config.json")
    except UserError as error:
        raise UserError(f"'{knob}' {error}") from None
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"'{knob}' {path}: {' '.join(str(error).split())[:300]}") from None


def check_other_models(cfg: Config, method: Method, tokenizer: Any) -> Any:
    """The reference and the second model are there and fit; the latter without its weights, if there is one."""
    m, knobs = cfg.model, cfg.rollout.overrides
    if method == "rl" and cfg.algorithm.kl_coef and m.reference:
        read_model_config(m.reference, "model.reference", m.trust_remote_code)
    if method != "rl" or knobs is None:
        return None
    model = bare_model(knobs.model_path, "rollout.offpolicy_guidance.model_path", cfg)
    check_same_tokenizer(tokenizer, load_tokenizer(knobs.model_path, m.trust_remote_code))
    check_second_fits(cfg, knobs, model.config, tokenizer)
    return model


def plan_line(cfg: Config, method: Method, batch: list[Any], visits: list[int], steps: int) -> str:
    if method == "sft":
        tokens = sum(len(t.prompt_ids) + max(len(d.token_ids) for d in t.demonstrations) for t in batch)
        return f"{len(batch)} traces, up to {tokens:,} tokens"
    g = cfg.guidance
    planner = Planner(cfg.rollout.n, g.n_prefix, cfg.sampling, cfg.schedule(steps), "random", cfg.seed)
    plan = planner.plan(batch, 0, visits)
    planned = [p for group in plan.groups for p in group]
    whole = sum(p.request is None for p in planned)
    partial = sum(p.request is not None and p.prefix > 0 for p in planned)
    own = len(planned) - whole - partial
    longest = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in plan.requests)
    return (
        f"{len(batch)} problems x {cfg.rollout.n} samples: {own} on-policy, {partial} from a trace prefix, "
        f"{whole} whole traces; at most {longest:,} tokens through the engine"
    )


def engine_line(cfg: Config, method: Method, model_config: Any) -> str:
    r = cfg.rollout
    if r.engine == "native" or method == "sft":
        return f"native, {r.slots or 'as many as fit'} slots"
    where = f"{len(r.vllm.servers)} server(s)" if r.vllm.servers else "in this process"
    size = f"{r.slots or VLLM_SLOTS} slots, {context_of(cfg, model_config)} tokens of context"
    return f"vLLM, {where}, {size}, mismatch correction {cfg.algorithm.mismatch_correction}"


def update_line(cfg: Config, steps: int) -> str:
    updates = math.ceil(cfg.batch.problems / (cfg.batch.mini_batch or cfg.batch.problems))
    a = cfg.algorithm
    first, last = lr_at(0, steps, cfg.optim), lr_at(steps - 1, steps, cfg.optim)
    return (
        f"{updates} optimizer step(s), micro-batches of {cfg.batch.tokens:,} tokens, lr {first:.2e} -> {last:.2e}, "
        f"{a.advantage}, {a.off_policy_reshape}, {a.loss_reduction}"
    )


def memory_line(cfg: Config, parts: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    # Where rollout and update take turns, the caches are released before the update begins.
    overlap = cfg.async_.max_staleness > 0
    update = sum(size for name, size in parts.items() if overlap or name not in CACHES)
    kept = ("weights", "copies for rollouts", "optimizer", "reference", "second model", *CACHES)
    rollout = sum(parts.get(name, 0) for name in kept)
    each = "" if cfg.launch == "local" else f" in each of {cfg.parallel.workers} processes"
    return f"about {max(update, rollout) / GIB:.2f} GiB at the peak{each} ({shown} GiB)"


def attended_tokens(cfg: Config, method: Method) -> int:
    """Of a full micro-batch: a group's prompt is computed once, but its keys lie before every response."""
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_tokens
    n = 1 if method == "sft" else cfg.rollout.n
    return cfg.batch.tokens * n * (prompt + response) // (prompt + n * response)


def memory_estimate(cfg: Config, model_config: Any, parameters: int, trained: int, method: Method) -> dict[str, float]:
    """Bytes. Activations: what the decoder layers keep for their backward pass (two values of the hidden width
    per token when checkpointed), and the head's chunk of logits."""
    size = SIZES[cfg.model.dtype]
    c = model_config
    local = cfg.launch == "local"
    master = 4 if size == 2 and cfg.model.lora is None and local else 0
    shards = 1 if local else cfg.parallel.shard_size or cfg.parallel.workers
    stored = size if local else 4  # sharded weights are the masters
    checkpointed = 2 * c.hidden_size * c.num_hidden_layers * size * cfg.batch.tokens
    everything = activation_bytes(c, cfg.batch.tokens, attended_tokens(cfg, method), size)
    kept = checkpointed if cfg.model.gradient_checkpointing is True else everything
    parts = {
        "weights": parameters * stored / shards,
        "optimizer": 0 if cfg.optim.offload else trained * (8 + master) / shards,
        "gradients": trained * 4 / shards,
        "activations": kept + head_bytes(cfg, c.vocab_size),
        "KV cache": 0.0 if method == "sft" else cache_bytes(cfg, c, size),
    }
    if cfg.algorithm.kl_coef and cfg.model.lora is None and method == "rl":
        parts["reference"] = parameters * size / shards
    lags = method == "rl" and cfg.async_.max_staleness > 0
    if not local or lags:
        parts["copies for rollouts"] = parameters * size * (2 if lags else 1)
    return parts


def second_memory(cfg: Config, model: Any) -> dict[str, float]:
    """A second model stays beside the policy, whole; its cache is there when the policy's is."""
    if model is None or cfg.rollout.overrides is None:
        return {}
    size = SIZES[cfg.rollout.overrides.dtype or cfg.model.dtype]
    return {"second model": parameters_of(model) * size, "second KV cache": cache_bytes(cfg, model.config, size)}


def cache_bytes(cfg: Config, model_config: Any, size: int) -> float:
    """Keys and values of as many sequences of full length as are in the making at once."""
    heads, width = key_value_shape(model_config)
    most = VLLM_SLOTS if cfg.rollout.engine == "vllm" else default_slots(setup.pick_device(cfg.model.device))
    slots = min(cfg.rollout.slots or most, cfg.batch.problems * cfg.rollout.n)
    return float(2 * model_config.num_hidden_layers * heads * width * cfg.longest * slots * size)


def head_bytes(cfg: Config, vocabulary: int) -> int:
    """The head's chunk of logits; on a CPU also in float32, with its gradient."""
    if setup.pick_device(cfg.model.device) == "cuda":
        return GPU_CHUNK_BYTES
    return 3 * CPU_CHUNK_ROWS * vocabulary * 4
