"""Figures and tables of tables.md and of the appendix of ../qwen/report.md, from the metrics of run.py.

python studies/gsm8k/figures.py            reads results/*.jsonl, draws docs/images/study-*.png and fills the
                                           tables between the marks `smollm-*` of both pages
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plan import GAMMAS, HERE, MAIN, TASKS
from run import read_rows

sys.path.insert(0, str(HERE.parents[1]))

from studies.common import fill_marks, half_width, legend_below, looks, panels, smooth, table, wilson

DOC = HERE.parent / "qwen" / "report.md"
PAGES = (DOC, HERE / "tables.md")
IMAGES = HERE.parents[1] / "docs" / "images"
LABELS = {
    "on_policy": "on-policy RL", "sft": "SFT", "rl_sft_loss": "RL with SFT loss", "sft_rl": "SFT + RL",
    "mixed": "Mixed-Policy", "luffy": "LUFFY", "mixed_shaping": "mixed + shaping",
    "on_policy_shaping": "on-policy + shaping", "on_policy_no_clip": "on-policy, no clip",
}  # fmt: skip
VARIANT_LOOKS = {
    "mixed_shaping": ("mixed", ":"), "on_policy_shaping": ("on_policy", ":"), "on_policy_no_clip": ("on_policy", "-."),
}  # fmt: skip
SETS = {"val-core/accuracy": "stories, easy", "val-hard/accuracy": "stories, hard", "val-words/accuracy": "other words",
        "val-longer/accuracy": "longer"}  # fmt: skip
GSM_SETS = {"val-core/accuracy": "GSM8K test", "val-varied/accuracy": "changed numbers",
            "val-stories/accuracy": "stories, easy"}  # fmt: skip
SPLIT_SETS = {"stories": {"val-core/accuracy": "stories, easy", "val-hard/accuracy": "stories, hard"},
              "gsm8k": {"val-core/accuracy": "GSM8K test, easy", "val-hard/accuracy": "GSM8K test, hard"}}  # fmt: skip
SPLIT_PROBLEMS = {("gsm8k", "val-core/accuracy"): 422}
NAMES = {"stories": "the stories", "gsm8k": "GSM8K"}
PROBLEMS = {"stories": 256, "gsm8k": 512}
LAST_STEP = 60
HELD_OUT = 512  # of either task: easy and hard stories, or GSM8K's test
PASS_PROBLEMS = 256
OTHER_PROBLEMS = {"val-stories/accuracy": 256, "val-varied/accuracy": 375, "val-math/accuracy": 308,
                  "val-arc/accuracy": 256}  # fmt: skip
Row = dict[str, Any]


def read(folder: Path) -> list[Row]:
    return list(read_rows(sorted(folder.glob("*.jsonl"))).values())


def last(row: Row, metric: str) -> float:
    return float(row["curves"][metric][-1][1])


def both(row: Row) -> float:
    """Held-out stories of one to four steps: as many of them are easy as are hard."""
    return (last(row, "val-core/accuracy") + last(row, "val-hard/accuracy")) / 2


def held_out(row: Row) -> float:
    return both(row) if row["task"] == "stories" else last(row, "val-core/accuracy")


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def share(values: Sequence[float], problems: int) -> str:
    """Percent with a 95 % interval: Student's over three seeds or more, else Wilson's over the problems. Two seeds
    answer the same problems, so they are not twice as many."""
    mean = statistics.mean(values)
    if len(values) >= 3:
        half = half_width(values)
        low, high = max(mean - half, 0.0), min(mean + half, 1.0)
    else:
        low, high = wilson(mean, problems)
    return f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def averaged(
    rows: Sequence[Row], metric: str | Sequence[str]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps, mean over runs (and over several metrics), smallest and largest."""
    names = [metric] if isinstance(metric, str) else list(metric)
    by_step: dict[float, list[float]] = {}
    for row in rows:
        parts = [dict(map(tuple, row["curves"].get(name, ()))) for name in names]
        for step in set.intersection(*(set(part) for part in parts)):
            by_step.setdefault(step, []).append(statistics.mean(part[step] for part in parts))
    steps = sorted(by_step)
    values = [by_step[step] for step in steps]
    return steps, [statistics.mean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def draw(
    ax: Any,
    rows: Sequence[Row],
    methods: Iterable[str],
    metric: str | Sequence[str],
    smoothed: int = 1,
    percent: bool = True,
    marker: str = "",
) -> None:
    """Means over runs; the band reaches from the smallest to the largest."""
    for method in methods:
        steps, mean, low, high = averaged(pick(rows, method=method), metric)
        if not steps:
            continue
        per_step = 0.5 if method == "sft" else 1.0  # a step of RL has two optimizer steps, one of SFT has one
        at = [step * per_step for step in steps]
        mean, low, high = ([(100 if percent else 1) * v for v in smooth(part, smoothed)] for part in (mean, low, high))
        look = looks(method, VARIANT_LOOKS)
        ax.plot(at, mean, marker=marker, ms=4, label=LABELS[method], lw=1.8, **look)
        ax.fill_between(at, low, high, color=look["color"], alpha=0.13, lw=0)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Any, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"study-{name}.png", dpi=130)
    plt.close(figure)


