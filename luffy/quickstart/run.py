"""``luffy quickstart``: methods on the same problems with the same number of samples, compared.

Everything runs through the ordinary recipes and the ordinary trainer; this file only strings them together.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from luffy.config import Config, built_in_recipes, load_config, stages_of
from luffy.errors import StopRequested, TrainingStopped, UserError
from luffy.files import json_object, write_atomically
from luffy.metrics import training_seconds
from luffy.progress import lasting
from luffy.report.html import write_report
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.run_folder.layout import METRICS
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.runs import flat_config
from luffy.schema import nearest, to_dict
from luffy.trainer import Trainer, train_stages


@dataclass(frozen=True)
class QuickstartTask:
    """``recipes``: the size of its recipes, e.g. ``tiny/luffy``. ``intro``: printed before training, with rich's marks.
    ``notes``: below the report's tables. ``out``: the default folder."""

    name: str
    recipes: str
    default_methods: str
    out: str
    intro: tuple[str, ...]
    notes: str

    @property
    def methods(self) -> list[str]:
        """Names of the methods that have a recipe: of every method, or of those in the folder of the task."""
        known = built_in_recipes()
        folder = "methods" if f"sizes/{self.recipes}" in known else self.recipes
        names = [name.removeprefix(f"{folder}/") for name in known if name.startswith(f"{folder}/")]
        return [name for name in names if name != SHARED]

    @property
    def title(self) -> str:
        return "luffy quickstart" if self.name == DEFAULT_TASK else f"luffy quickstart --task {self.name}"


SFT_RUN = "runs/tiny-sft/"  # where recipes of the tiny size look for what `luffy sft tiny/sft` left
SHARED = "chains"  # recipe with the settings that the methods of a folder share
DEFAULT_TASK = "chains"
HELD_OUT = (
    "Held-out problems have 8 terms like the training problems; the OOD set has 11. Accuracies of the curves are "
    "sampled at temperature 1, as in training. All methods see the same problems in the same order; "
)
TASKS = {
    task.name: task
    for task in (
        QuickstartTask(
            name="chains",
            recipes="tiny",
            default_methods="on_policy,sft,luffy",
            out="runs/quickstart",
            intro=(
                "Chains of sums, e.g. [bold]47+5-3+8=?[/] -> +5=52 -3=49 +8=57 #### 57",
                "The base model knows the steps, but gets 19 of 20 wrong by one: its samples are never right.\n",
            ),
            notes=HELD_OUT + "on-policy RL and LUFFY draw 8 samples for each (LUFFY: 7 and the trace), SFT learns from "
            "the same traces. sft-rl makes its SFT steps itself, and they count; other methods initialised or "
            "distilled from the SFT model use the one with the same seed, whose steps and seconds are not counted as "
            "theirs.",
        ),
        QuickstartTask(
            name="tools",
            recipes="tools",
            default_methods="on_policy,luffy",
            out="runs/quickstart-tools",
            intro=(
                "Chains of sums with a tool, e.g. [bold]47+5-3=?[/] -> add(47, 5) = 52, add(52, -3) = 49, #### 49",
                "In its head the base model gets 19 of 20 steps wrong by one. It knows how to call the tool, but does "
                "so in 1 of 25 turns: no sample of its own calls it for a whole chain.\n",
            ),
            notes=HELD_OUT + "an episode is up to 11 turns, and after each call of the tool its answer is the next "
            "message. On-policy RL plays 8 episodes for each problem, LUFFY 7 beside a teacher's trajectory, which "
            "calls the tool for every step. Tokens of the tool's answers are in no loss. An evaluation takes the first "
            "100 problems of each set.",
        ),
    )
}


def find_task(name: str) -> QuickstartTask:
    if name in TASKS:
        return TASKS[name]
    listed = f"; there are {', '.join(TASKS)}"
    raise UserError(f"--task: no task {name!r}{nearest(name, list(TASKS)) or listed}")


