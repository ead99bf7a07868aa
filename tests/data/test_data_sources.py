from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luffy.data import sources
from luffy.data.sources import JsonFloat, RowError, open_source
from luffy.errors import DataError

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(10)]


def write_arrow(path: Path, rows: list[dict], rows_per_batch: int = 3, stream: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    new_writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new_writer(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)


def test_jsonl_rows_by_index_and_in_order(write_jsonl):
    path = write_jsonl(ROWS)
    source = open_source(path)
    assert len(source) == 10
    assert [source[i] for i in (9, 0, 4)] == [ROWS[9], ROWS[0], ROWS[4]]
    assert list(source) == ROWS
    assert source.name(3) == f"{path}:4"
    assert source.default_id(3) == "train:4"
    assert source.fingerprint == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    with pytest.raises(IndexError, match="row 10 of 10"):
        source[10]


def test_jsonl_with_bom_blank_lines_crlf_and_no_final_newline(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n   \n{"a": "\xc3\xa9"}\n\n{"a": 3}')
    source = open_source(path)
    assert list(source) == [{"a": 1}, {"a": "é"}, {"a": 3}]
    assert [source[i]["a"] for i in (2, 1, 0)] == [3, "é", 1]
    assert [source.number(i) for i in range(3)] == [2, 5, 7]


def test_json_floats_keep_their_literal_and_stay_floats(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"answer": 0.50, "big": 1e3, "log_probs": [-0.25], "whole": 7}\n')
    row = open_source(path)[0]
    assert (row["answer"].text, row["big"].text) == ("0.50", "1e3")
    assert row["answer"] + 1 == 1.5 and row["log_probs"] == [-0.25] and row["whole"] == 7
    copy = pickle.loads(pickle.dumps(row["answer"]))
    assert isinstance(copy, JsonFloat) and copy.text == "0.50"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', r"bad.jsonl:2: not valid JSON \(Expecting ',' delimiter\), found .*data.bad_rows=skip"),
        (b"[1, 2]", r"bad.jsonl:2: expected a JSON object, found \[1, 2\]"),
        (b'{"a": "\xff"}', r"bad.jsonl:2: not UTF-8 text"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"bad.jsonl:2: not valid JSON"),
        (rb'{"a": "\uD83D"}', r"bad.jsonl:2: half of a surrogate pair"),
        (b"[" * 200_000, r"bad.jsonl:2: not valid JSON"),
    ],
)
def test_a_bad_json_line_is_named_and_the_others_stay_readable(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 0}\n' + line + b'\n{"a": 2}\n')
    source = open_source(path)
    with pytest.raises(RowError, match=message):
        source[1]
    assert source[2] == {"a": 2}
    assert [isinstance(row, RowError) for row in source.scan()] == [False, True, False]
    with pytest.raises(RowError):
        list(source)


def test_escaped_surrogate_pairs_are_text(tmp_path):
    path = tmp_path / "emoji.jsonl"
    path.write_bytes(rb'{"a": "\ud83d\ude00"}')
    assert open_source(path)[0] == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_gives_its_objects(tmp_path, indent):
    rows = [{"a": "b\\"}, {"a": '"}, ["', "c": [{"d": [1, 2]}]}, {"a": "é\n", "e": {}}]
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf\n " + json.dumps(rows, indent=indent, ensure_ascii=False).encode() + b"\n")
    source = open_source(path)
    assert list(source) == rows and len(source) == 3
    assert [source[i] for i in (2, 0, 1)] == [rows[2], rows[0], rows[1]]
    assert (source.name(2), source.default_id(2)) == (f"{path}:3", "data:3")
    assert source.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_bad_element_of_a_json_list_is_named_and_the_others_stay_readable(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"a": 0.50}, {"a": }, 7, {"a": 3},]')
    source = open_source(path)
    assert source[0]["a"].text == "0.50" and source[3] == {"a": 3}
    faults = {
        1: "data.json:2: not valid JSON",
        2: "data.json:3: expected a JSON object, found 7",
        4: "data.json:5: not",
    }
    for index, fault in faults.items():
        with pytest.raises(RowError, match=fault):
            source[index]
    assert [isinstance(row, RowError) for row in source.scan()] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"a": 1}', "it is not closed"),
        ('[{"a": 1}]\n[{"a": 2}]', "more follows after its closing bracket"),
        ('[{"a": "1}]', "a string in it is not closed"),
        ('[{"a": 1}}', "it is not closed"),
    ],
)
def test_what_begins_as_a_json_list_and_is_none(tmp_path, text, why):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"begins with a JSON list, but {why}; give one list or one object per line"):
        open_source(path)


