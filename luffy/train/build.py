"""From a config to a run: everything is built here, in the order in which a mistake shows soonest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from luffy.config import Config, Method, check_made_for
from luffy.conversations import build_conversations
from luffy.data import Encoder, ProblemSampler
from luffy.distributed.shard import local_world_size
from luffy.distributed.world import World
from luffy.errors import UserError
from luffy.files import remove_unfinished
from luffy.guidance import Planner
from luffy.guidance.gate import find_gate
from luffy.learn.gradient_check import check_gradients
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.learn.teacher import build_teacher
from luffy.models.load import eos_ids, load_model
from luffy.models.machine import default_workers, pick_device, use_threads
from luffy.rewards import Verifier
from luffy.run_folder.background_saver import BackgroundSaver
from luffy.run_folder.changes import Changes, Start, compare, measures_otherwise, set_records_aside
from luffy.run_folder.checkpoint import Checkpoint, CheckpointStore, find_checkpoint
from luffy.run_folder.lock import lock_folder
from luffy.run_folder.saved_state import Progress
from luffy.run_folder.stages import Span
from luffy.run_folder.timing import Stopwatch
from luffy.run_folder.trackers import check_trackers
from luffy.step.crediting import detach_notice
from luffy.step.memory import MethodMemory
from luffy.step.prefetch import Prefetcher
from luffy.step.run_state import Begun, Messages, Run
from luffy.step.snapshot import progress_of, restore, state_of, tensors_of
from luffy.step.tasks import (
    TaskSet,
    build_encoder,
    equal_prompts,
    left_out,
    load_eval_tasks,
    load_training_tasks,
    repeated_problems,
    with_date,
)
from luffy.train import setup
from luffy.train.build_engines import Engines, no_schedule
from luffy.train.held_out import HeldOut, read_evaluated
from luffy.train.held_out_traces import hold_out_traces
from luffy.train.saving import Saver
from luffy.train.stage_end import StageEnd
from luffy.train.weights import Export, base_of, load_weights, with_template
from luffy.types import Sample, Task

Data = dict[str, dict[str, int]]


# A training ready for its next step: the run, its held-out sets, what saves it, how it begins, what ends its processes
# and threads and releases the run folder, and what decides when its stage ends, in a run with stages.
Built = tuple[Run, HeldOut, Saver, Start, ExitStack, StageEnd | None]


def build(
    cfg: Config,
    method: Method,
    world: World,
    resume: str,
    allow_changed_data: bool,
    announce: Callable[[str], None],
    on_save: Callable[[Path], None],
    span: Span | None,
) -> Built:
    """Build a new run, or restore one from the checkpoint that ``resume`` (auto, never or a path) names. It holds the
    lock of the run folder until its ``ExitStack`` is closed. ``announce`` hears what is being done. ``span``: of a run
    with stages, which one it is."""
    check_made_for(cfg, method)
    use_threads(cfg.train.threads)
    with ExitStack() as closing:
        world.on_main(lambda: _lock(cfg, world, closing))
        messages = Messages(notices=world.on_main(lambda: check_trackers(cfg)))
        handed_on = frozenset() if span is None else span.handed_on
        store = CheckpointStore(cfg.folder / "checkpoints", cfg.train.keep, cfg.train.keep_optimizer, handed_on)
        checkpoint = world.on_main(lambda: find_checkpoint(cfg, store, resume, messages.notices.append))
        if checkpoint is not None and span is not None and checkpoint.step <= span.first:
            checkpoint = None  # of an earlier stage
        run, held_out, data, base = _assemble(cfg, method, world, checkpoint, messages, closing, announce, span)
        announce("restoring the state of the run" if checkpoint is not None else "beginning")
        own = checkpoint is not None and restore(run, checkpoint, allow_changed_data)
        start = _start(run, held_out, data, checkpoint, own)
        if run.engines.replica is not None:  # made before the masters of a checkpoint were there
            run.sync(run.progress.step - run.first)
            if world.joined and cfg.parallel.check_gradients:
                check_gradients(run.policy, run.engines.replica.model)
        messages.notices += _notices(run, held_out, data)
        saver = _saver(run, store, base, closing, on_save)
        saver.by_loss = held_out.by_loss
        world.on_main(lambda: remove_unfinished(cfg.folder))
        world.on_main(lambda: saver.take_up(run.progress))
        end = None if span is None else StageEnd.of(span, world, cfg.folder, run.progress.step)
        return run, held_out, saver, start, closing.pop_all(), end


def _start(run: Run, held_out: HeldOut, data: Data, checkpoint: Checkpoint | None, own: bool) -> Start:
    """How the run begins, with notices of what changed since the checkpoint. ``own``: whether the checkpoint is this
    run's. Reads the evaluations on record and settles which step is the best so far."""
    cfg, world, step = run.cfg, run.world, run.progress.step
    recipe = (
        cfg if run.span is None else replace(run.span.recipe, data=replace(run.span.recipe.data, date=cfg.data.date))
    )
    if checkpoint is not None and not own:
        run.messages.notices += world.on_main(lambda: set_records_aside(cfg.folder, step))
    held_out.evaluated = world.on_main(lambda: read_evaluated(cfg.folder, step))
    if checkpoint is None:
        return Start(data, recipe)
    origin = cfg.folder if own else checkpoint.run_folder
    changes: Changes = {}
    if origin is not None:
        changes, notices = world.on_main(lambda: compare(recipe, run.method, step, origin))
        run.messages.notices += notices
    if not own or measures_otherwise(changes, cfg):
        run.progress.forget_best()
    elif cfg.train.keep_best:  # an evaluation may have been deferred until after the checkpoint was taken
        run.progress.note_best(held_out.evaluated.get(step))
    return Start(data, recipe, origin, changes)


