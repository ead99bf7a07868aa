"""Lines of the report, the report as a table and as JSON, and its form without names and paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "failed", "skipped"]
Facts = Mapping[int, Any]  # what each rank measured; ranks that did not get so far are absent
COLORS: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
PRIVATE = ("host", "uuid", "folder", "servers", "visible")  # facts that the anonymous form leaves out
PATH = re.compile(r"(?<![\w/.:])~?(?:/[\w.@+-]+){2,}/?")
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F:]{0,4}")


@dataclass(frozen=True)
class Line:
    """One row of the table. ``remedy`` is for the statuses warning and failed."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def judged(check: str, found: str, *problems: tuple[object, Status, str, str]) -> Line:
    """The line of a check: with the first of its problems (holds, status, text to add, remedy) that holds, else ok."""
    for holds, status, more, remedy in problems:
        if holds:
            return Line(check, status, f"{found}{more}", remedy)
    return Line(check, "ok", found)


@dataclass(frozen=True)
class Cluster:
    """The machine of each rank, by rank."""

    hosts: Sequence[str]

    @property
    def machines(self) -> list[str]:
        """Host names in the order of their first rank."""
        return list(dict.fromkeys(self.hosts))

    def ranks_of(self, host: str) -> list[int]:
        """The ranks on a machine."""
        return [rank for rank, name in enumerate(self.hosts) if name == host]

    def name(self, ranks: Iterable[int]) -> str:
        """Ranks with their machines, e.g. ``rank 3 on node7``, ``ranks 8-15 on node1``."""
        wanted = sorted(ranks)
        parts = []
        for host in dict.fromkeys(self.hosts[rank] for rank in wanted):
            here = [rank for rank in wanted if self.hosts[rank] == host]
            parts.append(f"rank{'s' if len(here) > 1 else ''} {spans(here)} on {host}")
        return ", ".join(parts)


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    consecutive = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in consecutive]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def who_differs(cluster: Cluster, values: Facts) -> str:
    """The ranks that differ from the most frequent value, with both values; all of them if no value is the most
    frequent; '' if all ranks have one value."""
    counts = Counter(map(str, values.values())).most_common()
    if len(counts) < 2:
        return ""
    tied = counts[0][1] == counts[1][1]
    usual = None if tied else counts[0][0]
    parts = []
    for value, _ in counts:
        if value != usual:
            ranks = [rank for rank, mine in values.items() if str(mine) == value]
            parts.append(f"{value} on {cluster.name(ranks)}")
    return "; ".join(parts) + ("" if tied else f"; {usual} elsewhere")


@dataclass(frozen=True)
class Report:
    """``facts``: what every rank measured, by check and rank. ``private``: words to leave out of the anonymous form."""

    luffy: str
    launch: str
    cluster: Cluster
    lines: Sequence[Line]
    facts: Mapping[str, Facts] = field(default_factory=dict)
    private: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(line.status != "failed" for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """The report for programs, with all measurements."""
        return {
            "luffy": self.luffy,
            "launch": self.launch,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "machines": [{"name": host, "ranks": self.cluster.ranks_of(host)} for host in self.cluster.machines],
            "checks": [asdict(line) for line in self.lines],
            "facts": {check: {str(rank): value for rank, value in by.items()} for check, by in self.facts.items()},
        }

    @classmethod
    def received(cls, value: Mapping[str, Any]) -> Report:
        """The report whose ``asdict`` came as JSON."""
        facts = {check: {int(rank): fact for rank, fact in by.items()} for check, by in value["facts"].items()}
        lines = [Line(**line) for line in value["lines"]]
        return cls(**{**value, "cluster": Cluster(**value["cluster"]), "lines": lines, "facts": facts})

    def anonymous(self) -> Report:
        """The report without host names, user names, addresses and paths: machines are numbered."""
        numbers = {host: f"machine{i}" for i, host in enumerate(self.cluster.machines)}
        words = {**dict.fromkeys(self.private, "..."), **numbers}
        lines = [replace(one, found=scrub(one.found, words), remedy=scrub(one.remedy, words)) for one in self.lines]
        return replace(
            self,
            cluster=Cluster([numbers[host] for host in self.cluster.hosts]),
            lines=lines,
            facts=scrub(self.facts, words, PRIVATE),
            private=(),
        )

    def table(self) -> Group:
        """The report for a terminal."""
        machines, ranks = len(self.cluster.machines), len(self.cluster.hosts)
        where = f"{ranks} process{'es' * (ranks > 1)} on {machines} machine{'s' * (machines > 1)}"
        title = f"luffy {self.luffy} doctor, launch={self.launch}: {where}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("check", no_wrap=True)
        table.add_column("result", no_wrap=True)
        table.add_column("found, and what to do", overflow="fold")
        for line in self.lines:
            found = Text(line.found)
            if line.remedy:
                found.append(f"\n-> {line.remedy}", style="bold")
            table.add_row(Text(line.check), Text(line.status, style=COLORS[line.status]), found)
        counts = Counter(line.status for line in self.lines)
        summary = ", ".join(f"{counts[status]} {status}" for status in COLORS if counts[status])
        return Group(table, Text(f"{summary}; {self.seconds:.0f} s"))


def scrub(value: Any, words: Mapping[str, str], leave_out: Sequence[str] = ()) -> Any:
    """``value`` with each of ``words``, addresses and absolute paths replaced in all its strings; without the keys of
    ``leave_out``."""
    if isinstance(value, Mapping):
        return {key: scrub(inner, words, leave_out) for key, inner in value.items() if key not in leave_out}
    if isinstance(value, list | tuple):
        return [scrub(inner, words, leave_out) for inner in value]
    if not isinstance(value, str):
        return value
    for word in sorted(filter(None, words), key=len, reverse=True):
        value = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", words[word], value)
    return ADDRESS.sub("ADDRESS", PATH.sub("PATH", value))
