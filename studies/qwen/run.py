"""Runs the study: the next unfinished runs of the plan in its order, several at once on one GPU, for some minutes.

    python -m studies.qwen.run --model QWEN --data study-qwen --minutes 25

Every training and every evaluation is a process of its own (``luffy train``, ``luffy sft``, ``luffy eval``), run and
stopped as those of ``luffy compare``. A contest (plan.py) is watched through the metrics of its runs: by their steps,
while they train, those that lose are ended. When the time is nearly up, the runs under way are stopped with a
checkpoint and their models evaluated.
``--collect FOLDER`` always holds what is known so far: ``runs.jsonl``, a line a run with its curves and its
scores, and ``jobs.jsonl``, when each process ran. On a machine that keeps its disk the next call goes on from the
checkpoints; on another one, ``--known FILES`` leaves out what is finished.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from luffy.compare.process import Job, Process, luffy
from luffy.files import write_atomically
from studies.qwen.data import write_hard
from studies.qwen.evaluations import GENERALISATION, SCREEN, TEST, Evaluation
from studies.qwen.folders import BASE, Folders
from studies.qwen.plan import HARD_TRAIN, METHODS, RUNGS, STEP_S, Contest, Run, plan, runs_of
from studies.qwen.records import Row, best_rates, is_done, read_lines, read_rows, right_counts, validations

# Before the end: the last moment to begin an evaluation; to stop the trainings; so much earlier with --suites.
TO_STOP_S, TO_TEST_S, TO_SUITES_S = 40.0, 100.0, 200.0


@dataclass
class Running:
    """A process. ``run`` is None for evaluations."""

    name: str
    process: Process
    run: Run | None = None


class Driver:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.time() + 60 * args.minutes
        self.folders = Folders(args.out)
        self.running: list[Running] = []
        self.known = read_rows(args.known)
        lost = lost_before(self.known)
        self.settled = {name: row for name, row in self.known.items() if name in lost or self._is_settled(row)}
        self.begun: set[str] = set()
        self.tries: Counter[str] = Counter()
        self.contests: dict[str, Contest] = {}
        self.rates: dict[str, float] | None = None  # None: to be found out anew
        self.stopping = False
        self.last_collected = 0.0
        self.log = args.collect / "jobs.jsonl"
        args.collect.mkdir(parents=True, exist_ok=True)

    def _is_settled(self, row: Row) -> bool:
        """Its model is gone, so a run without a test is done again."""
        return "test" in row and is_done(row) and (row["status"] == "finished" or row["name"] not in self.args.runs)

    # ---- the loop

    def go(self) -> None:
        while True:
            self._reap()
            self._use_screening()
            self._end_losers()
            self._stop_when_late()
            self._start_jobs()
            self._collect(every_s=10)
            if not self.running:
                break
            time.sleep(self.args.poll_s)
        self._collect()
        for run in runs_of(plan(self._chosen())):
            if self._is_wanted(run) and (lack := self._lack(run)):
                print(f"left out: {run.name}, {lack}", flush=True)

    def _reap(self) -> None:
        for job in list(self.running):
            if (ended := job.process.poll()) is not None:
                self._ended(job, ended.code)

    def _ended(self, job: Running, code: int) -> None:
        self.running.remove(job)
        self.rates = None
        self._note(job.name, "ended", code)
        if job.run is None or self._status(job.run) == "dropped":
            return
        if self.folders.checkpoint(job.name) is not None and (code == 0 or self.stopping):
            self.folders.keep_model(job.name, "finished" if code == 0 else "cut")
        else:
            self.folders.set_status(job.name, "failed")
            if self.tries[job.name] < 2:
                self.begun.discard(job.name)

    def _use_screening(self) -> None:
        """The hard problems, once the base has been screened."""
        screened = self.folders.evaluation(BASE, SCREEN)
        if (self.args.data / HARD_TRAIN).exists() or not (counts := right_counts(screened)):
            return
        write_atomically(self.args.collect / "screened.json", json.dumps(counts))
        print(f"{write_hard(self.args.data, counts)} of {len(counts)} problems are hard", flush=True)

    def _end_losers(self) -> None:
        for contest in self.contests.values():
            names = [run.name for run in contest.runs]
            curves_of = {name: validations(self.settled[name]["curves"]) for name in names if name in self.settled}
            alive = [run.name for run in contest.runs if self._status(run) in ("running", "finished", "cut")]
            curves_of |= {name: self.folders.validation(name) for name in alive}
            for loser, step in losers(contest.rungs, curves_of):
                job = next((job for job in self.running if job.name == loser), None)
                if job is not None and self.folders.status(loser)["status"] == "running":
                    self.folders.set_status(loser, "dropped", step)
                    job.process.interrupt()  # SIGKILL could upset NVIDIA's MPS

    def _stop_when_late(self) -> None:
        if self.stopping or not self._is_late():
            return
        self.stopping = True
        for job in self.running:
            if job.run is not None and self._status(job.run) != "dropped":
                job.process.ask_to_stop()

    def _is_late(self) -> bool:
        return self._time_to_train() <= 0

    def _time_to_train(self) -> float:
        return self.end - TO_TEST_S - (TO_SUITES_S if self.args.suites else 0.0) - time.time()

    # ---- what to start

    def _start_jobs(self) -> None:
        """Trainings first. An evaluation takes up to 20 GB of the GPU, half of what a training takes. One fits beside
        all trainings; there are more only while no training waits for the memory."""
        runs: list[Run] = []
        while not self.stopping and (runs := self._next_runs()):
            if self._room() < 2 * min(len(runs), self._free_places()):
                break
            for run in runs:
                self.begun.add(run.name)
                self._start(run.name, self._training(run), run)
        most = self._room() if not runs else 1 - sum(job.run is None for job in self.running)
        if time.time() < self.end - TO_STOP_S:
            for name, evaluation in self._open_evaluations()[: max(most, 0)]:
                self._start(_job_name(name, evaluation), self._evaluation(name, evaluation))

    def _room(self) -> int:
        """How many evaluations more would fit on the GPU."""
        return 2 * int(self.args.at_once) + 1 - sum(1 if job.run is None else 2 for job in self.running)

    def _free_places(self) -> int:
        return int(self.args.at_once) - sum(job.run is not None for job in self.running)

    def _next_runs(self) -> list[Run]:
        """The first unit that fits. A contest may take one process more than there are places; where it does not
        fit, a single run or one of a contest without rungs fills the place. A model that a run begins with and that
        another machine had is trained again; the time of the runs that wait for it is kept for them."""
        free, waiting = self._free_places(), list[Run]()
        for unit in plan(self._chosen()):
            runs = [run for run in runs_of([unit]) if self._is_open(run)]
            lacking = {run.start for run in runs if run.start and not self.folders.model(run.start).exists()}
            starts = [run for run in runs_of(plan(self._chosen())) if run.name in lacking - self.begun]
            rungs = unit.rungs if isinstance(unit, Contest) else {}
            to_their_end = runs[: min(rungs.values(), default=1)]
            failed = lacking - {run.name for run in starts} - {job.name for job in self.running}
            if not runs or failed or not self._is_time_for([*waiting, *starts, *to_their_end]):
                continue
            if lacking:
                waiting += to_their_end
                runs, rungs = starts, {}
            runs = runs if rungs else runs[:1]
            if runs and free >= max(len(runs) - 1, 1):
                if isinstance(unit, Contest) and rungs:
                    self.contests[unit.method] = unit
                return runs
        return []

    def _is_open(self, run: Run) -> bool:
        if run.name in self.begun or not self._is_wanted(run) or self._lack(run):
            return False
        return self._status(run) not in ("finished", "dropped")

    def _is_wanted(self, run: Run) -> bool:
        return run.name not in self.settled and any(fnmatchcase(run.name, pattern) for pattern in self.args.runs)

    def _lack(self, run: Run) -> str | None:
        """What the run needs and is not there."""
        recipe = self._recipe(run)
        needed = [recipe["data"]["train"], *([recipe["teacher"]["path"]] if METHODS[run.method].has_teacher else [])]
        return next((f"which needs {path}" for path in needed if not Path(path).exists()), None)

    def _is_time_for(self, runs: Sequence[Run]) -> bool:
        """With ``--whole``: whether the GPU can also do all steps of ``runs`` before the trainings are stopped."""
        left = [(job.run, job.run.steps - self.folders.last_step(job.name)) for job in self.running if job.run]
        work = sum(STEP_S[run.kind] * steps for run, steps in [*left, *((run, run.steps) for run in runs)])
        return not self.args.whole or work <= self._time_to_train()

    def _chosen(self) -> dict[str, float]:
        if self.rates is None:
            self.rates = best_rates([*self._rows(), *self.settled.values()])  # what was decided stays so
        return self.rates

    def _open_evaluations(self) -> list[tuple[str, Evaluation]]:
        """Models and what they lack, the most important first. What failed once comes last, what failed twice never."""
        screening = replace(SCREEN, limit=self.args.screen)
        wanted = [
            (name, evaluation)
            for evaluation in (screening, TEST, *GENERALISATION)
            for name in (BASE, *self.folders.models())
            if self._is_due(name, evaluation)
        ]
        busy = {job.name for job in self.running}
        left = [pair for pair in wanted if self.tries[_job_name(*pair)] < 2 and _job_name(*pair) not in busy]
        return sorted(left, key=lambda pair: self.tries[_job_name(*pair)])

    def _is_due(self, name: str, evaluation: Evaluation) -> bool:
        if (self.folders.evaluation(name, evaluation) / "result.json").exists():
            return False
        if evaluation.name == SCREEN.name:
            return name == BASE and bool(self.args.screen) and not (self.args.data / HARD_TRAIN).exists()
        known = self.settled.get(name, {})  # the base, or a run that was only done again for another to begin with
        if evaluation is TEST:
            return "test" not in known
        wanted = "suites" not in known and any(fnmatchcase(name, pattern) for pattern in self.args.suites)
        return wanted and (name == BASE or is_done(self.folders.row(name)))

    def _evaluation(self, name: str, evaluation: Evaluation) -> list[str]:
        model = self.args.model if name == BASE else self.folders.model(name)
        return evaluation.command(self.args.luffy, model, self.args.data, self.folders.evaluation(name, evaluation))

    def _training(self, run: Run) -> list[str]:
        recipe = self.folders.begin(self._recipe(run))
        return [*self.args.luffy, "sft" if run.kind == "sft" else "train", str(recipe), *self.args.set]

    def _recipe(self, run: Run) -> Row:
        return run.recipe(self.args.model, self.args.data, self.args.out, self.args.teacher)

    def _start(self, name: str, command: Sequence[str], run: Run | None = None) -> None:
        self.tries[name] += 1
        log = self.args.out / "logs" / f"{name.replace(' ', '-')}.txt"
        log.parent.mkdir(exist_ok=True)
        self.running.append(Running(name, Process(Job(command, log)), run))
        self._note(name, "started")

    # ---- what is known

    def _status(self, run: Run) -> str | None:
        return self.folders.status(run.name).get("status", "dropped" if run.name in self.settled else None)

    def _note(self, name: str, what: str, code: int | None = None) -> None:
        line = {"time": round(time.time(), 1), "job": name, "what": what} | ({} if code is None else {"code": code})
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def _rows(self) -> list[Row]:
        return self.folders.rows(read_lines(self.log))

    def _collect(self, every_s: float = 0.0) -> None:
        if time.time() - self.last_collected < every_s:
            return
        self.last_collected = time.time()
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self._rows())
        write_atomically(self.args.collect / "runs.jsonl", lines)


def _job_name(name: str, evaluation: Evaluation) -> str:
    return f"{name} {evaluation.name}"


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base: a Hugging Face folder")
    parser.add_argument("--data", type=Path, default=Path("study-qwen"), help="what studies.qwen.data wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/qwen"))
    parser.add_argument("--collect", type=Path, default=Path("runs/qwen-collected"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--at-once", type=int, default=3, help="trainings that share the GPU")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["*"],
        help="names or patterns of the runs to do, e.g. 'luffy-lr*'; a known run "
        "that was cut off late is done again if its whole name is here",
    )
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="runs.jsonl of earlier machines")
    parser.add_argument("--teacher", type=Path, default=Path("teacher"), help="the 1.5B: a Hugging Face folder")
    parser.add_argument(
        "--screen", type=int, metavar="N", help="sample the base 8 times on N training problems: which ones are hard"
    )
    parser.add_argument(
        "--suites", nargs="+", default=[], help="models (patterns of runs, or base) to evaluate for question 5 too"
    )
    parser.add_argument("--whole", action="store_true", help="begin no run that the time does not suffice for")
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value for every training, to try things out")
    parser.add_argument("--luffy", type=shlex.split, default=luffy(), help="the command")
    parser.add_argument("--poll-s", type=float, default=1.0)
    args = parser.parse_args(arguments)
    for name in ("model", "data", "out", "collect", "teacher"):
        setattr(args, name, getattr(args, name).resolve())
    Driver(args).go()


if __name__ == "__main__":
    main()
