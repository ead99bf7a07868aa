"""The scorers of reasoning-gym's families, for problems of ``data.train=reasoning_gym:FAMILY``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from luffy.errors import UserError, how_to_install
from luffy.registry import in_module
from luffy.rewards.extract import last_boxed
from luffy.rewards.kinds import REWARDS
from luffy.schema import knob

OPEN, CLOSE = "<answer>", "</answer>"
Read = Literal["marked", "tag", "box", "whole"]


@dataclass(frozen=True)
class ReasoningGymSettings:
    """Settings of the reward ``reasoning_gym``."""

    read: Read = knob(
        "marked",
        "the answer: in the last <answer> (tag) or \\boxed{} (box), the later of both (marked), or all text after the "
        "last thought (whole)",
    )


REWARDS.register("reasoning_gym", own=False, reads_thoughts=False, settings=ReasoningGymSettings)(
    in_module("luffy.rewards.verifier:ReasoningGymReward")
)


def load(read: Read) -> Callable[[str | None, str], tuple[float, str]]:
    """Scorer for a worker process, of a row's ``entry`` and a response."""
    try:
        import reasoning_gym  # noqa: F401  # now, before the memory of the worker is limited
    except ImportError as error:
        raise UserError(f"the reward reasoning_gym needs its package: {how_to_install('reasoning_gym')}") from error
    return functools.partial(score, read)


def score(read: Read, entry: str | None, response: str) -> tuple[float, str]:
    """Score and status of a response. Some scorers raise where an answer is malformed: it is wrong then, if the same
    scorer can judge the gold answer."""
    if not isinstance(entry, str):
        raise ValueError("its row has no column 'entry', which problems of reasoning_gym:FAMILY have")
    answer = answer_in(response, read)
    if answer is None:
        return 0.0, "no_answer"
    judged = json.loads(entry, object_hook=_untagged)
    scorer = _scorer(judged["family"], json.dumps(judged["config"]))
    try:
        value = float(scorer(answer, judged))
    except MemoryError:
        raise
    except Exception:
        scorer(judged["answer"], judged)
        return 0.0, "ok"
    if not 0 <= value <= 1:
        raise ValueError(f"the scorer of {judged['family']} gave {value}, not a number from 0 to 1")
    return value, "ok"


def answer_in(response: str, read: Read) -> str | None:
    """The answer that a response marks, or None."""
    if read == "whole":
        return response.strip() or None
    end = response.rfind(CLOSE) if read != "box" else -1
    start = response.rfind(OPEN, 0, end) if end >= 0 else -1
    box = last_boxed(response) if read != "tag" else None
    if box is not None and box.start > start:
        return box.content
    return response[start + len(OPEN) : end].strip() if start >= 0 else None


@functools.lru_cache(maxsize=256)
def _scorer(family: str, config: str) -> Callable[[str, Any], float]:
    from reasoning_gym import create_dataset

    scorer: Callable[[str, Any], float] = create_dataset(family, **json.loads(config), size=16, seed=0).score_answer
    return scorer


def _untagged(value: dict[str, Any]) -> Any:
    """What data/reasoning_gym.py marked as no JSON."""
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    return dict(value["__dict__"]) if value.keys() == {"__dict__"} else value