def methods_figure(rows: Sequence[Row]) -> None:
    for task, sets in (("stories", ("val-core/accuracy", "val-hard/accuracy")), ("gsm8k", ("val-core/accuracy",))):
        runs = pick(rows, question="main", task=task)
        figure, (left, right) = panels(2, 3.5)
        draw(left, runs, [m for m in MAIN if m != "sft"], "batch/on_solved", 5)
        draw(right, runs, MAIN, sets, marker="o")
        left.set(title="own samples right in training", xlabel="step, mean of 5", ylabel="%", ylim=(0, None))
        right.set(title="held-out accuracy", xlabel="step (SFT: two optimizer steps)", ylabel="%", ylim=(0, None))
        legend_below(figure, right)
        save(figure, f"methods-{task}")


def dynamics_figure(rows: Sequence[Row]) -> None:
    with_traces = ("mixed", "mixed_shaping", "luffy")  # in the RL term
    for task in TASKS:
        runs = ablation_rows(rows, task)
        figure, axes = panels(4)
        for ax, (metric, title, unit) in zip(axes, DYNAMICS, strict=True):
            shown = with_traces if metric == "actor/off_policy_prob" else DYNAMIC
            draw(ax, runs, shown, metric, 3, percent=unit == "%")
            ax.set(title=title, xlabel="step, mean of 3", ylabel=unit, ylim=(0, None))
        legend_below(figure, axes[0])
        save(figure, f"dynamics-{task}")


def ablation_rows(rows: Sequence[Row], task: str) -> list[Row]:
    return pick(rows, question="main", task=task) + pick(rows, question="ablation", task=task)


DYNAMIC = ("on_policy", "rl_sft_loss", "mixed", "mixed_shaping", "luffy")
DYNAMICS = (
    ("actor/entropy_loss", "entropy", "nats per token"), ("response_length/mean", "response length", "tokens"),
    ("actor/off_policy_prob", "probability of trace tokens", "%"), ("actor/pg_clipfrac", "tokens clipped", "%"),
)  # fmt: skip


IN_THE_TABLE = (
    ("stories", "actor/entropy_loss", "stories: entropy, nats per token"),
    ("stories", "response_length/mean", "stories: response length, tokens"),
    ("gsm8k", "actor/entropy_loss", "GSM8K: entropy, nats per token"),
    ("gsm8k", "response_length/clip_ratio", "GSM8K: cut off at the limit, %"),
)


def dynamics_table(rows: Sequence[Row]) -> str:
    """Over the last ten steps, from run to run."""
    body = []
    for method in DYNAMIC:
        cells = [
            spread(pick(ablation_rows(rows, task), method=method), metric, 100 if title.endswith("%") else 1)
            for task, metric, title in IN_THE_TABLE
        ]
        body.append([LABELS[method], *cells])
    return table(["steps 51 to 60", *(title for _, _, title in IN_THE_TABLE)], body)


def spread(runs: Sequence[Row], metric: str, times: int) -> str:
    """Mean of a run's last ten steps, of those that have the metric: a step without an update has no entropy. Over
    three runs Student's interval, over fewer the runs themselves."""
    late = [[times * v for step, v in run["curves"].get(metric, ()) if step > LAST_STEP - 10] for run in runs]
    means = [statistics.mean(values) for values in late if values]
    if not any(means):
        return "" if metric == "actor/off_policy_prob" else "0"  # these have no trace in the RL term
    if len(means) < 3:
        return " and ".join(f"{value:.3g}" for value in means)
    middle, half = statistics.mean(means), half_width(means)
    high = min(middle + half, 100.0) if times == 100 else middle + half
    return f"{middle:.3g} ({max(middle - half, 0):.3g} to {high:.3g})"


