"""Lists of samples: filters, search, groups, growth; and that nothing is read twice."""

import json

import pytest
from builders import write_rows

from luffy.errors import UserError
from luffy.run_folder import runs
from luffy.view.live import Filter, SampleTable


def append_rows(path, rows):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture
def rows(make_sample_row):
    return [
        make_sample_row(1, 0, problem="p1"),
        make_sample_row(1, 1, problem="p1", reward=0.0, off_policy=[0, 0, 0], finish="length"),
        make_sample_row(
            1, 0, problem="p2", off_policy=[0, 0, 0], overrides=[0, 1, 0], response="\u00c9t\u00e9 \\boxed{42}"
        ),
        make_sample_row(2, 0, problem="p1", off_policy=[0, 0], tokens=["a", " b"], reward=None, turns=2),
    ]


@pytest.fixture
def table(tmp_path, rows):
    append_rows(tmp_path / "samples.jsonl", rows)
    return SampleTable(tmp_path / "samples.jsonl")


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"reward": "solved"}, [0, 2]),
        ({"reward": "unsolved"}, [1]),  # without a reward it is neither
        ({"reward": "solved", "success": 0.0}, [0, 1, 2]),  # this much or more, as in training
        ({"reward": "unsolved", "success": 1.1}, [0, 1, 2]),
        ({"off_policy": "teacher"}, [0]),
        ({"off_policy": "override"}, [2]),
        ({"off_policy": "policy"}, [1, 3]),
        ({"off_policy": "turns"}, [3]),
        ({"truncated": True}, [1]),
        ({"shortest": 3}, [0, 1, 2]),
        ({"longest": 2}, [3]),
        ({"longest": 0}, []),
        ({"step": 2}, [3]),
        ({"search": "boxed{42}"}, [2]),
        ({"search": "\\boxed"}, [2]),
        ({"search": "\u00e9T\u00c9"}, [2]),
        ({"search": "P2"}, [2]),
        ({"search": "token_ids"}, []),  # in every line, in no text
        ({"search": "a b", "reward": "unsolved"}, [1]),
    ],
)
def test_filters(table, wanted, numbers):
    with table.up_to_date():
        assert table.matching(Filter(**wanted)) == numbers


def test_files_with_escaped_letters_are_searched_too(tmp_path, rows):
    path = tmp_path / "ascii.jsonl"
    write_rows(path, rows)
    with SampleTable(path).up_to_date() as table:
        assert table.matching(Filter(search="\u00e9t\u00e9")) == [2]


def test_a_damaged_line_shifts_no_hit(tmp_path, rows):
    path = tmp_path / "samples.jsonl"
    for row in rows:
        append_rows(path, [row])
        with path.open("a") as file:
            file.write('{"step": 1, "problem": "boxed{42}\n')
    table = SampleTable(path)
    for _ in range(len(rows)):  # each damaged line ends a reading
        with pytest.raises(UserError, match="not JSON"), table.up_to_date():
            pass
    with table.up_to_date():
        assert len(table.heads) == len(rows)
        assert [table.matching(Filter(search=text)) for text in ("boxed{42}", "p1")] == [[2], [0, 1, 3]]


def test_an_unknown_filter_is_an_error():
    with pytest.raises(UserError, match="off_policy is 'x'; known: teacher, override, policy, turns"):
        Filter(off_policy="x")


def test_a_problem_over_training(table):
    with table.up_to_date():
        assert table.steps_of(3) == [(1, 0), (2, 3)]
        numbers, group = table.group(1)
        assert numbers == [0, 1]
        assert [row["sample"] for row in group] == [0, 1]


def test_growth_is_read_once_and_a_half_line_not_at_all(table, rows, monkeypatch):
    parsed = []
    monkeypatch.setattr(
        "luffy.view.live.sample_texts", lambda line, path: parsed.append(1) or runs.sample_texts(line, path)
    )
    with table.up_to_date():
        assert len(parsed) == len(table.heads) == 4
        assert table.matching(Filter(search="boxed")) == [2]
    parsed.clear()
    whole = json.dumps(rows[2], ensure_ascii=False) + "\n"
    with table.path.open("a", encoding="utf-8") as file:
        file.write(whole[:30])
    with table.up_to_date():
        assert len(table.heads) == 4 and not parsed
    with table.path.open("a", encoding="utf-8") as file:
        file.write(whole[30:])
    with table.up_to_date():
        assert table.matching(Filter(search="boxed")) == [2, 4]
    assert len(parsed) == 2  # one new line: read for the list, and for the search


def test_the_list_needs_no_token_lists(tmp_path, make_sample_row, monkeypatch):
    """Rows as the recorder writes them now: the numbers and texts come first."""

    def parse(line, path):
        return pytest.fail("parsed a whole line") if line.endswith(b"\n") else json.loads(line)

    monkeypatch.setattr("luffy.run_folder.runs.parse_line", parse)
    head = {"step": 3, "problem": 'a "quoted" \\ problem', "sample": 1, "reward": -0.5, "status": "ok", "finish": "stop",
            "length": 2, "off_policy_tokens": 1, "override_tokens": 0, "turns": 3, "calls": 2, "end": "answer", "prompt": "x", "answer": None, "response": "y, [1]"}  # fmt: skip
    for separators in ((",", ":"), (", ", ": ")):
        path = tmp_path / f"{len(separators[0])}.jsonl"
        path.write_text(json.dumps({**head, "token_ids": [1, 2], "advantages": None}, separators=separators) + "\n")
        with SampleTable(path).up_to_date() as table:
            (found,) = table.heads
        assert (found.step, found.problem, found.reward, found.length) == (3, 'a "quoted" \\ problem', -0.5, 2)
        assert (found.turns, found.calls, found.ends) == (3, 2, "y, [1]")


def test_a_long_file_is_read_in_parts(table, monkeypatch):
    monkeypatch.setattr("luffy.view.live.PATIENCE_S", -1.0)
    for known in (1, 2, 3, 4):
        with table.up_to_date():
            assert (len(table.heads), table.complete) == (known, False)
    with table.up_to_date():
        assert (len(table.heads), table.complete) == (4, True)
        assert [head.offset for head in table.heads] == sorted({head.offset for head in table.heads})


def test_a_problem_drawn_twice_in_a_step_is_two_groups(tmp_path, make_sample_row):
    rows = [make_sample_row(1, k, reward=reward) for reward in (0.0, 1.0) for k in range(2)]
    append_rows(tmp_path / "samples.jsonl", rows)
    with SampleTable(tmp_path / "samples.jsonl").up_to_date() as table:
        assert [table.group(n) for n in (0, 3)] == [([0, 1], rows[:2]), ([2, 3], rows[2:])]