def _notices(run: Run, held_out: HeldOut, data: Data) -> list[str]:
    notices = left_out(data["train"], data["eval"]) + run.tasks.problems.turns_notices
    notices += repeated_problems(run.cfg, len(run.tasks)) + equal_prompts(run.tasks, held_out.sets)
    return notices + (setup.dropout_notice(run.model.config) + detach_notice(run.cfg) if run.method == "rl" else [])


def _saver(
    run: Run, store: CheckpointStore, base: str | None, closing: ExitStack, on_save: Callable[[Path], None]
) -> Saver:
    background = export = None
    if run.world.joined:
        background = BackgroundSaver(store, run.world)
        closing.callback(background.close)
    if run.world.is_main:
        model = run.model if run.engines.replica is None or not run.world.joined else run.engines.replica.model
        tokenizer = with_template(run.tokenizer, run.tasks.encoder.chat_template)
        export = Export(model, tokenizer, run.eos_ids, lora=run.cfg.model.lora is not None)
    return Saver(store, export, background, lambda: (state_of(run, base), tensors_of(run)), run.messages.warn, on_save)


def _lock(cfg: Config, world: World, closing: ExitStack) -> None:
    # Workers that are started anew may find rank 0 of the lost group still on its way out.
    lock = lock_folder(cfg.folder, patience_s=30.0 if world.joined else 0.0)
    closing.callback(lock.release)


def _assemble(
    cfg: Config,
    method: Method,
    world: World,
    checkpoint: Checkpoint | None,
    messages: Messages,
    closing: ExitStack,
    announce: Callable[[str], None],
    span: Span | None,
) -> tuple[Run, HeldOut, Data, str | None]:
    """The run, its held-out sets, the content of data.json, and with LoRA the fingerprint of the base model."""
    setup.check_names(cfg, method)
    announce(f"reading the data with the tokenizer of {cfg.model.path}")
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    saved = {} if checkpoint is None else checkpoint.state()
    cfg = world.from_main(with_date(cfg, tokenizer, saved))
    if cfg.data.date is not None:
        messages.facts.append(f"prompts are dated {cfg.data.date} (data.date)")
    encoder = build_encoder(cfg, tokenizer)  # it counts what is held out alone
    tasks, traces = load_tasks(cfg, method, build_encoder(cfg, tokenizer), encoder)
    eval_tasks = load_eval_tasks(cfg, encoder)
    first = 0 if span is None else span.first
    done = progress_of(cfg, saved)
    steps = total_steps(cfg, len(tasks), replace(done, step=max(done.step - first, 0)))
    device = pick_device(cfg.model.device)
    verifier = _verifier(cfg, device, world, closing) if method == "rl" or eval_tasks else None
    torch.manual_seed(cfg.seed)
    announce(f"loading the model {cfg.model.path if checkpoint is None else checkpoint.path}")
    place = "cpu" if world.joined else device  # sharding moves the weights to the device, layer by layer
    model = load_weights(cfg, method, place, checkpoint)
    base = base_of(cfg, model, checkpoint)
    setup.check_context(cfg, model.config)
    end_of_text = encoder.stops(eos_ids(model, tokenizer))
    announce(f"starting the rollout engine ({cfg.rollout.engine})")
    engines = Engines(cfg, method, model, device, world, messages.warn)
    closing.callback(engines.current.close)
    engines.current.sync(0 if checkpoint is None else checkpoint.step - first)
    watch = Stopwatch()
    policy = Policy(model, cfg, temperature=1.0 if method == "sft" else None, world=world, watch=watch)
    reference = _reference(cfg, method, policy, tokenizer, device)
    policy.anchor = reference
    has_teacher = method == "rl" and cfg.teacher.is_there
    engine, before_step = engines.for_rollouts(tokenizer, steps) if method == "rl" else (engines.current, no_schedule)
    run = Run(
        cfg=cfg, method=method, world=world, messages=messages, watch=watch,
        tokenizer=tokenizer, eos_ids=end_of_text, tasks=tasks, total_steps=steps, model=model, policy=policy,
        reference=reference,
        teacher=build_teacher(cfg, policy, tokenizer, tasks.encoder, device, messages.warn) if has_teacher else None,
        engines=engines, engine=engine, before_step=before_step,
        prefetcher=_prefetcher(cfg, method, engines, steps, policy, closing), verifier=verifier,
        sampler=ProblemSampler(len(tasks), cfg.seed), planner=build_planner(cfg, steps, end_of_text, tokenizer),
        gate=find_gate(cfg.guidance.gate), memory=MethodMemory(cfg, len(tasks)),
        conversations=build_conversations(cfg, encoder), progress=Progress(step=first),
        span=span, ended_at=None if span is None or span.ending is None else span.ending.step,
    )  # fmt: skip
    messages.facts += [] if span is None or checkpoint is not None else span.told
    sizes = {name: len(of_set) for name, of_set in eval_tasks.items()}
    machine = {"processes": world.size, "gpus": world.size if device == "cuda" else 0}
    data = {"train": tasks.report, "eval": dict(encoder.counts), "held_out": sizes, "run": machine}
    return run, _held_out(run, eval_tasks, traces), data, base