ABLATED = ("on_policy", "on_policy_shaping", "on_policy_no_clip", "mixed", "mixed_shaping", "luffy")


def gamma_rows(rows: Sequence[Row], gamma: float, task: str) -> list[Row]:
    if gamma == 0.1:
        return pick(rows, question="main", task=task, method="luffy")
    return pick(rows, question="gamma", task=task, method=f"luffy_gamma_{gamma}")


def split_figure(rows: Sequence[Row]) -> None:
    steps = {("stories", "easy"): "1 or 2 steps", ("stories", "hard"): "3 or 4 steps",
             ("gsm8k", "easy"): "1 or 2 calculations", ("gsm8k", "hard"): "3 or more"}  # fmt: skip
    figure, axes = panels(4)
    for ax, ((task, part), length) in zip(axes, steps.items(), strict=True):
        draw(ax, pick(rows, question="split", task=task, note=part), ("on_policy", "luffy"), "batch/on_solved", 5)
        ax.set(title=f"{NAMES[task].removeprefix('the ')}, {length}", xlabel="step, mean of 5", ylim=(0, None))
    axes[0].set_ylabel("own samples right, %")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "split")


def problems_of(task: str, metric: str) -> int:
    return OTHER_PROBLEMS.get(metric, PROBLEMS[task])


def accuracy(runs: Sequence[Row], metric: str, problems: int, at: int = -1) -> str:
    """Over the runs that were asked."""
    values = [float(run["curves"][metric][at][1]) for run in runs if metric in run["curves"]]
    return share(values, problems) if values else "not run"


Group = tuple[str, Sequence[Row], int, Sequence[Row], dict[str, str]]  # task, base and its point, runs, sets


def accuracy_table(groups: Sequence[Group]) -> str:
    """Of the base and of every method after training; the sets of all groups side by side. The base is the point
    with that index in the curves of its rows: every run begins with an evaluation of the model it starts from."""
    start = [accuracy(base, m, problems_of(task, m), at) for task, base, at, _, sets in groups for m in sets]
    body = [["the base", "", *start]]
    for method in MAIN:
        found = [pick(runs, method=method) for _, _, _, runs, _ in groups]
        cells = [
            accuracy(runs, metric, problems_of(task, metric))
            for runs, (task, _, _, _, sets) in zip(found, groups, strict=True)
            for metric in sets
        ]
        body.append([LABELS[method], " / ".join(str(len(runs)) for runs in found), *cells])
    return table(["method", "runs", *(f"{name}, %" for *_, sets in groups for name in sets.values())], body)


def main_group(rows: Sequence[Row], task: str, sets: dict[str, str]) -> Group:
    runs = pick(rows, question="main", task=task)
    return task, pick(runs, method="luffy", seed=0), 0, runs, sets


def methods_table(rows: Sequence[Row]) -> str:
    """The sets that are like what was trained on: both tasks, and the stories from a base that knows something."""
    stories, gsm = pick_sets(SETS, "core", "hard"), pick_sets(GSM_SETS, "core")
    better = {metric: f"better base: {name}" for metric, name in stories.items()}
    warm = pick(rows, question="warm", note="base"), -1, pick(rows, question="warm", note="")
    return accuracy_table(
        [main_group(rows, "stories", stories), main_group(rows, "gsm8k", gsm), ("stories", *warm, better)]
    )


def generalisation_table(rows: Sequence[Row]) -> str:
    stories, gsm = pick_sets(SETS, "words", "longer"), pick_sets(GSM_SETS, "varied", "stories")
    return accuracy_table([main_group(rows, "stories", stories), main_group(rows, "gsm8k", gsm)])


def pick_sets(sets: dict[str, str], *wanted: str) -> dict[str, str]:
    return {f"val-{name}/accuracy": sets[f"val-{name}/accuracy"] for name in wanted}


