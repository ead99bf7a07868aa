from __future__ import annotations

from typing import Any

import pytest

from luffy.data.rows import ROW_KEY, ReadOptions, RowView
from luffy.data.schemas import LAYOUTS, READERS, detect
from luffy.data.sources import JsonFloat, RowError
from luffy.types import Message, Problem, Trace


def read_row(row: dict[str, Any], schema: str | None = None, **options: Any) -> Problem:
    name = schema or ("columns" if "columns" in options else detect(row))
    assert name is not None
    return READERS[name](RowView(row, "d.jsonl:7", "d:7", ReadOptions(**options)))


def fault(row: dict[str, Any], schema: str | None = None, **options: Any) -> str:
    with pytest.raises(RowError) as caught:
        read_row(row, schema, **options)
    message = str(caught.value)
    assert message.startswith("d.jsonl:7: ") and "\n" not in message
    return message


# ---- detection


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "q", "answer": "1"}, "luffy"),
        ({"prompt": "q", "answer": "1", "traces": [], "completion": "c"}, "luffy"),
        ({"prompt": [], "reward_model": {}, "data_source": "m"}, "verl"),
        ({"prompt": [], "target": None}, "verl"),
        ({"prompt": [], "target_lst": None}, "verl"),
        ({"problem": "p", "answer": "1", "generations": []}, "openr1"),
        ({"problem": "p", "answer": "1", "solution": "s"}, "openr1"),
        ({"question": "q", "answer": "so 3\n#### 3"}, "gsm8k"),
        ({"prompt": "q", "completion": "c"}, "completion"),
        ({"messages": [{"role": "user", "content": "q"}]}, "messages"),
        ({"prompt": "q", "messages": []}, "luffy"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "sharegpt"),
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"instruction": "q", "output": "a", "messages": []}, "messages"),
        ({"prompt": "q", "completion": "c", "answer": "1"}, "completion"),
        ({"question": "q", "answer": "3"}, None),
        ({"instruction": "q", "label": "3"}, None),
        ({}, None),
    ],
)
def test_detect(row, name):
    assert detect(row) == name


def test_every_detectable_layout_is_described_and_has_a_reader():
    assert set(LAYOUTS) == set(READERS) - {"columns"}


# ---- our own


def test_own_schema_in_full():
    problem = read_row(
        {
            "id": 5,
            "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}],
            "answer": "007",
            "source": "toy",
            "traces": [
                "it is 5",
                {"text": "five", "teacher": "big"},
                {"token_ids": [1, 2], "log_probs": [-0.5, 0], "teacher": None},
            ],
            "level": 3,
        }
    )
    assert problem == Problem(
        id="5",
        prompt=(Message("system", "be brief"), Message("user", "2+3?")),
        answer="007",
        source="toy",
        traces=(
            Trace(text="it is 5"),
            Trace(text="five", teacher="big"),
            Trace(token_ids=(1, 2), log_probs=(-0.5, 0.0)),
        ),
        meta={ROW_KEY: "d.jsonl:7", "level": 3},
    )


def test_own_schema_defaults():
    problem = read_row({"prompt": "2+3?", "answer": "5"})
    assert (problem.id, problem.prompt, problem.traces, problem.source) == ("d:7", "2+3?", (), "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.50", "0.50"),
        (" 1e3 ", " 1e3 "),
        (JsonFloat("0.50"), "0.50"),
        (JsonFloat("1e3"), "1e3"),
        (72, "72"),
        (0.5, "0.5"),
        (["72"], "72"),
    ],
)
def test_gold_stays_as_written(value, text):
    assert read_row({"prompt": "q", "answer": value}).answer == text


@pytest.mark.parametrize("value", [None, True, float("nan"), "", "  ", [], ["1", "2"], {"a": 1}])
def test_gold_that_is_no_answer(value):
    message = fault({"prompt": "q", "answer": value})
    assert "column 'answer': expected a " in message and message.endswith("fix the row or set data.bad_rows=skip")


