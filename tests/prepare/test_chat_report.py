"""What ``luffy prepare check`` says of chats."""

import json

import pytest
from builders import write_rows
from commands import luffy

from luffy.prepare.chat_report import chat_lines, chat_report

ASK = {"role": "user", "content": "2+3?"}
SAY = {"role": "assistant", "content": "5"}
ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}


def calling(*ids, content=None):
    made = [{"id": name, "type": "function", "function": {**ADD, "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(name=None):
    return {"role": "tool", "content": "5", **({} if name is None else {"tool_call_id": name})}


def report_of(*rows):
    return chat_report((f"f:{number}", row) for number, row in enumerate(rows, 1))


def test_turns_calls_tools_and_roles_in_order():
    long = [ASK, calling("a"), result("a"), calling("b", "c"), result("c"), result("b"), calling("d"), result("d"), SAY]
    report = report_of(
        {"messages": [ASK, SAY]},
        {"messages": long},
        {"prompt": [ASK], "traces": [{"messages": [SAY, ASK, SAY], "text": None}, {"text": "x"}]},
        {"messages": [{"role": "system", "content": "s"}, ASK, calling("a", content="Let me."), result(), SAY]},
    )
    assert (report["count"], report["single_turn"], report["with_calls"], report["faults"]) == (4, 1, 2, {})
    assert report["turns"] == {"p5": 2, "p50": 2, "p95": 4, "max": 4}
    assert report["calls"] == {"p5": 0, "p50": 1, "p95": 4, "max": 4}
    assert report["tools"] == {"add": 5} and report["null_content"] == 3
    assert report["roles"] == {
        "user assistant": 1,
        "user assistant tool assistant tool+ assistant tool assistant": 1,
        "assistant user assistant": 1,
        "system user assistant tool assistant": 1,
    }
    lines = list(chat_lines(report))
    assert lines[0] == "chats       4: 1 with one assistant turn, 3 with several; 2 with tool calls"
    assert "  null      3 turns are calls without content" in lines and not any("warning" in line for line in lines)


@pytest.mark.parametrize(
    ("chat", "roles"),
    [
        ([ASK, *[calling("a"), result("a")] * 4, SAY], "user (assistant tool)+ assistant"),
        ([ASK, calling("a", "b"), result("b"), result("a"), SAY], "user assistant tool+ assistant"),
        ([ASK, calling("a"), result("a"), SAY], "user assistant tool assistant"),
    ],
)
def test_repeated_roles_are_written_once(chat, roles):
    assert report_of({"messages": chat})["roles"] == {roles: 1}


@pytest.mark.parametrize(
    ("chat", "fault"),
    [
        ([ASK, result("a"), SAY], "results behind no call"),
        ([ASK, calling("a"), result("b"), SAY], "results with the id of no call before them"),
        ([ASK, calling("a", "b"), result("a"), SAY], "turns with another number of results than of calls"),
        ([ASK, calling("a"), result("a"), result("a"), SAY], "turns with another number of results than of calls"),
        ([ASK, SAY, ASK, calling("a")], "chats that end before the results of their last calls"),
    ],
)
def test_results_that_fit_no_call(chat, fault):
    report = report_of({"messages": [ASK, SAY]}, {"messages": chat}, {"messages": chat})
    assert report["faults"] == {fault: {"count": 2, "first": "f:2"}}
    assert f"warning     2 {fault}, first: f:2" in chat_lines(report)


def test_sharegpt_and_rows_without_chats():
    turns = [
        ("human", "q"),
        ("function_call", json.dumps([ADD, ADD])),
        ("observation", "5"),
        ("observation", "5"),
        ("gpt", "5"),
    ]
    report = report_of({"conversations": [{"from": who, "value": text} for who, text in turns]}, {"prompt": "q"})
    assert (report["tools"], report["roles"]) == ({"add": 2}, {"user assistant tool+ assistant": 1})
    assert report["faults"] == {} and list(chat_lines(report_of({"prompt": [ASK], "answer": "5"}))) == []


def test_the_command_reads_the_turns_that_training_would(tmp_path, tokenizer_folder):
    path = tmp_path / "chats.jsonl"
    row = {"messages": [ASK, SAY, {"role": "user", "content": "And 4?"}, {"role": "assistant", "content": "9"}]}
    write_rows(path, [row, {"messages": [ASK, calling("a"), result("b"), SAY], "answer": "5"}])
    args = ("prepare", "check", path, "--tokenizer", tokenizer_folder, "--verify", 0, "--examples", 0, "--json")
    reports = {turns: json.loads(luffy(*args, "--turns", turns)[1]) for turns in ("last", "all")}
    last, every = reports["last"], reports["all"]
    assert len(last["turns_notices"]) == 1 and every["turns_notices"] == []
    fault = "results with the id of no call before them"
    assert last["chats"] == every["chats"] and last["chats"]["faults"][fault]["first"] == f"{path}:2"
    assert [report["tokens"]["trace"]["max"] for report in (last, every)] == [3, 4]  # "5" or "9", and its end: 2 each
    assert every["tokens"]["conversation"]["max"] > last["tokens"]["conversation"]["max"] > 3  # with replies
    code, _, err = luffy(*args, "--turns", "first")
    assert code == 2 and "data.turns='first' is unknown; known: last, all" in err
