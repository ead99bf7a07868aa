"""The page, its assets, and the values and samples behind it. Nothing here writes.

Charts, tables and samples come as the same HTML that ``luffy report`` puts in its file; the scripts only fetch and
place it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from luffy._version import __version__
from luffy.errors import UserError
from luffy.report.charts import Chart, chart_grid, charts_of, family_charts
from luffy.report.methods import Method
from luffy.report.samples import CLOSE, problem_html, sample_cards
from luffy.report.svg import crowded
from luffy.report.tables import change_table, difference_table, final_table, phase_table, run_table, steps_of
from luffy.report.templates import asset, macro, page
from luffy.report.text import legible
from luffy.run_folder.runs import RunRecord, whole
from luffy.view.live import PAGE, Board, Filter, SampleTable, Snapshot

ASSETS = ("components.css", "components.js", "view.css", "view.js", "browser.js")
KINDS = {".css": "text/css", ".js": "text/javascript"}
MOST_SAMPLES = 64  # of a group
MOST_CHARTS = 24  # added by hand
MOST_SMOOTHING = 0.99

Query = Mapping[str, list[str]]


@dataclass(frozen=True)
class PageReply:
    body: str
    kind: str = "text/html"
    status: int = 200


def as_json(value: Any, status: int = 200) -> PageReply:
    """ASCII, so that no half of a character can break the encoding."""
    return PageReply(json.dumps(value, separators=(",", ":")), "application/json", status)


class Site:
    def __init__(self, board: Board) -> None:
        self.board = board
        self.assets = {f"/assets/{name}": PageReply(asset(name), KINDS[Path(name).suffix]) for name in ASSETS}
        self.pages: dict[str, Callable[[Query], PageReply]] = {
            "/": lambda query: PageReply(page("page.html", version=__version__)),
            "/api/state": self._state,
            "/api/curves": self._curves,
            "/api/tables": self._tables,
            "/api/knobs": self._knobs,
            "/api/samples": self._samples,
            "/api/group": self._group,
            "/api/text": self._text,
        }

    def answer(self, path: str, query: Query) -> PageReply:
        if path in self.assets:
            return self.assets[path]
        if path not in self.pages:
            return as_json({"error": "nothing here"}, 404)
        try:
            return self.pages[path](query)
        except UserError as error:
            return as_json({"error": legible(str(error))}, 400)

    def _state(self, query: Query) -> PageReply:
        now = self.board.snapshot()
        if _text(query, "have") == now.version:
            return as_json({"version": now.version})
        runs = [run for method in now.methods for run in method.runs]
        return as_json(
            {
                "version": now.version,
                "methods": [
                    {
                        "style": method.style,
                        "swatch": macro("swatch", method.style),
                        "label": method.label,
                        "runs": [self._run(now, run) for run in method.runs],
                    }
                    for method in now.methods
                ],
                "metrics": sorted({metric for run in runs for metric in run.metrics}),
                "charts": [chart.metric for chart in charts_of(now.methods)],
                "places": [legible(str(place)) for place in self.board.places],
                "waiting": list(now.waiting),
                "remarks": list(now.remarks),
            }
        )

    def _run(self, now: Snapshot, run: RunRecord) -> dict[str, Any]:
        live = self.board.run(now.ids[run.folder])
        return {
            "id": live.id,
            "folder": legible(str(run.folder)),
            "seed": run.seed,
            "kind": run.kind,
            "steps": steps_of([run]),
            "unfinished": run.unfinished,
            "time": run.last_time or 0.0,
            "files": [name for name, table in live.samples.items() if table.size],
        }

    def _curves(self, query: Query) -> PageReply:
        """The grid of charts of the chosen methods; ``metric`` adds charts before the fixed ones."""
        smoothing = _number(query, "smoothing", float, 0.0)
        if not 0 <= smoothing <= MOST_SMOOTHING:
            raise UserError(f"smoothing is {smoothing}; it lies between 0 and {MOST_SMOOTHING}")
        methods = self._chosen(query)
        fixed = charts_of(methods)
        added = [Chart(name, legible(name), "as recorded") for name in query.get("metric", [])[:MOST_CHARTS]]
        remarks: list[str] = []
        html = Markup("")
        if crowded(methods):
            html, fixed = family_charts(fixed[0], methods, remarks, smoothing), fixed[1:]
        html += chart_grid([*added, *fixed], methods, remarks, smoothing)
        return as_json({"html": html, "remarks": remarks})

    def _tables(self, query: Query) -> PageReply:
        methods = self._chosen(query)
        if not methods:
            return as_json({"final": "", "phases": "", "runs": ""})
        return as_json(
            {"final": final_table(methods), "phases": phase_table(methods) or "", "runs": run_table(methods)}
        )

    def _knobs(self, query: Query) -> PageReply:
        """Settings that differ between the methods, or with ``by=run`` between single runs, seeds and names too; and
        those that a resume changed."""
        methods = self._chosen(query)
        if _text(query, "by") == "run":
            methods = [single for method in methods for single in _singles(method)]
        return as_json(
            {
                "html": difference_table(methods) or "",
                "columns": len(methods),
                "changes": change_table(methods) or "",
            }
        )

    def _chosen(self, query: Query) -> list[Method]:
        styles = query.get("method")
        return self.board.snapshot().choose(None if styles is None else [_parse("method", s, int) for s in styles])

    def _table(self, query: Query) -> tuple[SampleTable, float]:
        run = self.board.run(_text(query, "run"))
        name = _text(query, "file") or "train"
        if name not in run.samples:
            raise UserError(f"file is {name!r}; known: {', '.join(run.samples)}")
        return run.samples[name], run.record.success

    def _samples(self, query: Query) -> PageReply:
        """One page of the list. ``near`` is a sample whose place in the list is wanted too."""
        found, success = self._table(query)
        wanted = replace(_filter(query), success=success)
        start = _number(query, "start", int, 0)
        with found.up_to_date() as table:
            numbers = table.matching(wanted)
            near = _number(query, "near", int, -1)
            return as_json(
                {
                    "total": len(numbers),
                    "of": len(table.heads),
                    "complete": table.complete,
                    "start": start,
                    "page": PAGE,
                    "entries": table.page(numbers, max(start, 0), success),
                    "steps": sorted({head.step for head in table.heads}),
                    "place": numbers.index(near) if near in numbers else -1,
                }
            )

    def _group(self, query: Query) -> PageReply:
        found, success = self._table(query)
        with found.up_to_date() as table:
            at = _number(query, "at", int, 0)
            numbers, rows = table.group(at)
            steps = table.steps_of(at)
        shown = rows[:MOST_SAMPLES]
        html = problem_html(rows[0]) + sample_cards(shown, len(rows), success, CLOSE)
        step = whole(rows[0].get("step"))
        return as_json({"html": html, "numbers": numbers[: len(shown)], "step": step, "steps": steps})

    def _text(self, query: Query) -> PageReply:
        """A whole response, however long, as plain text."""
        found, _ = self._table(query)
        with found.up_to_date() as table:
            return as_json({"text": table.response(_number(query, "at", int, 0))})


def _singles(method: Method) -> list[Method]:
    labels = [f"{method.label}, {legible(Path(run.folder).name)}" for run in method.runs]
    pairs = zip(labels, method.runs, strict=True)
    return [replace(method, label=label, runs=(run,), settings=run.config) for label, run in pairs]


def _filter(query: Query) -> Filter:
    return Filter(
        reward=_text(query, "reward"),
        off_policy=_text(query, "off_policy"),
        truncated=_text(query, "truncated") == "1",
        shortest=_number(query, "shortest", int, 0),
        longest=_number(query, "longest", int, None),
        step=_number(query, "step", int, None),
        search=_text(query, "search"),
    )


def _text(query: Query, name: str) -> str:
    return query.get(name, [""])[0]


def _number(query: Query, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    value = _text(query, name)
    return _parse(name, value, kind) if value else default


def _parse(name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name} is {value[:40]!r}; it is a number") from None
