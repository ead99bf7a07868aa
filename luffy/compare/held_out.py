"""The user's training data in three files: what arms train on, what decides between them, and what judges the end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.config import Config
from luffy.data.dataset import prompt_hash
from luffy.data.prompts import template_rows
from luffy.data.rows import columns_of
from luffy.errors import UserError
from luffy.files import write_atomically
from luffy.seeds import seed_of
from luffy.step.tasks import load_problems_of
from luffy.types import Problem, Trace

MOST, SHARE = 200, 0.1  # problems of each held-out file, and their share of all
FEWEST = 8


@dataclass(frozen=True)
class Split:
    """The files, and how many problems each has."""

    train: Path
    validation: Path
    test: Path
    sizes: Mapping[str, int]


def split_data(cfg: Config, folder: Path, held_out: int | None) -> Split:
    """Write the files below ``folder``. Problems with equal prompts go into the same one; which ones are held out does
    not depend on a seed. ``held_out``: problems of each held-out file; None: a tenth of all, at most 200."""
    problems = load_problems_of(cfg, cfg.data.train, cfg.data.split, limit=cfg.data.limit, require_answer=True)
    by_prompt: dict[int, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_prompt[prompt_hash(problem.prompt)].append(problem)
    order = sorted(by_prompt, key=lambda prompt: seed_of(f"compare:{prompt}"))
    wanted = held_out or min(MOST, int(SHARE * len(order)))
    if wanted < FEWEST or 2 * wanted > len(order) // 2:
        raise UserError(
            f"{len(order)} different training problems leave {wanted} for validation and as many for the test; at "
            f"least {FEWEST} each, and half of all for training, are needed: add data, or set --held-out"
        )
    parts = {
        "validation": [by_prompt[prompt][0] for prompt in order[:wanted]],
        "test": [by_prompt[prompt][0] for prompt in order[wanted : 2 * wanted]],
        "train": [problem for prompt in order[2 * wanted :] for problem in by_prompt[prompt]],
    }
    for name, part in parts.items():
        write_problems(folder / f"{name}.jsonl", part, traces=name == "train")
    files = {name: folder / f"{name}.jsonl" for name in parts}
    return Split(**files, sizes={name: len(part) for name, part in parts.items()})


def write_problems(path: Path, problems: Iterable[Problem], traces: bool) -> None:
    """A file in luffy's layout; without ``traces`` they are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row_of(problem) if traces else {**row_of(problem), "traces": []} for problem in problems]
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def row_of(problem: Problem) -> dict[str, Any]:
    prompt: Any = problem.prompt
    if not isinstance(prompt, str):
        prompt = template_rows(prompt, str)
    row = {"id": problem.id, "prompt": prompt, "answer": problem.answer, "source": problem.source}
    return {**columns_of(problem), **row, "traces": [trace_of(trace) for trace in problem.traces]}


def trace_of(trace: Trace) -> dict[str, Any]:
    messages = None if trace.messages is None else template_rows(trace.messages, str)
    values = {
        "text": trace.text, "token_ids": trace.token_ids, "messages": messages, "log_probs": trace.log_probs,
        "teacher": trace.teacher,
    }  # fmt: skip
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None
    }
