"""The authors' benchmark files: refused before anything is written, if one cannot be read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luffy.errors import DataError
from studies.paper.benchmarks import prepare_benchmarks

MATH = ("aime", "aime25", "amc", "math", "minerva", "olympiad_bench")


def write_benchmark(path, sources):
    rows = [
        {"data_source": s, "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
        for s in sources
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("empty", ["valid.all.parquet", "valid.gpqa.parquet"])
def test_a_file_of_zero_bytes_is_refused(tmp_path, empty):
    write_benchmark(tmp_path / "valid.all.parquet", MATH)
    (tmp_path / empty).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{empty}: the file is empty; give a file with data"):
        prepare_benchmarks(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_copied_and_the_rest_named(tmp_path):
    write_benchmark(tmp_path / "valid.all.parquet", MATH)
    benchmarks, missing = prepare_benchmarks(tmp_path, tmp_path / "out")
    assert [len(b.problems) for b in benchmarks] == [1] * 6
    assert missing == ["valid.arc_c.parquet", "valid.gpqa.parquet", "valid.mmlu_pro.parquet"]
    assert {p.name for p in (tmp_path / "out/benchmarks").iterdir()} == {"math6.parquet", "validation.parquet"}
