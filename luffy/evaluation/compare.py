"""``luffy eval compare``: one table of several evaluations, the best marked, and every difference tested by a paired
bootstrap."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luffy.errors import UserError
from luffy.evaluation.accuracy import item_accuracy
from luffy.evaluation.results import Evaluation, percent, read_evaluation, table
from luffy.files import write_atomically
from luffy.seeds import seed_of

AVERAGE = "average"
SHOWN_IDS = 5


@dataclass(frozen=True)
class PairedTest:
    """``second`` minus ``first``, per benchmark and on ``average``."""

    first: str
    second: str
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Comparison:
    """``accuracies[model][benchmark]`` holds item-averaged accuracies, ``average`` included."""

    titles: dict[str, str]
    accuracies: dict[str, dict[str, float]]
    tests: tuple[PairedTest, ...]
    resamples: int
    seed: int
    notes: tuple[str, ...]


def compare(folders: Sequence[Path], resamples: int = 1000, seed: int = 0) -> Comparison:
    if len(folders) < 2:
        raise UserError(f"a comparison needs at least 2 evaluation folders, found {len(folders)}")
    evaluations = dict(zip(_names(folders), map(read_evaluation, folders), strict=True))
    titles = _common_titles(evaluations)
    values = _aligned(evaluations, titles)
    accuracies = {model: _with_average({b: float(v.mean()) for b, v in own.items()}) for model, own in values.items()}
    tests = tuple(
        PairedTest(first, second, _differences(values[first], values[second], resamples, seed))
        for first, second in combinations(values, 2)
    )
    notes = (*_few_items(titles, next(iter(values.values()))), *_notes(evaluations))
    return Comparison(titles, accuracies, tests, resamples, seed, notes)


def _names(folders: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where two are called the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    paths = [str(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError("the same evaluation folder is given twice; name each once")
    return paths


def _common_titles(evaluations: Mapping[str, Evaluation]) -> dict[str, str]:
    first_name, first = next(iter(evaluations.items()))
    for name, other in evaluations.items():
        apart = sorted(set(first.titles) ^ set(other.titles))
        if apart:
            raise UserError(
                f"{first_name} and {name} do not cover the same benchmarks: {', '.join(apart)} "
                f"{'is' if len(apart) == 1 else 'are'} in only one of them; evaluate both with the same --suite "
                "(a file given by its path goes by its own name, not by that of the suite it belongs to)"
            )
    return first.titles


def _aligned(evaluations: Mapping[str, Evaluation], titles: Mapping[str, str]) -> dict[str, dict[str, Array]]:
    """Item accuracies in one order for all models; an item that one of them lacks is an error."""
    values: dict[str, dict[str, Array]] = {name: {} for name in evaluations}
    for benchmark in titles:
        items = {name: item_accuracy(e.rows_of(benchmark)) for name, e in evaluations.items()}
        order = list(next(iter(items.values())))
        for name, own in items.items():
            _check_same_items(benchmark, next(iter(items)), order, name, list(own))
            values[name][benchmark] = np.array([own[item] for item in order])
    _check_same_problems(evaluations)
    return values


def _check_same_items(benchmark: str, first: str, expected: Sequence[str], name: str, found: Sequence[str]) -> None:
    for lacking, apart in ((name, set(expected) - set(found)), (first, set(found) - set(expected))):
        if apart:
            shown = ", ".join(sorted(apart)[:SHOWN_IDS]) + (", ..." if len(apart) > SHOWN_IDS else "")
            raise UserError(
                f"{lacking} lacks {len(apart)} items of {benchmark} that {name if lacking == first else first} has: "
                f"{shown}; evaluate both on the same problems (the same --limit)"
            )


def _check_same_problems(evaluations: Mapping[str, Evaluation]) -> None:
    """Equal ids may still name different questions, or options in another order."""
    hashes = {name: evaluation.settings["problems"] for name, evaluation in evaluations.items()}
    if len(set(hashes.values())) > 1:
        raise UserError(
            f"{' and '.join(hashes)} were evaluated on different problems (prompts, golds or the order of options); "
            "use the same data and the same --seed"
        )


def _differences(
    first: Mapping[str, Array], second: Mapping[str, Array], resamples: int, seed: int
) -> dict[str, Difference]:
    tested = {b: paired_difference([(b, first[b], second[b])], resamples, seed) for b in first}
    tested[AVERAGE] = paired_difference([(b, first[b], second[b]) for b in first], resamples, seed)
    return tested


def _with_average(accuracies: dict[str, float]) -> dict[str, float]:
    return {**accuracies, AVERAGE: float(np.mean(list(accuracies.values())))}


def _few_items(titles: Mapping[str, str], values: Mapping[str, Array]) -> list[str]:
    """Note on benchmarks too small for reliable intervals."""
    few = [f"{titles[b]} {len(own)}" for b, own in values.items() if len(own) < ITEMS_TO_TELL]
    said = "no difference on them, nor on the average, can be told from chance, and their intervals are too narrow"
    return [f"fewer than {ITEMS_TO_TELL} problems ({', '.join(few)}): {said}"] if few else []


def _notes(evaluations: Mapping[str, Evaluation]) -> tuple[str, ...]:
    """Settings in which the evaluations differ: a difference in score may come from there."""
    notes = []
    keys = [key for key in next(iter(evaluations.values())).settings if key not in ("model", "model_identity", "suite")]
    for key in keys:
        values = {name: json.dumps(evaluation.settings.get(key)) for name, evaluation in evaluations.items()}
        if len(set(values.values())) > 1:
            notes.append(f"{key} differs: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    return tuple(notes)


# ---- Markdown


def as_markdown(c: Comparison) -> str:
    columns = [*c.titles, AVERAGE]
    titles = [*c.titles.values(), "Avg."]
    marked = {b: marks({model: own[b] for model, own in c.accuracies.items()}) for b in columns}
    rows = [[model, *(marked[b][model] for b in columns)] for model in c.accuracies]
    legend = "Best in **bold**, second best <u>underlined</u>."
    lines = ["# Comparison", "", *table(["model", *titles], rows), "", legend, ""]
    for test in c.tests:
        lines += [f"## {test.second} minus {test.first}", "", *_test_table(test, columns, titles), ""]
    lines.append(
        f"Paired bootstrap over items, {c.resamples} resamples, seed {c.seed}; 95 % intervals; two-sided p; * p < 0.05."
    )
    lines += [f"Note: {note}." for note in c.notes]
    return "\n".join(lines) + "\n"


def _test_table(test: PairedTest, columns: Sequence[str], titles: Sequence[str]) -> list[str]:
    rows = []
    for column, title in zip(columns, titles, strict=True):
        d = test.differences[column]
        star = "*" if d.significant else ""
        rows.append([title, f"{100 * d.value:+.1f}{star}", f"[{100 * d.low:+.1f}, {100 * d.high:+.1f}]", f"{d.p:.3f}"])
    return table(["benchmark", "difference", "95 % interval", "p"], rows)


def marks(values: Mapping[str, float]) -> dict[str, str]:
    """Equal values share a mark; when all are equal nothing is best."""
    exact = {model: round(value, 9) for model, value in values.items()}  # sums in another order differ in a last bit
    ranked = sorted(set(exact.values()), reverse=True)
    marked = {}
    for model, value in exact.items():
        text = percent(value)
        if len(ranked) > 1 and value == ranked[0]:
            text = f"**{text}**"
        elif len(ranked) > 1 and value == ranked[1]:
            text = f"<u>{text}</u>"
        marked[model] = text
    return marked


def write_comparison(comparison: Comparison, out: Path) -> None:
    """``OUT.json`` and ``OUT.md`` (a suffix of OUT is replaced)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out.with_suffix(".json"), json.dumps(asdict(comparison), indent=2, ensure_ascii=False) + "\n")
    write_atomically(out.with_suffix(".md"), as_markdown(comparison))


