"""The report on a data file, and the command line over all of it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_model, write_rows
from commands import luffy
from prepare_support import byte_tokenizer

from luffy.data import load_problems
from luffy.errors import DataError
from luffy.prepare.check import CheckOptions, check_file, report_lines


@pytest.fixture
def sums_file(tmp_path):
    rows = [
        {"id": f"s{i}", "prompt": f"{i}+1", "answer": str(i + 1), "traces": [f"so #### {i + 1}"]} for i in range(20)
    ]
    rows[3]["traces"] = []
    rows[4]["traces"] = ["so #### 77"]
    rows[5]["traces"] = [{"token_ids": byte_tokenizer()("#### 6").input_ids, "log_probs": [-1.0] * 6, "teacher": "big"}]
    rows[6]["traces"] = ["long " * 100 + "#### 7", "short #### 7"]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": ""}\nnot json\n')
    return str(path)


def test_the_report_in_figures(sums_file, tokenizer_folder):
    options = CheckOptions(tokenizer=str(tokenizer_folder), reward="gsm8k", max_trace_tokens=100, max_prompt_tokens=58)
    report = check_file(sums_file, options)
    assert report["schema"] == ["luffy"] and report["rows"] == 20
    assert report["skipped"] == {"prompt": 1, "json": 1}
    assert (report["traces"], report["with_traces"], report["share_with_traces"]) == (20, 19, 0.95)
    assert (report["traces_with_token_ids"], report["traces_with_log_probs"]) == (1, 1)
    assert report["teachers"] == {"teacher": 19, "big": 1}
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    # Chat markers are one token each: 3 + "user\n" 5 + "\n" 1 + "assistant\n" 10 and the question's bytes.
    assert report["tokens"]["prompt"] == {"p5": 22, "p50": 23, "p95": 23, "max": 23}
    assert report["tokens"]["trace"]["max"] == 507 and report["tokens"]["traces_over_budget"] == 1
    assert report["tokens"]["prompts_over_budget"] == 0
    verifier = report["verifier"]
    assert (verifier["checked"], verifier["agree"], verifier["share"]) == (19, 18, 18 / 19)
    assert [one["id"] for one in verifier["disagreements"]] == ["s4"]
    assert [example["id"] for example in report["examples"]] == ["s0", "s6", "s13"]  # three, all over the file
    assert report["examples"][0]["prompt"] == chat.format("0+1")
    assert report["examples"][0]["trace"] == "so #### 1<|im_end|>"
    text = "\n".join(report_lines(report))
    assert (
        chat.format("13+1") + "so #### 14<|im_end|>" in text
    )  # the trace continues the prompt and ends as the chat does
    assert "gsm8k agrees with 18 of 19 traces (94.7%)" in text
    assert "2 skipped" in text and "sums.jsonl:21" in text


def test_answers_inside_thoughts_count_where_they_do_in_training(tmp_path):
    path = tmp_path / "thoughts.jsonl"
    path.write_text(
        json.dumps({"prompt": "1+1", "answer": "2", "traces": ["<think>#### 2</think> That is it."]}) + "\n"
    )
    for inside in (False, True):
        report = check_file(str(path), CheckOptions(reward="gsm8k", answer_in_thought=inside))
        assert report["verifier"]["agree"] == inside


def test_a_trace_without_tags_never_closes_the_thought_that_the_prompt_opens(tmp_path, tokenizer_folder):
    path = tmp_path / "plain.jsonl"
    traces = ["1 and 1 #### 2", "1 and 1</think> #### 2", "<think>\n1 and 1</think> #### 2"]
    write_rows(path, ({"prompt": f"{t}?", "answer": "2", "traces": [t]} for t in traces))
    agree, opened = {}, {}
    for style in ("paper", "plain"):
        report = check_file(str(path), CheckOptions(reward="gsm8k", tokenizer=str(tokenizer_folder), style=style))
        agree[style], opened[style] = report["verifier"]["agree"], report["tokens"]["traces_open_thought"]
        assert ("1 traces begin with <think>, which" in "\n".join(report_lines(report))) == (style == "plain")
    assert agree == {"paper": 2, "plain": 3} and opened == {"paper": 0, "plain": 1}


def test_problems_that_are_there_twice_are_said(tmp_path, tokenizer_folder):
    chat = [{"role": "user", "content": "2+2"}]
    rows = [{"q": "1+1", "traces": "2"}, {"q": "2+2", "traces": "4"}, {"q": "2\t+2", "traces": ""}]
    files = {"train": [*rows, {"q": "1+1 ", "traces": "2"}], "test": [{"q": "3+3"}, {"q": chat}, {"q": "2-2"}]}
    train, held_out = (tmp_path / f"{name}.jsonl" for name in files)
    for name, some in files.items():
        write_rows(tmp_path / f"{name}.jsonl", some)
    options = CheckOptions(verify=0, eval=str(held_out), columns={"prompt": "q", "traces": "traces"})
    for tokenizer in (None, str(tokenizer_folder)):
        report = check_file(str(train), replace(options, tokenizer=tokenizer))
        assert [line for line in report_lines(report) if line.startswith("warning")] == [
            f"warning     1 of 4 problems repeat an earlier one, first: {train}:4 = {train}:1",
            f"warning     1 of 3 problems of {held_out} are in this file too, first: {held_out}:2 = {train}:2",
        ]
    lines = list(report_lines(check_file(str(held_out), replace(options, eval=str(train), columns={"prompt": "q"}))))
    assert f"warning     1 of 4 problems of {train} are in this file too, first: {train}:2 = {held_out}:2" in lines
    assert not any("repeat" in line for line in lines)
    (tmp_path / "test.jsonl").write_text(json.dumps({"q": "5+5"}) + "\n")
    assert f"held out    0 of 1 problems of {held_out} are in this file too" in report_lines(
        check_file(str(train), options)
    )


def test_repeats_are_counted_as_the_model_sees_them(tmp_path, tokenizer_folder):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    path = tmp_path / "rows.jsonl"
    write_rows(path, ({"prompt": prompt, "answer": "2"} for prompt in ("1+1", chat)))
    for tokenizer, count in ((None, 0), (str(tokenizer_folder), 1)):
        report = check_file(str(path), CheckOptions(verify=0, tokenizer=tokenizer, system_prompt="Add."))
        assert report["repeated"]["count"] == count


def test_chats_with_several_assistant_turns_are_counted(tmp_path):
    roles = ("user", "assistant")
    chats = [[{"role": roles[i % 2], "content": str(i)} for i in range(turns)] for turns in (2, 4, 6, 3)]
    path = tmp_path / "chats.jsonl"
    write_rows(path, ({"messages": chat} for chat in chats))
    lines = list(report_lines(check_file(str(path), CheckOptions(verify=0))))
    said = f"warning     2 of 4 problems are chats with several assistant turns, first: {path}:2; only the last turn"
    assert sum(line.startswith(said) for line in lines) == 1


def test_long_traces_are_shown_from_both_ends_unless_full(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "q", "answer": "1", "traces": ["a" * 3000 + "end"]}) + "\n")
    report = check_file(str(path), CheckOptions(verify=0))
    assert "1,503 characters not shown" in "\n".join(report_lines(report))
    assert "a" * 3000 + "end" in "\n".join(report_lines(report, full=True))
    assert "give --tokenizer" in "\n".join(report_lines(report))


def test_rows_of_megabytes_do_not_flood_the_terminal(tmp_path):
    row = {
        "id": "i" * 10**6,
        "prompt": "p" * 10**6,
        "answer": "g" * 10**6,
        "traces": [{"text": "t" * 10**6, "teacher": "n" * 10**6}],
    }
    many = [{"prompt": f"q{n}", "answer": "1", "traces": [{"text": "1", "teacher": f"teacher {n}"}]} for n in range(50)]
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row, *many])
    report = check_file(str(path), CheckOptions(verify=1, reward="gsm8k", examples=1))
    text = "\n".join(report_lines(report))
    assert len(text) < 12_000 and "998,500 characters not shown" in text and "and 31 more: --json names them" in text
    assert row["prompt"] in "\n".join(report_lines(report, full=True))
    assert report["examples"][0]["prompt"] == row["prompt"]  # --json has all of it


def test_a_terminal_is_not_told_what_to_do(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "\x1b[2J", "prompt": "a\x1b]0;title\x07b\n\tc", "answer": "1\r2"}) + "\n")
    text = "\n".join(report_lines(check_file(str(path), CheckOptions(verify=0))))
    assert r"a\x1b]0;title\x07b" + "\n\tc" in text and r"\x1b[2J" in text
    assert not {"\x1b", "\x07", "\r"} & set(text)


def test_traces_that_cannot_be_read_without_a_tokenizer_are_said_to_be(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "answer": "2", "traces": [{"token_ids": [3, 4]}]}) + "\n")
    text = "\n".join(report_lines(check_file(str(path), CheckOptions(reward="gsm8k"))))
    assert "nothing checked" in text and "or traces of token ids without --tokenizer" in text


def test_unusable_data_is_an_error(tmp_path, tokenizer_folder):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"x": 1}\n')
    with pytest.raises(DataError, match="no usable row, 1 skipped"):
        check_file(str(path), CheckOptions())
    path.write_text(json.dumps({"prompt": "q", "answer": "1", "traces": [[99999]]}) + "\n")
    with pytest.raises(DataError, match="token id 99999"):
        check_file(str(path), CheckOptions(tokenizer=str(tokenizer_folder), verify=0))


@pytest.mark.skipif("LUFFY_DATA" not in os.environ, reason="set LUFFY_DATA to a folder with gsm8k/train.jsonl")
def test_gsm8k(tokenizer_folder):
    file = str(Path(os.environ["LUFFY_DATA"], "gsm8k", "test.jsonl"))
    report = check_file(file, CheckOptions(tokenizer=str(tokenizer_folder), reward="gsm8k", verify=10**6))
    assert report["schema"] == ["gsm8k"] and report["rows"] == 1319 and report["skipped"] == {}
    assert report["verifier"]["agree"] == 1319
    assert report["tokens"]["prompts_over_budget"] == 0


# ---- the command line


def test_check_on_the_command_line(sums_file, tokenizer_folder, tmp_path):
    result = luffy("prepare", "check", sums_file, "--tokenizer", tokenizer_folder, "--reward", "gsm8k")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("as the model will see it") == 3
    result = luffy("prepare", "check", sums_file, "--reward", "gsm8k", "--json", "--examples", "2", "--eval", sums_file)
    report = json.loads(result.stdout)
    assert len(report["examples"]) == 2 and report["repeated"]["count"] == 0
    assert report["held_out"] == {"file": sums_file, "rows": 20, "count": 20, "first": f"{sums_file}:1 = {sums_file}:1"}
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n')
    result = luffy("prepare", "check", tmp_path / "bad.jsonl")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)


def test_local_traces_on_the_command_line(tmp_path):
    folder = tmp_path / "model"
    make_model("qwen2", vocab_size=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"q": "1+1", "meta": {"gold": "2"}, "level": 3}) + "\n")
    out = tmp_path / "traces.parquet"
    command = ["prepare", "traces", file, "--out", out, "--max-tokens", 4, "--n", 2, "--reward", "gsm8k"]
    local = ["--local", folder, "--style", "plain"]
    result = luffy(*command, *local, "--column", "prompt=q", "--column", "answer=meta.gold")
    assert result.returncode == 0, result.stderr
    (problem,) = load_problems(out)
    assert "samples cut off" in result.stdout and problem.traces == ()
    assert (problem.prompt, problem.answer, problem.meta["level"]) == ("1+1", "2", 3)
    result = luffy(*command, *local)
    assert result.returncode == 2 and "or with --column" in result.stderr
    assert luffy(*command).returncode == 2
    result = luffy(*command, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--api-key-env", "NO_SUCH_KEY")
    assert "NO_SUCH_KEY: the variable is not set" in result.stderr


def test_own_columns_are_checked_under_their_names(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"q": "1+1", "gold": "2", "solution": "so #### 2"}, {"q": "2+2", "gold": "4", "solution": ""}]
    write_rows(path, rows)
    named = ["--column", "prompt=q", "--column", "answer=gold", "--column", "traces=solution"]
    said = luffy("prepare", "check", path, "--reward", "gsm8k", *named)
    assert said.returncode == 0, said.stderr
    assert "problems    2 usable, 0 skipped" in said.stdout and "traces      1; 50.0%" in said.stdout
    assert "1+1\n[first trace] so #### 2" in said.stdout and said.stdout.rstrip().endswith("2+2")
    wrong = luffy("prepare", "check", path, "--column", "prompt")
    assert wrong.returncode == 2 and "write it as ours=theirs" in wrong.stderr