def test_csv_values_stay_texts_and_empty_ones_are_null(tmp_path):
    path = tmp_path / "rows.csv"
    text = (
        '\ufeffprompt,answer,traces\r\n"1,5 + ""2""\nis?",007,\r\n\r\né\u2028x,0.50,"a\n\nb"\n'
        + f"long,1,{'x' * 200_000}"
    )
    path.write_bytes(text.encode())
    source = open_source(path)
    rows = [
        {"prompt": '1,5 + "2"\nis?', "answer": "007", "traces": None},
        {"prompt": "é\u2028x", "answer": "0.50", "traces": "a\n\nb"},
        {"prompt": "long", "answer": "1", "traces": "x" * 200_000},
    ]
    assert list(source) == rows and [source[i] for i in (2, 0, 1)] == [rows[2], rows[0], rows[1]]
    assert [source.number(i) for i in range(3)] == [2, 5, 8]  # lines, as an editor shows them
    assert source.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(text.encode() + b"y")
    with pytest.raises(DataError, match="the file changed while it was in use"):
        source[0]


def test_a_bad_csv_row_is_named_and_the_others_stay_readable(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'prompt,answer\na,1\nb\nc,\xff\n"d"e,4\nf,5\n"g,6\n')
    source = open_source(path)
    assert source[0] == {"prompt": "a", "answer": "1"} and source[4] == {"prompt": "f", "answer": "5"}
    faults = {
        1: r"rows.csv:3: expected 2 values, one per column, found 1",
        2: r"rows.csv:4: not UTF-8 text",
        3: r"rows.csv:5: not valid CSV",
        5: r"rows.csv:7: not valid CSV \(unexpected end of data\)",
    }
    for index, fault in faults.items():
        with pytest.raises(RowError, match=fault):
            source[index]
    assert [isinstance(row, RowError) for row in source.scan()] == [False, True, True, True, False, True]


def test_csv_files_of_a_folder_count_only_where_there_is_no_other_data(write_jsonl, tmp_path):
    write_jsonl(ROWS, "repo/data/train.jsonl")
    (tmp_path / "repo" / "scores.csv").write_text("a,b\n1,2\n")
    (tmp_path / "repo" / "data" / "train.csv").write_text("a,b\n1,2\n")
    assert list(open_source(tmp_path / "repo")) == ROWS
    (tmp_path / "tables" / ".git").mkdir(parents=True)
    (tmp_path / "tables" / ".git" / "a.json").write_text("{}")
    (tmp_path / "tables" / "train.csv").write_text("prompt,answer\nq,1\n")
    assert list(open_source(tmp_path / "tables")) == [{"prompt": "q", "answer": "1"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "the file is empty"),
        ("blank.jsonl", b"\n \n", "the file is empty"),
        ("empty.parquet", b"", "the file is empty"),
        ("text.parquet", b"not parquet at all", "not a Parquet file"),
        ("text.arrow", b"not arrow at all, whatever one reads", "not an Arrow file"),
        ("table.tsv", b"a\tb\n1\t2\n", r"unknown file type '.tsv'; give one of .jsonl"),
        ("empty.json", b"[ ]", "the file is empty"),
        ("empty.csv", b"prompt,answer\n", "the file is empty"),
        ("twice.csv", b"a,a\n1,2\n", "the first line must name every column once, found"),
        ("unnamed.csv", b"a,\n1,2\n", "the first line must name every column once, found"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / name)


def test_missing_paths():
    with pytest.raises(DataError, match=r"^nowhere/train.jsonl: no such file or folder; check the path$"):
        open_source("nowhere/train.jsonl")
    with pytest.raises(DataError, match=r"^nowhere/train.JSONL: no such file or folder; check the path$"):
        open_source("nowhere/train.JSONL")
    with pytest.raises(DataError, match=r"^\./nowhere: no such file or folder; check the path$"):
        open_source("./nowhere")
    with pytest.raises(DataError, match="no data path was given"):
        open_source([])


def test_a_file_that_changes_under_us_is_noticed(write_jsonl):
    path = write_jsonl(ROWS)
    source = open_source(path)
    with open(path, "a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="the file changed while it was in use"):
        source[0]


@pytest.mark.parametrize("in_memory", [True, False])
def test_parquet_by_index_in_memory_and_through_the_disk_copy(tmp_path, monkeypatch, in_memory):
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 1 << 20 if in_memory else 0)
    monkeypatch.setattr(sources, "ROWS_PER_BATCH", 3)
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)
    source = open_source(path)
    assert list(source) == ROWS and len(source) == 10
    copies = tmp_path / "cache" / "arrow"
    assert not copies.exists()  # a scan alone copies nothing
    assert [source[i] for i in (9, 3, 0, 2)] == [ROWS[9], ROWS[3], ROWS[0], ROWS[2]]
    assert source.name(0) == f"{path}:1"
    assert source.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert copies.exists() is not in_memory
    if not in_memory:
        assert [file.name for file in copies.iterdir()] == [f"{source.fingerprint}.arrow"]
        assert open_source(path)[5] == ROWS[5]
        assert len(list(copies.iterdir())) == 1
    assert pickle.loads(pickle.dumps(source))[7] == ROWS[7]


