"""Results of an evaluation: result.json and result.md, made from items.jsonl.

The settings that decide the responses are saved with them, so that a folder never mixes two.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from luffy._version import __version__
from luffy.errors import UserError
from luffy.evaluation.accuracy import SUCCESS, Row, Summary, summarise
from luffy.evaluation.benchmarks import Suite
from luffy.files import as_object, json_object, try_lock, write_atomically
from luffy.run_folder.layout import CONFIG
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.runs import read_config

REMEDY = "run the evaluation's command again, or delete it"
ITEMS, RESULT, RESULT_MD = "items.jsonl", "result.json", "result.md"
SHOWN = (  # settings in result.md
    "temperature", "top_p", "top_k", "max_tokens", "seed", "style", "system_prompt", "reward", "limit", "dtype",
    "engine",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """``benchmarks`` keeps the paper's column order; ``missing`` names those of the suite without a readable row,
    ``left_out`` rows that cannot be read."""

    settings: dict[str, Any]
    titles: dict[str, str]
    benchmarks: dict[str, Summary]
    repeats: dict[str, int]
    missing: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return model_label(self.settings["model"])

    @property
    def average(self) -> dict[str, float]:
        """Benchmarks weigh the same, as in the paper."""
        summaries = self.benchmarks.values()
        return {
            key: float(np.mean([getattr(summary, key) for summary in summaries]))
            for key in ("accuracy", "mean_tokens", "truncated")
        }


def model_label(model: str) -> str:
    """A short name: the folder's own; for a checkpoint, whose folder is only called model, ``RUN-step-000060`` with
    the run's path from here, because runs of several methods may all be called seed-0."""
    folder = Path(model).resolve()
    here = Path.cwd()
    parts = folder.relative_to(here).parts if folder.is_relative_to(here) else folder.parts[1:]
    kept = [part for part in parts if part not in ("checkpoints", "model", "latest")]
    if "checkpoints" not in folder.parts or not kept:
        return Path(model).name or folder.name
    return "-".join(kept[1:] if kept[0] == "runs" and len(kept) > 1 else kept)


def build_result(suite: Suite, settings: Settings, rows: Sequence[Row]) -> Result:
    wanted = {b.name: [row for row in rows if row["benchmark"] == b.name] for b in suite.benchmarks}
    return Result(
        settings=asdict(settings),
        titles={b.name: b.title for b in suite.benchmarks},
        benchmarks={b.name: summarise(wanted[b.name], b.k) for b in suite.benchmarks},
        repeats={b.name: b.repeats for b in suite.benchmarks},
        missing=suite.missing,
        left_out=suite.left_out,
    )


def as_json(result: Result) -> str:
    """Content of result.json."""
    content = {
        "version": __version__,
        "model": result.settings["model"],
        "suite": result.settings["suite"],
        "average": result.average,
        "benchmarks": {
            name: {"title": result.titles[name], "rows_per_item_in_file": result.repeats[name], **asdict(summary)}
            for name, summary in result.benchmarks.items()
        },
        "missing": list(result.missing),
        "left_out": list(result.left_out),
        "settings": result.settings,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_result(result: Result, folder: Path) -> None:
    write_atomically(folder / RESULT, as_json(result))
    write_atomically(folder / RESULT_MD, as_markdown(result))


# ---- Markdown


def as_markdown(result: Result) -> str:
    settings = result.settings
    lines = [f"# {result.name} on {Path(settings['suite']).name}", "", *_headline(result), "", *_details(result), ""]
    lines += [f"Not evaluated, there is nothing to read: {name}." for name in result.missing]
    lines += [f"Not evaluated, the row cannot be read: {row}." for row in result.left_out]
    if result.missing or result.left_out:
        lines.append("")
    keys = (*SHOWN, "date") if settings.get("date") else SHOWN
    shown = ", ".join(f"{key} {_shown(settings, key)}" for key in keys)
    lines.append(f"Settings: {shown}; luffy {__version__}.")
    return "\n".join(lines) + "\n"


def _shown(settings: Mapping[str, Any], key: str) -> str:
    """A system prompt is quoted: it has commas and lines of its own. None is the style's."""
    value = settings[key]
    return json.dumps(value, ensure_ascii=False) if key == "system_prompt" and value is not None else str(value)


def _headline(result: Result) -> list[str]:
    titles = [f"{result.titles[name]} (avg@{summary.k})" for name, summary in result.benchmarks.items()]
    average = f"Avg. of {len(titles)}" if result.missing else "Avg."
    cells = [percent(summary.accuracy) for summary in result.benchmarks.values()]
    return table(["model", *titles, average], [[result.name, *cells, percent(result.average["accuracy"])]])


def _details(result: Result) -> list[str]:
    header = ["benchmark", "items", "k", "avg@k", "± s.e.", "pass@k"]
    header += ["tokens", "of right", "of wrong", "truncated", "statuses"]
    rows = []
    for name, s in result.benchmarks.items():
        best = s.pass_at[max(s.pass_at)]
        lengths = (s.mean_tokens, s.mean_tokens_right, s.mean_tokens_wrong)
        error = "" if s.standard_error is None else percent(s.standard_error)
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(s.statuses.items()))
        rows.append([
            result.titles[name], str(s.items), str(s.k), percent(s.accuracy), error, percent(best),
            *("" if length is None else f"{length:.0f}" for length in lengths), percent(s.truncated), statuses,
        ])  # fmt: skip
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


