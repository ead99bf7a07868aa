"""Figures and tables of docs/results/study-gsm8k.md, from the metrics that run.py collected.

python studies/gsm8k/figures.py            reads results/*.jsonl, draws docs/images/study-*.png and fills the
                                           tables between the marks in docs/results/study-gsm8k.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plan import GAMMAS, HERE, MAIN, TASKS, TRIED
from run import read_rows

sys.path.insert(0, str(HERE.parents[1]))

from studies.common import fill_marks, half_width, legend_below, panels, smooth, table, wilson

DOC = HERE.parents[1] / "docs" / "results" / "study-gsm8k.md"
IMAGES = DOC.parents[1] / "images"
LABELS = {
    "on_policy": "on-policy RL", "sft": "SFT", "rl_sft_loss": "RL with SFT loss", "sft_rl": "SFT + RL",
    "mixed": "Mixed-Policy", "luffy": "LUFFY", "mixed_shaping": "mixed + shaping",
    "on_policy_shaping": "on-policy + shaping", "on_policy_no_clip": "on-policy, no clip",
}  # fmt: skip
COLORS = {
    "on_policy": "#8c8c8c", "sft": "#d08a1d", "rl_sft_loss": "#7a5195", "sft_rl": "#5b8a3c", "mixed": "#3b7dd8",
    "luffy": "#c8373a", "mixed_shaping": "#6aa3e8", "on_policy_shaping": "#b0b0b0", "on_policy_no_clip": "#5e5e5e",
}  # fmt: skip
SETS = {"val-core/accuracy": "easy", "val-hard/accuracy": "hard", "val-words/accuracy": "other words",
        "val-longer/accuracy": "longer"}  # fmt: skip
GSM_SETS = {"val-core/accuracy": "GSM8K test", "val-varied/accuracy": "changed numbers",
            "val-stories/accuracy": "stories, easy", "val-math/accuracy": "MATH-500, whole numbers",
            "val-arc/accuracy": "ARC-c, numbered"}  # fmt: skip
SPLIT_SETS = {"stories": SETS,
              "gsm8k": {"val-core/accuracy": "GSM8K test, easy", "val-hard/accuracy": "GSM8K test, hard"}}  # fmt: skip
SPLIT_PROBLEMS = {"stories": {}, "gsm8k": {"val-core/accuracy": 422, "val-hard/accuracy": 512}}
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
        ax.plot(at, mean, marker=marker, ms=4, color=COLORS[method], label=LABELS[method], lw=1.8)
        ax.fill_between(at, low, high, color=COLORS[method], alpha=0.13, lw=0)
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


IN_THE_TABLE = (*DYNAMICS[:2], ("response_length/clip_ratio", "cut off at the limit", "%"), *DYNAMICS[2:])


def dynamics_table(rows: Sequence[Row], task: str) -> str:
    """Over the last ten steps, from run to run."""
    body = []
    for method in DYNAMIC:
        runs = pick(ablation_rows(rows, task), method=method)
        cells = [spread(runs, metric, 100 if unit == "%" else 1) for metric, _, unit in IN_THE_TABLE]
        body.append([LABELS[method], str(len(runs)), *cells])
    return table(["steps 51 to 60", "runs", *(f"{title}, {unit}" for _, title, unit in IN_THE_TABLE)], body)


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


def ablation_figure(rows: Sequence[Row]) -> None:
    figure, axes = panels(2)
    figure.set_size_inches(13, 3.2)
    for ax, task in zip(axes, TASKS, strict=True):
        for place, method in enumerate(ABLATED):
            values = [100 * held_out(run) for run in pick(ablation_rows(rows, task), method=method)]
            ax.bar(place, statistics.mean(values), 0.6, color=COLORS[method])
            ax.plot([place] * len(values), values, ".", color="black", ms=6)
        ax.set_xticks(range(len(ABLATED)), [LABELS[m].replace(" + ", "\n+ ").replace(", ", ",\n") for m in ABLATED])
        ax.set(ylabel="held-out accuracy, %", title=f"{NAMES[task]}; dots are runs")
        ax.grid(alpha=0.25, axis="y")
        ax.spines[["top", "right"]].set_visible(False)
    save(figure, "ablation")


ABLATED = ("on_policy", "on_policy_shaping", "on_policy_no_clip", "mixed", "mixed_shaping", "luffy")


def gamma_figure(rows: Sequence[Row]) -> None:
    figure, axes = panels(2)
    for ax, task in zip(axes, TASKS, strict=True):
        found = [(gamma, gamma_rows(rows, gamma, task)) for gamma in GAMMAS]
        for gamma, runs in found:
            for run in runs:
                ax.plot(gamma, 100 * held_out(run), "osD"[run["seed"]], color=COLORS["luffy"], alpha=0.5, ms=5)
        means = [100 * statistics.mean(map(held_out, runs)) for _, runs in found]
        ax.plot(GAMMAS, means, color=COLORS["luffy"])
        ax.set(xlabel="gamma", title=NAMES[task], xscale="log", ylim=(0, None))
        ax.set_xticks(GAMMAS, [f"{g:g}" for g in GAMMAS])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy, %")
    figure.supxlabel("line: mean; circles, squares, diamonds: seeds 0, 1, 2", fontsize=9)
    save(figure, "gamma")


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


def generalisation_figure(rows: Sequence[Row]) -> None:
    figure, (left, right) = panels(2)
    figure.set_size_inches(13, 3.4)
    for ax, task, sets in ((left, "stories", SETS), (right, "gsm8k", GSM_SETS)):
        bars(ax, pick(rows, question="main", task=task), sets)
        ax.set_title(f"trained on {NAMES[task]}")
    legend_below(figure, left)
    save(figure, "generalisation")


def bars(ax: Any, rows: Sequence[Row], sets: dict[str, str]) -> None:
    width = 0.8 / len(MAIN)
    for i, method in enumerate(MAIN):
        runs = pick(rows, method=method)
        values = [[100 * last(run, metric) for run in runs if metric in run["curves"]] for metric in sets]
        if not all(values):
            continue
        at = [k + (i - len(MAIN) / 2 + 0.5) * width for k in range(len(sets))]
        ax.bar(at, [statistics.mean(v) for v in values], width, color=COLORS[method], label=LABELS[method])
        for x, seeds in zip(at, values, strict=True):
            ax.plot([x] * len(seeds), seeds, ".", color="black", ms=3)
    ax.set_xticks(range(len(sets)), [name.replace(", ", ",\n") for name in sets.values()])
    ax.set_ylabel("accuracy, %")
    ax.spines[["top", "right"]].set_visible(False)


def pass_figure(rows: Sequence[Row]) -> None:
    figure, axes = panels(2)
    for task, ax in zip(("stories", "gsm8k"), axes, strict=True):
        for row in [row for row in pick(rows, question="main", task=task) if "pass" in row]:
            at = sorted(row["pass"], key=float)
            x, color = [float(t) for t in at], COLORS[row["method"]]
            best = [100 * row["pass"][t]["pass_at"]["8"] for t in at]
            ax.plot(x, best, "o-", ms=3, color=color, label=LABELS[row["method"]])
            ax.plot(x, [100 * row["pass"][t]["accuracy"] for t in at], "--", lw=1, color=color)
        ax.set(title={"stories": "hard stories", "gsm8k": "GSM8K test"}[task], xlabel="temperature", ylim=(0, None))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("pass@8 (solid), average (dashed), %")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, "pass")


def problems_of(task: str, metric: str) -> int:
    return OTHER_PROBLEMS.get(metric, PROBLEMS[task])


def accuracy(runs: Sequence[Row], metric: str, problems: int, at: int = -1) -> str:
    """Over the runs that were asked."""
    values = [float(run["curves"][metric][at][1]) for run in runs if metric in run["curves"]]
    return share(values, problems) if values else "not run"


def accuracy_table(rows: Sequence[Row], methods: Iterable[str], sets: dict[str, str], task: str) -> str:
    body = []
    for method in methods:
        runs = pick(rows, method=method)
        if runs:
            cells = [accuracy(runs, metric, problems_of(task, metric)) for metric in sets]
            body.append([LABELS[method], str(len(runs)), *cells])
    return table(["method", "runs", *(f"{name}, %" for name in sets.values())], body)


def start_table(rows: Sequence[Row]) -> str:
    """Before training: every run begins with an evaluation, of the same model and the same samples."""
    body = []
    for task, sets in (("stories", SETS), ("gsm8k", GSM_SETS)):
        first = pick(rows, question="main", task=task, method="luffy", seed=0)
        for metric, name in sets.items():
            if first:
                body.append([task, name, accuracy(first, metric, problems_of(task, metric), at=0)])
    return table(["task", "held-out set", "base model, %"], body)


def warm_table(rows: Sequence[Row]) -> str:
    """The base before, and every method after."""
    runs = pick(rows, question="warm", note="")
    base = [
        accuracy(pick(rows, question="warm", note="base"), metric, problems_of("stories", metric)) for metric in SETS
    ]
    lines = accuracy_table(runs, MAIN, SETS, "stories").splitlines()
    return "\n".join([*lines[:2], "| " + " | ".join(["the base", "", *base]) + " |", *lines[2:]]) if runs else lines[0]


def ablation_table(rows: Sequence[Row], task: str) -> str:
    body = []
    for method in ABLATED:
        runs = pick(ablation_rows(rows, task), method=method)
        clipped = [statistics.mean(v for _, v in run["curves"].get("actor/pg_clipfrac", [[0, 0.0]])) for run in runs]
        cells = [*outcome(runs), f"{100 * statistics.mean(clipped):.3f}"]
        body.append([LABELS[method] if method != "luffy" else "mixed + shaping, no clip = LUFFY", *cells])
    return table(["", *OUTCOME, "tokens clipped, %"], body)


OUTCOME = ("runs", "held-out accuracy, %", "own samples right, steps 51 to 60, %")


def outcome(runs: Sequence[Row]) -> list[str]:
    return [str(len(runs)), share([held_out(run) for run in runs], HELD_OUT), spread(runs, "batch/on_solved", 100)]


def entropy_table(rows: Sequence[Row]) -> str:
    """The same method without the bonus and with it; the pilot has only the paper's coefficient."""
    body = []
    for question, task, note, coefficient in (
        ("pilot", "25 steps of 64 problems", "", "0.01"), ("tune", "25 steps of 32 problems", "", "0"),
        ("entropy", "60 steps of 32 problems", "h0.01", "0.01"),
        ("entropy", "60 steps of 32 problems", "h0.001", "0.001"),
        ("main", "60 steps of 32 problems", "", "0"),
    ):  # fmt: skip
        for run in pick(rows, question=question, task="stories"):
            if run["method"] not in ("on_policy", "mixed", "luffy") or run["seed"] or not run["note"].startswith(note):
                continue
            start, end = (run["curves"]["actor/entropy_loss"][i][1] for i in (0, -1))
            solved = run["curves"]["batch/on_solved"][-1][1]
            cells = [f"{start:.2f} to {end:.2f}", f"{100 * solved:.1f}", share([both(run)], HELD_OUT)]
            body.append([LABELS[run["method"]], task, f"{run['lr']:g}", coefficient, *cells])
    head = ["method", "run", "learning rate", "coefficient", "entropy, nats", "own samples solved in the last step, %"]
    return table([*head, "held-out accuracy, %"], sorted(body, key=lambda cells: cells[:4]))