# ---- paired bootstrap over items (paper appendix C.3): is a difference more than the choice of test problems?


Array = NDArray[np.float64]
ITEMS_TO_TELL = 6  # the fewest with 2 / 2^items < 0.05
_CELLS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Difference:
    """``low`` and ``high`` bound the central 95 % of the resampled differences; ``p`` is two-sided."""

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def resampled_means(values: Array, resamples: int, rng: np.random.Generator) -> Array:
    """Means of ``resamples`` draws of as many items as there are, with replacement."""
    n = len(values)
    rows = max(1, _CELLS_AT_ONCE // n)
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    return np.concatenate([values[rng.integers(0, n, size=(count, n))].mean(axis=1) for count in blocks])


def paired_difference(pairs: Sequence[tuple[str, Array, Array]], resamples: int = 1000, seed: int = 0) -> Difference:
    """Second minus first, averaged over benchmarks with equal weight; ``pairs`` holds (name, first, second).

    Items are resampled within each benchmark, the same ones for both models. The draws depend on the seed
    and the benchmark alone, so every pair of models is judged on the same resampled test sets. Under the
    null hypothesis the resampled differences are centred on zero: p is the share of them, centred, at
    least as far out as the observed one, the observed one counted in (so p is never 0). Resamples of a handful of
    items are all alike, so p is never below what a sign test of the smallest benchmark can reach at best, 2 / 2^items:
    fewer than ``ITEMS_TO_TELL`` items tell no difference.
    """
    observed = float(np.mean([(second - first).mean() for _, first, second in pairs]))
    draws = np.mean([resampled_means(b - a, resamples, _rng(seed, name)) for name, a, b in pairs], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    # equal items give equal sums up to rounding: a hair's breadth counts as reached
    as_far = np.abs(draws - observed) >= abs(observed) - 1e-12
    fewest = min(len(first) for _, first, _ in pairs)
    p = max((1 + int(as_far.sum())) / (1 + resamples), 2.0 ** (1 - fewest))
    return Difference(observed, float(low), float(high), p)


def _rng(seed: int, benchmark: str) -> np.random.Generator:
    return np.random.default_rng(seed_of(f"bootstrap:{seed}:{benchmark}"))