# ---- reading an evaluation again


@dataclass(frozen=True)
class Evaluation:
    """Content of the folder of a finished evaluation."""

    content: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.content["settings"]
        return settings

    @property
    def titles(self) -> dict[str, str]:
        return {name: values["title"] for name, values in self.content["benchmarks"].items()}

    def rows_of(self, benchmark: str) -> list[Row]:
        return [row for row in self.rows if row["benchmark"] == benchmark]


def is_evaluation(folder: Path) -> bool:
    return (folder / ITEMS).is_file()


def read_items(folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(
        folder / ITEMS, benchmark=str, id=str, sample=int, response=str, tokens=int, finish=str, score=float, status=str
    )


def read_evaluation(folder: Path) -> Evaluation:
    content = read_result(folder)
    where, used = f"{folder / RESULT}: settings", {"model": str, "model_identity": str, "problems": str, "k": dict}
    as_object(content["settings"], where, REMEDY, temperature=float, **used)
    return Evaluation(content, tuple(read_items(folder)))


def read_result(folder: Path) -> dict[str, Any]:
    """The figures of a finished evaluation, without its responses."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --out folder of luffy eval")
    if not (folder / RESULT).is_file():
        state = "an unfinished evaluation: run its command again" if is_evaluation(folder) else "no evaluation"
        raise UserError(f"{folder} has no {RESULT}: it is {state}")
    path = folder / RESULT
    content = json_object(path.read_bytes(), path, REMEDY, settings=dict, benchmarks=dict)
    for name, figures in content["benchmarks"].items():
        as_object(figures, f"{path}: {name}", REMEDY, title=str, items=int, k=int, accuracy=float, pass_at=dict)
    return content


SETTINGS = "settings.json"

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Equal settings give equal responses, in whatever order and batches they are made."""

    model: str
    model_identity: str
    suite: str
    problems: str  # hash of every prompt and gold, options already in their order
    k: dict[str, int]
    reward: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    style: str
    system_prompt: str | None
    shuffle_options: bool
    limit: int | None
    dtype: str
    engine: str
    answer_in_thought: bool = False
    chat_template: str | None = None  # in place of the tokenizer's
    date: str | None = None  # that the prompts print, where the chat template asks for it
    success: float = SUCCESS  # a response that scores this or more is right
    cut_off: str = "score"  # reward.cut_off
    environment: dict[str, Any] | None = None
    prompt_opens_thought: bool = False  # a prompt does, and the reward reads no answer before that thought is closed


def problems_hash(suite: Suite) -> str:
    digest = hashlib.sha256()
    for benchmark in suite.benchmarks:
        for problem in benchmark.problems:
            prompt = problem.prompt
            said = prompt if isinstance(prompt, str) else [(m.role, m.content) for m in prompt]
            digest.update(json.dumps([benchmark.name, problem.id, said, problem.answer]).encode())
    return digest.hexdigest()


def recorded(folder: Path, setting: str, kind: type[T]) -> T | None:
    """A setting of the evaluation that this folder already holds; None where it holds none of this kind."""
    path = folder / SETTINGS
    value = _read_settings(path).get(setting) if path.exists() else None
    return value if isinstance(value, kind) else None


def _read_settings(path: Path) -> dict[str, Any]:
    return json_object(path.read_bytes(), path, "give another --out or delete that folder")


def claim(folder: Path, settings: Settings) -> None:
    """Write the settings of a new folder, or refuse one that was made with others."""
    path = folder / SETTINGS
    now = asdict(settings)
    if not path.exists():
        write_atomically(path, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        return
    before = _read_settings(path)
    # a model that was only moved is the same model: its identity decides
    # last the hash of the problems, which other settings decide
    before.setdefault("prompt_opens_thought", False)  # so older ones read all responses
    for key in [*(key for key in now if key not in ("model", "problems")), "problems"]:
        if before.get(key, now[key]) != now[key]:  # a folder may be older than a setting
            raise UserError(
                f"{folder} holds an evaluation with {key}={_in_short(before.get(key))}, this one has "
                f"{key}={_in_short(now[key])}; give another --out or delete that folder"
            )


def warn_of_another_prompt(settings: Settings) -> None:
    """Warn if the prompt differs from the training prompt of the checkpoint."""
    checkpoint = Path(settings.model).resolve().parent
    if checkpoint.parent.name != "checkpoints":
        return
    try:
        trained = read_config(checkpoint.parent.parent / CONFIG)
    except UserError:  # another tool's file
        return
    for option, now in {"style": settings.style, "system_prompt": settings.system_prompt}.items():
        before = trained.get(f"data.{option}", now)
        if before != now:
            flag = "--" + option.replace("_", "-")
            logger.warning("the run trained with %s %r, this evaluation has %r", flag, before, now)


def _in_short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two evaluations writing to one folder would do everything twice."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        if not try_lock(lock):
            raise UserError(f"another evaluation is writing to {folder}; wait for it or give another --out")
        yield
