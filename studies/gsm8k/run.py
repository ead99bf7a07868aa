"""Runs of the study, several at once on one GPU, in slices of time; called again, it goes on.

    python studies/gsm8k/run.py --data study-data --model SmolLM2-135M-Instruct.Q4_1.gguf --questions main

A run that its slice cuts short saves a checkpoint, and the next call resumes it. A finished run keeps its metrics and
its model. ``--collect FILE`` keeps the metrics of all runs, compact, in one file: what figures.py reads. On a machine
that has none of the runs, ``--known FILE`` leaves out those whose metrics an earlier one has collected. The question
"pass" samples from the models of "main" at several temperatures.
A model of 135M parameters leaves most of a large GPU idle, so --at-once runs share it; with NVIDIA's MPS
(``nvidia-cuda-mps-control -d`` before) their kernels run side by side.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from plan import CHOSEN, HERE, PLAN, TASKS, TEMPERATURES, Run
from rich.console import Console

from luffy.config import Config
from luffy.errors import TrainingStopped
from luffy.evaluation.plan import Options
from luffy.evaluation.runner import run_evaluation
from luffy.files import write_atomically
from luffy.models.machine import pick_device
from luffy.train.loop import Trainer

CURVES = (
    "batch/on_solved", "batch/solve_none", "actor/entropy_loss", "response_length/mean", "response_length/clip_ratio",
    "actor/off_policy_prob", "actor/on_policy_prob", "actor/pg_clipfrac", "actor/grad_norm", "actor/sft_loss",
    "timing_s/step", "timing_s/rollout", "timing_s/update",
)  # fmt: skip
SAMPLED = ("on_policy", "sft", "luffy")  # question 7: pass@8 against temperature
SAMPLES = 8
CUT = "the end of its slice"


class SliceOver(Exception):
    """The time of this call is spent; the run has a checkpoint."""


def train(run: Run, data: Path, model: str, out: Path, deadline: float) -> str:
    """One run in this process, to its end or to the deadline."""
    folder = out / run.name
    if time.time() > deadline:
        raise SliceOver
    folder.mkdir(parents=True, exist_ok=True)
    spent, started = folder / "seconds.txt", time.time()
    before = float(spent.read_text()) if spent.exists() else 0.0
    try:
        with (folder / "console.txt").open("a", encoding="utf-8") as log:
            _train(run.config(data, model, out), run.kind, log, deadline)
    finally:
        spent.write_text(f"{before + time.time() - started:.1f}")
        _free_memory()
    _keep_model_only(folder)
    done = {"seconds": float(spent.read_text()), "lr": run.lr, "method": run.method, "task": run.task,
            "question": run.question, "seed": run.seed, "note": run.note}  # fmt: skip
    (folder / "done.json").write_text(json.dumps(done))
    return f"{done['seconds']} s"


def _train(cfg: Config, kind: Literal["rl", "sft"], log: TextIO, deadline: float) -> None:
    with Trainer(cfg, kind, console=Console(file=log, width=120)) as trainer:
        trainer.on_step = lambda step, values: trainer.stop_soon(CUT) if time.time() > deadline else None
        try:
            trainer.train()
        except TrainingStopped as stop:
            if CUT in str(stop):
                raise SliceOver from None
            raise


def _free_memory() -> None:
    """The next run of this process finds the GPU as this one did."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _keep_model_only(folder: Path) -> None:
    shutil.rmtree(folder / "model", ignore_errors=True)
    (folder / "checkpoints" / "latest").resolve().joinpath("model").rename(folder / "model")
    shutil.rmtree(folder / "checkpoints")


def sample(run: Run, data: Path, model: str, out: Path, deadline: float) -> str:
    """pass@8 of a finished run's model at every temperature."""
    cfg = run.config(data, model, out)
    started = time.time()
    for temperature in TEMPERATURES:
        folder = out / run.name / f"pass-{temperature}"
        if (folder / "result.json").exists():
            continue
        if time.time() > deadline:
            raise SliceOver
        assert isinstance(cfg.data.eval, str)
        options = Options(
            model=str(out / run.name / "model"), suite=cfg.data.eval_also.get("hard", cfg.data.eval), out=folder,
            k=SAMPLES, temperature=temperature, max_tokens=cfg.rollout.max_tokens, style=cfg.data.style,
            system_prompt=cfg.data.system_prompt, reward=cfg.reward.kind, limit=256, dtype=cfg.model.dtype,
            device=pick_device("auto"), slots=256, chunk=4096,
        )  # fmt: skip
        run_evaluation(options)
    return f"{time.time() - started:.1f} s"


