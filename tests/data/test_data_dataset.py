from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luffy.data import ProblemDataset, load_problems
from luffy.data import dataset as dataset_module
from luffy.data.sources import open_source
from luffy.errors import ConfigError, DataError
from luffy.types import Message, Trace

GOOD = [{"prompt": f"q{i}", "answer": str(i)} for i in range(6)]


def test_problems_by_index(write_jsonl):
    problems = load_problems(write_jsonl(GOOD))
    assert len(problems) == 6 and problems[4].answer == "4" and problems[-1].answer == "5"
    assert [problem.id for problem in problems] == [f"train:{i}" for i in range(1, 7)]
    assert problems.schemas == ("luffy",) and not problems.skipped
    with pytest.raises(IndexError):
        problems[6]


def test_gold_literals_survive_the_file(tmp_path):
    path = tmp_path / "gold.jsonl"
    literals = ['"007"', '"0.50"', '"1e3"', "1e3", "0.50", "7", "-0.0", "12345678901234567890"]
    path.write_text("".join(f'{{"prompt": "q", "answer": {text}}}\n' for text in literals))
    assert [problem.answer for problem in load_problems(path)] == [text.strip('"') for text in literals]


def test_bad_rows_stop_or_are_counted(write_jsonl):
    rows = [GOOD[0], {"prompt": "q", "answer": None}, GOOD[1], "not an object", {"prompt": 3, "answer": "1"}, GOOD[2]]
    path = write_jsonl(rows)
    with pytest.raises(DataError) as caught:
        load_problems(path)
    assert str(caught.value) == (
        f"{path}:2: column 'answer': expected a string, found None; fix the row or set data.bad_rows=skip"
    )
    problems = load_problems(path, bad_rows="skip")
    assert [problem.answer for problem in problems] == ["0", "1", "2"]
    assert problems[2].id == "train:6"
    assert problems.skipped == {"answer": 1, "json": 1, "prompt": 1}
    assert problems.messages[0] == str(caught.value) and len(problems.messages) == 3


def test_only_the_first_messages_are_kept(write_jsonl):
    problems = load_problems(write_jsonl([GOOD[0], *[{"prompt": "q", "answer": None}] * 9]), bad_rows="skip")
    assert problems.skipped["answer"] == 9 and len(problems.messages) == dataset_module.SHOWN_MESSAGES


def test_a_file_with_no_usable_row(write_jsonl):
    path = write_jsonl([{"prompt": "q", "answer": None}] * 3)
    with pytest.raises(DataError, match=r"no usable row, 3 skipped; the first: .*:1: column 'answer'"):
        load_problems(path, bad_rows="skip")


def test_unknown_columns_list_what_is_known_and_what_was_found(write_jsonl):
    path = write_jsonl([{"instruction": "q", "label": "1"}])
    with pytest.raises(DataError) as caught:
        load_problems(path)
    message = str(caught.value)
    assert "no known schema fits the columns instruction, label; known: luffy (prompt, answer, traces?)" in message
    assert "gsm8k (question, answer with ####)" in message and message.endswith("or with --column")
    problems = load_problems(path, columns={"prompt": "instruction", "answer": "label"})
    assert (problems[0].prompt, problems[0].answer, problems.schemas) == ("q", "1", ("columns",))


def test_a_mistyped_optional_column_is_not_silent(write_jsonl):
    path = write_jsonl([{"q": "a", "a": "1", "solutions": ["s"]}, {"q": "b", "a": "2"}])
    columns = {"prompt": "q", "answer": "a", "traces": "solutions"}
    assert [len(problem.traces) for problem in load_problems(path, columns=columns)] == [1, 0]
    with pytest.raises(DataError, match=r"no row has the column 'solutoins'; correct data.columns.traces"):
        load_problems(path, columns=columns | {"traces": "solutoins"})