def choose_methods(methods: str, task: QuickstartTask = TASKS[DEFAULT_TASK]) -> list[str]:
    """Recipe names in the order to run them: those that need the SFT model come last, and add SFT."""
    known = task.methods
    named = [name.strip().replace("-", "_") for name in methods.split(",") if name.strip()]
    listed = f"; there are {', '.join(known)}, and all"
    for name in named:
        if name not in (*known, "all"):
            raise UserError(f"--methods: no method {name!r}{nearest(name, known) or listed}")
    if not named:
        raise UserError(f"--methods names none{listed}")
    chosen = known if "all" in named else list(dict.fromkeys(named))
    later = [name for name in chosen if sft_model_keys(load_config(f"{task.recipes}/{name}"))]
    first = ["sft"] if later and "sft" not in chosen else []
    return [*first, *(name for name in chosen if name not in later), *later]


def sft_model_keys(cfg: Config) -> dict[str, str]:
    """Config keys that name the SFT model, with its path inside the run folder of SFT."""
    values = {key: value for key, value in flat_config(cfg).items() if isinstance(value, str)}
    return {key: value.removeprefix(SFT_RUN) for key, value in values.items() if value.startswith(SFT_RUN)}


FINISHED = "quickstart.json"  # in a run folder: the config it was trained with, and what it reached
COLUMNS = (
    ("held-out", "heldout"),
    ("greedy", "heldout_greedy"),
    ("longer", "ood"),
    ("greedy", "ood_greedy"),
)


@dataclass(frozen=True)
class MethodOutcome:
    """Accuracies of one method with one seed, as fractions, and its training seconds."""

    start: float
    heldout: float
    heldout_greedy: float
    ood: float
    ood_greedy: float
    seconds: float


Outcomes = dict[str, dict[int, MethodOutcome]]


