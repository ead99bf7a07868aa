"""A figure is its numbers first: series with names, written as CSV, then drawn. Matplotlib is loaded only to draw."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.errors import UserError, how_to_install
from luffy.files import complete_or_nothing
from luffy.report.methods import free_style, line_of

DASHES = ("-", "--", "-.", ":")
MARK_UP_TO = 30
Styles = Mapping[str, int | None]  # of series by name (luffy/report/methods.py)
INSTALL_HINT = how_to_install("analysis")


@dataclass(frozen=True)
class Series:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``kind`` is "line", or "bar" for a histogram whose x are the left edges of equal bins."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    kind: str = "line"
    y_from_zero: bool = False


@dataclass(frozen=True)
class Figure:
    """``paper`` says which figure of the paper it repeats."""

    name: str
    title: str
    caption: str
    paper: str
    panels: tuple[Panel, ...]


def save(figure: Figure, folder: Path, styles: Styles | None = None) -> None:
    """``NAME.csv`` and ``NAME.png``. ``styles``: those that the report gives to what the series are of."""
    folder.mkdir(parents=True, exist_ok=True)
    with complete_or_nothing(folder / f"{figure.name}.csv") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "series", "x", "y"])
        for panel in figure.panels:
            for series in panel.series:
                writer.writerows([panel.title, series.name, x, y] for x, y in zip(series.x, series.y, strict=True))
    draw(figure, folder / f"{figure.name}.png", styles)


def draw(figure: Figure, path: Path, styles: Styles | None = None) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UserError(f"figures need Matplotlib ({error}); {INSTALL_HINT}") from error
    columns = min(len(figure.panels), 3)
    rows = -(-len(figure.panels) // columns)
    canvas = Canvas(figsize=(max(4.6 * columns, 6.4), 3.7 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(figure.title, fontsize=12)
    names = list(dict.fromkeys(series.name for panel in figure.panels for series in panel.series))
    colours = colours_of(names, styles or {})
    axes = [canvas.add_subplot(rows, columns, place + 1) for place in range(len(figure.panels))]
    for ax, panel in zip(axes, figure.panels, strict=True):
        _draw_panel(ax, panel, colours)
    _legend(canvas, axes, figure.panels, names)
    canvas.savefig(path, dpi=150)


def colours_of(names: Sequence[str], styles: Styles) -> dict[str, str]:
    """The colour of each series: of a method that of the report, else one that is not in use."""
    given = {name: styles[name] for name in names if name in styles}
    for name in names:
        if name not in given:
            given[name] = free_style([style for style in given.values() if style is not None])
    return {name: line_of(style)["color"] for name, style in given.items()}


def _draw_panel(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    if panel.kind == "bar":
        _draw_bars(ax, panel, colours)
    else:
        _draw_lines(ax, panel, colours)
    ax.set(xlabel=panel.x_label, ylabel=panel.y_label)
    ax.set_title(panel.title, fontsize=10)
    if panel.y_from_zero:
        highest = max((max(series.y) for series in panel.series), default=0.0) or 1.0
        ax.set_ylim(-0.02 * highest, 1.08 * highest)  # a line at zero stays visible
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_lines(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """Dashes too, so that curves that coincide can be told apart."""
    for place, series in enumerate(panel.series):
        ax.plot(
            series.x, series.y, color=colours[series.name], linewidth=1.7, linestyle=DASHES[place % len(DASHES)],
            marker="o" if len(series.x) <= MARK_UP_TO else None, markersize=3.5, label=series.name,
        )  # fmt: skip


def _draw_bars(ax: Any, panel: Panel, colours: dict[str, str]) -> None:
    """The series of a histogram stand side by side within a bin; single bars have values above, names below."""
    single = all(len(series.x) == 1 for series in panel.series)
    for place, series in enumerate(panel.series):
        bin_width = series.x[1] - series.x[0] if len(series.x) > 1 else 1.0
        width = 0.7 if single else bin_width / len(panel.series)
        left = series.x if single else [x + place * width for x in series.x]
        bars = ax.bar(left, series.y, width=width, align="edge", color=colours[series.name], label=series.name)
        if single:
            ax.bar_label(bars, fmt="%.1f", fontsize=9)
    if single:
        names = [series.name for series in panel.series]
        ax.set_xticks([series.x[0] + 0.35 for series in panel.series], names, rotation=30, ha="right", fontsize=8)


def _legend(canvas: Any, axes: Sequence[Any], panels: Sequence[Panel], names: Sequence[str]) -> None:
    """Below the figure where panels share their series; in the axes of a single panel; none for single bars."""
    named_below = all(panel.kind == "bar" and all(len(s.x) == 1 for s in panel.series) for panel in panels)
    if named_below or (len(names) == 1 and len(panels) > 1):
        return
    if len(panels) == 1:
        axes[0].legend(fontsize=9, frameon=False)
        return
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    canvas.legend(
        [found[name] for name in names], names, loc="outside lower center", ncols=min(len(names), 5), fontsize=9,
        frameon=False,
    )  # fmt: skip