def test_a_column_that_only_rows_beyond_the_limit_have_is_not_mistyped(write_jsonl):
    path = write_jsonl([{"q": "a", "a": "1"}, {"q": "b", "a": "2"}, {"q": "c", "a": "3", "solution": "s"}])
    columns = {"prompt": "q", "answer": "a", "traces": "solution"}
    assert [len(problem.traces) for problem in load_problems(path, columns=columns, limit=1)] == [0]
    with pytest.raises(DataError, match="no row has the column 'solutoin'"):
        load_problems(path, columns=columns | {"traces": "solutoin"}, limit=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": "jeopardy"}, "data.format='jeopardy' is unknown; known: auto, luffy, verl"),
        ({"schema": "columns"}, "names no prompt column"),
        ({"columns": {"answer": "a"}}, "names no prompt column"),
        ({"columns": {"prompt": "p", "reply": "a"}}, "unknown field 'reply'; known: prompt, answer"),
        ({"columns": {"prompt": "p", "teacher": "t"}}, "add traces: <column>"),
        ({"columns": {"prompt": "p"}, "schema": "gsm8k"}, "contradict each other"),
        ({"bad_rows": "ignore"}, "data.bad_rows='ignore' is unknown; known: error, skip"),
        ({"limit": 0}, "data.limit=0 leaves no problem"),
    ],
)
def test_options_that_cannot_be_honoured(write_jsonl, options, message):
    with pytest.raises(ConfigError, match=message):
        load_problems(write_jsonl(GOOD), **options)


def test_duplicate_ids_name_both_rows(write_jsonl):
    rows = [{**row, "id": str(index % 4)} for index, row in enumerate(GOOD)]
    path = write_jsonl(rows)
    with pytest.raises(DataError, match=rf"^{path}:5 and {path}:1: both have the id '0'; fix"):
        load_problems(path)
    problems = load_problems(path, bad_rows="skip")
    assert [problem.answer for problem in problems] == ["0", "1", "2", "3"]
    assert problems.skipped == {"duplicate id": 2}
    thrice = load_problems(write_jsonl([{**row, "id": "x"} for row in GOOD[:3]]), bad_rows="skip")
    assert [message.split(": ")[0] for message in thrice.messages] == [f"{path}:{row} and {path}:1" for row in (2, 3)]


def test_equal_hashes_of_different_ids_are_no_duplicates(write_jsonl, monkeypatch):
    monkeypatch.setattr(dataset_module, "text_hash", lambda text: 7)
    assert len(load_problems(write_jsonl(GOOD))) == 6
    with pytest.raises(DataError, match="both have the id 'x'"):
        load_problems(write_jsonl([{**GOOD[0], "id": "x"}, GOOD[1], {**GOOD[2], "id": "x"}]))


def test_the_same_file_twice_is_noticed(write_jsonl):
    path = write_jsonl(GOOD)
    with pytest.raises(DataError, match="both have the id"):
        load_problems([path, path])


def test_limit_stops_the_check_early(write_jsonl):
    path = write_jsonl([*GOOD[:3], {"prompt": "bad"}])
    assert [problem.answer for problem in load_problems(path, limit=3)] == ["0", "1", "2"]
    with pytest.raises(DataError):
        load_problems(path, limit=4)


def test_files_of_different_layouts_together(write_jsonl):
    first = write_jsonl([{"question": "q", "answer": "w\n#### 3"}], "gsm.jsonl")
    second = write_jsonl(GOOD[:1], "own.jsonl")
    problems = load_problems([first, second])
    assert [problem.id for problem in problems] == ["gsm:1", "own:1"] and problems.schemas == ("gsm8k", "luffy")
    # Within one file the first row decides, so a damaged row is not taken for another layout.
    mixed = write_jsonl([{"question": "q", "answer": "w\n#### 3"}, {"question": "q", "answer": "w 3"}], "mix.jsonl")
    with pytest.raises(DataError, match=r"mix.jsonl:2: column 'answer': expected a solution ending in"):
        load_problems(mixed)


def test_fingerprint_follows_bytes_and_options(write_jsonl):
    path = write_jsonl(GOOD)
    base = load_problems(path).fingerprint
    assert load_problems(path).fingerprint == base
    options = [{"limit": 3}, {"bad_rows": "skip"}, {"strip_calculator": False}, {"require_answer": False}]
    options.append({"columns": {"prompt": "prompt", "answer": "answer"}})
    prints = {base, *(load_problems(path, **option).fingerprint for option in options)}
    assert len(prints) == 6
    assert load_problems(write_jsonl(GOOD[:5])).fingerprint not in prints


