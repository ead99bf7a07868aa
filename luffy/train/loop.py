"""The training run: what `luffy train` and `luffy sft` share.

A step reads like the pseudocode: samples from their source, credit attached; one optimizer step per
mini-batch; log; evaluate; save. Whatever a step needs besides the weights (sampler, counters, random
state) is in the checkpoint, so a killed run continues as if nothing had happened.
"""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from luffy.config import Config, EvalConfig, to_yaml
from luffy.distributed.replica import on_host
from luffy.distributed.state import read_sharded, shard_whole
from luffy.distributed.world import World
from luffy.errors import AllStopped, Interrupted, TrainingStopped, UserError
from luffy.evaluation.held_out import evaluate
from luffy.files import remove_unfinished, write_atomically
from luffy.metrics import Max, Metric, Sum, merge_metrics
from luffy.models.load import eos_ids, load_model
from luffy.models.threads import use_threads
from luffy.report.console import RunView, was_idle
from luffy.report.recorder import (
    METRICS,
    Recorder,
    SilentRecorder,
    check_trackers,
    evaluation_rows,
    read_json_lines,
    sample_rows,
    trace_rows,
)
from luffy.report.runs import CONFIG
from luffy.report.timing import Stopwatch
from luffy.rewards import Verifier, build_verifier
from luffy.schema import to_dict
from luffy.train import setup
from luffy.train.ahead import Ahead
from luffy.train.background import BackgroundSaver
from luffy.train.changes import Changes, changed_settings, in_words, settings_before
from luffy.train.checkpoint import (
    BEST,
    DISK_ERRORS,
    Checkpoint,
    CheckpointStore,
    cannot_be_written,
    find_checkpoint,
    random_state,
    restore_random_state,
    set_records_aside,
)
from luffy.train.copies import Engines
from luffy.train.credit import uncredited
from luffy.train.lock import FolderLock, lock_folder
from luffy.train.memory import when_it_runs_out
from luffy.train.optim import lr_at
from luffy.train.policy import NonFiniteUpdate, Policy
from luffy.train.scorer import TokenScorer
from luffy.train.sources import RolloutSource, Source, StepBatch, TraceSource
from luffy.types import Group, Sample, TokenView

Method = Literal["rl", "sft"]
CTRL_C = "Ctrl-C"


@dataclass
class Progress:
    """Counters that outlive a process: they travel in state.json."""

    step: int = 0
    bad_in_a_row: int = 0
    bad_updates: int = 0
    best_step: int | None = None
    best_accuracy: float = -1.0


class EvaluationCut(Exception):
    """A stop came first; the evaluation is made up for when the run goes on."""


