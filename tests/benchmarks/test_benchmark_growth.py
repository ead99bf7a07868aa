"""The table of growing steps has a row for every point, and its speeds are tokens over seconds."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "growth.py"
SMALL = ["--shape", "tiny", "--samples", "2", "--prompt-tokens", "4", "--device", "cpu", "--dtype", "float32"]


@pytest.mark.slow
def test_a_row_a_point(tmp_path, capsys):
    out = tmp_path / "growth.json"
    runpy.run_path(str(SCRIPT))["main"]([*SMALL, "--points", "2x3,1x5", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["problems"], row["new_tokens"], row["update_tokens"]) for row in rows] == [
        (2, 2 * 2 * 3, 2 * 2 * (4 + 3)),
        (1, 2 * 5, 2 * (4 + 5)),
    ]
    for row in rows:
        assert row["rollout_tokens_per_second"] == pytest.approx(row["new_tokens"] / row["phases"]["rollout"])
    heads, *shown = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert heads[-5:-2] == ["update/s", "step/s", "outside"]
    assert [line[:2] for line in shown] == [["2", "3"], ["1", "5"]] and shown[0][-2].endswith("%")
