"""Train every method for a few steps in two checkouts and compare metrics and weights bit for bit.

Usage: python .ci/same_runs.py BEFORE AFTER OUT [METHOD ...]. BEFORE and AFTER are checkouts that this Python can run,
OUT is a folder for the runs. Methods start from a model that BEFORE trains by SFT first, so that some rewards are 1.
Takes about half a minute a method on one core. Exit code 1: a run differs or fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

STEPS = 4
VARIES = ("timing", "perf/", "time", "memory")  # metrics of speed
SETTINGS = {
    "opd": ["teacher.path={model}"],
    "guided": ["rollout.offpolicy_guidance.model_path={model}"],
    "relift": ["sft_steps.buffer=8"],
    "scaf": ["guidance.gate_from=0"],
}


def train(tree: Path, out: Path, command: str, method: str, *settings: str) -> Path:
    """Train in ``tree`` and return the run folder."""
    out.mkdir(parents=True, exist_ok=True)
    asked = [command, f"tiny/{method}", f"name={method}", "eval.every=0", *settings]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    log = out / f"{method}.log"
    with log.open("w") as file:
        code = subprocess.run(
            [sys.executable, "-m", "luffy", *asked], cwd=out, env=env, stdout=file, stderr=file
        ).returncode
    if code:
        sys.exit(f"{method} in {tree} failed; see {log}")
    return out / "runs" / method


def newest_model(run: Path) -> Path:
    return max(run.glob("checkpoints/step-*/model"))


def metrics(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not any(part in key for part in VARIES)} for row in rows]


def weights(run: Path) -> str:
    files = sorted(newest_model(run).glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main(before: Path, after: Path, out: Path, methods: list[str]) -> int:
    model = newest_model(train(before, out / "start", "sft", "sft", "train.steps=80"))
    different = 0
    for method in methods or sorted(path.stem for path in (before / "luffy/recipes/methods").glob("*.yaml")):
        command = "sft" if method == "sft" else "train"
        sets = [text.format(model=model) for text in SETTINGS.get(method, [])]
        asked = (command, method, f"train.steps={STEPS}", f"model.path={model}", *sets)
        one, other = (train(tree, out / name, *asked) for tree, name in ((before, "before"), (after, "after")))
        same = metrics(one) == metrics(other), weights(one) == weights(other)
        different += same != (True, True)
        print(
            f"{method:<12} metrics {'equal' if same[0] else 'DIFFER'}, weights {'equal' if same[1] else 'DIFFER'}",
            flush=True,
        )
    return different


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    folders = [Path(argument).resolve() for argument in sys.argv[1:4]]
    sys.exit(main(*folders, sys.argv[4:]) > 0)
