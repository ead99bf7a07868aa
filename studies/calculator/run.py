"""GSM8K with a calculator: what do a teacher's trajectories give a small model, in the group and in SFT?

    python -m studies.calculator.run --model QWEN --data FOLDER --out runs/calculator --minutes 9
    python -m studies.calculator.run --table

FOLDER has traces.parquet, val.jsonl and test.jsonl (README.md). Each method is trained with each seed and evaluated on
all test problems, and so is the base; ``--at-once`` of them share the GPU, each with at most ``--share`` of its memory.
A run that is tested adds a line to results.jsonl, and is not made again. When the minutes are up, trainings stop with a
checkpoint; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from luffy.compare.process import Job, Process
from luffy.config import load_config
from luffy.config.legacy import merge
from luffy.evaluation.accuracy import item_accuracy
from luffy.run_folder.recorder import read_json_lines

BASE = "base"
METHODS: dict[str, tuple[str, Mapping[str, Any]]] = {  # a built-in recipe, and what is changed of it
    "on_policy": ("small/on_policy", {}),
    "sft": ("small/sft", {}),
    "sft_rl": ("small/sft_rl", {"stages": {"sft": {"hand_on": "last", "train": {"steps": 100}}}}),
    "luffy": ("small/luffy", {}),
    "luffy_gate": ("small/luffy", {"guidance": {"n_prefix": 0, "gate": "trace_on_failure"}}),
}
SEEDS = (0, 1)
EVALUATION = {"k": 4, "temperature": 0.6, "max-tokens": 512, "dtype": "bfloat16"}
VALIDATION = ("val-core/accuracy", "val-core/environment/called")
RESULTS = Path(__file__).with_name("results.jsonl")
TO_STOP_S = 60.0  # before the end, for the checkpoints


def names() -> list[str]:
    return [f"{method}-s{seed}" for seed in SEEDS for method in METHODS]


def recipe(name: str, model: Path, data: Path, out: Path) -> dict[str, Any]:
    method, _, seed = name.rpartition("-s")
    base, changed = METHODS[method]
    shared = yaml.safe_load(Path(__file__).with_name("recipe.yaml").read_text(encoding="utf-8"))
    own = {
        "base": base, "name": name, "out": str(out), "seed": int(seed), "model": {"path": str(model)},
        "data": {"train": str(data / "traces.parquet"), "eval": str(data / "val.jsonl")},
    }  # fmt: skip
    return merge(merge(shared, own), changed)


class Study:
    """The folder of all runs, and the file of their results. ``command``: that of luffy."""

    def __init__(self, model: Path, data: Path, out: Path, results: Path, command: Sequence[str]) -> None:
        self.model, self.data, self.out, self.results, self.command = model, data, out, results, command
        out.mkdir(parents=True, exist_ok=True)

    def next_job(self, name: str) -> Job | None:
        """What a run, or the base, lacks: its training, its evaluation, or nothing."""
        if name in known(self.results):
            return None
        path, log = self.out / f"{name}.yaml", self.out / f"{name}.log"
        made = recipe(f"on_policy-s{SEEDS[0]}" if name == BASE else name, self.model, self.data, self.out)
        path.write_text(yaml.safe_dump(made), encoding="utf-8")
        if name != BASE and not self.trained(name).exists():
            return Job([*self.command, "sft" if name.startswith("sft-") else "train", str(path)], log)
        prompt = {
            key.replace("_", "-"): getattr(load_config(str(path)).data, key) for key in ("style", "system_prompt")
        }
        options = {**EVALUATION, **prompt, "suite": self.data / "test.jsonl", "out": self.test(name)}
        options |= {"environment": path, "reward-of": path}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return Job([*self.command, "eval", str(self.model if name == BASE else self.out / name), *words], log)

    def trained(self, name: str) -> Path:
        return self.out / f"{name}.trained"

    def test(self, name: str) -> Path:
        return self.out / "tests" / name

    def ended(self, name: str) -> bool:
        """Note a process that did its work; whether the run lacks nothing now. A tested run's checkpoints are deleted:
        they are gigabytes."""
        if not (self.test(name) / "result.json").exists():
            self.trained(name).touch()
            return False
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.record(name)) + "\n")
        shutil.rmtree(self.out / name / "checkpoints", ignore_errors=True)
        return True

    def record(self, name: str) -> dict[str, Any]:
        """``right``: how many of the samples of each test problem are, a digit each, in the order of the problems' ids.
        ``validation``: step, accuracy, and the share of episodes with a call."""
        rows = read_json_lines(self.test(name) / "items.jsonl")
        steps = [] if name == BASE else read_json_lines(self.out / name / "metrics.jsonl")
        return {
            "name": name,
            "right": "".join(str(round(EVALUATION["k"] * one)) for _, one in sorted(item_accuracy(rows).items())),
            "called": float(np.mean([has_valid_call(row) for row in rows])),
            **{key: float(np.mean([row[key] for row in rows])) for key in ("turns", "tokens")},
            "validation": [[s["step"], *map(s.get, VALIDATION)] for s in steps if VALIDATION[0] in s],
        }

    def go(self, minutes: float, at_once: int, poll_s: float = 1.0) -> None:
        end, waiting = time.monotonic() + 60 * minutes - TO_STOP_S, [BASE, *names()]
        running, stopped = dict[str, Process](), set[str]()
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < at_once and time.monotonic() < end:
                if job := self.next_job(name := waiting.pop(0)):
                    running[name] = Process(job)
            for name, process in list(running.items()):
                if (how := process.poll()) is not None:
                    del running[name]
                    print(f"{name}: {'stopped' if name in stopped else how.why or 'ok'}", flush=True)
                    if how.finished and name not in stopped and not self.ended(name):
                        waiting.insert(0, name)
                elif time.monotonic() >= end and name not in stopped:
                    stopped.add(name)
                    process.ask_to_stop()
            time.sleep(poll_s)


def known(results: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_json_lines(results)} if results.exists() else {}


def table(results: Path) -> list[str]:
    """Of each method the mean over its seeds; the standard error is over the test problems."""
    found = known(results)
    lines = [
        "|method|seeds|accuracy %|by seed|episodes with a valid call %|turns|tokens|",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for method in (BASE, *METHODS):
        if rows := [found[name] for name in (method, *(f"{method}-s{seed}" for seed in SEEDS)) if name in found]:
            accuracies = np.array([[int(digit) for digit in row["right"]] for row in rows]) / EVALUATION["k"] * 100
            by_problem = accuracies.mean(axis=0)
            error = by_problem.std(ddof=1) / math.sqrt(len(by_problem))
            each = ", ".join(f"{one:.1f}" for one in accuracies.mean(axis=1))
            means = [f"{np.mean([row[key] for row in rows]):.1f}" for key in ("turns", "tokens")]
            called = 100 * np.mean([row["called"] for row in rows])
            lines.append(
                f"|{method}|{len(rows)}|{by_problem.mean():.1f} ± {error:.1f}|{each}|{called:.1f}|{'|'.join(means)}|"
            )
    return lines


def has_valid_call(row: Mapping[str, Any]) -> bool:
    """Whether the environment answered a call of the episode with a result."""
    return bool(row["calls"] > sum(fault != "unreadable_call" for fault in row["faults"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the base: a Hugging Face folder or .gguf file")
    parser.add_argument("--data", type=Path, default=Path("calculator-data"))
    parser.add_argument("--out", type=Path, default=Path("runs/calculator"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.22, help="of the GPU's memory, for each process")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    args = parser.parse_args()
    if not args.table:
        if args.model is None:
            parser.error("--model is missing")
        Study(*(path.resolve() for path in (args.model, args.data, args.out, args.results)), luffy(args.share)).go(
            args.minutes, args.at_once
        )
    print("\n".join(table(args.results)))


def luffy(share: float) -> list[str]:
    """The command, limited to a share of the GPU's memory: its engine would take all that is free."""
    limit = f"torch.cuda.is_available() and torch.cuda.set_per_process_memory_fraction({share})"
    return [sys.executable, "-c", f"import torch; {limit}; from luffy.cli import main; main()"]


if __name__ == "__main__":
    main()
