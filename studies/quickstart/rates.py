"""Are the recipes of the quickstart tuned alike? Three learning rates for each method, one seed.

    python -m studies.quickstart.rates runs/rates

The rate is to be chosen on 200 problems of their own. The table also shows the accuracy of every run on the problems
that the quickstart reports, which decide nothing. SFT + RL begins with the model of SFT at the rate that SFT would
choose. On-policy RL alone is left out: it never sees a reward here.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from luffy.api import Trainer, load_config
from luffy.quickstart.task import draw_rows
from studies.common import table

RATES = (1e-4, 3e-4, 1e-3)
METHODS = ("luffy", "mixed", "rl_sft_loss", "sft", "sft_rl")
SHOWN = load_config("tiny/luffy").data.eval


def validation_file(folder: Path) -> Path:
    """200 problems that are neither trained on nor reported."""
    lines = Path(load_config("tiny/luffy").data.train).read_text() + Path(SHOWN).read_text()
    taken = {json.loads(line)["id"] for line in lines.splitlines()}
    rows = draw_rows(random.Random("quickstart-rates"), 200, 8, taken)
    path = folder / "validation.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, method: str, rate: float, start: Path | None) -> tuple[float, float]:
    """Accuracy after the last step: on the validation problems, and on those of the quickstart."""
    sets = {
        "out": str(folder), "name": f"{method}/{rate:g}", "optim.lr": rate, "data.eval": str(validation_file(folder)),
        "data.eval_also": {"shown": SHOWN},
    }  # fmt: skip
    if start is not None:
        sets["model.path"] = str(start)
    with Trainer(load_config(f"tiny/{method}", sets), "sft" if method == "sft" else "rl") as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (folder / method / f"{rate:g}" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "val-core/accuracy" in row][-1]
    return last["val-core/accuracy"], last["val-shown/accuracy"]


def main(folder: Path) -> None:
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for method in METHODS:
        start = None
        if method == "sft_rl":
            rate = max(RATES, key=lambda rate: found["sft"][rate])
            start = folder / "sft" / f"{rate:g}" / "checkpoints" / "latest" / "model"
        found[method] = {rate: run(folder, method, rate, start) for rate in RATES}
    head = ["validation (held-out), %", *(f"{rate:g}" for rate in RATES)]
    print(table(head, [[m, *(f"{100 * a:.1f} ({100 * b:.1f})" for a, b in of.values())] for m, of in found.items()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
