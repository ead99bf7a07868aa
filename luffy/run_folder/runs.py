"""Reading what runs left behind: one run, or all runs below a folder.

A run may still be going: only complete lines count. Samples are indexed by their place in the file
and read when they are asked for, because a long run records more of them than fits in memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from luffy.config import Config, parse_yaml
from luffy.config.knobs import Knobs
from luffy.config.legacy import PARTS
from luffy.errors import ConfigError, UserError
from luffy.files import LineOf, check_regular, complete_lines, json_object, leads_away, parse_line, read_file
from luffy.run_folder.layout import CONFIG, DATA, METRICS, SAMPLES
from luffy.schema import build, to_dict

MOST = 1 << 53  # of whole numbers: beyond, a float skips some
LARGEST = 1e100  # of other numbers: sums and squares of larger ones leave the range of a float
LAST_TIME = 253402300800  # 10000-01-01 in seconds: no calendar goes beyond
EXCERPT = 40  # characters of a response in a list: how it ends
NOT_RUNS = {"checkpoints", "tensorboard", "wandb"}  # may hold thousands of files; W&B has a config.yaml of its own
Points = list[tuple[int, float]]
Kind = Literal["train", "sft"]

# Recorder writes numbers and texts before lists, so the token lists need no parsing to tell samples apart.
# Possessive repeats (*+): a text of a megabyte is walked once.
_SAMPLE_HEAD = re.compile(rb'\{"step": ?\d+(?:, ?"\w+": ?(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[-+.\w]+))*+(?=,)')


class EmptyRun(UserError):
    """A run folder without a complete step: nothing to show yet."""


@dataclass(frozen=True, slots=True)
class SampleHead:
    """What a list of samples needs. ``offset`` is the sample's place in the file, ``ends`` how its response ends."""

    offset: int
    step: int
    problem: str
    sample: int
    reward: float | None
    finish: str
    length: int
    off_policy_tokens: int
    override_tokens: int
    turns: int
    calls: int
    ends: str


@dataclass(frozen=True)
class SampleIndex:
    """Where each recorded group lies in samples.jsonl: the offsets of its lines."""

    path: Path
    places: Mapping[GroupKey, Sequence[int]]

    @property
    def steps(self) -> list[int]:
        return sorted({key.step for key in self.places})

    def groups(self, step: int) -> list[GroupKey]:
        """In the order they were recorded."""
        return [key for key in self.places if key.step == step]

    def group(self, key: GroupKey) -> list[dict[str, Any]]:
        """All samples of a group, as ``recorder.sample_rows`` wrote them."""
        return read_samples(self.path, self.places[key])


class GroupKey(NamedTuple):
    """A problem at a step. ``draw`` counts from 0: a small dataset may give a problem to a step several times."""

    step: int
    problem: str
    draw: int = 0


