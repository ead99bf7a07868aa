"""A solved example in front of the teacher's prompts: without one it never calls the calculator (docs/log.md).

    python -m studies.calculator.shots ask DATA/train.jsonl DATA/asked.jsonl
    python -m studies.calculator.shots keep DATA/asked.parquet DATA/traces.parquet

``ask`` writes GSM8K's problems behind the example. ``keep`` takes what ``luffy prepare traces`` made of them: it drops
the example, and traces without a call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
TASK = r"Solve the problem with the function calculate: one call for each computation. Put the answer within \boxed{}."
PROBLEM = (
    "A baker makes 14 trays of 12 rolls. He sells 97 rolls in the morning and half of the rest in the afternoon, for "
    "$2 each. How many dollars does he earn?"
)
STEPS = (
    ("First the number of rolls.", "14 * 12", "168"),
    ("Now the rolls that he sells.", "97 + (168 - 97) / 2", "132.5"),
    ("Each brings $2.", "132.5 * 2", "265"),
)


def example() -> list[Row]:
    """The turns of a problem that was solved with three calls."""
    turns: list[Row] = [{"role": "user", "content": PROBLEM}]
    for text, expression, result in STEPS:
        call = {"name": "calculate", "arguments": {"expression": expression}}
        turns += [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": result, "name": "calculate"},
        ]
    return [*turns, {"role": "assistant", "content": r"He earns \boxed{265} dollars."}]


def asked(row: Row, place: int) -> Row:
    """A row of GSM8K as the teacher gets it."""
    prompt = [{"role": "system", "content": TASK}, *example(), {"role": "user", "content": row["question"]}]
    return {"id": f"train:{place}", "prompt": prompt, "answer": row["answer"].rpartition("####")[2].strip()}


def kept(row: Row) -> Row:
    """The row without the example, and with the traces that have a call."""
    called = [trace for trace in row["traces"] if any(turn["tool_calls"] for turn in trace["messages"] or ())]
    return {**row, "prompt": row["prompt"][-1]["content"], "traces": called}


def write_asked(source: Path, out: Path) -> int:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    out.write_text("".join(json.dumps(asked(*pair[::-1])) + "\n" for pair in enumerate(rows)), encoding="utf-8")
    return len(rows)


def write_kept(source: Path, out: Path) -> int:
    """How many problems have a trace."""
    table = pq.read_table(source)
    rows = [kept(row) for row in table.to_pylist()]
    schema = table.schema.set(table.schema.get_field_index("prompt"), pa.field("prompt", pa.string()))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out, compression="zstd")
    return sum(bool(row["traces"]) for row in rows)


if __name__ == "__main__":
    commands: dict[str, Callable[[Path, Path], int]] = {"ask": write_asked, "keep": write_kept}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    print(commands[sys.argv[1]](*map(Path, sys.argv[2:])), "problems")