class Trainer:
    """One process of a run. In a ``world`` of several, all go through the same steps, each with its share of the
    problems; the main one alone writes the run folder and speaks to the user."""

    def __init__(
        self,
        cfg: Config,
        method: Method = "rl",
        resume: str = "auto",
        allow_changed_data: bool = False,
        world: World | None = None,
        on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        console: Console | None = None,
    ) -> None:
        use_threads(cfg.train.threads)
        self.cfg, self.method, self.world, self.on_step = cfg, method, world or World(), on_step
        self.console, self.progress = console, Progress()
        self._stop_reason: str | None = None
        self.verifier: Verifier | None = None
        self._closing = ExitStack()
        self.saver: BackgroundSaver | None = None
        self.ahead: Ahead[Any] | None = None
        self._lock: FolderLock | None = None
        self.world.on_main(self._take_lock)
        try:
            self._build(resume, allow_changed_data)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        # Workers that are started anew may find the main process of the lost group still on its way out.
        self._lock = lock_folder(self.cfg.folder, patience_s=30.0 if self.world.joined else 0.0)

    def _build(self, resume: str, allow_changed_data: bool) -> None:
        cfg, method = self.cfg, self.method
        self.store = CheckpointStore(cfg.folder / "checkpoints", cfg.train.keep)
        self.facts: list[str] = []
        self.notices: list[str] = []
        self.changes: Changes = {}
        self.view: RunView | None = None
        self.notices += self.world.on_main(lambda: check_trackers(cfg))
        self.tokenizer = setup.load_policy_tokenizer(cfg.model)
        checkpoint = self.world.on_main(lambda: find_checkpoint(cfg, self.store, resume, self.notices.append))
        saved = {} if checkpoint is None else checkpoint.state()
        self.cfg = cfg = self.world.from_main(setup.with_date(cfg, self.tokenizer, saved))
        if cfg.data.date is not None:
            self.facts.append(f"prompts are dated {cfg.data.date} (data.date)")
        encoder = setup.build_encoder(cfg, self.tokenizer)
        self.tasks = setup.load_training_tasks(cfg, encoder, sft=method == "sft")
        encoder = setup.build_encoder(cfg, self.tokenizer)  # its counts begin anew
        self.eval_tasks = setup.load_eval_tasks(cfg, encoder)
        self.eval_report = dict(encoder.counts)
        self.total_steps = total_steps(cfg, len(self.tasks))
        self.verifier = self._build_verifier()
        self.device = setup.pick_device(cfg.model.device)
        torch.manual_seed(cfg.seed)
        self.model: Any = self._load_weights(checkpoint)
        setup.validate(cfg, method, self.model.config)
        self.eos = encoder.stops(eos_ids(self.model, self.tokenizer))
        self.lags = method == "rl" and cfg.async_.max_staleness > 0
        self.engines = Engines(cfg, method, self.model, self.device, self.world, self._warn)
        self._closing.callback(self.engines.current.close)
        self.engines.current.sync(0 if checkpoint is None else checkpoint.step)
        self.watch = Stopwatch()
        temperature = 1.0 if method == "sft" else None
        self.policy = Policy(self.model, cfg, temperature=temperature, world=self.world, watch=self.watch)
        self.saver = BackgroundSaver(self.store, self.world) if self.world.joined else None
        self.source = self._build_source()
        if checkpoint is not None:
            self._restore(checkpoint, allow_changed_data)
        if self.engines.replica is not None:  # made before the masters of a checkpoint were there
            self._sync(self.progress.step)
        self.notices += setup.left_out(self.tasks.report, self.eval_report)
        self.notices += setup.repeated_problems(cfg, len(self.tasks))
        if method == "rl":
            self.notices += setup.dropout_notice(self.model.config)
        self.world.on_main(lambda: remove_unfinished(cfg.folder))
        self.world.on_main(self._settle)

    def _check_made_alike(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state()
        if state["method"] != self.method:
            commands = {"rl": "luffy train", "sft": "luffy sft"}
            raise UserError(
                f"checkpoint {checkpoint.path} was made by `{commands[state['method']]}`, this is "
                f"`{commands[self.method]}`; start a new run with model.path={checkpoint.model}"
            )
        saved, now = state["model"], self._model_kind()
        differ = [f"model.{key} {saved.get(key)} -> {now[key]}" for key in now if saved.get(key) != now[key]]
        if differ:
            raise UserError(
                f"checkpoint {checkpoint.path} is of another kind of model: {', '.join(differ)}; set that as it was, "
                f"or start a new run with model.path={checkpoint.model}"
            )

    def _load_weights(self, checkpoint: Checkpoint | None) -> nn.Module:
        device = "cpu" if self.world.joined else self.device  # sharding takes them to the device, layer by layer
        m = self.cfg.model
        if checkpoint is None:
            return setup.load_policy(m, device)
        self._check_made_alike(checkpoint)
        if m.lora is None:
            return setup.load_policy(replace(m, path=str(checkpoint.model)), device)
        model = setup.load_policy(m, device)
        load_adapter(model, checkpoint.adapter)
        return model

    def _build_verifier(self) -> Verifier | None:
        if self.method == "sft" and not self.eval_tasks:
            return None
        r = self.cfg.reward
        return build_verifier(r.kind, r.weights or None, r.workers, r.timeout_s)

    def _warn(self, message: str) -> None:
        if self.view is None:
            self.notices.append(message)
        else:
            self.view.warn(message)

    def _build_source(self) -> Source:
        if self.method == "sft":
            return TraceSource(self.cfg, self.tasks, self.watch, self.world)
        assert self.verifier is not None
        engine, before_step = self.engines.for_rollouts(self.tokenizer, self.total_steps)
        source = RolloutSource(
            self.cfg, self.tasks, engine, self.verifier, self.policy, self._load_reference(), self.eos,
            self.total_steps, self.watch, self._count, before_step, self.world,
        )  # fmt: skip
        if self.lags:
            self.ahead = source.roll_out_ahead(self.engines.catch_up, self.total_steps)
        return source

    def _load_reference(self) -> TokenScorer | None:
        m = self.cfg.model
        if self.cfg.algorithm.kl_coef == 0 or (m.lora is not None and m.reference is None):
            return None
        device = "cpu" if self.world.joined else self.device
        model: nn.Module = load_model(m.reference or m.path, m.dtype, device, m.trust_remote_code)
        return self.policy.scorer_of(model.requires_grad_(False).eval())

    def _sync(self, version: int) -> None:
        """The engine rolls out with the weights as they are now; one that works ahead, when it begins a batch."""
        with nullcontext() if self.ahead is None else self.ahead.publishing(version):
            self.engines.renew(self.model)
        self.engines.current.sync(version)

    def train(self) -> Path:
        """Run to the last step; returns the model folder of the newest checkpoint."""
        if not self.is_finished or self.lacks_evaluation():
            recorder, view = self._open_records()
            self.view = view
            try:
                for fact in self.facts:
                    view.say(fact)
                for notice in self.notices:
                    view.warn(notice)
                with self._stopped_by_signals():
                    self._loop(view, recorder)
            except torch.OutOfMemoryError as error:
                raise TrainingStopped(f"stopped: {when_it_runs_out(error, self.cfg)}") from error
            finally:
                recorder.close()
                view.close()
                self.view = None
        return self.world.on_main(lambda: self._newest().model)

    def _open_records(self) -> tuple[Recorder, RunView]:
        """Those of other processes than the main one say and write nothing."""
        if not self.world.is_main:
            return SilentRecorder(self.cfg), RunView(self.cfg.name, self.total_steps, 0, Console(quiet=True))
        earlier = None if self.progress.step else set_records_aside(self.cfg.folder)
        self.notices += [earlier] if earlier else []
        self._write_settings()
        recorder = Recorder(self.cfg, self.progress.step or -1, self.notices.append)
        view = RunView(self.cfg.name, self.total_steps, self.progress.step, self.console)
        recorder.warn, self.watch.on_phase = view.warn, view.phase
        return recorder, view

    def stop_soon(self, reason: str) -> None:
        """End after the step under way, with a checkpoint of it; an evaluation waits until the run goes on. In a world
        of several every process must be told in the same step: a checkpoint needs all."""
        self._stop_reason = reason

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """SIGTERM, which schedulers send before they kill, and Ctrl-C end the run after its step; a second Ctrl-C at
        once. Several processes do not see a signal at the same step, so there it ends them at once, and the last
        checkpoint counts."""
        if self.world.joined or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupted(*_: object) -> None:
            self.stop_soon(CTRL_C)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"\nends after this step; Ctrl-C again ends it at once\n")  # print is not safe in a handler

        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: self.stop_soon("SIGTERM")),
            signal.SIGINT: signal.signal(signal.SIGINT, interrupted),
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def is_finished(self) -> bool:
        return self.progress.step >= self.total_steps

    def _write_settings(self) -> None:
        record, kept = self.cfg.folder / CONFIG, settings_before(self.cfg.folder, self.progress.step)
        if self.changes and not kept.exists():  # what came between made no step that counts
            write_atomically(kept, record.read_text(encoding="utf-8"))
        write_atomically(record, to_yaml(self.cfg))
        report = {"train": self.tasks.report, "eval": self.eval_report}
        write_atomically(self.cfg.folder / "data.json", json.dumps(report, indent=1) + "\n")

    def _count(self, done: int, total: int) -> None:
        if self.view is not None:
            self.view.count(done, total)

    def _newest(self) -> Checkpoint:
        newest = next(iter(self.store), None)
        if newest is None:
            raise UserError(
                f"{self.cfg.folder} has no checkpoint of its own; raise train.steps to go on from the other run"
            )
        return newest

    def _loop(self, view: RunView, recorder: Recorder) -> None:
        if self.lacks_evaluation():
            self._make_up_for_evaluation(view, recorder)
        first, idle = self.progress.step, 0
        while not self.is_finished:
            started = time.perf_counter()
            metrics = self.step(view, recorder)
            speed = throughput(metrics, time.perf_counter() - started)
            step = self.progress.step
            if self._is_due(step, self.cfg.eval.every) and self.eval_tasks:
                metrics |= self._evaluate_or_save(metrics, speed, view, recorder)
            values = self.log(metrics, speed, view, recorder)
            idle += was_idle(values)
            improved = self._note_best(step, values)
            if improved or self._is_due(step, self.cfg.train.save_every):
                with self.watch("save"):
                    self._save(step)
            self.on_step(step, values)
            if self.saver is not None:
                self.saver.poll()
            if self._stop_reason is not None and (not self.is_finished or self.lacks_evaluation()):
                self._save_if_new(step)
                raise self._stopped()
        self._stop_reason = None  # it came too late to end anything
        warn_if_mostly_idle(view, idle, self.progress.step - first)
        if self.saver is not None:
            self.saver.finish()

    def _stopped(self) -> TrainingStopped:
        kind = Interrupted if self._stop_reason == CTRL_C else TrainingStopped
        return kind(f"stopped at step {self.progress.step} by {self._stop_reason}; the same command goes on there")

    def lacks_evaluation(self) -> bool:
        """Whether the evaluation due at this step is not on record: before the first step, or after a stop in it."""
        step = self.progress.step
        if not self.eval_tasks or not self._is_due(step, self.cfg.eval.every):
            return False
        return self.world.on_main(lambda: step not in self._evaluated_steps())

    def _evaluated_steps(self) -> dict[int, float]:
        rows = read_json_lines(self.cfg.folder / METRICS)
        return {row["step"]: row["val-core/accuracy"] for row in rows if "val-core/accuracy" in row}

    def _make_up_for_evaluation(self, view: RunView, recorder: Recorder) -> None:
        step = self.progress.step
        try:
            values = read(self.evaluate(recorder=recorder)) | self.watch.take()
        except EvaluationCut:
            raise self._stopped() from None
        recorder.log(step, values)
        view.evaluated(step, values)
        if self.world.on_main(lambda: self._is_saved(step)) and self._note_best(step, values):
            self.world.on_main(self._settle)

    def _evaluate_or_save(
        self, metrics: dict[str, Metric], speed: dict[str, float], view: RunView, recorder: Recorder
    ) -> dict[str, Metric]:
        """An evaluation that fails must not cost the steps before it. (Of several processes it fails on one, and
        a checkpoint needs all.)"""
        try:
            return self.evaluate(recorder=recorder)
        except EvaluationCut:
            return {}
        except Exception:
            if self.world.size == 1:
                self.log(metrics, speed, view, recorder)
                self._save_if_new(self.progress.step)
            raise

    def _save_if_new(self, step: int) -> None:
        if self.saver is not None:
            self.saver.finish()  # what is still being written counts as there
        if step > 0 and not self.world.on_main(lambda: self._is_saved(step)):
            self._save(step)

    def _is_saved(self, step: int) -> bool:
        return step in [checkpoint.step for checkpoint in self.store]

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.total_steps or (every > 0 and step % every == 0)

    def step(self, view: RunView, recorder: Recorder) -> dict[str, Metric]:
        """One rollout batch (or batch of traces) and its optimizer steps."""
        index = self.progress.step
        before = self.source.state_dict()
        try:
            batch = self.source.next(index)
        except TrainingStopped as stop:
            self.source.load_state_dict(before)
            if self.world.size == 1 or isinstance(stop, AllStopped):  # a checkpoint needs all processes
                self._save_if_new(index)
            raise
        lr = lr_at(index, self.total_steps, self.cfg.optim)
        self.progress.step = index + 1
        parts: list[dict[str, Metric]] = [batch.metrics]
        rows = self._record(batch) if recorder.wants_samples(index + 1) else []
        with self.watch("update"):
            for mini in mini_batches(batch.samples, self.cfg.batch.mini_batch):
                parts.append(self._update(mini, lr, batch, view))
        with self.watch("sync"):
            self._sync(self.progress.step)
        recorder.write_samples(rows)
        return merge_metrics(parts)

    def log(
        self, metrics: dict[str, Metric], speed: dict[str, float], view: RunView, recorder: Recorder
    ) -> dict[str, float]:
        """The last step's figures, as they go on record."""
        values = read(metrics) | self.watch.take() | speed
        recorder.log(self.progress.step, values)
        view.step(self.progress.step, values)
        return values

    def _record(self, batch: StepBatch) -> list[dict[str, Any]]:
        """Rows of the first groups, with the tokens as the update is about to see them."""
        count = self.cfg.record.samples
        with self.watch("record"):
            credited, rejected = batch.shown(count)
            unpaid = [[uncredited(r) for r in group.rollouts] for group in rejected]
            return self._sample_rows(batch, count, [*self._token_views(credited), *self._token_views(unpaid)])

    def _token_views(self, groups: Sequence[Sequence[Sample]]) -> list[list[TokenView]]:
        views = iter(self.policy.token_views([sample for group in groups for sample in group]))
        return [[next(views) for _ in group] for group in groups]

    def _sample_rows(
        self, batch: StepBatch, count: float = math.inf, views: Sequence[Sequence[TokenView]] = ()
    ) -> list[dict[str, Any]]:
        """Rows of samples.jsonl of the first groups, whichever process holds them; in SFT a group is one trace."""
        step = self.progress.step
        credited, rejected = batch.shown(count)
        rows = []
        for i, place in enumerate(batch.places[: len(credited) + len(rejected)]):
            credit, view = credited[i : i + 1], views[i : i + 1]
            if self.method == "sft":
                rows.append((place, trace_rows(step, credit[0], self.tokenizer, view[0] if view else (), place)))
            else:
                group = (batch.groups[: len(credited)] + rejected)[i]
                rows.append((place, sample_rows(step, [group], credit, self.tokenizer, view)))
        return self._in_order(rows)

    def _in_order(self, rows: list[tuple[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """Rows of all processes, by their places."""
        ordered = sorted((pair for part in self.world.gather(rows) for pair in part), key=lambda pair: pair[0])
        return [row for _, part in ordered for row in part]

    def _update(self, samples: list[Sample], lr: float, batch: StepBatch, view: RunView) -> dict[str, Metric]:
        try:
            metrics = self.policy.update(samples, lr)
        except NonFiniteUpdate as error:
            self._bad_step(error, batch, view)
            return {"train/skipped_updates": Sum(1), "train/skipped_in_all": Max(self.progress.bad_updates)}
        self.progress.bad_in_a_row = 0
        return metrics

    def _bad_step(self, error: NonFiniteUpdate, batch: StepBatch, view: RunView) -> None:
        """Count it, keep the step's samples, and stop when it happens too often in a row."""
        step = self.progress.step
        self.progress.bad_in_a_row += 1
        self.progress.bad_updates += 1
        dump = self.cfg.folder / f"bad-step-{step:06d}.jsonl"
        rows = self._sample_rows(batch)
        if self.world.is_main:
            write_atomically(dump, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        view.warn(f"step {step}: update skipped, {error}; samples in {dump}")
        if self.progress.bad_in_a_row >= self.cfg.train.max_bad_steps:
            raise TrainingStopped(
                f"stopped at step {step}: {self.progress.bad_in_a_row} updates in a row were not finite "
                f"(last: {error}); look at {dump}, lower optim.lr, or resume from {self.store.folder}"
            )

    def evaluate(self, cfg: EvalConfig | None = None, recorder: Recorder | None = None) -> dict[str, Metric]:
        """The policy as it is now on every held-out set; ``cfg`` instead of the run's own settings. With a
        ``recorder``, the first problems of each set go on record: the same ones at every evaluation."""
        assert self.verifier is not None, "there is no held-out data"
        metrics: dict[str, Metric] = {}
        rows: list[dict[str, Any]] = []
        with self.watch("eval"):
            for name, tasks in self.eval_tasks.items():
                self._cut_when_stopped()
                metrics |= evaluate(
                    tasks, self.engines.current, self.verifier, self.tokenizer, cfg or self.cfg.eval,
                    max_tokens=self.cfg.rollout.max_tokens, eos_ids=self.eos, seed=self.cfg.seed,
                    reward=self.cfg.reward, name=name, progress=self._count_evaluated,
                    seen=None if recorder is None else partial(self._show_evaluated, rows, name),
                    rank=self.world.rank, ranks=self.world.size,
                )  # fmt: skip
        if recorder is not None:
            recorder.write_eval_samples(rows)
        return self.world.merge(metrics)

    def _count_evaluated(self, done: int, total: int) -> None:
        self._cut_when_stopped()
        self._count(done, total)

    def _cut_when_stopped(self) -> None:
        """Of several processes none may leave the others alone in an evaluation."""
        if self._stop_reason is not None and not self.world.joined:
            raise EvaluationCut

    def _show_evaluated(self, rows: list[dict[str, Any]], name: str, groups: Sequence[Group]) -> None:
        if self.cfg.record.samples_every:
            places = range(self.world.rank, self.cfg.record.samples, self.world.size)
            shown = zip(places, groups, strict=False)  # the first few of all
            made = [(place, evaluation_rows(self.progress.step, name, [g], self.tokenizer)) for place, g in shown]
            rows += self._in_order(made)

    def _note_best(self, step: int, values: dict[str, float]) -> bool:
        accuracy = values.get("val-core/accuracy")
        if not self.cfg.train.keep_best or accuracy is None or accuracy <= self.progress.best_accuracy:
            return False
        self.progress.best_accuracy, self.progress.best_step = accuracy, step
        return True

    def _save(self, step: int) -> None:
        state = {
            "progress": dict(vars(self.progress)),
            "method": self.method,
            "sampler": self.source.state_dict(),
            "data_fingerprint": self.tasks.problems.fingerprint,
            "usable": len(self.tasks),
            "model": self._model_kind(),
            "date": self.cfg.data.date,
        }
        tensors = dict(self.policy.optimizer.tensors())
        random = {f"random/{name}": t for name, t in random_state().items()}
        if self.saver is not None:
            tensors |= self._sharded_masters() | random
            taken = replace(self.progress)
            self.saver.start(step, tensors, self._model_writer(), state, lambda: self._settle(taken))
            return
        tensors = {name: t.contiguous().cpu() for name, t in tensors.items()} | random
        try:
            self.store.save(step, self._write_model, tensors, state)
        except DISK_ERRORS as error:
            raise cannot_be_written(step, self.store.folder, error) from error
        self._settle()

    def _sharded_masters(self) -> dict[str, torch.Tensor]:
        """Sharded weights are float32; where the model is of less precision, they are what a checkpoint of a single
        process calls masters."""
        if self.cfg.model.dtype == "float32":
            return {}
        return {f"{name}/master": p.detach() for name, p in self.policy.optimizer.parameters.items()}

    def _model_writer(self) -> Callable[[Path], None]:
        """Writes the weights as they are now, whenever it is called; only the main process will."""
        if not self.world.is_main:
            return lambda folder: None
        assert self.engines.replica is not None
        model: Any = self.engines.replica.model
        if self.cfg.model.lora is not None:
            snapshot = copy.deepcopy(model)
            return lambda folder: self._write_model(folder, snapshot)
        weights = on_host(model)

        def write(folder: Path) -> None:
            model.save_pretrained(folder / "model", state_dict=weights)
            self.tokenizer.save_pretrained(folder / "model")

        return write

    def _settle(self, progress: Progress | None = None) -> None:
        """Bring what follows from the checkpoints in line with them; also at the start, after a kill in a save.
        ``progress`` as it was when the newest checkpoint was taken; by default, as it is now."""
        now = progress or self.progress
        self.store.settle(now.best_step)
        if now.best_step is not None:
            best = {"step": now.best_step, "accuracy": now.best_accuracy}
            write_atomically(self.cfg.folder / BEST, json.dumps(best))

    def _model_kind(self) -> dict[str, Any]:
        """What optimizer state cannot be carried across."""
        return {"dtype": self.cfg.model.dtype, "lora": to_dict(self.cfg.model.lora)}

    def _write_model(self, folder: Path, model: Any = None) -> None:
        model = self.model if model is None else model
        if self.cfg.model.lora is not None:
            model.save_pretrained(folder / "adapter")
            model = copy.deepcopy(model).merge_and_unload()  # a copy: merging in place would round the base
        model.save_pretrained(folder / "model")
        self.tokenizer.save_pretrained(folder / "model")

    def _restore(self, checkpoint: Checkpoint, allow_changed_data: bool) -> None:
        state = checkpoint.state()
        same = state["data_fingerprint"] == self.tasks.problems.fingerprint and state["usable"] == len(self.tasks)
        if same:
            self.source.load_state_dict(state["sampler"])
        elif not allow_changed_data:
            raise UserError(
                f"the training data changed since {checkpoint.path} was saved; restore the old file, or pass "
                f"--allow-changed-data to go on with a fresh order over the new one"
            )
        tensors = self._read_tensors(checkpoint)
        restore_random_state({k.removeprefix("random/"): v for k, v in tensors.items() if k.startswith("random/")})
        self.policy.optimizer.load_tensors(tensors)
        self.progress = Progress(**state["progress"])
        step = self.progress.step
        self.facts.append(f"resumed at step {step} from {checkpoint.path}")
        if checkpoint.path.parent.resolve() != self.store.folder.resolve():
            self.progress.best_step, self.progress.best_accuracy = None, -1.0  # that checkpoint is another run's
            return
        made_up_for = self.world.on_main(lambda: self._evaluated_steps().get(step))  # after the checkpoint was taken
        if made_up_for is not None:
            self._note_best(step, {"val-core/accuracy": made_up_for})
        self.changes = self.world.on_main(lambda: changed_settings(self.cfg.folder, step, self.cfg))
        if self.changes:
            kept = f"those before are in {settings_before(self.cfg.folder, step).name}"
            self.notices.append(f"settings changed since step {step}: {in_words(self.changes)} ({kept})")

    def _read_tensors(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        if not self.world.joined:
            return checkpoint.tensors()
        parameters = self.policy.optimizer.parameters
        if checkpoint.shards.is_dir():
            return read_sharded(checkpoint.shards, parameters)
        return shard_whole(checkpoint.tensors(), parameters)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self._closing.close()
        if self.saver is not None:
            self.saver.close()
        if self.verifier is not None:
            self.verifier.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def warn_if_mostly_idle(view: RunView, idle: int, steps: int) -> None:
    if 2 * idle > steps:
        view.warn(
            f"{idle} of {steps} steps changed nothing: all groups were all right or all wrong (batch/solve_all, "
            "batch/solve_none); easier problems, traces or algorithm.oversample_rounds may help"
        )


def throughput(metrics: dict[str, Metric], seconds: float) -> dict[str, float]:
    """Of the training step itself: evaluation and saving have their own timings."""
    tokens = metrics["perf/update_tokens"].value if "perf/update_tokens" in metrics else 0.0
    return {"perf/throughput": tokens / seconds, "timing_s/step": seconds}


def read(metrics: dict[str, Metric]) -> dict[str, float]:
    """Values for the record; what was not measured is left out."""
    return {name: metric.value for name, metric in metrics.items() if metric.measured}


def total_steps(cfg: Config, problems: int) -> int:
    if cfg.train.steps is not None:
        return cfg.train.steps
    if cfg.train.epochs is None:
        raise UserError("say how long to train: set train.steps or train.epochs")
    return max(math.ceil(cfg.train.epochs * problems / cfg.batch.problems), 1)


def mini_batches(groups: Sequence[Sequence[Sample]], size: int | None) -> Iterator[list[Sample]]:
    """Samples of ``size`` problems at a time; an empty batch has no mini-batch."""
    step = size or max(len(groups), 1)
    for start in range(0, len(groups), step):
        yield [sample for group in groups[start : start + step] for sample in group]


def load_adapter(model: nn.Module, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    result: Any = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise UserError(f"adapter {folder} does not fit model.lora: unexpected {result.unexpected_keys[:3]}")