class GroupKeys:
    """The key of each sample, as they come. A group counts its samples upwards, so one that does not go on counting
    begins another group."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[int, int]] = {}  # draw and number of the last sample

    def of(self, head: SampleHead) -> GroupKey:
        draw, last = self._last.get((head.step, head.problem), (0, -1))
        draw += head.sample <= last
        self._last[head.step, head.problem] = draw, head.sample
        return GroupKey(head.step, head.problem, draw)


def read_samples(path: Path, offsets: Iterable[int]) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            rows.append(parse_line(file.readline(), path))
    return rows


@dataclass(frozen=True)
class RunRecord:
    """One run folder. ``config`` is flat: ``{"optim.lr": 1e-6, ...}``; ``rows`` are in order of their steps."""

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    samples: SampleIndex = SampleIndex(Path(SAMPLES), {})  # not looked for

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.name)

    @property
    def seed(self) -> int | None:
        value = self.config.get("seed")
        return value if isinstance(value, int) else None

    @property
    def success(self) -> float:
        """``reward.success``: from which reward on a problem is solved."""
        value = self.config.get("reward.success")
        return float(value) if is_number(value) else 1.0

    @property
    def kind(self) -> Kind:
        """What trained it. The config does not say: ``luffy train`` and ``luffy sft`` take the same recipe."""
        trained = [row for row in self.rows if row["step"] > 0]
        sampled = any(key.startswith("critic/") for row in trained for key in row)
        return "sft" if trained and not sampled else "train"

    @property
    def steps(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def stage_names(self) -> list[str]:
        """The stages of the run in their order, also those that have not begun; none of a plain run."""
        return list(dict.fromkeys(key.split(".")[1] for key in self.config if key.startswith("stages.")))

    @property
    def planned_steps(self) -> int | None:
        value = self.config.get("train.steps")
        return value if isinstance(value, int) and not self.stage_names else None

    @property
    def unfinished(self) -> bool:
        return self.planned_steps is not None and self.steps < self.planned_steps

    @cached_property
    def processes(self) -> int:
        """One a GPU. After a resume with another number that one counts for all steps. Where the run does not say, as
        older ones do not: those that its settings ask for."""
        if said := max(whole(_part_of(self.folder / DATA, "run").get("processes")), 0):
            return said
        return 1 if self.config.get("launch") == "local" else max(whole(self.config.get("parallel.workers")), 1)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the run says that it has no GPU; older ones do not say."""
        return _part_of(self.folder / DATA, "run").get("gpus") == 0

    @property
    def metrics(self) -> set[str]:
        return {key for row in self.rows for key in row} - {"step", "time"}

    @property
    def first_time(self) -> float:
        """When its first row was written; 0 where rows have no time."""
        return self._times[0] if self._times else 0.0

    @property
    def last_time(self) -> float | None:
        return max(self._times, default=None)

    @property
    def _times(self) -> list[float]:
        times = (row.get("time") for row in self.rows)
        return [float(time) for time in times if is_number(time) and 0 <= time < LAST_TIME]

    def series(self, metric: str) -> Points:
        """(step, value) where the metric was recorded and is a number to compute with."""
        return [(int(row["step"]), float(row[metric])) for row in self.rows if is_number(row.get(metric))]

    def at_start(self, metric: str) -> float | None:
        """The value before training: that of step 0, where it was evaluated."""
        return next((value for step, value in self.series(metric) if step == 0), None)

    def last(self, metric: str) -> float | None:
        return next((value for _, value in reversed(self.series(metric))), None)

    def best(self, metric: str) -> float | None:
        return max((value for _, value in self.series(metric)), default=None)

    def total(self, metric: str) -> float | None:
        values = [value for _, value in self.series(metric)]
        return math.fsum(values) if values else None


def is_number(value: Any) -> TypeGuard[float]:
    """A number to compute with: not NaN, and of a size whose sums and squares a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (LARGEST if isinstance(value, float) else MOST)


def whole(value: Any) -> int:
    """The value where it is a whole number, else 0: files of others may say anything."""
    return value if is_number(value) and isinstance(value, int) else 0


def _part_of(path: Path, key: str) -> dict[str, Any]:
    """An object in a JSON file; empty where the file does not have it, or cannot be read."""
    try:
        value = json_object(read_file(path), path, "").get(key)
    except (OSError, UserError):
        return {}
    return value if isinstance(value, dict) else {}


def load_run(folder: Path | str) -> RunRecord:
    """The record of a run folder; raises UserError where there is none, EmptyRun before its first step."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no run folder {folder}; name a folder with {METRICS} in it, or one above such folders")
    check_regular(folder / METRICS)
    if not (folder / METRICS).is_file():
        raise UserError(f"{folder} holds no {METRICS}; name the folder of a run (out/name of its recipe)")
    found = without_samples(folder, {})
    if not found.rows:
        raise EmptyRun(f"{folder / METRICS} has no complete line yet; wait for the run's first step")
    return replace(found, config=read_config(folder / CONFIG), samples=index_samples(folder / SAMPLES))


