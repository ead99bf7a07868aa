"""Figures and tables of report.md and docs/results/qwen-gsm8k.md, from the rows that run.py collected.

python -m studies.qwen.figures             reads results/*.jsonl, draws docs/images/qwen-*.png and fills the tables
                                           between the marks of the page
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from luffy.evaluation.benchmarks import SUITES
from studies.common import fill_marks, half_width, legend_below, looks, panels, plt, smooth, table
from studies.qwen.plan import HERE, METHODS, RELEASED, RELEASED_RATE, SHORT_STEPS, VARIANTS
from studies.qwen.records import Row, best_rates, got_far, last, read_rows, validation

PAGE = HERE / "report.md"
SUMMARY = HERE.parents[1] / "docs" / "results" / "qwen-gsm8k.md"
IMAGES = HERE.parents[1] / "docs" / "images"
VARIANT_LOOKS = {"hpt_light": ("hpt", ":"), "sft_luffy": ("luffy", ":")}
LATE = 10  # steps at the start and at the end of a run that tables average
FIRST_AND_LAST = (slice(0, LATE), slice(-LATE, None))
PROBLEMS = 64  # groups of a step
VALIDATION = "val-core/accuracy"
BENCHMARKS = {spec.name: spec.title for suite in ("math6", "ood") for spec in SUITES[suite]}
CHANCE = {"arc_c": 0.25}
PAPER = {
    "luffy": 50.1, "on_policy": 45.5, "sft": 44.1, "mixed": 44.4, "sft_rl": 48.2, "luffy_clip": 47.8,
    "rl_sft_loss": 40.1,
}  # fmt: skip  # arXiv 2504.14945, tables 1 and 4: the mean of six benchmarks, Qwen2.5-Math-7B
LAST_STEPS = 25  # of a run with rollouts in fp8 and its twin without, averaged


RESULTS = sorted((HERE / "results").glob("*.jsonl"))


def read(files: Iterable[Path] = RESULTS) -> list[Row]:
    return list(read_rows(files).values())


def label(row: Row) -> str:
    return "the base" if row["method"] == "base" else METHODS[row["method"]].label


def rate(row: Row) -> str:
    """The learning rate; the base has none."""
    return f"{row['lr']:g}" if "lr" in row else ""


def trained(rows: Iterable[Row]) -> list[Row]:
    """Runs of the main comparison that did a step."""
    runs = [row for row in rows if row["method"] != "base" and not row["note"]]
    return [row for row in runs if max(row["curves"]["step"], default=0) > 0]


def has_result(row: Row) -> bool:
    return "test" in row and (row["method"] == "base" or got_far(row))


def tested(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Runs with a result by method: the base first, then in the plan's order; only the rate of a decided contest."""
    rates = best_rates(trained(rows))
    found: dict[str, list[Row]] = {}
    for method in ("base", *METHODS):
        runs = [row for row in rows if row["method"] == method and has_result(row) and not row.get("note")]
        runs = [row for row in runs if method not in rates or row["lr"] == rates[method]]
        if runs:
            found[method] = runs
    return found


# ---- intervals


def shares(row: Row) -> list[float]:
    """Of each test problem, the share of its samples that is right."""
    return [int(count) / row["test"]["k"] for count in row["test"]["right"]]