def gamma_table(rows: Sequence[Row], task: str) -> str:
    return table(["gamma", *OUTCOME], [[f"{gamma:g}", *outcome(gamma_rows(rows, gamma, task))] for gamma in GAMMAS])


def split_table(rows: Sequence[Row], task: str) -> str:
    body = []
    for part in ("easy", "hard"):
        for method in ("on_policy", "luffy"):
            runs = pick(rows, question="split", task=task, note=part, method=method)
            counts = SPLIT_PROBLEMS[task]
            cells = [share([last(run, m) for run in runs], counts.get(m, PROBLEMS[task])) for m in SPLIT_SETS[task]]
            body.append([part, LABELS[method], str(len(runs)), spread(runs, "batch/on_solved", 100), *cells])
    sets = [f"{name}, %" for name in SPLIT_SETS[task].values()]
    return table(["trained on", "method", "runs", "own samples right, steps 51 to 60, %", *sets], body)


def tuning_table(rows: Sequence[Row]) -> str:
    body = []
    for method, rates in TRIED.items():
        cells = []
        for rate in rates:
            runs = pick(rows, question="tune", method=method, lr=rate)
            cells.append(f"{rate:g}: {100 * both(runs[0]):.1f}" if runs else f"{rate:g}: not run")
        body.append([LABELS[method], *cells])
    return table(["method", "tried: held-out accuracy, %", "", ""], body)


