"""Runs the study: the next unfinished runs of the plan in its order, several at once on one GPU, for some minutes.

    python -m studies.qwen.run --model QWEN --data study-qwen --minutes 25

Every training and every evaluation is a process of its own (``luffy train``, ``luffy sft``, ``luffy eval``). A contest
(plan.py) is watched through the metrics of its runs, and those that lose are ended. When the time is nearly up, the
runs under way are stopped with a checkpoint and their models evaluated.
``--collect FOLDER`` always holds what is known so far: ``runs.jsonl``, a line a run with its curves and its test
scores, and ``jobs.jsonl``, when each process ran. On a machine that keeps its disk the next call goes on from the
checkpoints; on another one, ``--known FILES`` leaves out what is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from luffy.config import load_config
from studies.qwen.plan import METHODS, RUNGS, Contest, Run, plan, runs_of
from studies.qwen.records import (
    Row,
    best_rates,
    curves,
    gpu_seconds,
    read_lines,
    read_rows,
    right_counts,
    test_row,
    validations,
)

SAMPLES, SCREENING = 4, 8
BASE = "base"
TO_STOP_S, TO_TEST_S = 40.0, 100.0  # before the end: the last moment to begin an evaluation; to stop the trainings


@dataclass
class Job:
    """A process. ``run`` is None for evaluations of the base."""

    name: str
    command: list[str]
    run: Run | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0


class Driver:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.time() + 60 * args.minutes
        self.running: list[Job] = []
        self.tests: list[Job] = []
        self.known = read_rows(args.known)
        lost = lost_before(self.known)
        self.settled = {n: row for n, row in self.known.items() if row["status"] == "finished" or n in lost}
        self.begun: set[str] = set()
        self.contests: dict[str, Contest] = {}
        self.rates: dict[str, float] | None = None  # None: to be found out anew
        self.stopping = False
        self.last_collected = 0.0
        self.log = args.collect / "jobs.jsonl"
        args.collect.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)

    # ---- the loop

    def go(self) -> None:
        self._queue_base()
        while True:
            self._reap()
            self._end_losers()
            self._stop_when_late()
            self._start_jobs()
            self._collect(every_s=10)
            if not self.running and not self.tests and (self.stopping or not self._next_runs()):
                break
            time.sleep(self.args.poll_s)
        self._collect()

    def _queue_base(self) -> None:
        if not (self.args.out / BASE / "test" / "result.json").exists() and BASE not in self.known:
            self.tests.append(self._test_job(BASE, self.args.model))
        if self.args.screen and not (self.args.out / BASE / "screen" / "result.json").exists():
            self.tests.append(self._screen_job())

    def _reap(self) -> None:
        for job in [job for job in self.running if job.process and job.process.poll() is not None]:
            assert job.process is not None
            self._ended(job, job.process.returncode)

    def _ended(self, job: Job, code: int) -> None:
        self.running.remove(job)
        self.rates = None
        self._note(job, "ended", code)
        if job.run is None:
            return
        if job.name != job.run.name:  # its test
            return
        finished = code == 0
        if finished or (self.stopping and self._checkpoint(job.run) is not None):
            self._set_status(job.run, "finished" if finished else "cut")
            self._keep_model(job.run)
            self.tests.append(self._test_job(job.run.name, self.args.out / job.run.name / "model", job.run))
        elif self._status(job.run) != "dropped":
            self._set_status(job.run, "failed")

    def _end_losers(self) -> None:
        for contest in self.contests.values():
            statuses = {run.name: self._status(run) for run in contest.runs}
            alive = [run for run in contest.runs if statuses[run.name] in ("running", "finished", "cut")]
            curves_of = {run.name: self._validation(run) for run in alive}
            for loser, step in losers(contest.rungs, curves_of):
                job = next((job for job in self.running if job.name == loser), None)
                if job is not None and statuses[loser] == "running":
                    assert job.run is not None and job.process is not None
                    self._set_status(job.run, "dropped", step)
                    job.process.send_signal(signal.SIGINT)  # no checkpoint; SIGKILL could upset NVIDIA's MPS

    def _stop_when_late(self) -> None:
        if self.stopping or not self._is_late():
            return
        self.stopping = True
        for job in self.running:
            if job.run is not None and job.name == job.run.name and job.process is not None:
                job.process.terminate()

    def _is_late(self) -> bool:
        return time.time() >= self.end - TO_TEST_S

    # ---- what to start

    def _start_jobs(self) -> None:
        while self.tests and time.time() < self.end - TO_STOP_S:
            self._start(self.tests.pop(0))
        if time.time() >= self.end - TO_STOP_S:
            self.tests.clear()
        if self.stopping:
            return
        for run in self._next_runs():
            self.begun.add(run.name)
            self._start(self._train_job(run))

    def _next_runs(self) -> list[Run]:
        """The first unit that fits. A contest may take one process more than there are places; where it does not
        fit, a single run or one of a contest without rungs fills the place. A model that a run begins with and that
        another machine had is trained again."""
        free = self.args.at_once - sum(job.run is not None and job.name == job.run.name for job in self.running)
        for unit in plan(self._chosen()):
            runs = [run for run in runs_of([unit]) if self._is_open(run)]
            lacking = {run.start for run in runs if run.start and not (self.args.out / run.start / "model").exists()}
            if lacking:
                runs = [r for r in runs_of(plan(self._chosen())) if r.name in lacking - self.begun]
            if not runs:
                continue
            if isinstance(unit, Contest) and unit.rungs and not lacking:
                if free >= max(len(runs) - 1, 1):
                    self.contests[unit.method] = unit
                    return runs
            elif free >= 1:
                return runs[:1]
        return []

    def _is_open(self, run: Run) -> bool:
        wanted = any(fnmatchcase(run.name, pattern) for pattern in self.args.runs)
        if run.name in self.begun or run.name in self.settled or not wanted:
            return False
        train = run.recipe(self.args.model, self.args.data, self.args.out)["data"]["train"]
        return Path(train).exists() and self._status(run) not in ("finished", "dropped")

    def _chosen(self) -> dict[str, float]:
        if self.rates is None:
            self.rates = best_rates([*self._rows(), *self.settled.values()])  # what was decided stays so
        return self.rates

    def _train_job(self, run: Run) -> Job:
        folder = self.args.out / run.name
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(run.recipe(self.args.model, self.args.data, self.args.out)), encoding="utf-8")
        self._set_status(run, "running")
        command = "sft" if run.kind == "sft" else "train"
        return Job(run.name, [*self.args.luffy, command, str(recipe), *self.args.set], run)

    def _test_job(self, name: str, model: Path, run: Run | None = None) -> Job:
        problems, out = self.args.data / "test.jsonl", self.args.out / name / "test"
        return Job(f"{name} test", self._eval_command(model, problems, out, SAMPLES, 0.6), run)

    def _screen_job(self) -> Job:
        out = self.args.out / BASE / "screen"
        return Job("base screen", self._eval_command(self.args.model, self.args.screen, out, SCREENING, 1.0))

    def _eval_command(self, model: Path, problems: Path, out: Path, k: int, temperature: float) -> list[str]:
        cfg = load_config("small/luffy")
        options = {
            "suite": problems, "out": out, "k": k, "temperature": temperature, "reward": cfg.reward.kind,
            "max-tokens": cfg.rollout.max_tokens, "style": cfg.data.style,
            "system-prompt": cfg.data.system_prompt, "dtype": cfg.model.dtype,
        }  # fmt: skip
        flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        return [*self.args.luffy, "eval", str(model), *flags]

    def _start(self, job: Job) -> None:
        log = self.args.out / "logs" / f"{job.name.replace(' ', '-')}.txt"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            job.process = subprocess.Popen(job.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        job.started = time.time()
        self.running.append(job)
        self._note(job, "started")

    # ---- the state of a run, on disk

    def _status(self, run: Run) -> str | None:
        path = self.args.out / run.name / "status.json"
        if path.exists():
            return str(json.loads(path.read_text())["status"])
        return "dropped" if run.name in self.settled else None

    def _set_status(self, run: Run, status: str, step: int | None = None) -> None:
        path = self.args.out / run.name / "status.json"
        path.write_text(json.dumps({"status": status} | ({} if step is None else {"step": step})))

    def _validation(self, run: Run) -> dict[int, float]:
        return validations(curves(read_lines(self.args.out / run.name / "metrics.jsonl")))

    def _checkpoint(self, run: Run) -> Path | None:
        latest = self.args.out / run.name / "checkpoints" / "latest"
        return latest.resolve() if latest.exists() else None

    def _keep_model(self, run: Run) -> None:
        folder, checkpoint = self.args.out / run.name, self._checkpoint(run)
        assert checkpoint is not None, f"{run.name} left no checkpoint"
        for old in ("model", "test"):  # of an earlier step
            shutil.rmtree(folder / old, ignore_errors=True)
        shutil.copytree(checkpoint / "model", folder / "model", copy_function=os.link)
        if self._status(run) == "finished":
            shutil.rmtree(folder / "checkpoints")

    def _note(self, job: Job, what: str, code: int | None = None) -> None:
        line = {"time": round(time.time(), 1), "job": job.name, "what": what} | ({} if code is None else {"code": code})
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    # ---- what comes back

    def _rows(self) -> list[Row]:
        jobs = read_lines(self.log)
        found = []
        for path in sorted(self.args.out.glob("*/recipe.yaml")):
            recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
            status = json.loads((path.parent / "status.json").read_text())
            metrics = read_lines(path.parent / "metrics.jsonl")
            row = {"name": recipe["name"], **_about(recipe), **status, "curves": curves(metrics)}
            row["curves"]["gpu_seconds"] = gpu_seconds(jobs, recipe["name"], [m["time"] for m in metrics])
            found.append(row | test_row(path.parent / "test", "test"))
        base = test_row(self.args.out / BASE / "test", "test")
        return [*found, *([{"name": BASE, "method": BASE, "status": "finished", "curves": {}} | base] if base else [])]

    def _collect(self, every_s: float = 0.0) -> None:
        if time.time() - self.last_collected < every_s:
            return
        self.last_collected = time.time()
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self._rows())
        _write(self.args.collect / "runs.jsonl", lines)
        counts = right_counts(self.args.out / BASE / "screen")
        if counts:
            _write(self.args.collect / "screened.json", json.dumps(counts))


def losers(rungs: Mapping[int, int], validation: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int]]:
    """Runs that end, each with the step of its rung. A rung is decided when all runs that are left have reached it."""
    left, out = set(validation), []
    for step, keep in sorted(rungs.items()):
        if len(left) > keep and all(step in validation[name] for name in left):
            ranked = sorted(left, key=lambda name: (-validation[name][step], name))
            out += [(name, step) for name in ranked[keep:]]
            left = set(ranked[:keep])
    return out


def lost_before(known: Mapping[str, Row]) -> set[str]:
    """The runs of earlier machines that lose their contest by ``RUNGS``."""
    contests: dict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    for name, row in known.items():
        if row.get("seed") == 0 and not row["note"] and METHODS[row["method"]].kind == "rl":
            contests[row["method"]][name] = validations(row["curves"])
    return {loser for runs in contests.values() for loser, _ in losers(RUNGS, runs)}


def _about(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says of its run; the name holds the method and the note."""
    method, *rest = recipe["name"].split("-lr")[0].split("-", 1)
    assert method in METHODS, recipe["name"]
    return {"method": method, "note": rest[0] if rest else "", "lr": recipe["optim"]["lr"], "seed": recipe["seed"],
            "steps": recipe["train"]["steps"]}  # fmt: skip


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base: a Hugging Face folder")
    parser.add_argument("--data", type=Path, default=Path("study-qwen"), help="what studies.qwen.data wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--collect", type=Path, default=Path("runs/qwen-collected"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--at-once", type=int, default=3, help="trainings that share the GPU")
    parser.add_argument(
        "--runs", nargs="+", default=["*"], help="names or patterns of the runs to do, e.g. 'luffy-lr*'"
    )
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="runs.jsonl of earlier machines")
    parser.add_argument("--screen", type=Path, help="sample the base 8 times on the problems of this file first")
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value for every training, to try things out")
    parser.add_argument("--luffy", type=shlex.split, default=[sys.executable, "-m", "luffy"], help="the command")
    parser.add_argument("--poll-s", type=float, default=1.0)
    args = parser.parse_args(arguments)
    for name in ("model", "data", "out", "collect"):
        setattr(args, name, getattr(args, name).resolve())
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, as would its children
    Driver(args).go()


if __name__ == "__main__":
    main()