def interval(of_seeds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean over seeds and problems in percent, and half its 95 % interval: the problems' own spread (normal), and with
    three seeds or more that of the seeds (Student's), added in squares."""
    problems = by_problem(of_seeds)
    half = 100 * 1.96 * statistics.stdev(problems) / math.sqrt(len(problems))
    return 100 * statistics.fmean(problems), math.hypot(half, half_of_seeds(of_seeds))


def half_of_seeds(of_seeds: Sequence[Sequence[float]]) -> float:
    """Half the interval of the seeds' means, in percent; 0 with fewer than three, of which it would say nothing."""
    means = [statistics.fmean(values) for values in of_seeds]
    return 100 * half_width(means) if len(means) >= 3 else 0.0


def by_problem(of_seeds: Iterable[Sequence[float]]) -> list[float]:
    """The mean over seeds."""
    return [statistics.fmean(values) for values in zip(*of_seeds, strict=True)]


def accuracy(runs: Sequence[Row]) -> str:
    middle, half = interval([shares(run) for run in runs])
    return f"{middle:.1f} ({middle - half:.1f} to {middle + half:.1f})"


def solved(row: Row) -> list[float]:
    """Of each test problem, whether one of its samples is right."""
    return [float(count != "0") for count in row["test"]["right"]]


def pass_at_4(runs: Sequence[Row]) -> str:
    """In percent, the mean over seeds."""
    return f"{100 * statistics.fmean(statistics.fmean(solved(run)) for run in runs):.1f}"


def difference(ones: Sequence[Row], others: Sequence[Row], score: Callable[[Row], list[float]]) -> str:
    """Paired problem by problem: seed by seed where both have the same seeds, else the means over the seeds of each,
    whose spread is added in squares. Not paired, which is wider, where the order of the problems is not known."""
    first, second = ({row.get("seed"): score(row) for row in rows} for rows in (ones, others))
    both = [list(found.values()) for found in (first, second)]
    if not all(row["test"].get("in_order", True) for row in (*ones, *others)):
        (one, half), (other, half_of_other) = map(interval, both)
        middle, half = one - other, math.hypot(half, half_of_other)
    elif first.keys() == second.keys():
        middle, half = interval([less(first[seed], second[seed]) for seed in first])
    else:
        middle, half = interval([less(*map(by_problem, both))])
        half = math.hypot(half, *map(half_of_seeds, both))
    return f"{middle:+.1f} ({middle - half:+.1f} to {middle + half:+.1f})"


def less(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


# ---- tables


def main_table(rows: Sequence[Row]) -> str:
    body = []
    for method, runs in tested(rows).items():
        tests = [run["test"] for run in runs]
        cells = [label(runs[0]), rate(runs[0]), str(len(runs)), steps_of(runs)]
        cells += [accuracy(runs), pass_at_4(runs)]
        cells += [f"{mean(tests, 'tokens'):.0f}", f"{100 * mean(tests, 'truncated'):.1f}"]
        if method != "base":
            costs = [cost(run, rows) for run in runs]
            seconds, tokens = (statistics.fmean(values) for values in zip(*costs, strict=True))
            cells += [f"{seconds:.0f}", f"{tokens / 1e6:.1f}"]
        body.append(cells)
    head = ["", "learning rate", "seeds", "steps", "test accuracy, %", "pass@4, %", "tokens a response",
            "at the limit, %", "GPU seconds", "tokens in updates, millions"]  # fmt: skip
    return table(head, body)


def cost(run: Row, rows: Iterable[Row]) -> tuple[float, float]:
    """GPU seconds and tokens in updates, those of the run that it began with included."""
    seconds, tokens = begins_at(run, rows)
    return seconds + last(run, "gpu_seconds"), tokens + sum(present(run, "perf/update_tokens"))


def begins_at(run: Row, rows: Iterable[Row]) -> tuple[float, float]:
    """What the run that it began with cost."""
    before = METHODS[run["method"]].after
    (start,) = [r for r in tested(rows)[before] if r["seed"] == run["seed"]] if before else [None]
    return cost(start, rows) if start else (0.0, 0.0)


def mean(values: Sequence[Row], key: str) -> float:
    return statistics.fmean(value[key] for value in values)


def steps_of(runs: Sequence[Row]) -> str:
    done = sorted({run["curves"]["step"][-1] for run in runs if run["curves"]})
    return ", ".join(f"{step:g}" for step in done)


def rates_table(rows: Sequence[Row]) -> str:
    """Every trained run with a result, also those whose rate lost."""
    runs = sorted(filter(has_result, trained(rows)), key=order)
    body = [[label(run), rate(run), str(run["seed"]), f"{100 * validation(run):.1f}", accuracy([run])] for run in runs]
    return table(
        ["", "learning rate", "seed", "validation accuracy, mean of the last four, %", "test accuracy, %"], body
    )


def difference_table(rows: Sequence[Row]) -> str:
    return differences({method: found for method, found in tested(rows).items() if method != "base"})


def differences(runs: Mapping[str, Sequence[Row]]) -> str:
    """Of all pairs of methods."""
    body = [
        [f"{METHODS[a].label} less {METHODS[b].label}", *(difference(runs[a], runs[b], s) for s in (shares, solved))]
        for a, b in combinations(runs, 2)
    ]
    return table(["", "difference in test accuracy, points", "in pass@4"], body)


def paper_table(rows: Sequence[Row]) -> str:
    """LUFFY against each of the paper's baselines, there and here."""
    runs = tested(rows)
    body = [
        [METHODS[method].label, f"{score}", f"{PAPER['luffy'] - score:+.1f}", accuracy(runs[method]),
         difference(runs["luffy"], runs[method], shares)]
        for method, score in PAPER.items() if method != "luffy"
    ]  # fmt: skip
    return table(["", "paper", "LUFFY less this, paper", "here", "LUFFY less this, here"], body)


def validation_table(rows: Sequence[Row]) -> str:
    runs = sorted(trained(rows), key=order)
    steps = sorted({step for run in runs for step, _ in points(run, VALIDATION)})
    body = []
    for run in runs:
        body.append([label(run), rate(run), str(run["seed"]), *validation_cells(run, steps)])
    return table(["", "rate", "seed", *(f"{step:g}" for step in steps)], body)


def validation_cells(run: Row, steps: Iterable[float]) -> list[str]:
    at = dict(points(run, VALIDATION))
    return [f"{100 * at[step]:.1f}" if step in at else "" for step in steps]


def order(row: Row) -> tuple[int, float, int]:
    return list(METHODS).index(row["method"]), row["lr"], row["seed"]


DYNAMICS = (
    ("batch/on_solved", "own samples right, %", 100), ("actor/entropy_loss", "entropy, nats a token", 1),
    ("response_length/mean", "tokens a response", 1), ("response_length/clip_ratio", "at the limit, %", 100),
    ("actor/grad_norm", "gradient norm", 1), ("actor/off_policy_prob", "probability of trace tokens", 1),
    ("actor/pg_clipfrac", "tokens clipped, %", 100),
)  # fmt: skip


def dynamics_table(rows: Sequence[Row]) -> str:
    """The first and the last steps of a run."""
    body = []
    for run in sorted((row for row in trained(rows) if METHODS[row["method"]].kind == "rl"), key=order):
        for part, name in zip(FIRST_AND_LAST, ("first", "last"), strict=True):
            cells = [cell([value for _, value in values(run)][part], 1) for values in SERIES.values()]
            body.append([label(run), rate(run), str(run["seed"]), name, *cells])
    return table(["", "rate", "seed", f"{LATE} steps", *SERIES], body)


def series(metric: str, times: float) -> Callable[[Row], list[tuple[float, float]]]:
    """A metric in the unit of its title, by step."""
    return lambda run: [(step, times * value) for step, value in points(run, metric)]


def without_signal(run: Row) -> list[tuple[float, float]]:
    """Groups all wrong or all right, in %, by step."""
    none, every = (points(run, f"batch/solve_{x}") for x in ("none", "all"))
    return [(step, 100 * (a + b) / PROBLEMS) for (step, a), (_, b) in zip(none, every, strict=True)]


SERIES: dict[str, Callable[[Row], list[tuple[float, float]]]] = {
    **{title: series(metric, times) for metric, title, times in DYNAMICS},
    "groups without a signal, %": without_signal,
}


def cell(values: Sequence[float], times: float) -> str:
    return f"{times * statistics.fmean(values):.3g}" if any(values) else ""


def cost_table(rows: Sequence[Row]) -> str:
    body = []
    for method in METHODS:
        runs = [row for row in trained(rows) if row["method"] == method]
        if runs:
            steps = sum(run["curves"]["step"][-1] for run in runs)
            seconds = sum(last(run, "gpu_seconds") for run in runs)
            body.append([METHODS[method].label, str(len(runs)), str(steps), f"{seconds:.0f}", f"{seconds / steps:.2f}"])
    return table(["", "runs", "steps", "GPU seconds", "GPU seconds a step, evaluation included"], body)


# ---- sections that the page has once there are data


def hard_problems(rows: Sequence[Row]) -> str:
    """Question 2: runs on the training problems that the base never solved."""
    hard = [row for row in rows if row.get("note") == "hard" and has_result(row)]
    runs = {method: found for method in METHODS if (found := [row for row in hard if row["method"] == method])}
    if not runs:
        return ""
    (base,) = (row for row in rows if row["method"] == "base")
    body = []
    for found in runs.values():
        own = [[value for row in found for value in present(row, "batch/on_solved")[part]] for part in FIRST_AND_LAST]
        cells = [f"{100 * statistics.fmean(values):.3g}" if values else "" for values in own]
        seconds = statistics.fmean(last(row, "gpu_seconds") for row in found)
        begin = [label(found[0]), rate(found[0]), str(len(found)), steps_of(found)]
        body.append([*begin, *cells, accuracy(found), pass_at_4(found),
                     accuracy([unsolved(row, base) for row in found]), f"{seconds:.0f}"])  # fmt: skip
    head = ["", "learning rate", "seeds", "steps", f"own samples right, first {LATE} steps, %", f"last {LATE}, %",
            "test accuracy, %", "pass@4, %", "on test problems that the base never solved, %",
            "GPU seconds"]  # fmt: skip
    text = "Trained on the training problems that the base solved in none of 8 samples."
    image = "![Own samples right and validation accuracy of the runs on hard problems](../../docs/images/qwen-hard.png)"
    return "\n".join(["## Hard problems", "", text, "", image, "", table(head, body), "", differences(runs)])


def unsolved(row: Row, base: Row) -> Row:
    """The row with the test problems alone of which the base solved none."""
    pairs = zip(row["test"]["right"], base["test"]["right"], strict=True)
    return {**row, "test": {**row["test"], "right": "".join(count for count, before in pairs if before == "0")}}


def variants(rows: Sequence[Row]) -> str:
    """Question 4: LUFFY with one thing changed, below LUFFY with the same learning rate and seed."""
    runs = [row for note in VARIANTS for row in rows if row.get("note") == note and has_result(row)]
    plain = [row for row in rows if row.get("note") in ("", "short") and has_result(row)]
    plain = [row for row in plain if any(are_twins(row, run) and row["steps"] == run["steps"] for run in runs)]
    body = []
    for run in sorted([*plain, *runs], key=lambda row: -row["steps"]):
        title = VARIANTS[run["note"]][0] if run["note"] in VARIANTS else "as it is"
        cut = f"{100 * run['test']['truncated']:.1f}"
        probability, entropy = (
            cell(present(run, metric)[part], 1)
            for metric, part in zip(("actor/off_policy_prob", "actor/entropy_loss"), FIRST_AND_LAST, strict=True)
        )
        body.append([title, steps_of([run]), accuracy([run]), pass_at_4([run]), cut, probability, entropy])
    head = [
        "LUFFY", "steps", "test accuracy, %", "pass@4, %", "at the limit, %",
        f"probability of trace tokens, first {LATE} steps", f"entropy, last {LATE} steps, nats a token",
    ]  # fmt: skip
    return "\n".join(["## What matters in LUFFY", "", table(head, body)]) if body else ""


def released(rows: Sequence[Row]) -> str:
    """Question 8: the coefficients of the authors' scripts, each below the same run with the study's own."""
    runs = [row for row in rows if row.get("note") == "released" and has_result(row)]
    body = []
    for run in runs:
        for row in [*(row for row in trained(rows) if are_twins(row, run) and has_result(row)), run]:
            changed = RELEASED[run["method"]][0] if row is run else "as in the study"
            entropy = cell(present(row, "actor/entropy_loss")[FIRST_AND_LAST[1]], 1)
            body.append([label(row), changed, steps_of([row]), accuracy([row]), pass_at_4([row]), entropy])
    head = ["", "coefficient", "steps", "test accuracy, %", "pass@4, %", f"entropy, last {LATE} steps, nats a token"]
    text = (
        f"One run each at learning rate {RELEASED_RATE:g} (`luffy/recipes/paper/*_released.yaml` has the arithmetic)."
    )
    lines = ["## Coefficients of the released scripts", "", text, "", table(head, body)]
    return "\n".join(lines) if body else ""


def short_runs(rows: Sequence[Row]) -> list[Row]:
    """Question 6: runs of ``SHORT_STEPS``; of an older method without one, the same steps of its run with the learning
    rate and seed of the newer ones, which has no test there."""
    runs = [row for row in rows if row.get("note") == "short" and has_result(row)]
    newer = {(run["lr"], run["seed"]) for run in runs if run["method"] not in PAPER}
    older = [row for row in trained(rows) if METHODS[row["method"]].kind == "rl" and (row["lr"], row["seed"]) in newer]
    older = [up_to(row, SHORT_STEPS) for row in older if row["method"] not in {run["method"] for run in runs}]
    return sorted([*runs, *older], key=order)


def up_to(row: Row, step: int) -> Row:
    """The row as it was after that step."""
    count = sum(at <= step for at in row["curves"]["step"])
    cut = {name: values[:count] for name, values in row["curves"].items()}
    return {name: value for name, value in row.items() if name != "test"} | {"curves": cut}


def newer_methods(rows: Sequence[Row]) -> str:
    """Question 6."""
    runs, body = short_runs(rows), []
    luffy = [run for run in runs if run["method"] == "luffy" and "test" in run]
    steps = sorted({step for run in runs for step, _ in points(run, VALIDATION) if step})
    for run in runs:
        late = [cell(present(run, metric)[-LATE:], times) for metric, times in
                (("batch/on_solved", 100), ("actor/entropy_loss", 1), ("actor/grad_norm", 1))]  # fmt: skip
        seconds, tokens = cost(run, rows)
        scores = [accuracy([run]), pass_at_4([run])] if "test" in run else ["", ""]
        scores += [difference([run], luffy, shares)] if "test" in run and luffy and run not in luffy else [""]
        begin = [label(run), rate(run), steps_of([run])]
        body.append([*begin, *scores, *validation_cells(run, steps), *late, f"{seconds:.0f}", f"{tokens / 1e6:.1f}"])
    head = ["", "learning rate", "steps", "test accuracy, %", "pass@4, %", "test less LUFFY's, points",
            *(f"validation, step {step:g}, %" for step in steps), f"last {LATE} steps: own samples right, %",
            "entropy, nats a token", "gradient norm", "GPU seconds", "tokens in updates, millions"]  # fmt: skip
    image = "![Validation accuracy and entropy of all methods in 100 steps](../../docs/images/qwen-newer.png)"
    return "\n".join(["## The newer methods", "", image, "", table(head, body)]) if body else ""


def are_twins(one: Row, other: Row) -> bool:
    """They differ in what they change alone."""
    return all(one[key] == other[key] for key in ("method", "lr", "seed"))


def evaluated(rows: Sequence[Row], key: str) -> dict[str, dict[str, list[Row]]]:
    """By method, by benchmark (``key`` is suites) or temperature (temperatures): its runs, or without such its short
    one, with what they scored there as their test."""
    found: dict[str, dict[str, list[Row]]] = {}
    short = {row["method"]: row for row in rows if row.get("note") == "short" and has_result(row)}
    runs = tested(rows)
    for method in dict.fromkeys([*runs, *short]):
        for run in [run for run in runs.get(method, []) if key in run] or [short.get(method, {})]:
            for name, made in run.get(key, {}).items():
                found.setdefault(method, {}).setdefault(name, []).append({**run, "test": made})
    return found


def is_above_chance(runs: Sequence[Row], benchmark: str) -> bool:
    middle, half = interval([shares(run) for run in runs])
    return middle - half > 100 * CHANCE.get(benchmark, 0.0)


def generalisation(rows: Sequence[Row]) -> str:
    """Question 5."""
    models = evaluated(rows, "suites")
    if not models:
        return ""
    seen = {name for made in models.values() for name in made}
    above = {name for made in models.values() for name, runs in made.items() if is_above_chance(runs, name)}
    names, others = ([name for name in BENCHMARKS if name in group] for group in (above, seen - above))
    body = []
    for made in models.values():
        runs = next(iter(made.values()))
        scores = [accuracy(made[name]) if name in made else "" for name in names]
        body.append([label(runs[0]), rate(runs[0]), steps_of(runs), *scores])
    head = ["", "learning rate", "steps", *(f"{BENCHMARKS[name]}, %" for name in names)]
    lines = ["## Generalisation", "", "4 samples a problem at temperature 0.6."]
    if others:
        lines[-1] += f" Within the noise of chance for all models: {', '.join(BENCHMARKS[name] for name in others)}."
    lines += ["", table(head, body)]
    if evaluated(rows, "temperatures"):
        lines += ["", "![Right samples, and problems with a right sample, against the temperature of sampling]"
                  "(../../docs/images/qwen-temperature.png)"]  # fmt: skip
    return "\n".join(lines)


FP8 = (
    ("batch/on_solved", "own samples right, %", 100), ("actor/entropy_loss", "entropy, nats a token", 1),
    ("response_length/mean", "tokens a response", 1),
    ("rollout/logprob_diff_mean", "log-prob difference of engine and policy", 1),
    ("rollout/ess", "effective sample size", 1),
)  # fmt: skip


def fp8_rollouts(rows: Sequence[Row]) -> str:
    """Question 7: runs with rollouts in fp8, and as many steps of the runs without that have their seeds."""
    runs, short = ([row for row in rows if row.get("note") == note and row["curves"].get("step")]
                   for note in ("fp8", "bf16"))  # fmt: skip
    if not runs:
        return ""
    steps = min(run["curves"]["step"][-1] for run in runs)
    body = []
    for run in runs:
        twins = [row for row in (*trained(rows), *short) if are_twins(row, run)]
        for kind, row in [*(("bfloat16", twin) for twin in twins), ("fp8", run)]:
            scores = [f"{100 * value:.1f}" for step, value in points(row, VALIDATION) if 0 < step <= steps]
            late = {metric: [v for step, v in points(row, metric) if steps - LAST_STEPS < step <= steps]
                    for metric, _, _ in FP8}  # fmt: skip
            at_the_end = accuracy([row]) if "test" in row and row["steps"] == run["steps"] else ""
            means = [cell(late[metric], times) for metric, _, times in FP8]
            body.append([kind, str(row["seed"]), *scores, at_the_end, *means])
    at = [f"validation at step {step:g}, %" for step, _ in points(runs[0], VALIDATION) if 0 < step <= steps]
    head = ["rollouts", "seed", *at, f"test at step {steps:g}, %", *(title for _, title, _ in FP8)]
    text = "On-policy RL with rollouts in bfloat16 and in fp8. Behind the test: means of the last "
    text += f"{LAST_STEPS} of {steps:g} steps."
    lines = ["## Rollouts in fp8", "", text, "", table(head, body)]
    if all("test" in row for row in (*runs, *short)) and len(runs) == len(short):
        row = ["fp8 less bfloat16", difference(runs, short, shares)]
        lines += ["", table(["", "difference in test accuracy, points"], [row])]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "main": main_table, "paper": paper_table, "rates": rates_table, "differences": difference_table,
    "validation": validation_table, "dynamics": dynamics_table, "cost": cost_table, "hard": hard_problems,
    "newer": newer_methods, "variants": variants, "generalisation": generalisation, "fp8": fp8_rollouts,
    "released": released,
}  # fmt: skip


# ---- figures


def look(method: str) -> dict[str, Any]:
    """Colour and line of a method."""
    return looks(method, VARIANT_LOOKS)


def points(row: Row, metric: str) -> list[tuple[float, float]]:
    pairs = zip(row["curves"]["step"], row["curves"].get(metric, ()), strict=False)
    return [(step, value) for step, value in pairs if value is not None]


def present(row: Row, metric: str) -> list[float]:
    return [value for _, value in points(row, metric)]


def accuracy_figure(rows: Sequence[Row]) -> None:
    """Validation accuracy against what it took. Thick: the mean of a method's seeds, as far as all of them got. Thin:
    single runs, dotted where the learning rate lost or the run was cut off early."""
    figure, axes = panels(3, 3.6)
    results = tested(rows)
    for row in trained(rows):
        style = "-" if row in results.get(row["method"], ()) else ":"
        found = validated(row, rows)
        for i, ax in enumerate(axes):
            ax.plot(
                [at[i] for at in found],
                [at[-1] for at in found],
                style,
                color=look(row["method"])["color"],
                lw=0.8,
                alpha=0.5,
            )
    for method, runs in results.items():
        if method == "base":
            continue
        of_seeds = [validated(run, rows) for run in runs]
        means = [[statistics.fmean(x) for x in zip(*at_step, strict=True)] for at_step in zip(*of_seeds, strict=False)]
        for i, ax in enumerate(axes):
            ax.plot([at[i] for at in means], [at[-1] for at in means], marker="o", ms=3, lw=1.8, **look(method),
                    label=f"{label(runs[0])}, {rate(runs[0])}")  # fmt: skip
    for ax, name in zip(axes, ("step", "GPU seconds", "tokens in updates, millions"), strict=True):
        tidy(ax)
        ax.set(xlabel=name, ylim=(20, None))  # below: runs at 1e-5
    axes[0].set_ylabel("validation accuracy, %")
    legend_below(figure, axes[0])
    save(figure, "accuracy")


def validated(row: Row, rows: Sequence[Row]) -> list[tuple[float, float, float, float]]:
    """At each validation: the step, GPU seconds, millions of tokens in updates, and the accuracy in %."""
    curves, (spent, seen) = row["curves"], begins_at(row, rows)
    tokens = list(accumulate((value or 0.0 for value in curves["perf/update_tokens"]), initial=seen))[1:]
    columns = zip(curves["step"], curves["gpu_seconds"], tokens, curves.get(VALIDATION, ()), strict=False)
    return [(step, spent + s, count / 1e6, 100 * value) for step, s, count, value in columns if value is not None]


def dynamics_figure(rows: Sequence[Row]) -> None:
    figure, axes = plt.subplots(2, 4, figsize=(13, 5.6), layout="constrained")
    runs = [
        row for found in tested(rows).values() for row in found if row["curves"] and METHODS[row["method"]].kind == "rl"
    ]
    for ax, (title, values_of) in zip(axes.flat, SERIES.items(), strict=True):
        for row in sorted(runs, key=order):
            found = values_of(row)
            if any(value for _, value in found):
                steps, values = zip(*found, strict=True)
                ax.plot(steps, smooth(values, LATE), lw=1.2, **look(row["method"]),
                        label=f"{label(row)}, {rate(row)}")  # fmt: skip
        tidy(ax)
        ax.set(title=title)
        if title == "gradient norm":
            ax.set_yscale("log")
            ax.set_yticks((0.2, 0.5, 1, 2), ("0.2", "0.5", "1", "2"))
            ax.minorticks_off()
    for ax in axes[1]:
        ax.set_xlabel(f"step, mean of {LATE}")
    legend_below(figure, axes[0, 0])
    save(figure, "dynamics")


def hard_figure(rows: Sequence[Row]) -> None:
    """Question 2: own samples and validation of the runs on hard problems."""
    runs = [row for row in rows if row.get("note") == "hard" and row["curves"].get("step")]
    if not runs:
        return
    figure, axes = panels(2, 3.6)
    named: set[str] = set()
    for row in sorted(runs, key=order):
        title = f"_{label(row)}" if row["method"] in named else f"{label(row)}, {rate(row)}"
        named.add(row["method"])
        for ax, metric, shown, marker in zip(
            axes, ("batch/on_solved", VALIDATION), (smooth, list), ("", "o"), strict=True
        ):
            if found := points(row, metric):
                steps, values = zip(*found, strict=True)
                ax.plot(steps, [100 * value for value in shown(values)], lw=1.5, **look(row["method"]),
                        marker=marker, ms=3, label=title)  # fmt: skip
    axes[0].set(title="own samples right, %", xlabel="step, mean of 5")
    axes[1].set(title="validation accuracy, %", xlabel="step")
    for ax in axes:
        tidy(ax)
    legend_below(figure, axes[1])
    save(figure, "hard")


def newer_figure(rows: Sequence[Row]) -> None:
    """Question 6."""
    runs = short_runs(rows)
    if not runs:
        return
    figure, axes = panels(2, 3.6)
    for ax, metric, title, times, shown, marker in (
        (axes[0], VALIDATION, "validation accuracy, %", 100, list, "o"),
        (axes[1], "actor/entropy_loss", "entropy, nats a token", 1, smooth, ""),
    ):
        for run in runs:
            steps, values = zip(*points(run, metric), strict=True)
            ax.plot(steps, [times * value for value in shown(values)], lw=1.5, marker=marker, ms=3, label=label(run),
                    **look(run["method"]))  # fmt: skip
        tidy(ax)
        ax.set(title=title)
    axes[0].set(xlabel="step")
    axes[1].set(xlabel="step, mean of 5")
    legend_below(figure, axes[0])
    save(figure, "newer")


def temperature_figure(rows: Sequence[Row]) -> None:
    """The first 250 test problems, 8 samples each, with 95 % intervals."""
    models = evaluated(rows, "temperatures")
    if not models:
        return
    figure, axes = panels(2, 3.6)
    for ax, score, title in zip(
        axes, (shares, solved), ("right samples, %", "problems with a right one of 8, %"), strict=True
    ):
        for place, (method, made) in enumerate(models.items()):
            at = sorted(made, key=float)
            middles, halves = zip(*(interval([score(run) for run in made[t]]) for t in at), strict=True)
            beside = 0.015 * (place - (len(models) - 1) / 2)  # bars of several models do not hide each other
            ax.errorbar([float(t) + beside for t in at], middles, halves, marker="o", ms=3, capsize=2, lw=1.5,
                        label=label(made[at[0]][0]), **look(method))  # fmt: skip
        tidy(ax)
        ax.set(xlabel="temperature", ylabel=title)
    legend_below(figure, axes[0])
    save(figure, "temperature")


def tidy(ax: Any) -> None:
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"qwen-{name}.png", dpi=120)
    plt.close(figure)


def fill(text: str, rows: Sequence[Row]) -> str:
    return fill_marks(text, {name: make(rows) for name, make in TABLES.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", default=RESULTS, help="runs.jsonl of run.py")
    collected = read(parser.parse_args().results)
    for draw in (accuracy_figure, dynamics_figure, hard_figure, newer_figure, temperature_figure):
        draw(collected)
    for page in (PAGE, SUMMARY):
        page.write_text(fill(page.read_text(encoding="utf-8"), collected), encoding="utf-8")
