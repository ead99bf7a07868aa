"""A file larger than memory must work, so memory may not follow the size of the file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_probe import MEGABYTE, peak_growth, rows_of


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_memory_does_not_follow_the_file(tmp_path, kind):
    path = tmp_path / f"large.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for row in rows_of(60):
                file.write(json.dumps(row) + "\n")
    elif kind == "json":
        with path.open("w") as file:
            for place, row in enumerate(rows_of(60)):
                file.write(("," if place else "[") + json.dumps(row))
            file.write("]")
    elif kind == "csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, next(rows_of(1)))
            table.writeheader()
            table.writerows({**row, "traces": row["traces"][0]} for row in rows_of(60))
    else:  # one single row group: the worst case, since a row group is what a reader decodes at once
        table = pa.Table.from_pylist(list(rows_of(120)))
        pq.write_table(table, path, use_dictionary=False, write_batch_size=50)
        assert pq.read_metadata(path).num_row_groups == 1
    rows, growth = peak_growth(path, tmp_path / "cache")
    assert rows == (6291 if kind == "parquet" else 3145)
    limit = 80 if kind == "parquet" else 25  # Parquet: page buffers, 170 and growing if it read whole groups
    assert growth < limit, f"{growth} MB more memory for a file of {path.stat().st_size // MEGABYTE} MB"