def first_stage(run: RunRecord) -> RunRecord | None:
    """The run whose model this one started from, up to the checkpoint that it took and without its samples; None where
    it is no run, or cannot be read."""
    path = run.config.get("model.path")
    if not isinstance(path, str):
        return None
    try:
        folder = next((place for place in Path(path).parents if (place / METRICS).is_file()), None)
        if folder is None or folder.resolve() == run.folder.resolve():
            return None
        found = without_samples(folder, read_config(folder / CONFIG), _checkpoint_step(path, folder))
    except (UserError, OSError, ValueError):
        return None
    return found if found.rows else None


def _checkpoint_step(path: str, run: Path) -> float:
    """The step of a model in a run's checkpoints, also where the path goes by ``latest``; infinite without one."""
    inside = Path(os.path.relpath(os.path.realpath(path), os.path.realpath(run))).parts
    if inside[:1] != ("checkpoints",) or len(inside) < 2:
        return math.inf
    step = checkpoint_step(run / "checkpoints" / inside[1])
    return math.inf if step is None else step


def checkpoint_step(folder: Path) -> int | None:
    """The step of a checkpoint: its name says it, or its state where a copy made a folder of the link ``latest``. None
    where neither does."""
    if named := re.fullmatch(r"step-(\d{6,})", folder.name):
        return int(named[1])
    step = _part_of(folder / "state.json", "progress").get("step")
    return step if is_number(step) and isinstance(step, int) and step >= 0 else None


def without_samples(
    folder: Path,
    config: Mapping[str, Any],
    through_step: float = math.inf,
    choose: Callable[[Sequence[bytes]], Sequence[bytes]] = lambda lines: lines,
) -> RunRecord:
    """The record of a run folder up to a step, with its flat config; samples are not looked for. ``choose``: which
    lines of its metrics to parse."""
    lines = choose([line for _, line in complete_lines(folder / METRICS)])
    rows = (metric_row(line, folder / METRICS) for line in lines)
    kept = in_order(row for row in rows if row["step"] <= through_step)
    return RunRecord(folder, config, kept)


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By step. A step may have two rows (its own, then an evaluation made up for): what was written last counts."""
    by_step: dict[Any, dict[str, Any]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def find_runs(places: Iterable[Path | str]) -> list[Path]:
    """Every run folder named by, or found below, ``places``: sorted below each, none twice."""
    found = [(place, _below(place, METRICS)) for place in map(Path, places)]
    for place, runs in found:
        if not runs:
            raise UserError(f"no run in or below {place}: no {METRICS} there; name a run folder (out/name of a recipe)")
    return _once(run for _, runs in found for run in runs)


def find_begun(places: Iterable[Path | str]) -> list[Path]:
    """As ``find_runs``, with those that have only written their config; there may be none yet. A config above other
    runs is a recipe that someone keeps there."""
    found = _once(run for place in map(Path, places) for run in _below(place, METRICS, CONFIG))
    above = {folder for run in found for folder in run.resolve().parents}
    return [run for run in found if (run / METRICS).is_file() or run.resolve() not in above]


def _below(place: Path, *signs: str) -> list[Path]:
    if not place.is_dir():
        raise UserError(f"no folder {place}; name a run folder, or one that holds runs below it")
    return sorted(runs_below(place, signs), key=natural_order)


def _once(runs: Iterable[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for run in runs:
        found.setdefault(run.resolve(), run)
    return list(found.values())


def load_runs(folders: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
    """All that have steps, and a line for each that has none or cannot be read; having none at all is an error."""
    records, skipped = [], []
    for folder in folders:
        try:
            records.append(load_run(folder))
        except UserError as error:
            skipped.append(str(error))
    if not records:
        raise UserError(skipped[0] if skipped else "no run was named; name at least one run folder")
    return records, skipped


def index_samples(path: Path) -> SampleIndex:
    places: dict[GroupKey, list[int]] = {}
    keys = GroupKeys()
    for offset, line in complete_lines(path):
        places.setdefault(keys.of(sample_head(offset, sample_texts(line, path))), []).append(offset)
    return SampleIndex(path, places)


def sample_texts(line: bytes, path: Path) -> dict[str, Any]:
    """A sample without its token lists; whole where an older version wrote it, which did not count its tokens."""
    head = _SAMPLE_HEAD.match(line)
    row = parse_line(head[0] + b"}", path) if head else {}
    row = row if "length" in row else parse_line(line, path)
    if not row.keys() >= {"step", "problem", "response"} and leads_away(path):
        raise UserError(f"{path}: a link to a file that holds no samples; put the file of the run in its place")
    return row


def sample_head(offset: int, row: Mapping[str, Any]) -> SampleHead:
    reward = row.get("reward")
    return SampleHead(
        offset=offset,
        step=whole(row.get("step")),
        problem=str(row.get("problem", "")),
        sample=whole(row.get("sample")),
        reward=float(reward) if is_number(reward) else None,
        finish=str(row.get("finish", "?")),
        length=_count(row, "length", "tokens", len),
        off_policy_tokens=_count(row, "off_policy_tokens", "off_policy", _flagged),
        override_tokens=_count(row, "override_tokens", "overrides", _flagged),
        turns=whole(row.get("turns")),
        calls=whole(row.get("calls")),
        ends=str(row.get("response", ""))[-EXCERPT:],
    )


def _count(row: Mapping[str, Any], key: str, tokens: str, of: Callable[[Any], int]) -> int:
    return whole(row[key]) if key in row else of(listed(row, tokens))


def _flagged(values: Sequence[Any]) -> int:
    return sum(map(bool, values))


def listed(row: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a sample; empty where there is none or something else stands there."""
    value = row.get(name)
    return value if isinstance(value, list) else []


