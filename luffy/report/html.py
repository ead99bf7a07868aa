"""``luffy report``: runs side by side in one HTML file that needs nothing but itself.

Complete without its script, which adds the read-out under the pointer, the choice of samples and the
switch between light and dark. The page's own policy forbids every request.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from luffy._version import __version__
from luffy.errors import UserError
from luffy.files import write_atomically
from luffy.report.curves import MOST_POINTS, envelope, thin_out
from luffy.report.figures import Line, hover_data, line_chart, swatch
from luffy.report.methods import Method, group_runs
from luffy.report.runs import Points, RunRecord, find_runs, load_runs
from luffy.report.samples import HEAD_TOKENS, TAIL_TOKENS, choose_groups, group_html
from luffy.report.tables import difference_table, evaluations, final_table, phase_table, run_table
from luffy.report.text import show

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
NOTHING = Markup("")


def always(run: RunRecord) -> bool:
    return True


def samples_rollouts(run: RunRecord) -> bool:
    return run.kind == "train"


def is_guided(run: RunRecord) -> bool:
    return run.kind == "train" and run.config.get("guidance.n_prefix") != 0


@dataclass(frozen=True)
class Chart:
    """A metric to draw. An empty mean is recorded as 0, so where 0 cannot be a real value it is no point,
    and where it can, ``of`` says which runs have the metric at all."""

    metric: str
    title: str
    about: str
    from_zero: bool = False
    zero_is_empty: bool = False
    of: Callable[[RunRecord], bool] = always

    def points(self, run: RunRecord) -> Points:
        if not self.of(run):
            return []
        return [(step, value) for step, value in run.series(self.metric) if value or not self.zero_is_empty]


CHARTS = (
    Chart("critic/rewards/mean", "Reward, on-policy", "mean reward of the policy's own samples", True),
    Chart("batch/off_solved", "Reward, off-policy", "share of guided samples that are right", True, of=is_guided),
    Chart("actor/entropy_loss", "Entropy", "mean entropy of the policy per token, in nats", True, True),
    Chart("response_length/mean", "Response length", "tokens; of the traces in SFT"),
    Chart("actor/off_policy_prob", "Off-policy probability", "of teacher tokens under the policy", True, True),
    Chart("actor/pg_clipfrac", "Clip fraction", "share of tokens whose ratio is clipped", True, of=samples_rollouts),
    Chart("actor/sft_loss", "SFT loss", "negative log-likelihood per trace token, in nats", True, True),
    Chart("actor/grad_norm", "Gradient norm", "before clipping", True),
    Chart("perf/throughput", "Throughput", "tokens trained on per second of a step", True),
)  # fmt: skip


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
    if not runs:
        raise UserError("no run was named; name at least one run folder")
    records, skipped = load_runs(find_runs(runs))
    out = default_out(runs) if out is None else Path(out)
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name the file to write, e.g. {out / 'report.html'}")
    figures = NOTHING if analysis is None else analysis_section(Path(analysis))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, render(group_runs(records), title, notes, skipped, figures))
    return out


def render(
    methods: Sequence[Method],
    title: str,
    notes: str | None = None,
    left_out: Sequence[str] = (),
    analyses: Markup = NOTHING,
) -> Markup:
    """The page. The same runs give the same bytes."""
    remarks = [*left_out, *_remarks(methods)]
    sections = [
        _final_section(methods),
        _curves_section(methods, remarks),
        analyses,
        _time_section(methods),
        _knobs_section(methods),
        _samples_section(methods, remarks),
        _runs_section(methods, remarks),  # last: it lists what the others left out
    ]
    body = Markup("\n").join([_header(methods, title, notes), *(s for s in sections if s)])
    return Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="{}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,"><title>{}</title>\n<style>\n{}</style></head>\n'
        "<body>\n<main>{}</main>\n<script>\n{}</script></body></html>\n"
    ).format(Markup(POLICY), show(title), asset("report.css"), body, asset("report.js"))


def analysis_section(folder: Path) -> Markup:
    """The figures of ``luffy analyze``, inside the page."""
    listing = folder / "analysis.json"
    if not listing.is_file():
        raise UserError(
            f"--analysis {folder}: no analysis.json there; make it with: luffy analyze RUN... --out {folder}"
        )
    figures = [_analysis_figure(folder, entry) for entry in json.loads(listing.read_text(encoding="utf-8"))]
    return _section("analyses", "Analyses", "Made by luffy analyze.", *figures)


def _analysis_figure(folder: Path, entry: dict[str, Any]) -> Markup:
    image = base64.b64encode((folder / Path(entry["png"]).name).read_bytes()).decode()
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


def _final_section(methods: Sequence[Method]) -> Markup:
    intro = (
        "Means over seeds; \u00b1 is the half width of the 95 % interval (Student's t over seeds). Final is the last "
        "recorded value. Best is the highest of a run; chosen on the problems it is measured on, it flatters."
    )
    return _section("final", "Final figures", intro, final_table(methods))


def legend(methods: Sequence[Method]) -> Markup:
    items = [Markup("<li>{} {}</li>").format(swatch(i), show(method.label)) for i, method in enumerate(methods)]
    return Markup('<ul class="legend" aria-label="methods">{}</ul>').format(Markup("").join(items))


def charts_of(methods: Sequence[Method]) -> list[Chart]:
    """Accuracies first, whatever sets were evaluated, then the fixed list."""
    found = evaluations([run for method in methods for run in method.runs])
    first = [Chart(m, f"Accuracy, {name}", "share of problems answered right", True) for m, name in found]
    return [*first, *CHARTS]


def _curves_section(methods: Sequence[Method], remarks: list[str]) -> Markup:
    last = max(run.steps for method in methods for run in method.runs)
    figures, missing = [], []
    for chart in charts_of(methods):
        figure = _figure(chart, methods, last, remarks)
        figures.append(figure)
        if not figure:
            missing.append(chart.title.lower())
    if missing:
        remarks.append(f"No chart for want of values: {', '.join(missing)}.")
    several = any(len(method.runs) > 1 for method in methods)
    intro = (
        "Thick lines are means over seeds, thin lines single seeds, bands the range from lowest to highest seed. "
        "Means and bands cover the steps that all seeds of a method span."
    )
    grid = Markup('<div class="charts">{}</div>').format(Markup("").join(figures))
    return _section("curves", "Learning curves", intro if several else "One run per method.", legend(methods), grid)


def _figure(chart: Chart, methods: Sequence[Method], last: int, remarks: list[str]) -> Markup:
    """One chart, or nothing where no run has a value."""
    raw = [[chart.points(run) for run in method.runs] for method in methods]
    flat = [curve for curves in raw for curve in curves if curve]
    if not flat:
        return Markup("")
    thinned, width = thin_out(flat)
    if width > 1:
        remarks.append(f"{chart.title}: more than {MOST_POINTS} steps, so each point is a mean over {width} of them.")
    rest = iter(thinned)
    lines = []
    for style, (method, curves) in enumerate(zip(methods, raw, strict=True)):
        drawn = [next(rest) for curve in curves if curve]
        if drawn:
            lines.append(Line(method.label, style, drawn, envelope(drawn)))
    data = json.dumps(hover_data(lines), separators=(",", ":")).replace("<", "\\u003c")
    return Markup(
        '<figure><figcaption><b>{}</b> <span class="sub">{}</span></figcaption>{}'
        '<script type="application/json">{}</script></figure>'
    ).format(chart.title, chart.about, line_chart(lines, last, chart.title, chart.from_zero), Markup(data))


def _time_section(methods: Sequence[Method]) -> Markup | None:
    content = phase_table(methods)
    intro = "Mean seconds of a training step, by what they were spent on, over all steps of all seeds."
    return None if content is None else _section("time", "Time per phase", intro, content)


def _knobs_section(methods: Sequence[Method]) -> Markup | None:
    content = difference_table(methods)
    intro = "Every setting that is not the same in all methods; the rest is in each run's config.yaml."
    return None if content is None else _section("knobs", "What sets the methods apart", intro, content)


def _samples_section(methods: Sequence[Method], remarks: list[str]) -> Markup | None:
    shown, hidden = choose_groups(methods)
    without = [m.label for m in methods if not any(run.samples.places for run in m.runs)]
    if without:
        remarks.append(f"No samples recorded: {', '.join(without)}.")
    if not shown:
        return None
    if hidden:
        remarks.append(f"{len(shown)} of {len(shown) + hidden} recorded groups of samples are shown.")
    intro = (
        "The first problem recorded at the first, a middle and the last recorded step of one run per method, with all "
        f"its samples; not chosen by outcome. Responses beyond {HEAD_TOKENS + TAIL_TOKENS} tokens lack their middle."
    )
    key = Markup(
        '<p class="key"><mark class="teacher">teacher token</mark> <span>policy token</span> '
        '<span class="shadekey"><span class="p0">unlikely</span> <span class="p4">even</span> '
        "<span>likely policy token</span></span></p>"
    )
    tools = Markup(
        '<div class="tools" hidden><label>Method <select id="pick-method"></select></label> '
        '<label>Step <select id="pick-step"></select></label> '
        '<label><input type="checkbox" id="shade"> shade by probability</label></div>'
    )
    groups = Markup("\n").join(group_html(group) for group in shown)
    return _section("samples", "Samples", intro, tools, key, groups)


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


def _runs_section(methods: Sequence[Method], remarks: Sequence[str]) -> Markup:
    items = Markup("").join(Markup("<li>{}</li>").format(show(remark)) for remark in remarks)
    noted = Markup('<h3>Left out and noted</h3><ul class="remarks">{}</ul>').format(items) if remarks else Markup("")
    return _section("runs", "Runs", "What the figures above are made of.", run_table(methods), noted)
