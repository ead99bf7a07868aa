"""`--dry-run`: check everything, build the first batch, and say what a step will do and need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.distributed.cost import Gpu
from luffy.errors import UserError
from luffy.guidance import Planner
from luffy.guidance.plan import Plan, Planned
from luffy.models.load import DTYPES, slow_dtype
from luffy.models.memory import memory_of_machine, resident_bytes
from luffy.report.recorder import check_trackers
from luffy.rewards import Verifier
from luffy.rollout.native import default_slots
from luffy.train import setup
from luffy.train.bare_models import ModelShape, OtherModels, check_other_models, model_shape, parameters_of
from luffy.train.batch import mini_batches, needed_log_probs
from luffy.train.build import build_planner, total_steps
from luffy.train.draws import Drawn, draw_batch
from luffy.train.estimate import ALLOCATOR, Parts, Work, passes_of, planned_sample, rollout_parts, update_parts
from luffy.train.gpu_cost import TIMED_ENGINES, StepTime, gpu_named, times_on_gpus
from luffy.train.groups import verified
from luffy.train.method_memory import MethodMemory
from luffy.train.optim import lr_at
from luffy.train.probe import this_gpu, time_on_cpu
from luffy.train.run_state import Method
from luffy.train.trial import try_model
from luffy.train.vllm_settings import VLLM_SLOTS, context_of
from luffy.types import Request, Sample, Task

GIB = 2**30
SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
LOADED_LATER = GIB // 10  # libraries and scratch memory that only a training touches, on a CPU
PROBLEMS_LOOKED_AT, TRACES_VERIFIED = 1000, 64
FEW_RIGHT = 0.8  # of them: fewer is worth a remark


@dataclass(frozen=True)
class Renting:
    """GPUs to estimate for: ``gpu`` by name (None: this machine's, or h200 where it has none), and what an hour of one
    costs."""

    gpu: str | None = None
    price: float | None = None


@dataclass(frozen=True)
class Place:
    """Where the run is meant to be made: on a GPU or the CPU of this machine, or on a ``rented`` GPU, which need not be
    there. Memory in bytes."""

    on_gpu: bool
    free: float
    total: float
    name: str
    rented: str | None = None

    @classmethod
    def of(cls, cfg: Config, renting: Renting) -> Place:
        """A GPU that is named is meant. Several processes that ask for no CPU are meant for GPUs, H200s where this
        machine has none."""
        several = cfg.model.device != "cpu" and cfg.launch != "local"
        rented = renting.gpu or ("h200" if several and not torch.cuda.is_available() else None)
        if rented is None:
            on_gpu = setup.pick_device(cfg.model.device) == "cuda"
            return cls(on_gpu, *memory_of_machine(on_gpu))
        memory = gpu_named(rented).memory
        return cls(True, memory, memory, f"a rented {rented.upper()}", rented)


def dry_run(cfg: Config, method: Method, trainings: int = 1, renting: Renting | None = None) -> list[str]:
    """Lines to print; ``trainings`` like this one are made one after the other. Weights are not loaded: the model is
    built without memory to count its parameters."""
    renting = renting or Renting()
    place = Place.of(cfg, renting)
    if renting.price is not None and not place.on_gpu:
        raise UserError("--gpu-price is for GPUs, and this run is meant for the CPU: name one with --gpu")
    setup.check_names(cfg, method)
    notices = check_trackers(cfg)
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    encoder = setup.build_encoder(cfg, tokenizer)
    tasks = setup.load_training_tasks(cfg, encoder, sft=method == "sft")
    eval_tasks = setup.load_eval_tasks(cfg, encoder)
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
    notices += setup.repeated_problems(cfg, len(tasks)) + setup.equal_prompts(tasks, eval_tasks)
    several = "" if trainings == 1 else f", the first of {trainings} seeds"
    old, reference = needed_log_probs(cfg, len(batch)) if method == "rl" else (range(0), False)
    scored = len(old) / len(batch) + reference + teacher_passes(cfg, method, model, others.teacher)
    work = work_of(cfg, model, planned_samples(cfg, batch, plan), scored, place.on_gpu)
    requests = plan.requests if plan else []
    kept = kept_parts(cfg, method, work, others)
    if place.on_gpu:
        work = replace(work, unused=place.free - sum(kept.values()) - work.trained * 4 / shards_of(cfg))
    needs = memory_needs(cfg, work, requests, others, kept)
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
        *(f"warning    {notice}" for notice in notices),
        "first prompt, as the model sees it:",
        encoder.render(batch[0].problem),
    ]
    return lines


def check_reward(cfg: Config, method: Method, tasks: setup.TaskSet, tokenizer: Any, verifier: Verifier) -> str:
    """What the reward of the run says of the first traces, as the update would see them."""
    if method == "sft":
        return "not verified: SFT learns from all of them"
    if not setup.uses_traces(cfg):
        return "not used"
    looked_at = (tasks[i] for i in range(min(len(tasks), PROBLEMS_LOOKED_AT)))
    some = list(islice(((t.problem, d.token_ids) for t in looked_at for d in t.demonstrations), TRACES_VERIFIED))
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

    def __init__(self, cfg: Config, tasks: setup.TaskSet, planner: Planner, verifier: Verifier, tokenizer: Any) -> None:
        self.cfg, self.tasks, self.planner = cfg, tasks, planner
        self.sampler, self.memory = ProblemSampler(len(tasks), cfg.seed), MethodMemory(cfg, len(tasks))
        self._verifier, self._tokenizer = verifier, tokenizer

    def trace_rewards(self, task: Task) -> list[float]:
        traces = [(task.problem, demo.token_ids) for demo in task.demonstrations]
        return [score.value for score in verified(traces, self._verifier, self._tokenizer)]

    def plan(self) -> Plan:
        """Of all processes together."""
        draws = draw_batch(self, 0, 0)
        tasks = self.tasks.at([draw.row for draw in draws])
        return Drawn(draws, tasks, list(range(len(draws))), {}).plan(self, 0)


def first_problems(cfg: Config, tasks: setup.TaskSet) -> list[Task]:
    """Of SFT."""
    return tasks.at(ProblemSampler(len(tasks), cfg.seed).next(cfg.batch.problems))


def planned_samples(cfg: Config, batch: list[Task], plan: Plan | None) -> list[list[Sample]]:
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
        config=model.config,
        parameters=model.parameters,
        trained=model.trained,
        itemsize=SIZES[cfg.model.dtype],
        on_gpu=on_gpu,
        lora_rank=None if cfg.model.lora is None else cfg.model.lora.rank,
        checkpointing=cfg.model.gradient_checkpointing,
        passes=[passes_of(part, cfg.batch.tokens, model.shares) for part in parts],
        scored=scored,
    )


def shards_of(cfg: Config) -> int:
    """Processes that share one copy of the weights; hybrid, those of a machine as large as the cost model's."""
    p = cfg.parallel
    if cfg.launch == "local":
        return 1
    return p.shard_size or (min(p.workers, Gpu.per_machine) if p.shard == "hybrid" else p.workers)


def kept_parts(cfg: Config, method: Method, work: Work, others: OtherModels) -> Parts:
    """What stays in memory from step to step."""
    local, shards, size = cfg.launch == "local", shards_of(cfg), work.itemsize
    master = 4 if size == 2 and cfg.model.lora is None and local else 0
    moments = 16 if method == "rl" and cfg.sft_steps.buffer else 8  # SFT steps have an optimizer of their own
    parts = {
        "runtime": 0.0 if work.on_gpu else float(resident_bytes() + LOADED_LATER),
        "weights": work.parameters * (size if local else 4) / shards,  # sharded weights are the masters
        "optimizer": 0.0 if cfg.optim.offload and work.on_gpu else work.trained * (moments + master) / shards,
    }
    lags = method == "rl" and cfg.async_.max_staleness > 0
    if method == "rl" and cfg.loads_reference:
        parts["reference"] = work.parameters * size / shards
    if not local or lags:
        parts["copies for rollouts"] = float(work.parameters * size * (2 if lags else 1))
    if others.second is not None and cfg.rollout.overrides is not None:
        dtype = cfg.rollout.overrides.dtype or cfg.model.dtype
        parts["second model"] = float(parameters_of(others.second) * SIZES[dtype])
    if method == "rl":
        parts["teacher"] = teacher_bytes(cfg, work, others.teacher) / shards
        parts["fp8 copy"] = float(work.parameters) if cfg.rollout.precision == "fp8" else 0.0
    return {name: size for name, size in parts.items() if size}


def teacher_bytes(cfg: Config, work: Work, model: Any) -> float:
    """Over all processes: a model of its own; of averaged weights those that are trained, in float32; of the policy of
    the start a copy, unless it is the policy without its adapters."""
    size = SIZES[cfg.teacher.dtype or cfg.model.dtype]
    if model is not None:
        return float(parameters_of(model) * size)
    if cfg.teacher.average:
        return float(work.trained * 4)
    return float(work.parameters * size) if cfg.teacher.is_self and cfg.model.lora is None else 0.0


def teacher_passes(cfg: Config, method: Method, model: ModelShape, teacher: Any) -> float:
    """Forward passes of the policy that take as long as those of a teacher in this process."""
    if method == "sft" or cfg.teacher.path is None:
        return 0.0
    return 1.0 if teacher is None else parameters_of(teacher) / model.parameters


def slots_of(cfg: Config, work: Work, requests: Sequence[Request]) -> int:
    most = VLLM_SLOTS if cfg.rollout.engine == "vllm" else default_slots("cuda" if work.on_gpu else "cpu")
    return min(cfg.rollout.slots or most, len(requests))


def memory_needs(
    cfg: Config, work: Work, requests: Sequence[Request], others: OtherModels, kept: Parts
) -> dict[str, Parts]:
    """Bytes of each phase by part. Where rollouts and updates take turns, each has its own beside what is ``kept``.
    What an engine of the user's own needs is not known."""
    update = update_parts(replace(work, trained=work.trained // shards_of(cfg)))
    if not requests or cfg.rollout.engine not in TIMED_ENGINES:
        return {"update": kept | update}
    slots = slots_of(cfg, work, requests)
    longest = max(len(r.given_ids) + r.sampling.max_tokens for r in requests)
    prompts = [len(ids) for ids in {r.given_ids for r in requests}]
    rollout = rollout_parts(work, slots, prompts, longest, len(requests) // len(prompts))
    if others.second is not None and cfg.rollout.overrides is not None:
        size = SIZES[cfg.rollout.overrides.dtype or cfg.model.dtype]
        beside = rollout_parts(replace(work, config=others.second.config, itemsize=size), slots, prompts, longest, 1)
        rollout["second KV cache"] = beside["KV cache"]
    if cfg.async_.max_staleness > 0:
        return {"update beside rollouts": kept | update | rollout}
    return {"update": kept | update, "rollout": kept | rollout}


def memory_line(cfg: Config, work: Work, requests: Sequence[Request], needs: dict[str, Parts], place: Place) -> str:
    """The phase that needs the most, part by part; the others as a sum; and what the place of the run has."""
    above = ALLOCATOR if work.on_gpu else 1.0
    totals = {phase: above * sum(parts.values()) for phase, parts in needs.items()}
    phase = max(totals, key=lambda name: totals[name])
    shown = ", ".join(f"{name} {above * size / GIB:.2f}" for name, size in needs[phase].items())
    others = "".join(f"; {name} {total / GIB:.2f} GiB" for name, total in totals.items() if name != phase)
    if requests and cfg.rollout.engine not in TIMED_ENGINES:
        others += f"; how much rollouts of {cfg.rollout.engine} need is not known"
    each = "" if cfg.launch == "local" else f" in each of {cfg.parallel.workers} processes"
    host = f"; {12 * work.trained / GIB:.1f} GiB of host memory for optim.offload" if cfg.optim.offload else ""
    free = "" if place.rented else f", {place.free / GIB:.1f} free"
    short = "" if totals[phase] <= place.free else ": TOO LITTLE (docs/troubleshooting.md, out of memory)"
    return (
        f"about {totals[phase] / GIB:.2f} GiB at the peak{each}, in the {phase}: {shown} GiB{others}{host}; "
        f"{place.name} has {place.total / GIB:.1f} GiB{free}{short}"
    )


def time_line(
    cfg: Config, work: Work, requests: Sequence[Request], steps: int, place: Place, price: float | None
) -> str:
    """Of a step and of all ``steps``: on a CPU by a trial, on GPUs with their cost by the cost model."""
    if place.on_gpu:
        return f"cost       {gpu_line(cfg, work, requests, steps, place, price)}"
    return f"time       {cpu_line(cfg, work, requests, steps)}"


def gpu_line(
    cfg: Config, work: Work, requests: Sequence[Request], steps: int, place: Place, price: float | None
) -> str:
    """The same run with short responses and with all of full length."""
    gpu = gpu_named(place.rented) if place.rented else this_gpu()
    gpus = cfg.parallel.workers
    name = f"{gpus} x {place.rented.upper() if place.rented else 'GPU of this machine'}"
    found = times_on_gpus(cfg, work, requests, gpu)
    if not found:
        return f"not estimated: the run does not fit on {name}"
    parts = parts_of(cfg, requests, cfg.rollout.engine in TIMED_ENGINES, found)
    hours = [t.step * steps * gpus / 3600 for t in found]
    paid = "" if price is None else f", {_span(_rounded(h * price) for h in hours)} at {price:g} an hour"
    lengths = " (responses of a quarter of rollout.max_tokens in the mean, and of full length)" if requests else ""
    return (
        f"on {name}: {_span(duration(t.step) for t in found)} a step ({parts}), "
        f"{_span(duration(t.step * steps) for t in found)} for {steps} steps, {_span(map(_rounded, hours))} GPU "
        f"hours{paid}{lengths}, without rewards, evaluations and checkpoints; by the cost model with "
        f"{gpu.flops / 1e12:.0f} TFLOP/s and {gpu.memory_bandwidth / 1e12:.1f} TB/s (docs/results/cost.md says how it "
        "was checked)"
    )


def parts_of(cfg: Config, requests: Sequence[Request], timed: bool, found: Sequence[StepTime]) -> str:
    """What a step's time is made of; ``timed``: whether rollouts are in it, where there are any."""
    if requests and timed:
        return f"rollout {_span(duration(t.rollout) for t in found)}, update {_span(duration(t.update) for t in found)}"
    return "update alone" + (f": how long rollouts of {cfg.rollout.engine} take is not known" if requests else "")


def _span(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.5 else f"{number:.2g}"


def cpu_line(cfg: Config, work: Work, requests: Sequence[Request], steps: int) -> str:
    """Every response as long as it may become."""
    if slow_dtype(cfg.model.dtype, "cpu"):
        return f"not tried in {cfg.model.dtype}, which is slow on this CPU"
    rolled_out = requests if cfg.rollout.engine == "native" else []
    found = time_on_cpu(cfg, work, rolled_out, slots_of(cfg, work, requests))
    if found is None:
        return "not estimated: the model cannot be tried on this machine with fewer layers"
    parts = parts_of(cfg, requests, cfg.rollout.engine == "native", [found])
    layers = "one layer" if work.config.num_hidden_layers == 1 else "two layers"
    return (
        f"roughly {duration(found.step)} a step ({parts}), {duration(steps * found.step)} for {steps} steps, without "
        f"rewards, evaluations and checkpoints; tried with {layers} of the model on this machine, responses of full "
        f"length"
    )


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 9.5 else f"{seconds:.0f} s"
