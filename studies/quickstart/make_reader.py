"""Make the start of ``tiny/opsd`` from the base: ``python -m studies.quickstart.make_reader --out DIR``.

The base cannot read a solution that stands behind the question. This model can, and is the base otherwise: SFT on
problems that are in no set of the quickstart, two of three with the solution behind the question and as the trace, the
third without it and with the base's habit, a trace of steps that come out one short. The weights that ship came from
this script (minutes on one core).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

import luffy.quickstart
from luffy.config import Config, load_config
from luffy.data.prompts import SOLUTION
from luffy.trainer import Trainer
from studies.quickstart import task
from studies.quickstart.make_base import RIGHT

ASSETS = Path(luffy.quickstart.__file__).parent / "assets"
STEPS, PROBLEMS, TERMS = 160, 3072, 8


def reader_rows(count: int = PROBLEMS) -> list[task.Row]:
    """Problems that no file of the quickstart has; every third one is not shown its solution."""
    files = sorted((ASSETS / "data").glob("*.jsonl"))
    taken = {json.loads(line)["id"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    hint = load_config("tiny/opsd").teacher.hint_text
    rng = random.Random("quickstart-reader")
    rows: list[task.Row] = []
    while len(rows) < count:
        chain = task.draw_chain(rng, TERMS)
        row = task.row_of(chain)
        if row["id"] in taken:
            continue
        taken.add(row["id"])
        if len(rows) % 3 == 2:
            habit = task.solution_of(chain, [rng.random() >= RIGHT for _ in chain[1:]])
            rows.append({**row, "traces": [habit]})
        else:
            rows.append({**row, "prompt": f"{row['prompt']}{hint.replace(SOLUTION, task.solution_of(chain))}"})
    return rows


def config(folder: Path) -> Config:
    data = folder / "reader.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in reader_rows()), encoding="utf-8")
    return load_config(
        "tiny/sft",
        {
            "out": str(folder),
            "name": "reader",
            "data.train": str(data),
            "data.eval": None,
            "data.eval_also": {},
            "data.max_prompt_tokens": 80,
            "batch.problems": 48,
            "batch.tokens": 8192,
            "optim.lr": 1e-3,
            "train.steps": STEPS,
            "train.save_every": STEPS,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart's base to read a solution behind the question.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights, the config and the tokenizer")
    target = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder, Trainer(config(Path(folder)), "sft") as trainer:
        shutil.copytree(trainer.train(), target)


if __name__ == "__main__":
    main()
