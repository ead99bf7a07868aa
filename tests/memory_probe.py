"""How much memory reading a dataset takes, measured in a process of its own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MEGABYTE = 1 << 20

# Peak memory above that after the imports, while every row is checked and then 400 are read at random.
PROBE = """
import random, re, sys
from pathlib import Path
from luffy.data import ProblemDataset, sources

sources.IN_MEMORY_BYTES = 1 << 20

def megabytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024

def watched(rows):
    for index, row in enumerate(rows):
        if index % 50 == 0:
            seen.append(megabytes())
        yield row

seen = [megabytes()]
source = sources.open_source(sys.argv[1])
scan = source.scan
source.scan = lambda: watched(scan())
problems = ProblemDataset(source)
for index in random.Random(0).choices(range(len(problems)), k=400):
    assert problems[index].answer == str(index)
    seen.append(megabytes())
print(len(problems), max(seen) - seen[0])
"""


def rows_of(megabytes: int, row_bytes: int = 20_000) -> Iterator[dict]:
    noise = random.Random(0)
    for index in range(megabytes * MEGABYTE // row_bytes):
        text = noise.randbytes(row_bytes // 2 - 50).hex()
        yield {"prompt": f"q{index}", "answer": str(index), "traces": [text]}


def peak_growth(path: Path, cache: Path, timeout_s: float = 120) -> tuple[int, int]:
    environment = {"LUFFY_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[1]
    probe = [sys.executable, "-c", PROBE, str(path)]
    done = subprocess.run(probe, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    rows, growth = done.stdout.split()
    return int(rows), int(growth)
