"""What the studies share: intervals, tables between marks of a page, the looks of figures."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from luffy.report.curves import t_quantile_95
from luffy.report.methods import METHODS, line_of

plt.rcParams["lines.scale_dashes"] = False  # thick lines keep the dashes of the report


def half_width(values: Sequence[float]) -> float:
    """Of Student's 95 % interval of the mean."""
    return t_quantile_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def wilson(p: float, n: int) -> tuple[float, float]:
    z = 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    made = ["| " + " | ".join([*cells, *[""] * (len(head) - len(cells))]) + " |" for cells in body]
    return "\n".join(lines + made) if made else "No run of this question is finished."


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def looks(method: str, variants: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Colour and line of a method as in ``luffy report``; a variant (method, line) has the colour of its method."""
    if method in variants:
        name, line = variants[method]
        return {**looks(name, {}), "linestyle": line}
    return line_of(None if method == "base" else METHODS.index(method))


def panels(count: int, height: float = 3.1) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(1, count, figsize=(3.4 * count, height), layout="constrained")
    return figure, list(axes) if count > 1 else [axes]


def legend_below(figure: Any, ax: Any) -> None:
    """Each label once: seeds of a method share theirs."""
    columns = 4 if figure.get_figwidth() > 8 else 3
    lines, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, lines, strict=True))
    figure.legend(
        once.values(),
        once.keys(),
        loc="outside lower center",
        handlelength=4.6,
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


def fill_marks(text: str, tables: Mapping[str, str]) -> str:
    """The page with every table between ``<!-- its name -->`` and ``<!-- end -->``."""
    for name, made in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(partial(_between, made), text)
    return text


def _between(made: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{made}\n{marks[2]}"
