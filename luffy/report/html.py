"""``luffy report``: runs side by side in one HTML file that needs nothing but itself.

Complete without its script, which adds the read-out under the pointer, the choice of samples and the
switch between light and dark. The page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from luffy._version import __version__
from luffy.errors import UserError
from luffy.files import as_object, json_value, read_file, write_atomically
from luffy.report.charts import accuracy_dots, by_accuracy, chart_grid, charts_of, family_charts
from luffy.report.curves import FEW_SEEDS
from luffy.report.methods import Method, families, group_runs, with_styles
from luffy.report.samples import BRIEF, choose_groups, group_html
from luffy.report.svg import crowded
from luffy.report.tables import (
    change_table,
    difference_table,
    final_figures,
    final_table,
    phase_table,
    run_table,
    stage_table,
)
from luffy.report.templates import asset, page
from luffy.run_folder.runs import find_runs, load_runs

PNG = b"\x89PNG\r\n"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def default_out(places: Sequence[Path | str]) -> Path:
    """report.html in the named folder, or in the one that the named folders share."""
    return Path(os.path.commonpath([Path(place).resolve() for place in places])) / "report.html"


def write_report(
    runs: Sequence[Path | str],
    out: Path | str | None = None,
    title: str = "Training report",
    notes: str | None = None,
    analysis: Path | str | None = None,
) -> Path:
    """Compare the runs named by, or found below, ``runs`` in one HTML file; returns its path.

    ``notes`` is plain text shown under the title, paragraphs apart by blank lines; ``analysis`` is a folder
    that ``luffy analyze`` wrote, whose figures go into the page.
    """
    records, skipped = load_runs(find_runs(runs))
    out = default_out(runs) if out is None else Path(out)
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name the file to write, e.g. {out / 'report.html'}")
    figures = [] if analysis is None else analysis_figures(Path(analysis))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render(group_runs(records), title, notes, skipped, figures))
    return out


def report_json(runs: Sequence[Path | str]) -> dict[str, Any]:
    """The final table of the report for programs; ``left_out`` says which folders have nothing to show, and why."""
    records, skipped = load_runs(find_runs(runs))
    return {"version": __version__, "methods": final_figures(group_runs(records)), "left_out": skipped}


def render(
    methods: Sequence[Method],
    title: str,
    notes: str | None = None,
    left_out: Sequence[str] = (),
    analyses: Sequence[dict[str, Any]] = (),
) -> Markup:
    """The page. The same runs give the same bytes."""
    remarks = [*left_out, *_remarks(methods)]
    styled = with_styles(methods)
    counts = [len(method.runs) for method in methods]
    final = by_accuracy(styled) if crowded(styled) else styled
    curves, more_curves = _curves(styled, remarks)
    return page(
        "report.html",
        policy=POLICY,
        style=asset("components.css"),
        script=asset("components.js") + asset("report.js"),
        title=title,
        facts=_facts(methods),
        notes=[text for text in (notes or "").split("\n\n") if text.strip()],
        methods=styled,
        crowded=crowded(styled),
        most_seeds=max(counts),
        few=FEW_SEEDS,
        few_seeds=any(1 < n < FEW_SEEDS for n in counts),
        dots=accuracy_dots(final) if crowded(styled) else "",
        final_table=final_table(final),
        curves=curves,
        more_curves=more_curves,
        stage_table=stage_table(styled),
        analyses=analyses,
        phase_table=phase_table(styled),
        overlaps=any(run.config.get("async.max_staleness") for method in methods for run in method.runs),
        difference_table=difference_table(styled),
        change_table=change_table(styled),
        groups=_sample_groups(styled, remarks),
        longest_response=BRIEF.head + BRIEF.tail,
        run_table=run_table(styled),
        remarks=remarks,
    )


def _facts(methods: Sequence[Method]) -> list[str]:
    runs = [run for method in methods for run in method.runs]
    counts = {"method": len(methods), "run": len(runs), "step": sum(run.steps for run in runs)}
    facts = [f"{n:,} {noun}" + ("" if n == 1 else "s") for noun, n in counts.items()]
    times = [run.last_time for run in runs if run.last_time is not None]
    if times:
        facts.append(f"last step recorded {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC")
    return [*facts, f"luffy {__version__}"]


def _curves(
    methods: Sequence[Method], remarks: list[str]
) -> tuple[list[Markup], list[tuple[str, list[Method], Markup]]]:
    """All charts; with many methods the first ones (held-out accuracy, if it was measured) for all categories, and the
    others of each category apart."""
    charts = charts_of(methods)
    if not crowded(methods):
        return [chart_grid(charts, methods, remarks)], []
    others = [chart for chart in charts if chart.metric != charts[0].metric]
    first = [family_charts(chart, methods, remarks) for chart in charts if chart.metric == charts[0].metric]
    return first, [(name, members, chart_grid(others, members, [])) for name, members in families(methods).items()]


def analysis_figures(folder: Path) -> list[dict[str, Any]]:
    """The figures of ``luffy analyze``: title, caption and image (base64) of each."""
    listing = folder / "analysis.json"
    if not listing.is_file():
        raise UserError(
            f"--analysis {folder}: no analysis.json there; make it with: luffy analyze RUN... --out {folder}"
        )
    remedy = f"make it again with: luffy analyze RUN... --out {folder}"
    entries = json_value(listing.read_bytes(), listing, remedy)
    if not isinstance(entries, list):
        raise UserError(f"{listing}: not a list; {remedy}")
    checked = [as_object(entry, listing, remedy, png=str, title=str, caption=str) for entry in entries]
    for entry in checked:
        path = folder / Path(entry["png"]).name
        content = read_file(path)
        if not content.startswith(PNG):
            raise UserError(f"{path}: not a PNG; {remedy}")
        entry["image"] = base64.b64encode(content).decode()
    return checked


def _sample_groups(methods: Sequence[Method], remarks: list[str]) -> list[Markup]:
    shown, hidden = choose_groups(methods)
    without = [m.label for m in methods if not any(run.samples.places for run in m.runs)]
    if without:
        remarks.append(f"No samples recorded: {', '.join(without)}.")
    if shown and hidden:
        remarks.append(f"{len(shown)} of {len(shown) + hidden} recorded groups of samples are shown.")
    return [group_html(group) for group in shown]


def _remarks(methods: Sequence[Method]) -> list[str]:
    remarks = []
    for method in methods:
        late = [str(run.folder) for run in method.runs if run.unfinished]
        if late:
            remarks.append(f"Not at its last step, or stopped early: {', '.join(late)}.")
        if method.repeated_seeds:
            seeds = ", ".join(map(str, method.repeated_seeds))
            remarks.append(
                f"{method.label}: seed {seeds} occurs more than once; intervals count every run as one seed."
            )
    return remarks