def test_own_schema_from_parquet_where_absent_parts_are_null(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "answer": "1", "traces": [{"text": "t", "token_ids": None}]},
        {"prompt": [{"role": "user", "content": "r"}], "answer": "2", "traces": [{"text": None, "token_ids": [3, 4]}]},
        {"prompt": [{"role": "user", "content": "s"}], "answer": "3", "traces": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    problems = ProblemDataset(open_source(tmp_path / "own.parquet"))
    assert [problem.traces for problem in problems] == [(Trace(text="t"),), (Trace(token_ids=(3, 4)),), ()]
    assert problems[1].prompt == (Message("user", "r"),)


LUFFY_DATA = os.environ.get("LUFFY_DATA")


@pytest.mark.skipif(not LUFFY_DATA, reason="LUFFY_DATA is not set")
def test_real_gsm8k():
    folder = Path(str(LUFFY_DATA)) / "gsm8k"
    problems = load_problems(folder, require_traces=True)
    assert len(problems) == 7473 and problems[0].answer == "72"
    assert len(load_problems(folder, split="test")) == 1319
    for problem in problems:
        assert problem.answer.lstrip("-").replace(".", "", 1).isdigit(), problem
        text = problem.traces[0].text
        assert text is not None and "<<" not in text and "####" in text


@pytest.mark.skipif(not LUFFY_DATA, reason="LUFFY_DATA is not set")
def test_real_verl_benchmark():
    problems = load_problems(Path(str(LUFFY_DATA)) / "benchmarks" / "math6.parquet")
    assert len(problems) == 6023 and problems.schemas == ("verl",)
    assert problems[0].source == "math" and problems[0].answer == r"\left( 3, \frac{\pi}{2} \right)"
    prompt = problems[0].prompt
    assert [message.role for message in prompt if isinstance(message, Message)] == ["system", "user"]


PLAIN = {"prompt": "1+1", "answer": "2"}


@pytest.mark.parametrize(
    ("first", "later", "column"),
    [
        (PLAIN, {**PLAIN, "completion": "it is 2"}, "completion"),
        (PLAIN | {"traces": ["a"]}, {**PLAIN, "target": "it is 2"}, "target"),
        (PLAIN | {"completion": "a"}, {**PLAIN, "traces": ["it is 2"]}, "traces"),
        (PLAIN | {"traces": None}, {**PLAIN, "traces": None, "completion": "it is 2"}, "completion"),
        ({"prompt": "1+1", "reward_model": {"ground_truth": "2"}, "target": "a"},
         {"prompt": "1+2", "reward_model": {"ground_truth": "3"}, "traces": ["it is 3"]}, "traces"),
    ],
)  # fmt: skip
def test_a_trace_in_another_layouts_column_is_not_overlooked(write_jsonl, first, later, column):
    path = write_jsonl([first, later])
    with pytest.raises(DataError, match=rf":2: column '{column}': holds a trace, but the file is read as"):
        load_problems(path)
    skipping = load_problems(path, bad_rows="skip")
    assert len(skipping) == 1 and skipping.skipped == {column: 1}


def test_blank_texts_in_another_layouts_column_are_no_trace(write_jsonl):
    path = write_jsonl([PLAIN | {"traces": ["a"]}, {**PLAIN, "generations": ["", " "]}])
    assert [len(problem.traces) for problem in load_problems(path)] == [1, 0]


def test_a_row_without_a_trace_and_one_with_its_own_are_fine(write_jsonl):
    rows = [PLAIN | {"completion": "a"}, PLAIN, PLAIN | {"completion": "b", "traces": ["noted elsewhere"]}]
    assert [len(p.traces) for p in load_problems(write_jsonl(rows))] == [1, 0, 1]
    own = load_problems(write_jsonl([PLAIN, PLAIN | {"completion": "b"}], "own.jsonl"), schema="luffy")
    assert [p.traces for p in own] == [(), ()]  # the user said how to read it


def test_assistant_turns_before_the_last_are_reported(write_jsonl):
    def chat(*contents):
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]

    rows = [
        {"messages": chat("q", "a")},
        {"messages": chat("q", "a", "more?", "b")},
        {"messages": chat("q", "a", "why?")},
    ]
    path = write_jsonl([*rows, {"messages": chat("q", "a", "b?", "b", "c?", "c")}])
    (notice,) = load_problems(path, require_answer=False).turns_notices
    assert notice.startswith(f"2 of 4 problems are chats with several assistant turns, first: {path}:2; only the last")
    assert load_problems(write_jsonl(rows[:1]), require_answer=False).turns_notices == []
    # a prompt that is a chat with turns of its own loses nothing: its trace is a column of its own
    verl = {"prompt": chat("q", "a", "more?"), "reward_model": {"ground_truth": "1"}, "target": "b"}
    assert load_problems(write_jsonl([verl])).turns_notices == []
    shared = [{"from": ("human", "gpt")[i % 2], "value": str(i)} for i in range(4)]
    assert load_problems(write_jsonl([{"conversations": shared}]), require_answer=False).turns_notices