def _held_out(run: Run, tasks: dict[str, list[Task]], traces: Sequence[Sample]) -> HeldOut:
    by_loss = bool(traces) and (not tasks if run.span is None else run.span.stage.by_loss)
    return HeldOut(
        run.cfg, run.world, tasks, run.engines.current, run.verifier, run.tokenizer, run.eos_ids, run.conversations,
        traces, run.policy.log_probs, by_loss,
    )  # fmt: skip


def load_tasks(cfg: Config, method: str, encoder: Encoder, of_held_out: Encoder) -> tuple[TaskSet, list[Sample]]:
    """The training problems, and the held-out traces, which ``of_held_out`` encodes."""
    return hold_out_traces(cfg, load_training_tasks(cfg, encoder, sft=method == "sft"), of_held_out)


def _verifier(cfg: Config, device: str, world: World, closing: ExitStack) -> Verifier:
    processes = local_world_size() if world.joined else 1
    verifier = cfg.reward.verifier(cfg.reward.workers or default_workers(device, processes))
    closing.callback(verifier.close)
    return verifier


def build_planner(cfg: Config, steps: int, end_of_text: tuple[int, ...], tokenizer: Any) -> Planner:
    cut_at = cfg.guidance.cut_at

    @cache
    def ends_prefix(token: int) -> bool:
        text = tokenizer.decode([token])
        return any(mark in text for mark in cut_at)

    return Planner(
        n=cfg.rollout.n,
        n_prefix=cfg.guidance.n_prefix,
        sampling=replace(cfg.sampling, eos_ids=end_of_text),
        schedule=cfg.schedule(steps),
        trace_choice=cfg.guidance.trace_choice,
        seed=cfg.seed,
        ends_prefix=ends_prefix if cut_at else None,
    )


def _prefetcher(
    cfg: Config, method: Method, engines: Engines, steps: int, policy: Policy, closing: ExitStack
) -> Prefetcher[Begun] | None:
    staleness = cfg.async_.max_staleness
    if method == "sft" or staleness == 0:
        return None
    prefetcher = Prefetcher[Begun](engines.catch_up, staleness, steps, policy.device)
    closing.callback(prefetcher.close)
    return prefetcher


def _reference(cfg: Config, method: Method, policy: Policy, tokenizer: Any, device: str) -> TokenScorer | None:
    """The model that a KL or SFT term compares with; with LoRA it is the policy without its adapters."""
    if not cfg.loads_reference(method):
        return None
    m = cfg.model
    model = load_model(m.reference or m.path, m.dtype, "cpu" if policy.world.joined else device, m.trust_remote_code)
    if m.reference not in (None, m.path):
        setup.check_reference(cfg, model.config, tokenizer)
    return policy.scorer_of(model.requires_grad_(False).eval())


def total_steps(cfg: Config, problems: int, done: Progress | None = None) -> int:
    """Steps of the whole training over so many problems; those that are ``done`` may have had another batch size."""
    if cfg.train.steps is not None:
        return cfg.train.steps
    if cfg.train.epochs is None:
        raise UserError("say how long to train: set train.steps or train.epochs")
    done = done or Progress()
    return max(done.step + math.ceil((cfg.train.epochs * problems - done.problems) / cfg.batch.problems), 1)
