"""``luffy report``: runs side by side in one HTML file that needs nothing but itself.

Complete without its script, which adds the read-out under the pointer, the choice of samples and the
switch between light and dark. The page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from luffy._version import __version__
from luffy.errors import UserError
from luffy.files import as_object, json_value, read_file, write_atomically
from luffy.report.charts import chart_grid, charts_of, family_charts, legend
from luffy.report.curves import FEW_SEEDS
from luffy.report.dots import accuracy_dots
from luffy.report.figures import crowded
from luffy.report.method_colours import with_styles
from luffy.report.method_families import by_accuracy, families
from luffy.report.methods import Method, Styled, group_runs
from luffy.report.runs import find_runs, load_runs
from luffy.report.samples import BRIEF, choose_groups, colour_choice, colour_key, group_html
from luffy.report.tables import change_table, difference_table, final_figures, final_table, phase_table, run_table
from luffy.report.text import show

PNG = b"\x89PNG\r\n"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
NOTHING = Markup("")


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
    figures = NOTHING if analysis is None else analysis_section(Path(analysis))
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
    analyses: Markup = NOTHING,
) -> Markup:
    """The page. The same runs give the same bytes."""
    remarks = [*left_out, *_remarks(methods)]
    styled = with_styles(methods)
    sections = [
        _final_section(styled),
        _curves_section(styled, remarks),
        analyses,
        _time_section(styled),
        _knobs_section(styled),
        _changes_section(styled),
        _samples_section(styled, remarks),
        _runs_section(styled, remarks),  # last: it lists what the others left out
    ]
    body = Markup("\n").join([_header(methods, title, notes), *(s for s in sections if s)])
    return Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,"><title>{}</title>\n<style>\n{}</style></head>\n'
        "<body>\n<main>{}</main>\n<script>\n{}</script></body></html>\n"
    ).format(Markup(POLICY), show(title), asset("components.css"), body, asset("components.js") + asset("report.js"))


def analysis_section(folder: Path) -> Markup:
    """The figures of ``luffy analyze``, inside the page."""
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
    figures = [_analysis_figure(folder, entry) for entry in checked]
    return _section("analyses", "Analyses", "Made by luffy analyze.", *figures)


def _analysis_figure(folder: Path, entry: dict[str, Any]) -> Markup:
    path = folder / Path(entry["png"]).name
    content = read_file(path)
    if not content.startswith(PNG):
        raise UserError(f"{path}: not a PNG; make it again with: luffy analyze RUN... --out {folder}")
    image = base64.b64encode(content).decode()
    return Markup(
        '<figure class="analysis"><figcaption><strong>{}</strong><span class="sub">{}</span></figcaption>'
        '<img src="data:image/png;base64,{}" alt="{}"></figure>'
    ).format(show(entry["title"]), show(entry["caption"]), image, show(entry["title"]))


def asset(name: str) -> Markup:
    return Markup((files("luffy.report") / "assets" / name).read_text(encoding="utf-8"))


def _header(methods: Sequence[Method], title: str, notes: str | None) -> Markup:
    runs = [run for method in methods for run in method.runs]
    facts = [_count(len(methods), "method"), _count(len(runs), "run"), _count(sum(run.steps for run in runs), "step")]
    times = [run.last_time for run in runs if run.last_time is not None]
    if times:
        facts.append(f"last step recorded {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC")
    facts.append(f"luffy {__version__}")
    paragraphs = Markup("").join(Markup("<p>{}</p>").format(show(p)) for p in (notes or "").split("\n\n") if p.strip())
    return Markup(
        '<header><div class="tools" hidden><button type="button" id="theme">Dark</button></div>'
        '<h1>{}</h1><p class="facts">{}</p><div class="notes">{}</div></header>'
    ).format(show(title), " \u00b7 ".join(facts), paragraphs)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _section(name: str, heading: str, intro: str, *content: Markup) -> Markup:
    frame = '<section id="{0}" aria-labelledby="{0}-h"><h2 id="{0}-h">{1}</h2><p class="intro">{2}</p>{3}</section>'
    return Markup(frame).format(name, heading, intro, Markup("").join(content))


def _final_section(methods: Sequence[Styled]) -> Markup:
    counts = [len(method.runs) for _, method in methods]
    seeds = "One seed per method, so no ranges." if max(counts) == 1 else "Means over seeds"
    seeds += (
        f"; of fewer than {FEW_SEEDS}, their range and each value" if any(1 < n < FEW_SEEDS for n in counts) else ""
    )
    interval = "\u00b1 is the half width of the 95 % interval (Student's t over seeds)"
    seeds += f"; {interval}" if max(counts) >= FEW_SEEDS else ""
    seeds += "." if max(counts) > 1 else ""
    best = "Best is the highest of a run; chosen on the problems it is measured on, it flatters. "
    timed = "Seconds include evaluations and checkpoints, but not the checkpoint at which a training ends or stops."
    intro = f"{seeds} Final is the last recorded value. {'' if crowded(methods) else best}{timed}"
    if crowded(methods):
        methods = by_accuracy(methods)
        return _section("final", "Final figures", intro, accuracy_dots(methods), final_table(methods))
    return _section("final", "Final figures", intro, final_table(methods))


def _curves_section(methods: Sequence[Styled], remarks: list[str]) -> Markup:
    several = any(len(method.runs) > 1 for _, method in methods)
    intro = (
        "Thick lines are means over seeds, thin lines single seeds, bands the range from lowest to highest seed. "
        "Means and bands cover the steps that all seeds of a method span."
    )
    intro = intro if several else "One run per method."
    if crowded(methods):
        intro += " Methods are drawn by family; the others are grey behind them."
        return _section("curves", "Learning curves", intro, *_curves_by_family(methods, remarks))
    grid = chart_grid(charts_of(methods), methods, remarks)
    return _section("curves", "Learning curves", intro, legend(methods), grid)


def _curves_by_family(methods: Sequence[Styled], remarks: list[str]) -> list[Markup]:
    """The first charts (held-out accuracy, where it was measured) for all families, the others of each to be opened."""
    charts = charts_of(methods)
    others = [chart for chart in charts if chart.metric != charts[0].metric]
    parts = [family_charts(chart, methods, remarks) for chart in charts if chart.metric == charts[0].metric]
    for family, members in families(methods).items():
        grid = chart_grid(others, members, [])
        opened = Markup("<details><summary>{}: all other curves</summary>{}{}</details>")
        parts.append(opened.format(family, legend(members), grid))
    return parts


def _time_section(methods: Sequence[Styled]) -> Markup | None:
    content = phase_table(methods)
    intro = (
        "Mean seconds per training step, by what they were spent on, over all steps of all seeds; evaluations and "
        "checkpoints are spread over all steps."
    )
    if any(run.config.get("async.max_staleness") for _, method in methods for run in method.runs):
        intro += " With async.max_staleness rollouts run beside updates: the phases sum to more than the whole."
    return None if content is None else _section("time", "Time per phase", intro, content)


def _knobs_section(methods: Sequence[Styled]) -> Markup | None:
    content = difference_table(methods)
    intro = "Every setting that is not the same in all methods; the rest is in each run's config.yaml."
    if crowded(methods):
        intro = "The settings of each method that are not those of most methods; all are in each run's config.yaml."
    return None if content is None else _section("knobs", "What sets the methods apart", intro, content)


def _changes_section(methods: Sequence[Styled]) -> Markup | None:
    content = change_table(methods)
    intro = "The rest of the page goes by the settings that a run has now."
    return None if content is None else _section("changes", "Settings changed at a resume", intro, content)


def _samples_section(methods: Sequence[Styled], remarks: list[str]) -> Markup | None:
    shown, hidden = choose_groups(methods)
    without = [m.label for _, m in methods if not any(run.samples.places for run in m.runs)]
    if without:
        remarks.append(f"No samples recorded: {', '.join(without)}.")
    if not shown:
        return None
    if hidden:
        remarks.append(f"{len(shown)} of {len(shown) + hidden} recorded groups of samples are shown.")
    intro = (
        "The first problem or two recorded at the first, a middle and the last recorded step of one run per method, "
        f"with all samples; not chosen by outcome. Responses beyond {BRIEF.head + BRIEF.tail} tokens lack their middle."
    )
    tools = Markup(
        '<div class="tools" hidden><label>Method <select id="pick-method"></select></label> '
        '<label>Step <select id="pick-step"></select></label> {}</div>'
    ).format(colour_choice())
    groups = Markup("\n").join(group_html(group) for group in shown)
    return _section("samples", "Samples", intro, tools, colour_key(), groups)


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


def _runs_section(methods: Sequence[Styled], remarks: Sequence[str]) -> Markup:
    items = Markup("").join(Markup("<li>{}</li>").format(show(remark)) for remark in remarks)
    noted = Markup('<h3>Left out and noted</h3><ul class="remarks">{}</ul>').format(items) if remarks else Markup("")
    return _section("runs", "Runs", "What the figures above are made of.", run_table(methods), noted)