@dataclass
class Comparison:
    """Outcomes by method and seed, and errors of failed runs by ``METHOD/seed-N``."""

    outcomes: Outcomes = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def quickstart(
    out: Path,
    seeds: int,
    steps: int | None = None,
    methods: str | None = None,
    as_json: bool = False,
    task: str = DEFAULT_TASK,
) -> Outcomes:
    """Train every method with every seed below ``out``, print the table, write summary.json and report.html.

    ``methods``: comma-separated recipe names, or ``all``; default: the task's. ``as_json``: print the summary to
    standard output and everything else to standard error. If a run fails the others continue, and a TrainingStopped
    names it at the end. Finished runs are not repeated.
    """
    about = find_task(task)
    chosen = choose_methods(methods or about.default_methods, about)
    planned = [(method, configure(out, method, seed, steps, about)) for seed in range(seeds) for method in chosen]
    for _, cfg in planned:
        refuse_fewer_steps(cfg)
    console = Console(file=lasting(sys.stderr))
    for line in about.intro:
        console.print(line)
    found = Comparison()
    out.mkdir(parents=True, exist_ok=True)
    for method, cfg in planned:
        run_and_note(found, method, cfg, console)
        write_atomically(out / "summary.json", json.dumps(summary(found), indent=1) + "\n")
    if found.outcomes:
        places = [out / name for name in found.outcomes]
        report = write_report(places, out / "report.html", title=about.title, notes=about.notes)
        shown_on = console if as_json else Console()
        shown_on.print(table(found.outcomes))
        shown_on.print(f"\nreport   {report}\nsummary  {out / 'summary.json'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(summary(found), indent=1))
    if found.failed:
        raise TrainingStopped(f"failed: {', '.join(found.failed)}; see the errors above and in {out / 'summary.json'}")
    return found.outcomes


def configure(
    out: Path, method: str, seed: int, steps: int | None, task: QuickstartTask = TASKS[DEFAULT_TASK]
) -> Config:
    overrides = {"out": str(out), "name": f"{shown(method)}/seed-{seed}", "seed": seed}
    if steps is not None:
        overrides |= {"train.steps": steps, "train.save_every": steps}
    recipe = f"{task.recipes}/{method}"
    model = sft_model_keys(load_config(recipe))
    overrides |= {key: str(out / "sft" / f"seed-{seed}" / path) for key, path in model.items()}
    return load_config(recipe, overrides)


def shown(method: str) -> str:
    return method.replace("_", "-")


def refuse_fewer_steps(cfg: Config) -> None:
    """Raise a UserError if a run has more steps than asked for: its results would count as those of fewer steps."""
    done = max((checkpoint.step for checkpoint in CheckpointStore(cfg.folder / "checkpoints", keep=1)), default=0)
    planned = [trained.train.steps or done for trained in [stage.cfg for stage in stages_of(cfg)] or [cfg]]
    if done > sum(planned):
        raise UserError(
            f"{cfg.folder} is trained up to step {done} already, and {sum(planned)} were asked for; "
            f"choose another --out, or --steps {done} or more"
        )


def run_and_note(found: Comparison, method: str, cfg: Config, console: Console) -> None:
    """Train one method with one seed; print and record an error, unless it is a request to stop."""
    try:
        console.print(f"[bold]{cfg.name}[/]")
        outcome = finished(cfg) or run_one(cfg)
    except StopRequested:
        raise
    except Exception as error:
        if not isinstance(error, UserError | TrainingStopped):
            traceback.print_exc()
        found.failed[cfg.name] = f"{type(error).__name__}: {error}"
        console.print(f"{cfg.name} failed: {error}", style="red", markup=False, soft_wrap=True)
    else:
        found.outcomes.setdefault(shown(method), {})[cfg.seed] = outcome


def finished(cfg: Config) -> MethodOutcome | None:
    """Outcome of a finished run with the same settings, if there is one."""
    path = cfg.folder / FINISHED
    kept = json_object(path.read_bytes(), path, "delete it, and the run is made again") if path.is_file() else {}
    same = kept.get("config") == json.loads(json.dumps(to_dict(cfg)))
    return MethodOutcome(**kept["outcome"]) if same else None


def run_one(cfg: Config) -> MethodOutcome:
    greedy: dict[str, float] = {}

    def train(trainer: Trainer) -> None:
        trainer.train()
        found = trainer.evaluate(replace(cfg.eval, temperature=0.0))
        greedy.update({name: m.value for name, m in found.items()})

    train_stages(cfg, act=train)
    rows = read_json_lines(cfg.folder / METRICS)
    evaluated = [row for row in rows if "val-core/accuracy" in row]
    outcome = MethodOutcome(
        start=evaluated[0]["val-core/accuracy"],
        heldout=evaluated[-1]["val-core/accuracy"],
        heldout_greedy=greedy["val-core/accuracy"],
        ood=evaluated[-1]["val-ood/accuracy"],
        ood_greedy=greedy["val-ood/accuracy"],
        seconds=sum(map(training_seconds, rows)),
    )
    write_atomically(cfg.folder / FINISHED, json.dumps({"config": to_dict(cfg), "outcome": asdict(outcome)}) + "\n")
    return outcome


def summary(found: Comparison) -> dict[str, object]:
    methods = {
        name: {
            "seeds": {str(seed): outcome.heldout for seed, outcome in by_seed.items()},
            "start": statistics.fmean(o.start for o in by_seed.values()),
            "all": {str(seed): vars(outcome) for seed, outcome in by_seed.items()},
        }
        for name, by_seed in found.outcomes.items()
    }
    return {"methods": methods} | ({"failed": found.failed} if found.failed else {})


def table(outcomes: Outcomes) -> Table:
    """Table of at most 80 columns, the best held-out accuracy first."""
    seeds = max(len(by_seed) for by_seed in outcomes.values())
    title = f"Correct answers after training in percent, {seeds} seed{'s' if seeds > 1 else ''}"
    caption = "sampled at temperature 1, or greedy; longer: 11 terms, not 8"
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("method", no_wrap=True)
    for heading in ("start", *(heading for heading, _ in COLUMNS), "seconds"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, by_seed in by_accuracy(outcomes):
        runs = list(by_seed.values())
        cells = [percent([getattr(o, attribute) for o in runs]) for _, attribute in COLUMNS]
        seconds = f"{statistics.fmean(o.seconds for o in runs):.0f}"
        made.add_row(name, f"{100 * statistics.fmean(o.start for o in runs):.1f}", *cells, seconds)
    return made


def by_accuracy(outcomes: Outcomes) -> list[tuple[str, dict[int, MethodOutcome]]]:
    def shown_accuracies(entry: tuple[str, dict[int, MethodOutcome]]) -> list[float]:
        return [middle([getattr(o, attribute) for o in entry[1].values()]) for attribute in ("heldout", "ood")]

    return sorted(outcomes.items(), key=shown_accuracies, reverse=True)


def middle(values: Sequence[float]) -> float:
    return (min(values) + max(values)) / 2


def percent(values: Sequence[float]) -> str:
    """``95.5``, or with several seeds midrange and half-range: ``96.2 ±0.3``."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    return f"{100 * middle(values):.1f} ±{50 * (max(values) - min(values)):.1f}"
