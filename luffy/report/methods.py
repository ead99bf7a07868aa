"""Runs that differ in their seed alone are one method."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luffy.report.runs import RunRecord
from luffy.report.text import legible

OWN = ("seed", "name", "out")  # what names a run rather than a method
SHOWN_DIFFERENCES = 3  # keys in a label

_SEED_FOLDER = re.compile(r"(?:seed|s)[-_]?\d+")
_SEED_SUFFIX = re.compile(r"(?P<label>.+?)[-_.](?:seed|s)[-_]?\d+")


@dataclass(frozen=True)
class Method:
    """``settings`` are the flat config without what names a run, and ``command``: train or sft."""

    label: str
    runs: tuple[RunRecord, ...]
    settings: Mapping[str, Any]

    @property
    def repeated_seeds(self) -> list[int]:
        counts = Counter(run.seed for run in self.runs if run.seed is not None)
        return [seed for seed, count in counts.items() if count > 1]


Styled = tuple[int, Method]  # a method and the number of its colour and dash


def group_runs(runs: Sequence[RunRecord]) -> list[Method]:
    """Methods in the order of their first run. Folders that name a method keep it apart even where the
    config is the same (two versions of the code, say); other runs go by their config alone."""
    groups: dict[str, Method] = {}
    for run in runs:
        named = folder_label(run)
        settings = settings_of(run)
        key = json.dumps([named, settings], sort_keys=True, default=str)
        if key in groups:
            groups[key] = replace(groups[key], runs=(*groups[key].runs, run))
        else:
            groups[key] = Method(legible(named or plain_label(run)), (run,), settings)
    return _distinct(list(groups.values()))


def folder_label(run: RunRecord) -> str | None:
    """``luffy`` of a folder ``luffy/seed-0``, ``luffy-s0`` or ``luffy-seed0``; None of any other."""
    folder = run.folder.resolve()
    if _SEED_FOLDER.fullmatch(folder.name):
        return folder.parent.name or None
    match = _SEED_SUFFIX.fullmatch(folder.name)
    return match["label"] if match else None


def plain_label(run: RunRecord) -> str:
    """The run's own name, its seed stripped, for folders that follow no convention."""
    name = run.name.rsplit("/", 1)[-1]
    match = _SEED_SUFFIX.fullmatch(name)
    return match["label"] if match else name


def settings_of(run: RunRecord) -> dict[str, Any]:
    """A path that carries the run's own seed (data drawn per seed) does not make another method."""
    kept = {key: _without_seed(value, run.seed) for key, value in run.config.items() if key not in OWN}
    return {"command": run.kind, **kept}


def _without_seed(value: Any, seed: int | None) -> Any:
    if not isinstance(value, str) or seed is None:
        return value
    return re.sub(rf"(?<![A-Za-z0-9])(seed[-_]?|s){seed}(?![0-9])", r"\1*", value)


def differing_keys(methods: Sequence[Method]) -> list[str]:
    """Keys that do not have one and the same value in all of them, in the order of the config."""
    keys = dict.fromkeys(key for method in methods for key in method.settings)
    return [key for key in keys if len({_written(m.settings.get(key)) for m in methods}) > 1]


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _distinct(methods: list[Method]) -> list[Method]:
    """Methods of the same label get what sets them apart written behind it."""
    counts = Counter(method.label for method in methods)
    twins = {label: [m for m in methods if m.label == label] for label, n in counts.items() if n > 1}
    seen: Counter[str] = Counter()
    result = []
    for method in methods:
        label = method.label
        if label in twins:
            label = f"{label}{_difference(method, differing_keys(twins[label]))}"
        seen[label] += 1
        result.append(replace(method, label=label if seen[label] == 1 else f"{label} #{seen[label]}"))
    return result


def _difference(method: Method, keys: Sequence[str]) -> str:
    shown = [f"{key.rsplit('.', 1)[-1]}={show_value(method.settings.get(key))}" for key in keys[:SHOWN_DIFFERENCES]]
    rest = [f"{len(keys) - len(shown)} more"] if len(keys) > len(shown) else []
    return f" ({', '.join([*shown, *rest])})" if shown else ""


def show_value(value: Any) -> str:
    return legible(value) if isinstance(value, str) else json.dumps(value, default=str)
