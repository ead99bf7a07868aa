"""A picture of a comparison: validation accuracy of every candidate by seconds of training, as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping

from luffy.compare.state import ArmState
from luffy.report.charts import process_seconds
from luffy.report.curves import Curve, envelope
from luffy.report.methods import Method
from luffy.report.svg import HEIGHT, WIDTH, Line, line_chart
from luffy.report.templates import asset, macro
from luffy.run_folder.runs import RunRecord

ACCURACY, TITLE = "val-core/accuracy", "Validation accuracy by seconds of training"


def picture(methods: list[Method], states: Mapping[str, ArmState]) -> str:
    """Evaluations of the trainings, and those after each rung."""
    lines = []
    for method in methods:
        curves = [curve for run in method.runs if (curve := curve_of(run, states[run.folder.name]))]
        if curves:
            lines.append(Line(method.label, method.style, curves, envelope(curves)))
    end = max((x for line in lines for curve in line.seeds for x, _ in curve), default=1.0)
    chart = line_chart(lines, end, TITLE, from_zero=True, axis="seconds") if lines else ""
    return macro("picture", asset("components.css"), WIDTH, HEIGHT, TITLE, chart)


def curve_of(run: RunRecord, state: ArmState) -> Curve:
    """(seconds, accuracy) of an arm."""
    at = process_seconds(run)
    own = [(at[step], value) for step, value in run.series(ACCURACY) if step in at]
    return sorted({*own, *zip(state.at, state.rungs, strict=True)})
