"""Makes the start of ``tiny/opsd`` from the base: ``python -m luffy.quickstart.make_reader --out DIR``.

The base cannot read a solution that stands behind the question. This model can: SFT on such prompts, with the solution
as the trace, of problems that are in no set of the quickstart. Without a solution in the prompt it still gets
every problem wrong, as the base does. The weights that ship came from this script (a minute on one core).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import cast

from luffy.config import Config, load_config
from luffy.data.hints import SOLUTION
from luffy.quickstart import task
from luffy.train.loop import Trainer

ASSETS = Path(__file__).parent / "assets"
STEPS, PROBLEMS = 100, 2048


def shown_rows(count: int = PROBLEMS) -> list[dict[str, object]]:
    """New problems with the solution behind the question, as ``teacher.hint_text`` of ``tiny/opsd`` shows it."""
    files = sorted((ASSETS / "data").glob("*.jsonl"))
    taken = {json.loads(line)["id"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    hint = load_config("tiny/opsd").teacher.hint_text
    rows = []
    for row in task.draw_rows(random.Random("quickstart-reader"), count, 8, taken):
        (solution,) = cast(list[str], row["traces"])
        rows.append({**row, "prompt": f"{row['prompt']}{hint.replace(SOLUTION, solution)}"})
    return rows


def config(folder: Path) -> Config:
    data = folder / "shown.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in shown_rows()), encoding="utf-8")
    return load_config(
        "tiny/sft",
        {
            "out": str(folder),
            "name": "reader",
            "data.train": str(data),
            "data.eval": None,
            "data.eval_also": {},
            "data.max_prompt_tokens": 80,
            "batch.problems": 32,
            "batch.tokens": 8192,
            "optim.lr": 1e-3,
            "train.steps": STEPS,
            "train.save_every": STEPS,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    target = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder, Trainer(config(Path(folder)), "sft") as trainer:
        shutil.copytree(trainer.train(), target)


if __name__ == "__main__":
    main()