def ablation_table(rows: Sequence[Row]) -> str:
    body = []
    for method in ABLATED:
        runs = {task: pick(ablation_rows(rows, task), method=method) for task in TASKS}
        clipped = [
            statistics.mean(v for _, v in run["curves"].get("actor/pg_clipfrac", [[0, 0.0]])) for run in runs["stories"]
        ]
        cells = [*outcomes(runs), f"{100 * statistics.mean(clipped):.3f}"]
        body.append([LABELS[method] if method != "luffy" else "mixed + shaping, no clip = LUFFY", *cells])
    return table(["", *OUTCOMES, "tokens clipped, stories, %"], body)


OUTCOMES = ("runs", "stories, %", "GSM8K, %")


def outcomes(runs: dict[str, list[Row]]) -> list[str]:
    """Number of runs and held-out accuracy of both tasks."""
    both_tasks = [runs[task] for task in ("stories", "gsm8k")]
    counts = " / ".join(str(len(part)) for part in both_tasks)
    return [counts, *(share([held_out(run) for run in part], HELD_OUT) for part in both_tasks)]


def entropy_table(rows: Sequence[Row]) -> str:
    """The same method with the bonus and without it, one seed."""
    body = []
    for question, note, coefficient in (
        ("main", "", "0"), ("entropy", "h0.001", "0.001"), ("entropy", "h0.01", "0.01")
    ):  # fmt: skip
        for run in pick(rows, question=question, task="stories", seed=0):
            if run["method"] not in ("mixed", "luffy") or not run["note"].startswith(note):
                continue
            start, end = (run["curves"]["actor/entropy_loss"][i][1] for i in (0, -1))
            cells = [f"{start:.2f} to {end:.2f}", share([both(run)], HELD_OUT)]
            body.append([LABELS[run["method"]], coefficient, *cells])
    return table(["method", "coefficient", "entropy, nats", "held-out accuracy, %"], sorted(body))


def gamma_table(rows: Sequence[Row]) -> str:
    found = {gamma: {task: gamma_rows(rows, gamma, task) for task in TASKS} for gamma in GAMMAS}
    return table(["gamma", *OUTCOMES], [[f"{gamma:g}", *outcomes(runs)] for gamma, runs in found.items()])


def split_table(rows: Sequence[Row]) -> str:
    body = []
    for part in ("easy", "hard"):
        for method in ("on_policy", "luffy"):
            found = {task: pick(rows, question="split", task=task, note=part, method=method) for task in SPLIT_SETS}
            cells = [
                share([last(run, m) for run in found[task]], SPLIT_PROBLEMS.get((task, m), PROBLEMS[task]))
                for task, sets in SPLIT_SETS.items()
                for m in sets
            ]
            counts = " / ".join(str(len(runs)) for runs in found.values())
            right = spread(found["stories"], "batch/on_solved", 100)
            body.append([part, LABELS[method], counts, right, *cells])
    sets = [f"{name}, %" for part in SPLIT_SETS.values() for name in part.values()]
    return table(["trained on", "method", "runs", "own stories right, steps 51 to 60, %", *sets], body)


def pass_table(rows: Sequence[Row]) -> str:
    body = []
    temperatures = sorted({t for row in rows for t in row.get("pass", ())}, key=float)
    for task in ("stories", "gsm8k"):
        for row in [row for row in pick(rows, question="main", task=task) if "pass" in row]:
            found = row["pass"]
            cells = [share([found[t]["pass_at"]["8"]], PASS_PROBLEMS) if t in found else "" for t in temperatures]
            body.append([task, LABELS[row["method"]], *cells])
    return table(["task", "method", *(f"T = {t}" for t in temperatures)], body)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "smollm-methods": methods_table,
    "smollm-ablation": ablation_table,
    "smollm-dynamics": dynamics_table,
    "smollm-entropy": entropy_table,
    "smollm-gamma": gamma_table,
    "smollm-split": split_table,
    "smollm-generalisation": generalisation_table,
    "smollm-pass": pass_table,
}
FIGURES = (methods_figure, dynamics_figure, split_figure)


def fill(text: str, rows: list[Row]) -> str:
    """Each table between its marks."""
    return fill_marks(text, {name: make(rows) for name, make in TABLES.items()})


def main() -> None:
    rows = read(HERE / "results")
    for figure in FIGURES:
        figure(rows)
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(f"{len(rows)} runs, {len(FIGURES)} figures, {len(TABLES)} tables")


if __name__ == "__main__":
    main()
