"""``luffy quickstart``: three methods on the same problems with the same number of samples, compared.

Everything runs through the ordinary recipes and the ordinary trainer; this file only strings them together.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luffy.config import Config, load_config
from luffy.files import write_atomically
from luffy.progress import lasting
from luffy.report.html import write_report
from luffy.report.recorder import read_json_lines
from luffy.report.tables import OUTSIDE_STEPS, STEP_SECONDS
from luffy.train.loop import Trainer
from luffy.train.run_state import Method

METHODS: tuple[tuple[str, str, Method], ...] = (
    ("on-policy", "tiny/on_policy", "rl"),
    ("sft", "tiny/sft", "sft"),
    ("luffy", "tiny/luffy", "rl"),
)
COLUMNS = (
    ("held-out", "heldout"),
    ("greedy", "heldout_greedy"),
    ("longer", "ood"),
    ("greedy", "ood_greedy"),
)


@dataclass(frozen=True)
class MethodOutcome:
    """What one method reached with one seed; accuracies are shares of right answers."""

    start: float
    heldout: float
    heldout_greedy: float
    ood: float
    ood_greedy: float
    seconds: float


def quickstart(out: Path, seeds: int, steps: int | None = None) -> dict[str, dict[int, MethodOutcome]]:
    """Train every method with every seed below ``out``, print the table, write summary.json and report.html."""
    console = Console(file=lasting(sys.stderr))
    console.print("Chains of sums, e.g. [bold]47+5-3+8=?[/] -> +5=52 -3=49 +8=57 #### 57")
    console.print("The base model knows the steps, but gets 19 of 20 wrong by one: its own samples are never right.\n")
    outcomes: dict[str, dict[int, MethodOutcome]] = {name: {} for name, _, _ in METHODS}
    for seed in range(seeds):
        for name, recipe, method in METHODS:
            outcomes[name][seed] = run_one(configure(out, name, recipe, seed, steps), method)
    write_atomically(out / "summary.json", json.dumps(summary(outcomes), indent=1) + "\n")
    report = write_report([out / name for name in outcomes], out / "report.html", title="luffy quickstart", notes=NOTES)
    Console().print(table(outcomes))
    Console().print(f"\nreport   {report}\nsummary  {out / 'summary.json'}", highlight=False, soft_wrap=True)
    return outcomes


NOTES = (
    "Held-out problems have 8 terms like the training problems; the OOD set has 11. Accuracies of the curves are "
    "sampled at temperature 1, as in training. All methods see the same problems in the same order; on-policy RL and "
    "LUFFY draw 8 samples for each (LUFFY: 7 and the trace), SFT learns from the same traces."
)


def configure(out: Path, name: str, recipe: str, seed: int, steps: int | None) -> Config:
    overrides = [f"out={json.dumps(str(out))}", f"name={name}/seed-{seed}", f"seed={seed}"]
    if steps is not None:
        overrides += [f"train.steps={steps}", f"train.save_every={steps}"]
    return load_config(recipe, overrides)


def run_one(cfg: Config, method: Method) -> MethodOutcome:
    with Trainer(cfg, method) as trainer:
        trainer.train()
        greedy = {name: m.value for name, m in trainer.evaluate(replace(cfg.eval, temperature=0.0)).items()}
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    evaluated = [row for row in rows if "val-core/accuracy" in row]
    return MethodOutcome(
        start=evaluated[0]["val-core/accuracy"],
        heldout=evaluated[-1]["val-core/accuracy"],
        heldout_greedy=greedy["val-core/accuracy"],
        ood=evaluated[-1]["val-ood/accuracy"],
        ood_greedy=greedy["val-ood/accuracy"],
        seconds=sum(row.get(name, 0.0) for row in rows for name in (STEP_SECONDS, *OUTSIDE_STEPS)),
    )


def summary(outcomes: dict[str, dict[int, MethodOutcome]]) -> dict[str, object]:
    return {
        "methods": {
            name: {
                "seeds": {str(seed): outcome.heldout for seed, outcome in by_seed.items()},
                "start": statistics.fmean(o.start for o in by_seed.values()),
                "all": {str(seed): vars(outcome) for seed, outcome in by_seed.items()},
            }
            for name, by_seed in outcomes.items()
        }
    }


def table(outcomes: dict[str, dict[int, MethodOutcome]]) -> Table:
    seeds = max(len(by_seed) for by_seed in outcomes.values())
    title = f"Right answers after training in percent, {seeds} seed{'s' if seeds > 1 else ''}"
    shown = Table(title=title, caption="sampled at temperature 1, or greedy; longer: 11 terms, not 8")
    shown.add_column("method")
    for heading in ("start", *(heading for heading, _ in COLUMNS), "seconds"):
        shown.add_column(heading, justify="right")
    for name, by_seed in outcomes.items():
        runs = list(by_seed.values())
        cells = [percent([getattr(o, attribute) for o in runs]) for _, attribute in COLUMNS]
        seconds = f"{statistics.fmean(o.seconds for o in runs):.0f}"
        shown.add_row(name, percent([o.start for o in runs]), *cells, seconds)
    return shown


def percent(values: Sequence[float]) -> str:
    """``95.5``, or with several seeds the middle of their range and half its width: ``96.2 ±0.3``."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    low, high = 100 * min(values), 100 * max(values)
    return f"{(low + high) / 2:.1f} ±{(high - low) / 2:.1f}"
