"""The problem sets of the study.

    python studies/gsm8k/make_data.py --data FOLDER --out study-data

FOLDER is laid out as `luffy eval` wants it (docs/data.md): gsm8k/train.jsonl and test.jsonl, benchmarks/math6.parquet
and arc_c.parquet. Of GSM8K's own files it makes links; the benchmarks become problems whose answer is a number, as in
GSM8K; everything else is generated from fixed seeds, so it is the same everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stories import stories
from variants import variants

from luffy.evaluation.benchmarks import load_suite, question_of, read_choices
from luffy.types import Problem

SHORT, LONG = (1, 2), (3, 4)


def make(data: Path, out: Path) -> dict[str, int]:
    out.mkdir(parents=True, exist_ok=True)
    train, test = (_read(data / "gsm8k" / f"{name}.jsonl") for name in ("train", "test"))
    trained = list(stories(0, 4000, SHORT + LONG))
    known = {row["prompt"] for row in trained}
    easy, hard = (_unseen(stories(seed, 300, steps), known)[:256] for seed, steps in ((1, SHORT), (2, LONG)))
    known |= {row["prompt"] for row in easy + hard}
    sets: dict[str, Iterable[dict[str, Any]]] = {
        "stories-train": trained,
        "stories-train-easy": [row for row in trained if row["steps"] in SHORT],
        "stories-train-hard": [row for row in trained if row["steps"] in LONG],
        "stories-easy": easy,
        "stories-hard": hard,
        "stories-words": stories(3, 256, SHORT + LONG, held_out=True),
        "stories-longer": stories(4, 256, (5, 6)),
        "stories-warm": _unseen(stories(5, 1700, SHORT + LONG), known)[:1600],
        "gsm8k-train-easy": [row for row in train if calculations(row) in SHORT],
        "gsm8k-train-hard": [row for row in train if calculations(row) > max(SHORT)],
        "gsm8k-easy": [row for row in test if calculations(row) in SHORT],
        "gsm8k-hard": [row for row in test if calculations(row) > max(SHORT)],
        "gsm8k-varied": variants(test, 0),
        "math-integers": filter(None, map(_integer, _benchmark(data, "math6", "math500"))),
        "arc-numbers": map(_numbered, _benchmark(data, "ood", "arc_c")[:256]),
    }
    for name in ("train", "test"):
        link = out / f"gsm8k-{name}.jsonl"
        link.unlink(missing_ok=True)
        link.symlink_to((data / "gsm8k" / f"{name}.jsonl").resolve())
    return {name: _write(out / f"{name}.jsonl", rows) for name, rows in sets.items()}


def calculations(row: dict[str, Any]) -> int:
    """How many a human solution of GSM8K marks; a few mark none, which says nothing of their length."""
    return int(row["answer"].count("<<"))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _benchmark(data: Path, suite: str, name: str) -> tuple[Problem, ...]:
    found = (b.problems for b in load_suite(suite, data, shuffle=False).benchmarks if b.name == name)
    return next(found, ())


def _integer(problem: Problem) -> dict[str, Any] | None:
    answer = problem.answer.strip()
    return {"prompt": question_of(problem), "answer": answer} if answer.removeprefix("-").isdigit() else None


def _numbered(problem: Problem) -> dict[str, Any]:
    """Options with numbers instead of letters, so that the answer is a number."""
    choices = read_choices(question_of(problem), problem.answer, problem.id)
    options = [f"{n}) {option}" for n, option in enumerate(choices.options, 1)]
    question = f"{choices.stem.rstrip()} Give the number of the right option.\n\n" + "\n".join(options)
    return {"prompt": question, "answer": str(choices.gold + 1)}


def _unseen(rows: Iterable[dict[str, Any]], known: set[object]) -> list[dict[str, Any]]:
    return [row for row in rows if row["prompt"] not in known]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/ and benchmarks/")
    parser.add_argument("--out", type=Path, default=Path("study-data"))
    args = parser.parse_args()
    for name, count in make(args.data, args.out).items():
        print(f"{count:5} {name}")
