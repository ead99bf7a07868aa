"""The tables of docs/results/scaling.md, from where the tests saw each feature work (docs/results/scaling-seen.jsonl).

LUFFY_SEEN=seen.jsonl make test-distributed              # and test-nccl SEEN=seen.jsonl, test-ray
python tests/distributed/feature_table.py seen.jsonl     # adds what is new, writes the table again
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SEEN = ROOT / "docs" / "results" / "scaling-seen.jsonl"
PAGE = ROOT / "docs" / "results" / "scaling.md"
BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"
LAUNCHES = ("torchrun, gloo", "torchrun, NCCL", "ray, gloo", "one process")


def read_notes(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_notes(rows: list[dict[str, str]]) -> dict[tuple[str, str], dict[str, str]]:
    """By feature and launch, the row that was seen last."""
    return {(row["feature"], row["launch"]): row for row in sorted(rows, key=lambda row: row["date"])}


def markdown_table(rows: dict[tuple[str, str], dict[str, str]]) -> str:
    """Features by launch with the number of processes; then what is refused, with a part of the error."""
    features = list(dict.fromkeys(feature for feature, launch in rows if launch != "refused"))
    lines = [f"| feature | {' | '.join(LAUNCHES)} |", "|---" * (1 + len(LAUNCHES)) + "|"]
    for feature in features:
        cells = [rows.get((feature, launch)) for launch in LAUNCHES]
        shown = [cell["ranks"] if cell else "" for cell in cells]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    dates = sorted({row["date"] for row in rows.values()})
    lines += ["", f"Seen on {dates[0]}" + (f" to {dates[-1]}." if len(dates) > 1 else ".")]
    lines += ["", "| refused by `--dry-run` | the error says |", "|---|---|"]
    lines += [f"| {feature} | {row['ranks']} |" for (feature, launch), row in rows.items() if launch == "refused"]
    return "\n".join(lines)


def page_with(text: str, made: str) -> str:
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main(*files: str) -> None:
    rows = newest_notes([row for path in (SEEN, *map(Path, files)) for row in read_notes(path)])
    SEEN.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    PAGE.write_text(page_with(PAGE.read_text(), markdown_table(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
