"""Settings that decide the responses of an evaluation, saved with them so that a folder never mixes two."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from luffy.errors import UserError
from luffy.evaluation.accuracy import SUCCESS
from luffy.evaluation.benchmarks import Suite
from luffy.files import json_object, try_lock, write_atomically
from luffy.run_folder.layout import CONFIG
from luffy.run_folder.runs import read_config

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
    value = _read(path).get(setting) if path.exists() else None
    return value if isinstance(value, kind) else None


def _read(path: Path) -> dict[str, Any]:
    return json_object(path.read_bytes(), path, "give another --out or delete that folder")


def claim(folder: Path, settings: Settings) -> None:
    """Write the settings of a new folder, or refuse one that was made with others."""
    path = folder / SETTINGS
    now = asdict(settings)
    if not path.exists():
        write_atomically(path, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        return
    before = _read(path)
    # a model that was only moved is the same model: its identity decides
    # last the hash of the problems, which other settings decide
    before.setdefault("prompt_opens_thought", False)  # so older ones read all responses
    for key in [*(key for key in now if key not in ("model", "problems")), "problems"]:
        if before.get(key, now[key]) != now[key]:  # a folder may be older than a setting
            raise UserError(
                f"{folder} holds an evaluation with {key}={_shown(before.get(key))}, this one has "
                f"{key}={_shown(now[key])}; give another --out or delete that folder"
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


def _shown(value: Any) -> str:
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
