"""Check everything, build the first batch, and say what a step will do and need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.dry_run.bare_models import ModelShape, check_other_models, model_shape, parameters_of
from luffy.dry_run.disk import checkpoint_parts, disk_line
from luffy.dry_run.memory_model import Work, passes_of, planned_sample
from luffy.dry_run.memory_needs import SIZES, memory_line, work_and_needs
from luffy.dry_run.place import Place, Renting
from luffy.dry_run.times import time_line
from luffy.dry_run.trial import try_model
from luffy.errors import UserError
from luffy.guidance import Planner
from luffy.guidance.plan import Plan, Planned
from luffy.models.forward import text_config
from luffy.models.load import slow_dtype
from luffy.report.recorder import check_trackers
from luffy.rewards import Verifier
from luffy.rollout.native import default_slots
from luffy.train import setup
from luffy.train.batch import detach_notice, mini_batches, needed_log_probs
from luffy.train.build import build_planner, total_steps
from luffy.train.draws import Drawn, draw_batch
from luffy.train.groups import verified
from luffy.train.method_memory import MethodMemory
from luffy.train.optim import lr_at
from luffy.train.run_state import Method
from luffy.train.tasks import (
    TaskSet,
    build_encoder,
    equal_prompts,
    load_eval_tasks,
    load_training_tasks,
    repeated_problems,
    uses_traces,
)
from luffy.train.vllm_settings import VLLM_SLOTS, context_of
from luffy.types import Sample, Task

PROBLEMS_LOOKED_AT, TRACES_VERIFIED = 1000, 64
FEW_RIGHT = 0.8  # of them: fewer is worth a remark


def dry_run(cfg: Config, method: Method, trainings: int = 1, renting: Renting | None = None) -> list[str]:
    """Lines to print; ``trainings`` like this one are made one after the other. Weights are not loaded: the model is
    built without memory to count its parameters."""
    renting = renting or Renting()
    place = Place.of(cfg, renting)
    if renting.price is not None and not place.on_gpu:
        raise UserError("--gpu-price is for GPUs, and this run is meant for the CPU: name one with --gpu")
    setup.check_names(cfg, method)
    notices = check_trackers(cfg) + ([place.notice] if place.notice else [])
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    encoder = build_encoder(cfg, tokenizer)
    tasks = load_training_tasks(cfg, encoder, sft=method == "sft")
    eval_tasks = load_eval_tasks(cfg, encoder)
    model = model_shape(cfg)
    setup.check_context(cfg, model.config)
    try_model(model.config, cfg)
    if not place.on_gpu:
        notices += [remark for dtype in dtypes_of(cfg, method) if (remark := slow_dtype(dtype, "cpu"))][:1]
    others = check_other_models(cfg, method, tokenizer)
    held_out = ", ".join(f"{name} {len(items)}" for name, items in eval_tasks.items()) or "none"
    steps = total_steps(cfg, len(tasks))
    traces, plan = "not verified: no reward is needed", None
    if method == "rl" or eval_tasks:
        with cfg.reward.verifier(workers=1) as verifier:
            traces = check_reward(cfg, method, tasks, tokenizer, verifier)
            if method == "rl":
                planner = build_planner(cfg, steps, encoder.stops(()), tokenizer)
                plan = FirstStep(cfg, tasks, planner, verifier, tokenizer).plan()
    batch = [group[0].task for group in plan.groups] if plan else first_problems(cfg, tasks)
    notices += tasks.problems.turns_notices
    notices += repeated_problems(cfg, len(tasks)) + equal_prompts(tasks, eval_tasks)
    notices += detach_notice(cfg) if method == "rl" else []
    several = "" if trainings == 1 else f", the first of {trainings} seeds"
    scored = scoring_passes(cfg, model, others.teacher, len(batch)) if method == "rl" else 0.0
    work = work_of(cfg, model, planned_samples(batch, plan), scored, place.on_gpu)
    requests = plan.requests if plan else []
    work, needs = work_and_needs(cfg, method, work, requests, others, place)
    lines = [
        f"run        {cfg.folder}  ({method}, {steps} steps, seed {cfg.seed}{several})",
        f"model      {cfg.model.path}  {model.parameters / 1e6:,.2f} M parameters, {cfg.model.dtype}",
        f"data       {', '.join(f'{k} {v}' for k, v in tasks.report.items())}; held out {held_out}",
        f"traces     {traces}",
        f"engine     {engine_line(cfg, method, model.config, place.on_gpu)}",
        f"step       {plan_line(cfg, batch, plan)}",
        f"update     {update_line(cfg, method, steps)}",
        f"memory     {memory_line(cfg, work, requests, needs, place)}",
        time_line(cfg, work, requests, steps * trainings, place, renting.price),
        f"disk       {disk_line(cfg, work, checkpoint_parts(cfg, method, work), steps, trainings, place)}",
        *(f"warning    {notice}" for notice in notices),
        "first prompt, as the model sees it:",
        encoder.render(batch[0].problem),
    ]
    return lines


def check_reward(cfg: Config, method: Method, tasks: TaskSet, tokenizer: Any, verifier: Verifier) -> str:
    """What the reward of the run says of the first traces, as the update would see them."""
    if method == "sft":
        return "not verified: SFT learns from all of them"
    if not uses_traces(cfg):
        return "not used"
    looked_at = (tasks[i] for i in range(min(len(tasks), PROBLEMS_LOOKED_AT)))
    some = list(islice(((t, d.token_ids) for t in looked_at for d in t.demonstrations), TRACES_VERIFIED))
    if not some:
        return f"none with the first {min(len(tasks), PROBLEMS_LOOKED_AT)} problems"
    scores = verified(some, verifier, tokenizer)
    right, failed = sum(cfg.reward.solved(s.value) for s in scores), sum(not s.is_verdict for s in scores)
    doubt = ""
    if failed:
        doubt = f"; {failed} COULD NOT BE SCORED: look at the reward (luffy verify)"
    elif (best := max(s.value for s in scores)) < cfg.reward.success and best > cfg.reward.failure:
        doubt = f"; THE BEST SCORE IS {best:g}, below reward.success={cfg.reward.success:g}"
    elif right < FEW_RIGHT * len(some):
        doubt = "; LOOK AT THEM: only right ones teach (luffy prepare check)"
    return f"{right} of the first {len(some)} are right by reward {cfg.reward.name}{doubt}"


def dtypes_of(cfg: Config, method: Method) -> set[str]:
    """Of the policy's weights and, where there is one, the second model's."""
    knobs = cfg.rollout.overrides if method == "rl" else None
    return {cfg.model.dtype} | ({knobs.dtype or cfg.model.dtype} if knobs else set())


class FirstStep:
    """What a run plans its first step with."""

    def __init__(self, cfg: Config, tasks: TaskSet, planner: Planner, verifier: Verifier, tokenizer: Any) -> None:
        self.cfg, self.tasks, self.planner = cfg, tasks, planner
        self.sampler, self.memory = ProblemSampler(len(tasks), cfg.seed), MethodMemory(cfg, len(tasks))
        self._verifier, self._tokenizer = verifier, tokenizer

    def trace_rewards(self, task: Task) -> list[float]:
        traces = [(task, demo.token_ids) for demo in task.demonstrations]
        return [score.value for score in verified(traces, self._verifier, self._tokenizer)]

    def plan(self) -> Plan:
        """Of all processes together."""
        draws = draw_batch(self, 0, 0)
        tasks = self.tasks.at([draw.row for draw in draws])
        return Drawn(draws, tasks, list(range(len(draws))), {}).plan(self, 0)


def first_problems(cfg: Config, tasks: TaskSet) -> list[Task]:
    """Of SFT."""
    return tasks.at(ProblemSampler(len(tasks), cfg.seed).next(cfg.batch.problems))


def planned_samples(batch: list[Task], plan: Plan | None) -> list[list[Sample]]:
    """By problem, every response of the engine as long as it may become."""
    if plan is None:
        return [[planned_sample(t.prompt_ids, max(len(d.token_ids) for d in t.demonstrations))] for t in batch]
    return [[planned_sample(p.task.prompt_ids, _most_tokens(p)) for p in group] for group in plan.groups]


def _most_tokens(planned: Planned) -> int:
    if planned.request is None:
        assert planned.demonstration is not None
        return len(planned.demonstration.token_ids)
    return planned.prefix + planned.request.sampling.max_tokens


def plan_line(cfg: Config, batch: list[Task], plan: Plan | None) -> str:
    if plan is None:
        tokens = sum(len(t.prompt_ids) + max(len(d.token_ids) for d in t.demonstrations) for t in batch)
        return f"{len(batch)} traces, up to {tokens:,} tokens"
    planned = [p for group in plan.groups for p in group]
    whole = sum(p.request is None for p in planned)
    partial = sum(p.request is not None and p.prefix > 0 for p in planned)
    own = len(planned) - whole - partial
    longest = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in plan.requests)
    gate = cfg.guidance.gate
    further = "" if gate == "none" else f"; rounds of the gate {gate} come on top and are not counted"
    experts = cfg.batch.experts
    alone = f" and {experts} with a trace alone" if experts else ""
    return (
        f"{len(batch) - experts} problems x {cfg.rollout.n} samples{alone}: {own} on-policy, {partial} from a trace "
        f"prefix, {whole} whole traces; at most {longest:,} tokens through the engine{further}"
    )


def engine_line(cfg: Config, method: Method, model_config: Any, on_gpu: bool) -> str:
    r = cfg.rollout
    if r.engine == "native" or method == "sft":
        return f"native, {r.slots or default_slots('cuda' if on_gpu else 'cpu'):,} slots"
    corrected = f"mismatch correction {cfg.algorithm.mismatch_correction}"
    if r.engine != "vllm":
        return f"{r.engine}, {corrected}"
    where = f"{len(r.vllm.servers)} server(s)" if r.vllm.servers else "in this process"
    size = f"{r.slots or VLLM_SLOTS} slots, {context_of(cfg, model_config)} tokens of context"
    return f"vLLM, {where}, {size}, {corrected}"


def update_line(cfg: Config, method: Method, steps: int) -> str:
    a, b = cfg.algorithm, cfg.batch
    first, last = lr_at(0, steps, cfg.optim), lr_at(steps - 1, steps, cfg.optim)
    sft = method == "sft"
    loss = f"{a.sft_reshape}, token-mean" if sft else f"{a.advantage}, {a.off_policy_reshape}, {a.loss_reduction}"
    return f"{b.updates} optimizer step(s), micro-batches of {b.tokens:,} tokens, lr {first:.2e} -> {last:.2e}, {loss}"


def work_of(cfg: Config, model: ModelShape, planned: Sequence[Sequence[Sample]], scored: float, on_gpu: bool) -> Work:
    parts = mini_batches(planned, cfg.batch.updates * cfg.parallel.workers)  # of one process, at least one problem
    return Work(
        config=text_config(model.config),
        parameters=model.parameters,
        trained=model.trained,
        itemsize=SIZES[cfg.model.dtype],
        on_gpu=on_gpu,
        lora_rank=None if cfg.model.lora is None else cfg.model.lora.rank,
        checkpointing=cfg.model.gradient_checkpointing,
        passes=[passes_of(part, cfg.batch.tokens, model.shares) for part in parts],
        scored=scored,
    )


def scoring_passes(cfg: Config, model: ModelShape, teacher: Any, problems: int) -> float:
    """How often the tokens of a batch are scored before the update, in forward passes of the policy: for old log-probs,
    by the reference, and by a teacher in this process (``teacher`` is None where it is the policy itself)."""
    old, reference = needed_log_probs(cfg, problems)
    passes = len(old) / problems + reference
    if cfg.teacher.path is not None:
        passes += 1.0 if teacher is None else parameters_of(teacher) / model.parameters
    return passes