def test_an_unwritable_cache_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LUFFY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 0)
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    with pytest.raises(DataError, match="set LUFFY_CACHE to a writable folder"):
        open_source(path)[0]


def test_parquet_and_arrow_without_rows(tmp_path):
    empty = pa.table({"a": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "none.parquet")
    with pytest.raises(DataError, match="the file has no rows"):
        open_source(tmp_path / "none.parquet")
    with pa.OSFile(str(tmp_path / "none.arrow"), "wb") as file, pa.ipc.new_stream(file, empty.schema):
        pass
    with pytest.raises(DataError, match="the file has no rows"):
        open_source(tmp_path / "none.arrow")


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_stream_and_file_formats(tmp_path, stream):
    write_arrow(tmp_path / "data.arrow", ROWS, stream=stream)
    source = open_source(tmp_path / "data.arrow")
    assert list(source) == ROWS
    assert [source[i] for i in (9, 3, 2)] == [ROWS[9], ROWS[3], ROWS[2]]
    assert pickle.loads(pickle.dumps(source))[7] == ROWS[7]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_a_float_of_few_bits_is_the_shortest_decimal_that_names_it(tmp_path, kind):
    narrow = kind.to_pandas_dtype()
    numbers = [narrow(0.1), None, narrow(2048), narrow(1 / 3)]
    expected = [0.1, None, 2048.0, {16: 0.3333, 32: 0.33333334, 64: 1 / 3}[kind.bit_width]]
    nested = [{"gold": number} for number in numbers[:3]] + [None]
    columns = {
        "answer": pa.array(numbers, kind),
        "meta": pa.array(nested, pa.struct([("gold", kind)])),
        "log_probs": pa.array([numbers[:1]] * 4, pa.list_(kind)),
    }
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    source = open_source(tmp_path / "data.parquet")
    rows = list(source)
    assert [row["answer"] for row in rows] == expected and rows == [source[i] for i in range(4)]
    assert [row["meta"] and row["meta"]["gold"] for row in rows] == [0.1, None, 2048.0, None]
    assert rows[0]["log_probs"] == [float(narrow(0.1))]


def test_saved_dataset_folders_of_one_and_of_several_splits(tmp_path):
    one = tmp_path / "one"
    write_arrow(one / "data-00000-of-00002.arrow", ROWS[:6])
    write_arrow(one / "data-00001-of-00002.arrow", ROWS[6:])
    write_arrow(one / "cache-1234.arrow", ROWS)
    (one / "state.json").write_text("{}")
    (one / "dataset_info.json").write_text("{}")
    assert list(open_source(one)) == ROWS
    several = tmp_path / "several"
    write_arrow(several / "train" / "data-00000-of-00001.arrow", ROWS[:7])
    write_arrow(several / "test" / "data-00000-of-00001.arrow", ROWS[7:])
    (several / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert list(open_source(several)) == ROWS[:7]
    assert list(open_source(several, split="test")) == ROWS[7:]
    with pytest.raises(DataError, match="no file of split 'validation' here, only the subfolders test, train"):
        open_source(several, split="validation")


def test_folder_picks_the_split_its_names_say(write_jsonl, tmp_path):
    write_jsonl(ROWS[:2], "gsm/train-00000-of-00002.jsonl")
    write_jsonl(ROWS[2:4], "gsm/train-00001-of-00002.jsonl")
    write_jsonl(ROWS[4:], "gsm/my_test.jsonl")
    write_jsonl(ROWS[:1], "gsm/dev.jsonl")
    folder = tmp_path / "gsm"
    assert list(open_source(folder)) == ROWS[:4]
    assert list(open_source(folder, split="test")) == ROWS[4:]
    assert list(open_source(folder, split="validation")) == ROWS[:1]
    with pytest.raises(DataError, match=r"no file of split 'extra'; the names say train, test, validation"):
        open_source(folder, split="extra")


def test_folder_without_split_names_gives_all_and_data_subfolder_is_found(write_jsonl, tmp_path):
    write_jsonl(ROWS[5:], "flat/b.jsonl")
    write_jsonl(ROWS[:5], "flat/a.jsonl")
    assert list(open_source(tmp_path / "flat")) == ROWS
    write_jsonl(ROWS, "repo/data/train.jsonl")
    write_jsonl(ROWS[:1], "repo/extended/train.jsonl")
    (tmp_path / "repo" / "README.md").write_text("hello")
    assert list(open_source(tmp_path / "repo")) == ROWS


def test_folders_that_leave_a_choice_are_refused(write_jsonl, tmp_path):
    write_jsonl(ROWS, "configs/main/train.jsonl")
    write_jsonl(ROWS, "configs/socratic/train.jsonl")
    with pytest.raises(DataError, match="only the subfolders main, socratic; name one"):
        open_source(tmp_path / "configs")
    write_jsonl(ROWS, "only_test/test/a.jsonl")
    with pytest.raises(DataError, match="no file of split 'train' here, only the subfolders test"):
        open_source(tmp_path / "only_test")
    write_jsonl(ROWS, "twice/train.jsonl")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "twice" / "train.parquet")
    with pytest.raises(DataError, match=r"holds \.jsonl and \.parquet files; name the files to read"):
        open_source(tmp_path / "twice")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="no data file in this folder"):
        open_source(tmp_path / "void")