def test_the_form_of_a_row_error():
    assert fault({"prompt": "q", "answer": None}) == (
        "d.jsonl:7: column 'answer': expected a string, found None; fix the row or set data.bad_rows=skip"
    )
    assert "column 'answer': expected a string, but the row has only prompt, label" in fault(
        {"prompt": "q", "label": "1"}
    )
    assert len(fault({"prompt": "q", "answer": ["x" * 500] * 2})) < 200


def test_no_answer_is_fine_when_none_is_required():
    assert read_row({"prompt": "q", "traces": ["t"]}, require_answer=False).answer == ""
    assert read_row({"prompt": "q", "answer": "3"}, require_answer=False).answer == "3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "column 'prompt': expected a non-empty string or a list of chat messages, found ''"),
        ({"prompt": []}, "column 'prompt': expected"),
        ({"prompt": 3}, "column 'prompt': expected .* found 3"),
        ({"prompt": ["hello"]}, r"column 'prompt\[0\]': expected a chat message .* found 'hello'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"column 'prompt\[0\]': expected a chat"),
        ({"id": 1.5}, "column 'id': expected a string or a whole number, found 1.5"),
        ({"id": ""}, "column 'id': expected"),
        ({"source": 4}, "column 'source': expected a string, found 4"),
        ({"traces": 4}, "column 'traces': expected a trace or a list of traces, found 4"),
        ({"traces": ["", 4]}, r"column 'traces\[1\]': expected a non-empty string, token ids"),
        ({"traces": [None]}, r"column 'traces\[0\]': expected .* found None"),
        ({"traces": [{"teacher": "x"}]}, r"column 'traces\[0\]': expected one of 'text', 'token_ids' and 'messages'"),
        ({"traces": [{"text": "t", "token_ids": [1]}]}, "expected one of 'text', 'token_ids' and 'messages'"),
        ({"traces": [{"text": "t", "teacher": 4}]}, r"column 'traces\[0\].teacher': expected a string, found 4"),
        ({"traces": [{"text": 4}]}, r"column 'traces\[0\].text': expected a non-empty string"),
        ({"traces": [{"token_ids": []}]}, r"column 'traces\[0\].token_ids': expected a list of token ids, found \[\]"),
        ({"traces": [{"token_ids": [1, -1]}]}, "expected a list of token ids"),
        ({"traces": [{"token_ids": ["1"]}]}, "expected a list of token ids"),
        ({"traces": [{"text": "t", "log_probs": [-1]}]}, "log-probs need the token ids"),
        ({"traces": [{"token_ids": [1, 2, 3], "log_probs": [-1]}]}, "expected 3 numbers, one per token id, found 1"),
        ({"traces": [{"token_ids": [1], "log_probs": "no"}]}, "expected a list of numbers, found 'no'"),
        ({"traces": [{"token_ids": [1, 2], "log_probs": [-1, 0.5]}]}, "at most 0, found 0.5 at position 1"),
        ({"traces": [{"token_ids": [1], "log_probs": [float("nan")]}]}, "finite .* found nan at position 0"),
        ({"traces": [{"token_ids": [1], "log_probs": [float("-inf")]}]}, "finite .* found -inf"),
        ({"traces": [{"token_ids": [1], "log_probs": [-(10**400)]}]}, "finite .* found -1000"),
        ({"traces": [{"token_ids": [1], "log_probs": [None]}]}, "found None at position 0"),
    ],
)
def test_own_schema_faults(change, message):
    import re

    assert re.search(message, fault({"prompt": "q", "answer": "1"} | change, schema="luffy"))


# ---- verl


def verl_row(**more: Any) -> dict[str, Any]:
    chat = [{"role": "system", "content": "think"}, {"role": "user", "content": "1+1?"}]
    return {"prompt": chat, "data_source": "math", "reward_model": {"style": "rule", "ground_truth": "2"}} | more


