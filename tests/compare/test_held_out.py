"""Validation and test problems leave the training data, with all that have their prompts."""

import json

import pytest
from builders import write_rows

from luffy.compare.held_out import split_data, write_problems
from luffy.config import load_config
from luffy.data import load_problems
from luffy.errors import UserError
from luffy.step.tasks import load_problems_of


def test_turns_and_calls_are_kept(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "<b>", "n": [1, None]}}}
    turns = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"}, {"role": "tool", "content": "é", "name": "sub"},
        {"role": "assistant", "content": "5"},
    ]  # fmt: skip
    rows = [{"prompt": turns[:4], "answer": "5", "traces": [turns[1:], {"messages": turns[1:], "teacher": "t"}, "x"]}]
    problem = load_problems(write_rows(tmp_path / "chats.jsonl", rows))[0]
    write_problems(tmp_path / "again.jsonl", [problem], traces=True)
    again = load_problems(tmp_path / "again.jsonl")[0]
    assert len(problem.prompt[1].tool_calls) == 2 and problem.traces[1].messages[2].name == "sub"
    assert (again.prompt, again.traces) == (problem.prompt, problem.traces)


def test_three_files_without_a_prompt_in_common(tmp_path):
    chat = [{"role": "user", "content": "tell me"}]
    rows = [
        {"id": str(i), "prompt": f"p {i % 60}", "answer": str(i), "traces": [{"text": "t", "teacher": "x"}]}
        for i in range(90)
    ]
    write_rows(tmp_path / "all.jsonl", [*rows, {"id": "chat", "prompt": chat, "answer": "1", "traces": []}])
    cfg = load_config("tiny/luffy", {"data.train": str(tmp_path / "all.jsonl")})
    split = split_data(cfg, tmp_path / "split", 10)
    read = {name: [json.loads(line) for line in getattr(split, name).read_text().splitlines()] for name in split.sizes}
    assert {name: len(found) for name, found in read.items()} == split.sizes
    assert (split.sizes["validation"], split.sizes["test"]) == (10, 10)
    prompts = [{str(row["prompt"]) for row in found} for found in read.values()]
    assert not prompts[0] & prompts[1] and not prompts[0] & prompts[2] and not prompts[1] & prompts[2]
    assert not any(row["traces"] for name in ("validation", "test") for row in read[name])
    again = load_problems_of(cfg, str(split.train), "train", limit=None, require_answer=True)
    assert len(again) == split.sizes["train"] and any(problem.traces for problem in (again[i] for i in range(9)))
    assert split_data(cfg, tmp_path / "again", 10).test.read_text() == split.test.read_text()
    with pytest.raises(UserError, match="61 different training problems leave 20 for validation"):
        split_data(cfg, tmp_path / "more", 20)