def collect(out: Path) -> list[dict[str, Any]]:
    """A row a run: what it was and its curves, {metric: [[step, value], ...]}."""
    rows = []
    for folder in sorted(path.parent for path in out.glob("*/metrics.jsonl")):
        done = folder / "done.json"
        row: dict[str, Any] = {"name": folder.name, "finished": done.exists()}
        row |= json.loads(done.read_text()) if done.exists() else {}
        row["curves"] = _curves(folder / "metrics.jsonl")
        passes = {path.parent.name.removeprefix("pass-"): _passes(path) for path in folder.glob("pass-*/result.json")}
        rows.append(row | ({"pass": dict(sorted(passes.items()))} if passes else {}))
    return rows


def _curves(path: Path) -> dict[str, list[list[float]]]:
    curves: dict[str, list[list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if name in CURVES or (name.startswith("val-") and name.endswith("/accuracy")):
                curves.setdefault(name, []).append([values["step"], float(f"{value:.4g}")])
    return curves


def _passes(path: Path) -> dict[str, Any]:
    (summary,) = json.loads(path.read_text())["benchmarks"].values()
    return {"accuracy": summary["accuracy"], "pass_at": summary["pass_at"]}


@dataclass(frozen=True)
class Job:
    """A run to train, or the model of one to sample from."""

    run: Run
    sampling: bool = False

    @property
    def name(self) -> str:
        return f"{self.run.name} pass@{SAMPLES}" if self.sampling else self.run.name

    @property
    def needs(self) -> str | None:
        """The run whose model it takes."""
        return self.run.name if self.sampling else self.run.start

    def may_start(self, out: Path) -> bool:
        return self.needs is None or is_trained(self.needs, out)

    def is_done(self, out: Path) -> bool:
        if self.sampling:
            return all((out / self.run.name / f"pass-{t}" / "result.json").exists() for t in TEMPERATURES)
        return is_trained(self.run.name, out)

    def do(self, data: Path, model: str, out: Path, deadline: float) -> str:
        return (sample if self.sampling else train)(self.run, data, model, out, deadline)


def is_trained(name: str, out: Path) -> bool:
    return (out / name / "done.json").exists()


def jobs(question: str, tasks: Sequence[str] = TASKS) -> list[Job]:
    runs = [run for run in PLAN["main" if question == "pass" else question]() if run.task in tasks]
    if question != "pass":
        return [Job(run) for run in runs]
    return [Job(run, sampling=True) for run in runs if run.seed == 0 and run.method in SAMPLED]


def read_rows(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Finished runs of earlier calls by name; of one that is in several files, what the later ones add or change."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if row["finished"]:
                found[row["name"]] = {**found.get(row["name"], {}), **row}
    return found


def known_jobs(rows: Mapping[str, dict[str, Any]]) -> set[str]:
    sampled = [name for name, row in rows.items() if set(map(str, TEMPERATURES)) <= set(row.get("pass", ()))]
    return set(rows) | {f"{name} pass@{SAMPLES}" for name in sampled}


def without_known(asked: Sequence[Job], known: set[str]) -> list[Job]:
    """What is left to do. A model that is gone is trained again where something left to do begins with it, whether
    its question was asked or not."""
    every = {job.name: job for job in [*asked, *(job for question in PLAN for job in jobs(question))]}
    wanted = {job.name for job in asked} - known
    while more := {needs for name in wanted if (needs := every[name].needs)} - wanted:
        wanted |= more
    return [job for name, job in every.items() if name in wanted]


class Slice:
    """The jobs of several questions over a pool of processes, each after the one it needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.started = args, time.time()
        self.deadline = self.started + args.minutes * 60
        self.known = read_rows(args.known)
        self.waiting = [job for job in self.every() if not job.is_done(args.out)]
        self.failed: dict[str, str] = {}

    def every(self) -> list[Job]:
        """The first seed of all questions before the second of any: a study cut short says something of each."""
        every = [job for question in self.args.questions for job in jobs(question, self.args.tasks)]
        return sorted(without_known(every, known_jobs(self.known)), key=lambda job: job.run.seed)

    def go(self) -> None:
        while not self._went_through():
            print("a process died and took the others with it; they start again", flush=True)

    def _went_through(self) -> bool:
        """False: a process died, and its pool takes no more jobs."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.args.at_once, mp_context=context) as pool:
            under_way: dict[Future[str], Job] = {}
            broken = False
            while True:
                for job in [] if broken else self._startable(self.args.at_once - len(under_way)):
                    paths = (self.args.data, self.args.model, self.args.out)
                    try:
                        under_way[pool.submit(job.do, *paths, self.deadline)] = job
                    except BrokenExecutor:
                        broken = True
                        self.waiting.append(job)
                if not under_way:
                    return not broken
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job = under_way.pop(future)
                    broken |= isinstance(future.exception(), BrokenExecutor)
                    if not self._note(job.name, future):
                        self.waiting.append(job)
                self._collect()

    def _startable(self, room: int) -> list[Job]:
        ready = [job for job in self.waiting if job.may_start(self.args.out)][: max(room, 0)]
        if time.time() > self.deadline:
            ready = []
        self.waiting = [job for job in self.waiting if job not in ready]
        return ready

    def _collect(self) -> None:
        """After every job: whoever ends this process loses nothing that is finished."""
        if self.args.collect:
            self.args.collect.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self.rows())
            write_atomically(self.args.collect, lines)

    def rows(self) -> list[dict[str, Any]]:
        """Of this machine and of those before it."""
        here = {row["name"]: row for row in collect(self.args.out)}
        return [{**self.known.get(name, {}), **here.get(name, {})} for name in sorted(self.known | here)]

    def _note(self, name: str, future: Future[str]) -> bool:
        """Say what became of it; False: it failed for the first time, so it may try again (with memory that others
        held then)."""
        error, now = future.exception(), f"{time.time() - self.started:6.0f} s"
        if error is None:
            self.failed.pop(name, None)
            print(f"{now}  {name}: {future.result()}", flush=True)
        elif isinstance(error, SliceOver):
            print(f"{now}  {name}: goes on in the next slice", flush=True)
        else:
            print(f"{now}  {name}: failed, {type(error).__name__}: {str(error)[:300]}", flush=True)
            again = name in self.failed
            self.failed[name] = "".join(traceback.format_exception(error))
            return again
        return True


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the learning rates tried for a method, the one with the best held-out accuracy."""
    best: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row["finished"] and row["question"] == "tune":
            sets = ("val-core/accuracy", "val-hard/accuracy")
            accuracy = sum(row["curves"][name][-1][1] for name in sets) / len(sets)
            best[row["method"]] = max(best.get(row["method"], (-1.0, 0.0)), (accuracy, row["lr"]))
    return {method: rate for method, (_, rate) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("study-data"), help="what make_data.py wrote")
    parser.add_argument("--model", required=True, help="the base model")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--questions", nargs="+", choices=(*PLAN, "pass"), default=["main"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--at-once", type=int, default=8, help="runs that share the GPU")
    parser.add_argument("--minutes", type=float, default=60, help="of this slice")
    parser.add_argument("--collect", type=Path, help="write the metrics of all runs here")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="such files: what they have is not run again")
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    part = Slice(args)
    part.go()
    if "tune" in args.questions:
        (HERE / "rates.json").write_text(json.dumps(CHOSEN | choose(part.rows())) + "\n", encoding="utf-8")
    for name, text in part.failed.items():
        print(f"--- {name}\n{text}", file=sys.stderr)
    left = [job.name for job in part.every() if not job.is_done(args.out)]
    print(f"{len(left)} are not finished" + (f": {', '.join(left)}" if left else ""))
    sys.exit(1 if part.failed else 0)


if __name__ == "__main__":
    main()