def pass_table(rows: Sequence[Row]) -> str:
    body = []
    temperatures = sorted({t for row in rows for t in row.get("pass", ())}, key=float)
    for task in ("stories", "gsm8k"):
        for row in [row for row in pick(rows, question="main", task=task) if "pass" in row]:
            found = row["pass"]
            cells = [share([found[t]["pass_at"]["8"]], PASS_PROBLEMS) if t in found else "" for t in temperatures]
            body.append([task, LABELS[row["method"]], *cells])
    return table(["task", "method", *(f"T = {t}" for t in temperatures)], body)


def cost_table(rows: Sequence[Row]) -> str:
    body = []
    for question in ("pilot", "tune", "main", "ablation", "entropy", "gamma", "split", "warm"):
        for task in ("stories", "gsm8k"):
            runs = pick(rows, question=question, task=task)
            if runs:
                steps = [v for run in runs for _, v in run["curves"]["timing_s/step"]]
                cells = [f"{statistics.median(steps):.2f}", f"{sum(run['seconds'] for run in runs) / 60:.0f}"]
                body.append([question, task, str(len(runs)), str(len(steps)), *cells])
    return table(
        ["question", "task", "runs", "steps", "median s a step, several runs at once", "minutes of all runs, added up"],
        body,
    )


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "start": start_table,
    "stories": lambda rows: accuracy_table(pick(rows, question="main", task="stories"), MAIN, SETS, "stories"),
    "gsm8k": lambda rows: accuracy_table(pick(rows, question="main", task="gsm8k"), MAIN, GSM_SETS, "gsm8k"),
    "warm": warm_table,
    "ablation-stories": partial(ablation_table, task="stories"),
    "ablation-gsm8k": partial(ablation_table, task="gsm8k"),
    "dynamics-stories": partial(dynamics_table, task="stories"),
    "dynamics-gsm8k": partial(dynamics_table, task="gsm8k"),
    "entropy": entropy_table,
    "gamma-stories": partial(gamma_table, task="stories"),
    "gamma-gsm8k": partial(gamma_table, task="gsm8k"),
    "split-stories": partial(split_table, task="stories"),
    "split-gsm8k": partial(split_table, task="gsm8k"),
    "tuning": tuning_table,
    "pass": pass_table,
    "cost": cost_table,
}
FIGURES = (
    methods_figure, ablation_figure, dynamics_figure, gamma_figure, split_figure, generalisation_figure, pass_figure,
)  # fmt: skip


def fill(text: str, rows: list[Row]) -> str:
    """Each table between its marks."""
    return fill_marks(text, {name: make(rows) for name, make in TABLES.items()})


def main() -> None:
    rows = read(HERE / "results")
    for figure in FIGURES:
        figure(rows)
    DOC.write_text(fill(DOC.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(f"{len(rows)} runs, {len(FIGURES)} figures, {len(TABLES)} tables")


if __name__ == "__main__":
    main()
