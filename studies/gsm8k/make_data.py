"""The problem sets of the study.

    python studies/gsm8k/make_data.py --gsm8k .../gsm8k --out study-data

Of GSM8K's own files it makes links; everything else is generated from fixed seeds, so it is the same everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stories import stories
from variants import variants

SHORT, LONG = (1, 2), (3, 4)


def make(gsm8k: Path, out: Path) -> dict[str, int]:
    out.mkdir(parents=True, exist_ok=True)
    test = [json.loads(line) for line in (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = list(stories(0, 4000, SHORT + LONG))
    known = {row["prompt"] for row in trained}
    sets: dict[str, Iterable[dict[str, Any]]] = {
        "stories-train": trained,
        "stories-train-easy": [row for row in trained if row["steps"] in SHORT],
        "stories-train-hard": [row for row in trained if row["steps"] in LONG],
        "stories-easy": _unseen(stories(1, 300, SHORT), known)[:256],
        "stories-hard": _unseen(stories(2, 300, LONG), known)[:256],
        "stories-words": stories(3, 256, SHORT + LONG, held_out=True),
        "stories-longer": stories(4, 256, (5, 6)),
        "gsm8k-varied": variants(test, 0),
    }
    for name in ("train", "test"):
        link = out / f"gsm8k-{name}.jsonl"
        link.unlink(missing_ok=True)
        link.symlink_to((gsm8k / f"{name}.jsonl").resolve())
    return {name: _write(out / f"{name}.jsonl", rows) for name, rows in sets.items()}


def _unseen(rows: Iterable[dict[str, Any]], known: set[object]) -> list[dict[str, Any]]:
    return [row for row in rows if row["prompt"] not in known]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("study-data"))
    args = parser.parse_args()
    for name, count in make(args.gsm8k, args.out).items():
        print(f"{count:5} {name}")