def runs_below(place: Path, signs: Sequence[str]) -> Iterator[Path]:
    """Folders that hold one of the files ``signs``."""
    for folder, below, files in os.walk(place):
        below[:] = [name for name in below if name not in NOT_RUNS]
        if any(sign in files for sign in signs):
            yield Path(folder)


def natural_order(path: Path) -> list[tuple[int, int | str]]:
    """seed-2 before seed-10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", str(path)) if part]


def metric_row(line: bytes, path: Path) -> dict[str, Any]:
    row = parse_line(line, path)
    if not isinstance(row.get("step"), int) or not is_number(row["step"]):
        raise UserError(f"{LineOf(path, line)}: without a whole number as 'step'; mend or remove it")
    return row


def read_config(path: Path) -> dict[str, Any]:
    """The flat config with today's defaults filled in, so that a run of an older version still compares."""
    if not path.is_file():
        return {}
    try:
        values = parse_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: a run's config is a mapping, got {type(values).__name__}")
        return _current(values, path)
    except ConfigError:
        if leads_away(path):
            raise UserError(f"{path}: a link to a file that is no config; put that of the run in its place") from None
        raise


def _current(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        return flat_config(build(Config, values))
    except ConfigError:
        if leads_away(path):
            raise
        return flatten(values)  # has keys that are gone, or parts of a plugin: shown as it is


def flat_config(cfg: Knobs) -> dict[str, Any]:
    """``{"optim.lr": 1e-6, ...}``"""
    return flatten(to_dict(cfg))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under dotted keys; an empty mapping stays as it is. A part's name stands under its own key, beside
    its settings: ``{"algorithm.credit": "rloo", "algorithm.credit.length_penalty": 0.1}``."""
    return dict(_flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            settings = dict(value)
            if f"{prefix}{key}" in PARTS and "name" in value:
                yield f"{prefix}{key}", settings.pop("name")
            yield from _flat(settings, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