@pytest.mark.parametrize(
    ("target", "texts"),
    [
        ({"target": [{"role": "assistant", "content": "two"}]}, ["two"]),
        ({"target": "two"}, ["two"]),
        ({"target": ["two", "2"]}, ["two", "2"]),
        ({"target": {"role": "assistant", "content": "two"}}, ["two"]),
        ({"target": None}, []),
        ({"target": []}, []),
        ({"target": " "}, []),
        ({}, []),
        (
            {"target_lst": [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]},
            ["a", "b"],
        ),
        ({"target": None, "target_lst": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_verl(target, texts):
    problem = read_row(verl_row(**target, extra_info={"index": 3}))
    assert [trace.text for trace in problem.traces] == texts
    assert problem.prompt == (Message("system", "think"), Message("user", "1+1?"))
    assert (problem.answer, problem.source, problem.id) == ("2", "math", "d:7")
    assert problem.meta["extra_info"] == {"index": 3} and "target" not in problem.meta


def test_verl_faults():
    assert "column 'reward_model.ground_truth': expected a string, found None" in fault(
        verl_row(reward_model={"ground_truth": None})
    )
    assert "column 'reward_model.ground_truth': expected a string, but the row has only" in fault(
        verl_row(reward_model=None)
    )
    two = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "column 'target[0]': expected an answer between two assistant turns" in fault(verl_row(target=two))
    assert "expected an assistant message with text" in fault(verl_row(target=[{"role": "user", "content": "a"}]))


# ---- OpenR1-Math


def plain_openr1_row(**more: Any) -> dict[str, Any]:
    return {"problem": "p", "answer": "3", "generations": ["a", "b", "c"]} | more


@pytest.mark.parametrize(
    ("verdicts", "texts"),
    [
        ({"correctness_math_verify": [True, False, True]}, ["a", "c"]),
        ({"correctness_math_verify": [None, False, True], "correctness_llama": [True] * 3}, ["c"]),
        ({"correctness_math_verify": None, "correctness_llama": [False, True, False]}, ["b"]),
        ({"correctness_math_verify": [False] * 3}, []),
        ({"generations": ["", "b", "c"], "correctness_math_verify": [True, True, False]}, ["b"]),
        ({}, ["a", "b", "c"]),
    ],
)
def test_openr1_keeps_only_correct_generations(verdicts, texts):
    problem = read_row(plain_openr1_row(**verdicts))
    assert [trace.text for trace in problem.traces] == texts
    assert {trace.teacher for trace in problem.traces} <= {"DeepSeek-R1"}
    assert (problem.prompt, problem.answer, problem.source) == ("p", "3", "openr1")


@pytest.mark.parametrize("yes", [True, 1, 1.0])
@pytest.mark.parametrize("no", [False, 0, 0.0, None])
def test_openr1_verdicts_may_be_numbers(yes, no):
    row = {"problem": "1+1", "answer": "2", "generations": ["a", "b"], "correctness_math_verify": [no, yes]}
    assert [trace.text for trace in read_row(row).traces] == ["b"]


@pytest.mark.parametrize("verdict", ["true", 2, -1, [1]])
def test_openr1_verdicts_that_say_nothing_are_refused(verdict):
    row = {"problem": "1+1", "answer": "2", "generations": ["a"], "correctness_math_verify": [verdict]}
    with pytest.raises(RowError, match=r"true or false \(1 or 0\)"):
        read_row(row)


def test_openr1_edges():
    assert read_row({"problem": "p", "answer": "3", "source": "aime"}).source == "aime"
    assert "column 'correctness_math_verify': expected a list of 3 verdicts" in fault(
        plain_openr1_row(correctness_math_verify=[True])
    )
    message = fault(plain_openr1_row(correctness_math_verify=[False] * 3), require_traces=True)
    assert "column 'generations': traces are required, but the row has no usable one" in message
    assert message.endswith("data.bad_rows=skip")


# ---- GSM8K

WORKED = "She sold 48/2 = <<48/2=24>>24 clips.\nIn all <<48+24=72>>1,072.\n#### 1,072"


def test_gsm8k():
    problem = read_row({"question": "How many?", "answer": WORKED})
    assert problem.answer == "1072" and problem.prompt == "How many?" and problem.source == "gsm8k"
    assert problem.traces == (Trace(text="She sold 48/2 = 24 clips.\nIn all 1,072.\n#### 1,072", teacher="human"),)
    kept = read_row({"question": "How many?", "answer": WORKED}, strip_calculator=False)
    assert kept.traces[0].text == WORKED


@pytest.mark.parametrize("answer", ["no mark", None, "work ####  "])
def test_gsm8k_faults(answer):
    assert "column 'answer': expected a" in fault({"question": "q", "answer": answer}, schema="gsm8k")


# ---- prompt / completion


def test_completion():
    row = {"prompt": "q", "completion": [{"role": "assistant", "content": "c"}], "answer": "3"}
    assert read_row(row).traces == (Trace(text="c"),) and read_row(row).answer == "3"
    plain = {"prompt": "q", "completion": "c"}
    assert read_row(plain, require_answer=False).answer == ""
    assert "column 'answer': expected a string, but the row has only prompt, completion" in fault(plain)
    assert "column 'completion': expected a non-empty string" in fault(
        {"prompt": "q", "completion": ""}, require_answer=False
    )


# ---- chats


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def test_the_last_assistant_turn_of_a_chat_is_the_trace():
    problem = read_row({"messages": turns("q", "a", "more?", "b"), "answer": "3", "id": "x", "level": 2})
    assert problem.prompt == (Message("user", "q"), Message("assistant", "a"), Message("user", "more?"))
    assert problem.traces == (Trace(text="b"),) and (problem.answer, problem.id, problem.meta["level"]) == ("3", "x", 2)
    system = [{"role": "system", "content": "Be brief."}, *turns("q", "a")]
    assert read_row({"messages": system}, require_answer=False).prompt[0] == Message("system", "Be brief.")
    unanswered = read_row({"messages": turns("q"), "answer": "3"})
    assert unanswered.prompt == (Message("user", "q"),) and unanswered.traces == ()


def test_faults_of_a_chat():
    for chat in ([], "q", ["q"], None, [{"content": "q"}]):
        assert "column 'messages': expected a non-empty list of chat messages" in fault({"messages": chat})
    only = [{"role": "assistant", "content": "a"}]
    assert "column 'messages'" in fault({"messages": only, "answer": "1"})
    assert "column 'messages[1]'" in fault({"messages": turns("q", ""), "answer": "1"})
    assert "data.columns={prompt: messages, answer: ..., traces: messages}" not in fault({"messages": turns("q", "a")})
    assert "luffy sft" in fault({"messages": turns("q", "a")})


def test_sharegpt():
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    problem = read_row({"conversations": turns, "answer": "3", "id": "x", "level": 2})
    assert problem.prompt == (Message("user", "q"),) and problem.traces == (Trace(text="a"),)
    assert (problem.answer, problem.id, problem.meta) == ("3", "x", {ROW_KEY: "d.jsonl:7", "level": 2})
    named = [{"from": "system", "value": "Be brief."}, *turns]
    for row in ({"conversations": named}, {"conversations": turns, "system": "Be brief."}):
        prompt = read_row(row, require_answer=False).prompt
        assert prompt == (Message("system", "Be brief."), Message("user", "q"))
    written = {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    assert read_row(written, require_answer=False).traces == (Trace(text="a"),)


def test_faults_of_sharegpt():
    for chat in ([], "q", None):
        assert "column 'conversations': expected a non-empty list" in fault({"conversations": chat})
    assert "column 'conversations[0]': expected a turn" in fault({"conversations": ["q"]})
    tool = [{"from": "human", "value": "q"}, {"from": "function", "value": "f()"}]
    assert "column 'conversations[1].from': expected one of system, human" in fault({"conversations": tool})
    silent = [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]
    assert "column 'conversations[1]'" in fault({"conversations": silent})


def test_alpaca():
    problem = read_row({"instruction": "Add.", "input": "2+3", "output": "So 5", "answer": "5", "text": "t"})
    assert (problem.prompt, problem.answer, problem.traces) == ("Add.\n\n2+3", "5", (Trace(text="So 5"),))
    assert problem.meta == {ROW_KEY: "d.jsonl:7", "text": "t"}
    for blank in ("", " ", None):
        assert read_row({"instruction": "q", "input": blank, "output": "a"}, require_answer=False).prompt == "q"
    told = read_row({"instruction": "q", "output": "", "system": "Be brief.", "answer": "5"})
    assert told.prompt == (Message("system", "Be brief."), Message("user", "q")) and told.traces == ()


def test_faults_of_alpaca():
    row = {"instruction": "q", "output": "a", "answer": "1"}
    assert "column 'instruction': expected a non-empty string" in fault({**row, "instruction": " "})
    assert "column 'input': expected a string, found 3" in fault({**row, "input": 3})
    assert "column 'history': earlier turns are not read" in fault({**row, "history": [["q", "a"]]})
    assert "column 'output'" in fault({**row, "output": ""}, require_traces=True)


# ---- column map


def test_columns_with_nested_paths_teachers_and_log_probs():
    columns = {
        "prompt": "item.instruction",
        "answer": "label",
        "traces": "solutions",
        "id": "key",
        "source": "origin",
        "teacher": "by",
        "log_probs": "scores",
    }
    row = {
        "item": {"instruction": "q"},
        "label": JsonFloat("0.50"),
        "solutions": [[1, 2], "text"],
        "key": "k1",
        "origin": "lab",
        "by": ["a", "b"],
        "scores": [[-0.1, -0.2], None],
    }
    problem = read_row(row, columns=columns)
    assert (problem.id, problem.prompt, problem.answer, problem.source) == ("k1", "q", "0.50", "lab")
    assert problem.traces == (
        Trace(token_ids=(1, 2), log_probs=(-0.1, -0.2), teacher="a"),
        Trace(text="text", teacher="b"),
    )


def test_hints_are_kept_whatever_their_column_is_called():
    row = {"prompt": "q", "answer": "1", "hints": ["a", "b"]}
    assert read_row(row).meta["hints"] == ["a", "b"]
    mapped = read_row({"p": "q", "a": "1", "levels": ["a"]}, columns={"prompt": "p", "answer": "a", "hints": "levels"})
    assert mapped.meta["hints"] == ["a"] and "levels" not in mapped.meta


def test_columns_with_one_value_for_all_traces():
    columns = {"prompt": "p", "answer": "a", "traces": "t", "teacher": "by", "log_probs": "lp"}
    row = {"p": "q", "a": "1", "t": [4, 5], "by": "x", "lp": [-1, -2]}
    assert read_row(row, columns=columns).traces == (Trace(token_ids=(4, 5), log_probs=(-1.0, -2.0), teacher="x"),)
    assert "column 'by': expected one value for each of the 1 traces" in fault(
        row | {"by": ["x", "y"]}, columns=columns
    )
    assert "column 'lp': expected one value for each of the 2 traces" in fault(
        row | {"t": [[4], [5]], "lp": [-1]}, columns=columns
    )


@pytest.mark.parametrize("blank", [[""], ["  ", ""], "", [], None])
def test_empty_texts_are_no_traces(blank):
    row = {"prompt": "q", "answer": "1", "traces": blank}
    assert read_row(row).traces == () and "no usable one" in fault(row, require_traces=True)
    assert read_row(row, columns={"prompt": "prompt", "answer": "answer", "traces": "traces"}).traces == ()


def test_empty_texts_among_traces_leave_the_others_as_they_are():
    columns = {"prompt": "p", "answer": "a", "traces": "t", "teacher": "by", "log_probs": "lp"}
    row = {"p": "q", "a": "1", "t": ["", [4, 5], " "], "by": ["x", "y", "z"], "lp": [[], [-1, -2], None]}
    assert read_row(row, columns=columns).traces == (Trace(token_ids=(4, 5), log_probs=(-1.0, -2.0), teacher="y"),)


def test_a_literal_column_with_a_dot_wins_over_the_path():
    assert read_row(
        {"a.b": "literal", "a": {"b": "path"}, "y": "1"}, columns={"prompt": "a.b", "answer": "y"}
    ).prompt == ("literal")


def test_required_traces():
    row = {"prompt": "q", "answer": "1"}
    assert fault(row, require_traces=True) == (
        "d.jsonl:7: column 'traces': traces are required, but the row has only prompt, answer; "
        "add the column or map another with data.columns.traces"
    )
    assert "no usable one" in fault(row | {"traces": []}, require_traces=True)
    assert read_row(row | {"traces": ["t"]}, require_traces=True).traces == (Trace(text="t"),)
