"""A report as a reader gets it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import make_metric_row, make_sample_row, write_run  # noqa: F401


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, by class; all text; tags with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._rows: list[list[str]] | None = None
        self._open: list[str] = []
        self.feed(html)
        self.close()
        for rows in self.tables.values():
            rows[:] = [[" ".join(cell.split()) for cell in row] for row in rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._open.append(tag)
        if tag == "table":
            self._rows = self.tables[(given["class"] or "").split()[0]] = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._open):
            return
        self.text += data
        if self._rows and self._rows[-1] and "title" not in self._open:
            self._rows[-1][-1] += data

    def row(self, table: str, name: str) -> list[str]:
        return next(row for row in self.tables[table] if row and row[0] == name)


@pytest.fixture
def read_page():
    return lambda path: Page(Path(path).read_text(encoding="utf-8"))
