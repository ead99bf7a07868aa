"""The problem sets of the study.

    python -m studies.qwen.data --gsm8k FOLDER --traces traces.parquet --benchmarks FOLDER --out study-qwen

FOLDER has GSM8K's train.jsonl and test.jsonl; traces.parquet is what ``luffy prepare traces`` wrote for train.jsonl.
512 training problems, drawn once, become the validation set. ``--benchmarks`` (math6.parquet and arc_c.parquet) are
copied for question 5. With ``--screened FILE`` (how many of 8 samples of the base were right, by problem; run.py
--screen writes it) the hard problems are written too.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from studies.qwen.plan import HARD_TRAIN

VALIDATION = 512
Row = dict[str, Any]


def make(
    gsm8k: Path, traces: Path, out: Path, screened: Mapping[str, int] | None = None, benchmarks: Path | None = None
) -> dict[str, int]:
    """Writes the sets and returns their sizes."""
    out.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(traces)
    held_out = set(random.Random(0).sample(range(table.num_rows), VALIDATION))
    rows = table.to_pylist()
    train = [row for i, row in enumerate(rows) if i not in held_out]
    validation = [row for i, row in enumerate(rows) if i in held_out]
    shutil.copyfile(gsm8k / "test.jsonl", out / "test.jsonl")
    if benchmarks is not None:
        (out / "benchmarks").mkdir(exist_ok=True)
        for file in benchmarks.glob("*.parquet"):
            shutil.copyfile(file, out / "benchmarks" / file.name)
    counts = {"validation": _write_lines(out / "val.jsonl", [_without(row, "traces") for row in validation])}
    plain = [_with_traces(row, lambda trace: _without(trace, "log_probs")) for row in train]
    sets = {"train": plain, "train-recorded": train}
    sets |= {f"train-traces{n}": [{**row, "traces": row["traces"][:n]} for row in plain] for n in (1, 2)}
    for name, found in sets.items():
        _write_table(out / f"{name}.parquet", pa.Table.from_pylist(found))
        counts[name] = len(found)
    if screened is not None:
        counts["train-hard"] = write_hard(out, screened)
    human = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(human) == len(rows), "train.jsonl is not what the traces were made for"
    kept = [line for i, line in enumerate(human) if i not in held_out]
    (out / "train-human.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return counts | {"train-human": len(kept)}


def write_hard(folder: Path, screened: Mapping[str, int]) -> int:
    """The screened training problems that the base never solved."""
    table = pq.read_table(folder / "train.parquet")
    hard = table.filter(pa.array([screened.get(name) == 0 for name in table["id"].to_pylist()]))
    _write_table(folder / HARD_TRAIN, hard)
    return int(hard.num_rows)


def _write_table(path: Path, table: pa.Table) -> None:
    aside = path.with_name(f".{path.name}")
    pq.write_table(table, aside, compression="zstd", compression_level=19)
    aside.replace(path)


def _with_traces(row: Row, change: Callable[[Row], Row]) -> Row:
    return {**row, "traces": [change(trace) for trace in row["traces"]]}


def _without(row: Row, key: str) -> Row:
    return {k: v for k, v in row.items() if k != key}


def _write_lines(path: Path, rows: list[Row]) -> int:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("study-qwen"))
    parser.add_argument("--benchmarks", type=Path)
    parser.add_argument("--screened", type=Path)
    args = parser.parse_args()
    right = json.loads(args.screened.read_text(encoding="utf-8")) if args.screened else None
    for name, count in make(args.gsm8k, args.traces, args.out, right, args.benchmarks).items():
        print(f"{count:5} {name}")
