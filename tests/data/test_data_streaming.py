"""A file larger than memory must work, so memory may not follow the size of the file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MEGABYTE = 1 << 20

# Peak memory above that after the imports, while every row is checked and then 400 are read at random.
PROBE = """
import random, re, sys
from pathlib import Path
from luffy.data import ProblemDataset, open_source, sources

sources.IN_MEMORY_BYTES = 1 << 20

def megabytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

def watched(rows):
    for index, row in enumerate(rows):
        if index % 50 == 0:
            seen.append(megabytes())
        yield row

seen = [megabytes()]
source = open_source(sys.argv[1])
scan = source.scan
source.scan = lambda: watched(scan())
problems = ProblemDataset(source)
for index in random.Random(0).choices(range(len(problems)), k=400):
    assert problems[index].answer == str(index)
    seen.append(megabytes())
print(len(problems), max(seen) - seen[0])
"""


def rows_of(megabytes: int, row_bytes: int = 20_000):
    noise = random.Random(0)
    for index in range(megabytes * MEGABYTE // row_bytes):
        text = noise.randbytes(row_bytes // 2 - 50).hex()
        yield {"prompt": f"q{index}", "answer": str(index), "traces": [text]}


def peak_growth(path: Path, cache: Path) -> tuple[int, int]:
    environment = {"LUFFY_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[2]
    probe = [sys.executable, "-c", PROBE, str(path)]
    done = subprocess.run(probe, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows, growth = done.stdout.split()
    return int(rows), int(growth)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_follow_the_file(tmp_path, kind):
    path = tmp_path / f"large.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for row in rows_of(60):
                file.write(json.dumps(row) + "\n")
    else:  # one single row group: the worst case, since a row group is what a reader decodes at once
        table = pa.Table.from_pylist(list(rows_of(120)))
        pq.write_table(table, path, use_dictionary=False, write_batch_size=50)
        assert pq.read_metadata(path).num_row_groups == 1
    rows, growth = peak_growth(path, tmp_path / "cache")
    assert rows == (3145 if kind == "jsonl" else 6291)
    limit = 25 if kind == "jsonl" else 80  # Parquet: page buffers, 170 and growing if it read whole groups
    assert growth < limit, f"{growth} MB more memory for a file of {path.stat().st_size // MEGABYTE} MB"
