"""From a config to a run: everything is built here, in the order in which a mistake shows soonest."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from luffy.config import Config
from luffy.data import ProblemSampler
from luffy.distributed.shard import local_world_size
from luffy.distributed.world import World
from luffy.errors import UserError
from luffy.files import remove_unfinished
from luffy.guidance import Planner
from luffy.guidance.gate import find_gate
from luffy.models.load import eos_ids, load_model
from luffy.models.threads import default_workers
from luffy.report.recorder import check_trackers
from luffy.report.timing import Stopwatch
from luffy.rewards import Verifier
from luffy.train import held_out, recording, saving, setup
from luffy.train.background_saver import BackgroundSaver
from luffy.train.batch import detach_notice
from luffy.train.build_engines import Engines, no_schedule
from luffy.train.changes import measures_otherwise
from luffy.train.checkpoint import Checkpoint, CheckpointStore, find_checkpoint, set_records_aside
from luffy.train.gradient_check import check_gradients
from luffy.train.lock import lock_folder
from luffy.train.method_memory import MethodMemory
from luffy.train.policy import Policy
from luffy.train.prefetch import Prefetcher
from luffy.train.run_state import Messages, Method, RolloutBatch, Run
from luffy.train.saved_state import Progress
from luffy.train.scorer import TokenScorer
from luffy.train.tasks import (
    build_encoder,
    equal_prompts,
    left_out,
    load_eval_tasks,
    load_training_tasks,
    repeated_problems,
    with_date,
)
from luffy.train.teacher import build_teacher


def build_run(
    cfg: Config,
    method: Method,
    world: World,
    resume: str,
    allow_changed_data: bool,
    announce: Callable[[str], None] = lambda doing: None,
) -> Run:
    """A run ready for its next step: a new one, or restored from the checkpoint that ``resume`` (auto, never or a path)
    names. Holds the lock of the run folder until ``run.closing.close()``. ``announce`` hears what is being done."""
    with ExitStack() as closing:
        world.on_main(lambda: _lock(cfg, world, closing))
        messages = Messages(notices=world.on_main(lambda: check_trackers(cfg)))
        store = CheckpointStore(cfg.folder / "checkpoints", cfg.train.keep, cfg.train.keep_optimizer)
        checkpoint = world.on_main(lambda: find_checkpoint(cfg, store, resume, messages.notices.append))
        run = _assemble(cfg, method, world, store, checkpoint, messages, closing, announce)
        announce("restoring the state of the run" if checkpoint is not None else "beginning")
        own = checkpoint is not None and saving.restore(run, checkpoint, allow_changed_data)
        step = run.progress.step
        if step and not own:
            earlier = world.on_main(lambda: set_records_aside(cfg.folder, step))
            messages.notices += [earlier] if earlier else []
        run.evaluated = world.on_main(lambda: held_out.read_evaluated(cfg.folder, step))
        if checkpoint is not None:
            run.origin = cfg.folder if own else checkpoint.run_folder
            recording.note_changes(run)
            if not own or measures_otherwise(run.changes, cfg):
                held_out.forget_best(run)
            else:
                held_out.note_best(run)  # an evaluation that was made up for after the checkpoint was taken
        if run.engines.replica is not None:  # made before the masters of a checkpoint were there
            run.sync(step)
            if world.joined and cfg.parallel.check_gradients:
                check_gradients(run.policy, run.engines.replica.model)
        messages.notices += left_out(run.tasks.report, run.eval_report)
        messages.notices += run.tasks.problems.turns_notices
        messages.notices += repeated_problems(cfg, len(run.tasks))
        messages.notices += equal_prompts(run.tasks, run.eval_tasks)
        if method == "rl":
            messages.notices += setup.dropout_notice(run.model.config) + detach_notice(cfg)
        world.on_main(lambda: remove_unfinished(cfg.folder))
        world.on_main(lambda: saving.tidy(run))
        run.closing = closing.pop_all()
    return run


def _lock(cfg: Config, world: World, closing: ExitStack) -> None:
    # Workers that are started anew may find rank 0 of the lost group still on its way out.
    lock = lock_folder(cfg.folder, patience_s=30.0 if world.joined else 0.0)
    closing.callback(lock.release)


def _assemble(
    cfg: Config,
    method: Method,
    world: World,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    messages: Messages,
    closing: ExitStack,
    announce: Callable[[str], None],
) -> Run:
    setup.check_names(cfg, method)
    announce(f"reading the data with the tokenizer of {cfg.model.path}")
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    saved = {} if checkpoint is None else checkpoint.state()
    cfg = world.from_main(with_date(cfg, tokenizer, saved))
    if cfg.data.date is not None:
        messages.facts.append(f"prompts are dated {cfg.data.date} (data.date)")
    tasks = load_training_tasks(cfg, build_encoder(cfg, tokenizer), sft=method == "sft")
    encoder = build_encoder(cfg, tokenizer)  # its counts begin anew
    eval_tasks = load_eval_tasks(cfg, encoder)
    steps = total_steps(cfg, len(tasks), saving.progress_of(cfg, saved))
    device = setup.pick_device(cfg.model.device)
    verifier = _verifier(cfg, device, world, closing) if method == "rl" or eval_tasks else None
    torch.manual_seed(cfg.seed)
    announce(f"loading the model {cfg.model.path if checkpoint is None else checkpoint.path}")
    model = saving.load_weights(cfg, method, world, device, checkpoint)
    base = saving.base_of(cfg, model, checkpoint)
    setup.check_context(cfg, model.config)
    end_of_text = encoder.stops(eos_ids(model, tokenizer))
    announce(f"starting the rollout engine ({cfg.rollout.engine})")
    engines = Engines(cfg, method, model, device, world, messages.warn)
    closing.callback(engines.current.close)
    engines.current.sync(0 if checkpoint is None else checkpoint.step)
    watch = Stopwatch()
    policy = Policy(model, cfg, temperature=1.0 if method == "sft" else None, world=world, watch=watch)
    saver = BackgroundSaver(store, world) if world.joined else None
    if saver is not None:
        closing.callback(saver.close)
    has_teacher = method == "rl" and cfg.teacher.is_there
    engine, before_step = engines.for_rollouts(tokenizer, steps) if method == "rl" else (engines.current, no_schedule)
    return Run(
        cfg=cfg, method=method, world=world, device=device, messages=messages, watch=watch, closing=closing,
        tokenizer=tokenizer, eos_ids=end_of_text, tasks=tasks, eval_tasks=eval_tasks,
        eval_report=dict(encoder.counts), total_steps=steps, model=model, policy=policy,
        reference=_reference(cfg, method, policy, tokenizer, device),
        teacher=build_teacher(cfg, policy, tokenizer, tasks.encoder, device, messages.warn) if has_teacher else None,
        engines=engines, engine=engine, before_step=before_step,
        prefetcher=_prefetcher(cfg, method, engines, steps, policy, closing), verifier=verifier,
        sampler=ProblemSampler(len(tasks), cfg.seed), planner=build_planner(cfg, steps, end_of_text, tokenizer),
        gate=find_gate(cfg.guidance.gate), memory=MethodMemory(cfg, len(tasks)),
        store=store, saver=saver, base=base,
    )  # fmt: skip


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
) -> Prefetcher[RolloutBatch] | None:
    staleness = cfg.async_.max_staleness
    if method == "sft" or staleness == 0:
        return None
    prefetcher = Prefetcher[RolloutBatch](engines.catch_up, staleness, steps, policy.device)
    closing.callback(prefetcher.close)
    return prefetcher


def _reference(cfg: Config, method: Method, policy: Policy, tokenizer: Any, device: str) -> TokenScorer | None:
    """The model that a KL term compares with; with LoRA it is the policy without its adapters."""
    if method == "sft" or not cfg.loads_reference:
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
