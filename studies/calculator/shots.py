"""Solved examples in front of the teacher's prompts: without them it never calls the calculator (docs/log.md).

    python -m studies.calculator.shots ask DATA/train.jsonl DATA/asked.jsonl
    python -m studies.calculator.shots keep DATA/asked.parquet DATA/traces.parquet

``ask`` writes GSM8K's problems behind the examples. Their calls are plain JSON in the text: with the chat template's
tags this teacher does not follow them. ``keep`` takes what ``luffy prepare traces`` made of them: it drops the
examples, traces without a call or with an error in reply, and problems without a trace.
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
EXAMPLES = (  # a problem, the steps of its solution with a call and its result each, and the answer
    (
        "A baker makes 14 trays of 12 rolls. He sells 97 rolls in the morning and half of the rest in the afternoon, "
        "for $2 each. How many dollars does he earn?",
        (
            ("First the number of rolls.", "14 * 12", "168"),
            ("Now the rolls that he sells.", "97 + (168 - 97) / 2", "132.5"),
            ("Each brings $2.", "132.5 * 2", "265"),
        ),
        r"He earns \boxed{265} dollars.",
    ),
    (
        "Mia reads 18 pages a day for 5 days. Her book has 240 pages. She reads the rest at 25 pages a day. How many "
        "days does the rest take?",
        (
            ("In 5 days she reads", "18 * 5", "90"),
            ("The pages that are left:", "240 - 90", "150"),
            ("At 25 pages a day she needs", "150 / 25", "6"),
        ),
        r"The rest takes \boxed{6} days.",
    ),
    (
        "A farmer has 3 fields with 45 trees each. A third of all trees are apple trees, and each gives 20 kg of "
        "apples. How many kg of apples does he harvest?",
        (
            ("All trees:", "3 * 45", "135"),
            ("Apple trees:", "135 / 3", "45"),
            ("Apples:", "45 * 20", "900"),
        ),
        r"He harvests \boxed{900} kg.",
    ),
)


def examples() -> list[Row]:
    """The turns of the solved problems."""
    turns: list[Row] = []
    for problem, steps, answer in EXAMPLES:
        turns.append({"role": "user", "content": problem})
        for text, expression, result in steps:
            call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
            turns.append({"role": "assistant", "content": f"{text}\n{call}"})
            turns.append({"role": "tool", "content": result, "name": "calculate"})
        turns.append({"role": "assistant", "content": answer})
    return turns


def asked(row: Row, place: int) -> Row:
    """A row of GSM8K as the teacher gets it."""
    prompt = [{"role": "system", "content": TASK}, *examples(), {"role": "user", "content": row["question"]}]
    return {"id": f"train:{place}", "prompt": prompt, "answer": row["answer"].rpartition("####")[2].strip()}


def kept(row: Row) -> Row:
    """The row without the examples, and with the traces that have a call and no error in reply."""
    return {**row, "prompt": row["prompt"][-1]["content"], "traces": [t for t in row["traces"] if called_well(t)]}


def called_well(trace: Row) -> bool:
    replies = [turn["content"] for turn in trace["messages"] or () if turn["role"] == "tool"]
    return bool(replies) and not any(reply.startswith("error") for reply in replies)


def write_asked(source: Path, out: Path) -> int:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    out.write_text("".join(json.dumps(asked(row, place)) + "\n" for place, row in enumerate(rows)), encoding="utf-8")
    return len(rows)


def write_kept(source: Path, out: Path) -> int:
    """How many problems have a trace; the others are dropped."""
    table = pq.read_table(source)
    rows = [row for row in map(kept, table.to_pylist()) if row["traces"]]
    schema = table.schema.set(table.schema.get_field_index("prompt"), pa.field("prompt", pa.string()))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out, compression="zstd")
    return len(rows)


if __name__ == "__main__":
    commands: dict[str, Callable[[Path, Path], int]] = {"ask": write_asked, "keep": write_kept}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    print(commands[sys.argv[1]](*map(Path, sys.argv[2:])), "problems")