def test_several_paths_are_concatenated(write_jsonl, tmp_path):
    first, second = write_jsonl(ROWS[:4], "a/x.jsonl"), write_jsonl(ROWS[4:], "b/y.jsonl")
    source = open_source([first, second])
    assert list(source) == ROWS and source[3] == ROWS[3] and source[4] == ROWS[4]
    assert source.name(4) == f"{second}:1"
    assert (source.default_id(3), source.default_id(4)) == ("x:4", "y:1")
    assert source.fingerprint != open_source([second, first]).fingerprint
    same_stem = open_source([first, write_jsonl(ROWS[4:], "b/x.jsonl")])
    assert same_stem.default_id(4) == f"{tmp_path}/b/x:1"


def test_a_hub_id_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"^org/name: no such file .* install huggingface_hub, or give a local path$"):
        open_source("org/name")


def test_a_hub_id_is_fetched_and_failures_are_one_line(monkeypatch, write_jsonl, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write_jsonl(ROWS, "snapshot/main/train.jsonl")
    write_jsonl(ROWS[:1], "snapshot/socratic/train.jsonl")
    asked = {}

    def fetch(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr("luffy.data.data_files.hub_fault", lambda: None)  # as where the hub answers
    assert list(open_source("openai/gsm8k/main")) == ROWS
    assert asked["repo"] == "openai/gsm8k" and asked["repo_type"] == "dataset"
    assert "main/*.parquet" in asked["allow_patterns"]
    with pytest.raises(DataError, match="has no data files under 'nothing'"):
        open_source("openai/gsm8k/nothing")

    def fail(repo: str, **options: object) -> str:
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DataError) as caught:
        open_source("org/name")
    assert str(caught.value) == (
        "org/name: no such file or folder, and hub dataset 'org/name' cannot be fetched "
        "(ConnectionError: no route); check the name, or give a local path"
    )


def test_importing_the_package_loads_no_optional_or_heavy_library():
    heavy = "{'transformers', 'datasets', 'huggingface_hub', 'vllm', 'ray'}"
    code = f"import luffy.data, sys; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
