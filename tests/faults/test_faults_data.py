"""Data as it really comes: malformed rows of every kind, mixed types, files larger than memory, files that change."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import write_rows
from malformed_rows import MALFORMED
from memory_probe import MEGABYTE, peak_growth, rows_of
from trainings import train

from luffy.data import load_problems
from luffy.data.sources import open_source
from luffy.errors import DataError, UserError
from luffy.train.loop import Trainer


def sound(i):
    return json.dumps({"id": f"p{i}", "prompt": f"{i}+1", "answer": str(i + 1), "traces": [f"{i + 1}"]}).encode()


def test_every_malformed_row_is_skipped_and_counted_and_no_sound_one_is_lost(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [line for i, bad in enumerate(MALFORMED.values()) for line in (sound(i), bad)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    problems = load_problems(str(path), bad_rows="skip")
    assert [p.id for p in problems] == [f"p{i}" for i in range(len(MALFORMED))]
    assert problems.skipped.total() == len(MALFORMED) >= 60


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_row_is_one_line_that_names_it(tmp_path, kind):
    path = tmp_path / "train.jsonl"
    path.write_bytes(sound(0) + b"\n" + MALFORMED[kind] + b"\n")
    with pytest.raises(DataError) as caught:
        load_problems(str(path))
    said = str(caught.value)
    assert said.startswith(f"{path}:2: ") and "\n" not in said and len(said) < 1000


def test_mixed_types_in_one_column(tmp_path):
    """A gold is text, whatever the file makes of it; what is no gold is counted by its column."""
    golds = ["7", 7, 7.5, "007", "1e3", None, True, [7], ["1", "2"], {"a": 1}, "½"]
    path = tmp_path / "train.jsonl"
    write_rows(path, ({"id": str(i), "prompt": "q", "answer": g} for i, g in enumerate(golds)))
    problems = load_problems(str(path), bad_rows="skip")
    assert [p.answer for p in problems] == ["7", "7", "7.5", "007", "1e3", "7", "½"]
    assert problems.skipped == {"answer": 4}


@pytest.mark.parametrize("column", [pa.array([1, 2]), pa.array([1.5, 2.5]), pa.array(["1", None]), pa.array([[1], [2]]),
                                    pa.array([b"1", b"2"]), pa.array([{"a": 1}, None]), pa.array([True, False])])  # fmt: skip
def test_any_type_of_a_parquet_column_is_an_answer_or_one_clear_line(tmp_path, column):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": column}), path)
    try:
        assert all(isinstance(p.answer, str) and p.answer for p in load_problems(str(path)))
    except DataError as error:
        assert "column 'answer'" in str(error) and str(path) in str(error)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_damaged_tables_are_one_line(tmp_path, kind):
    """A flipped byte or a cut anywhere in a table: its problems, or a DataError; no other exception and no crash."""
    path = tmp_path / f"train.{kind.split()[0]}"
    write_table(path, kind)
    data = path.read_bytes()
    damaged = [data[:cut] for cut in range(1, len(data), 97)]
    damaged += [data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :] for i in range(0, len(data), 23)]
    refused = 0
    for content in damaged:
        path.unlink()  # not in place: the bytes before may still be mapped
        path.write_bytes(content)
        try:
            assert all(isinstance(p.answer, str) for p in load_problems(str(path), bad_rows="skip"))
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    print(f"\n{kind}: {len(damaged)} damaged files, {refused} refused, the others read")
    assert refused > len(data) // 97


def write_table(path, kind):
    rows = [{"id": str(i), "prompt": f"{i}", "answer": str(i), "traces": ["t"]} for i in range(50)]
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
        return
    new_writer = pa.ipc.new_stream if kind == "arrow stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new_writer(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_a_gigabyte_in_constant_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 2048 * MEGABYTE:
        pytest.skip("needs 2 GB of disk")
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for row in rows_of(1024):
            file.write(json.dumps(row) + "\n")
    rows, growth = peak_growth(path, tmp_path / "cache", timeout_s=900)
    print(f"\n{path.stat().st_size / 1e9:.2f} GB, {rows} rows: {growth} MB more memory")
    path.unlink()
    assert rows == 53_687 and growth < 25


CHANGES = {
    "a row less": lambda lines: lines[:-1],
    "a row more": lambda lines: [*lines, lines[0].replace('"p0"', '"extra"')],
    "another order": lambda lines: lines[::-1],
    "an answer of the same length": lambda lines: [lines[0].replace('"answer": "0"', '"answer": "9"'), *lines[1:]],
    "another trace": lambda lines: [lines[0].replace("0+0=0", "0+0=7"), *lines[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_changed_between_save_and_resume_is_refused(make_config, sums, tmp_path, change):
    path = tmp_path / "train.jsonl"
    shutil.copy(sums, path)
    train(make_config(data={"train": str(path)}, train={"steps": 2}))
    lines = sums.read_text().splitlines()
    changed = CHANGES[change](lines)
    assert changed != lines
    path.write_text("\n".join(changed) + "\n")
    with pytest.raises(UserError, match="training data changed since"):
        Trainer(make_config(data={"train": str(path)}))
    shutil.copy(sums, path)  # the old bytes again, with another date
    with Trainer(make_config(data={"train": str(path)})) as trainer:
        assert trainer.progress.step == 2


def test_a_file_changed_in_place_during_a_run_is_noticed_and_a_touched_one_is_not(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(sound(0) + b"\n" + sound(1) + b"\n")
    source = open_source(path)
    os.utime(path, (1, 1))
    assert source[0]["id"] == "p0"
    path.write_bytes(path.read_bytes().replace(b'"2"', b'"3"'))  # as long as before
    with pytest.raises(DataError, match="the file changed while it was in use"):
        source[1]
