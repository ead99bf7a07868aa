"""A small OpenR1 in, exact counts out; killed and resumed, the same bytes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from builders import write_rows
from commands import luffy
from prepare_support import openr1_row, trace, write_openr1

from luffy.data import Encoder, load_problems
from luffy.errors import ConfigError, DataError, UserError
from luffy.models.load import load_tokenizer
from luffy.prepare.journal import Journal
from luffy.rewards import build_verifier
from luffy.types import Message, Problem, Score
from studies.paper import openr1, screen, select
from studies.paper.openr1 import ScreenOptions, prepare_openr1
from studies.paper.overlap import EvaluationIndex, question_key, words_of
from studies.paper.select import Choice, held_out_count, why_none

pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")

AIME = (
    "A rope of length twelve meters is cut into three pieces so that the second piece is twice as long as the first "
    "and the third is half of it. How long is the second piece?"
)
COPIED = "Consider this. " + AIME.replace("How long", "Find how long").replace("twelve  ", "twelve ")


def small_openr1():
    return [
        openr1_row("What is $1+1$?", "2", [trace("2"), trace("3"), trace("2", 40), trace("2")]),  # wrong, repeated
        openr1_row("What is 1+1", "2", [trace("2")]),  # duplicate up to layout
        openr1_row("What is $1-1$?", "0", [trace("0"), trace("0", 900)]),  # not a duplicate; one over-long
        openr1_row("Missing", None, [trace("1")]),
        openr1_row("Empty", " ", [trace("1")]),
        openr1_row("Show that it is so.", "proof", [trace("proof")]),
        openr1_row("Two parts", "a) 3; b) 5", [trace("5")]),  # Math-Verify alone would read 5
        openr1_row(COPIED, "4", [trace("4")]),
        openr1_row("Half of one?", r"\frac{1}{2}", [trace("0.5"), "", "<think>\nI box \\boxed{0.5} but never end"]),
        openr1_row("All wrong", "7", [trace("8"), "no answer here </think> at all"]),
        openr1_row("All long", "7", [trace("7", 900), trace("7", 901)]),
        openr1_row("No generation", "7", []),
        openr1_row("Q" * 900, "7", [trace("7")]),  # prompt over the budget
        openr1_row("Unreadable gold", "}{", [trace("7")]),
        openr1_row("Middle", "9", [trace("9", 300)]),
    ]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation") / "aime.jsonl"
    rows = [{"id": "first", "prompt": "What is 2+2?", "answer": "4"}, {"id": "second", "prompt": AIME, "answer": "4"}]
    write_rows(path, rows)
    return str(path)


OPTIONS = {"max_trace_tokens": 600, "max_prompt_tokens": 1400}


def prepare(source, tokenizer, out, evaluation=(), choice=None, workers=1, **changes):
    options = ScreenOptions(**{**OPTIONS, "decontaminate": tuple(evaluation), **changes})
    return prepare_openr1(source, str(tokenizer), out, options, choice or Choice(), workers)


@pytest.fixture(scope="module")
def verifier():
    with build_verifier("math", workers=1) as verifier:
        yield verifier


@pytest.fixture
def one_verifier(verifier, monkeypatch):
    """A worker takes seconds to start: tests of what comes before and after it share one."""
    monkeypatch.setattr(openr1, "build_verifier", lambda *args, **kwargs: contextlib.nullcontext(verifier))
    return verifier


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tokenizer_folder, evaluation):
    folder = tmp_path_factory.mktemp("openr1")
    source = write_openr1(folder / "train.parquet", small_openr1())
    return folder / "out", prepare(source, tokenizer_folder, folder / "out", [evaluation], workers=2), source


def test_a_row_with_a_chat_is_no_row_of_openr1(tmp_path, tokenizer_folder, one_verifier):
    rows = [openr1_row(problem, "2", [trace("2")]) for problem in ("1+1", [{"role": "user", "content": "0+2"}])]
    write_rows(tmp_path / "rows.jsonl", rows)
    card = prepare(str(tmp_path / "rows.jsonl"), tokenizer_folder, tmp_path / "out")
    assert card["rows"]["dropped"] == {"bad_row": 1} and card["rows"]["kept"] == 1


def test_every_row_and_trace_is_counted_once(prepared):
    _, card, _ = prepared
    assert card["rows"] == {
        "read": 15,
        "dropped": {
            "no_answer": 2, "unverifiable": 3, "contaminated": 1, "prompt_too_long": 1, "no_trace": 1, "too_long": 1,
            "not_confirmed": 1, "duplicate": 1,
        },
        "kept": 4, "train": 4, "held_out": 0,
    }  # fmt: skip
    assert card["traces"] == {
        "read": 22,
        "dropped": {
            "problem_dropped": 7, "empty": 1, "repeated": 1, "cut_off": 1, "too_long": 3, "wrong": 2, "no_answer": 1,
            "error": 1,
        },
        "kept": 5,
    }  # fmt: skip


def test_the_output_is_what_training_reads(prepared, tokenizer_folder):
    out, card, _ = prepared
    problems = load_problems(out / "train.parquet", require_traces=True)
    assert problems.schemas == ("luffy",)
    assert [(problem.prompt, problem.answer, len(problem.traces)) for problem in problems] == [
        ("What is $1+1$?", "2", 2), ("What is $1-1$?", "0", 1), ("Half of one?", r"\frac{1}{2}", 1), ("Middle", "9", 1),
    ]  # fmt: skip
    assert problems[0].traces[1].text == trace("2", 40)
    assert {t.teacher for p in problems for t in p.traces} == {"DeepSeek-R1"}
    assert {p.source for p in problems} == {"olympiads"}
    # The budgets were counted as the trainer counts: nothing is dropped there.
    encoder = Encoder(
        load_tokenizer(tokenizer_folder), "paper", max_prompt_tokens=1400, max_response_tokens=600,
        overlong_trace="error",
    )  # fmt: skip
    lengths = [len(d.token_ids) for p in problems for d in encoder.encode(p).demonstrations]
    assert card["tokens"]["trace"]["max"] == max(lengths)


def test_contaminated_rows_are_listed_with_what_they_match(prepared, evaluation):
    out, _, source = prepared
    [entry] = [json.loads(line) for line in (out / "contaminated.jsonl").read_text().splitlines()]
    assert entry["row"] == f"{source}:8"
    assert entry["evaluation_item"] == f"{evaluation}#second"
    assert entry["ngram"] == "a rope of length twelve meters is cut into three pieces so that"
    assert entry["question"] == COPIED


def test_the_card_says_what_was_done(prepared):
    out, card, _ = prepared
    text = (out / "DATA_CARD.md").read_text()
    assert "15 read, 4 kept" in text
    assert "| unverifiable | a gold that no parser can compare (proof, several parts, prose) | 3 |" in text
    assert "2 items, 0 unreadable rows" in text
    assert json.loads((out / "card.json").read_text()) == json.loads(json.dumps(card))


class Interrupted(Exception):
    pass


def test_a_stopped_run_goes_on_and_gives_the_same_files(
    prepared, one_verifier, tmp_path, tokenizer_folder, evaluation, monkeypatch
):
    out, _, source = prepared
    monkeypatch.setattr(screen, "TRACES_AT_ONCE", 3)
    scored, original, stop_after = [], one_verifier.score, 2

    def score(items):
        if len(scored) >= stop_after:
            raise Interrupted
        scored.append(len(items))
        return original(items)

    monkeypatch.setattr(one_verifier, "score", score)
    with pytest.raises(Interrupted):
        prepare(source, tokenizer_folder, tmp_path / "out", [evaluation])
    assert not (tmp_path / "out" / "train.parquet").exists()
    journal = tmp_path / "out" / "verified.jsonl"
    done = len(journal.read_text().splitlines()) - 1
    assert 0 < done < 15
    with journal.open("a") as file:
        file.write('{"row": 99, "torn')  # what a kill in the middle of a write leaves
    stop_after = 100
    prepare(source, tokenizer_folder, tmp_path / "out", [evaluation])
    assert sum(scored) == 10  # every candidate once: nothing verified before is verified again
    for name in ("train.parquet", "contaminated.jsonl", "card.json", "DATA_CARD.md"):
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes(), name


@pytest.fixture
def copied(prepared, tmp_path):
    out, _, source = prepared
    return shutil.copytree(out, tmp_path / "copy"), source


def test_changed_settings_are_refused_but_another_choice_is_free(copied, tokenizer_folder, evaluation, monkeypatch):
    out, source = copied
    with pytest.raises(DataError, match="verified.jsonl: was made with max_trace_tokens=600, now it is 500"):
        prepare(source, tokenizer_folder, out, [evaluation], max_trace_tokens=500)
    with pytest.raises(DataError, match="was made with decontaminate"):
        prepare(source, tokenizer_folder, out, [])
    monkeypatch.setattr(openr1, "build_verifier", lambda *a, **k: pytest.fail("verified again"))
    card = prepare(source, tokenizer_folder, out, [evaluation], Choice(held_out="0.25", max_traces=1))
    assert (card["rows"]["train"], card["rows"]["held_out"]) == (3, 1)
    assert card["traces"]["dropped"]["over_count"] == 1
    train, held = (set(p.prompt for p in load_problems(out / name)) for name in ("train.parquet", "held_out.parquet"))
    assert len(train) == 3 and len(held) == 1 and not train & held
    rest = prepare(source, tokenizer_folder, out, [evaluation], Choice(held_out="rest"))
    assert (rest["rows"]["train"], rest["rows"]["held_out"]) == (4, 3)
    problems = load_problems(out / "held_out.parquet")
    assert [(p.prompt, p.traces) for p in problems] == [("All wrong", ()), ("All long", ()), ("No generation", ())]
    card = prepare(source, tokenizer_folder, out, [evaluation])
    assert not (out / "held_out.parquet").exists()  # it would overlap the new train.parquet


def test_splits_are_by_trace_length(copied, tokenizer_folder, evaluation, monkeypatch):
    out, source = copied
    assert select.SPLITS == {"all": None, "easy": 2048, "hard": 4096}
    monkeypatch.setitem(select.SPLITS, "easy", 200)
    card = prepare(source, tokenizer_folder, out, [evaluation], Choice(split="easy"))
    assert card["rows"]["train"] == 3
    assert card["rows"]["dropped"]["over_split"] == 1
    assert {p.prompt for p in load_problems(out / "train.parquet")} == {
        "What is $1+1$?",
        "What is $1-1$?",
        "Half of one?",
    }


def test_labels_only_spare_work(one_verifier, tmp_path, tokenizer_folder):
    rows = [
        openr1_row("One", "1", [trace("1"), trace("1", 3)], correctness_math_verify=[False, True]),
        openr1_row("Two", "2", [trace("3")], correctness_math_verify=[True]),
    ]
    source = write_openr1(tmp_path / "train.parquet", rows)
    card = prepare(source, tokenizer_folder, tmp_path / "distrust")
    assert card["traces"] == {"read": 3, "dropped": {"wrong": 1}, "kept": 2}
    card = prepare(source, tokenizer_folder, tmp_path / "trust", trust_labels=True)
    assert card["traces"] == {"read": 3, "dropped": {"labelled_wrong": 1, "wrong": 1}, "kept": 1}


def test_two_processes_do_not_share_a_folder(prepared, tokenizer_folder, evaluation):
    out, _, source = prepared
    settings = json.loads((out / "verified.jsonl").read_text().splitlines()[0])["settings"]
    with Journal(out / "verified.jsonl", settings), pytest.raises(UserError, match="another process is at work"):
        prepare(source, tokenizer_folder, out, [evaluation])


@pytest.mark.parametrize("damaged", [b"\0\0\0\0", b"[]", b"[" * 100_000])
def test_a_damaged_line_of_the_journal_is_named(tmp_path, damaged):
    path = tmp_path / "verified.jsonl"
    with Journal(path, {}) as journal:
        journal.append([{"id": "a"}, {"id": "b"}])
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], damaged]) + b"\n")
    with Journal(path, {}) as journal:
        assert journal[0] == {"id": "a"}
        for read in (list, lambda journal: journal[1]):
            with pytest.raises(UserError, match=r"verified.jsonl:3: not .*; cut off the file before that line"):
                read(journal)


def test_nothing_is_recorded_after_a_batch_that_failed(tmp_path, monkeypatch):
    """Record i of the journal is that of row i."""
    monkeypatch.setattr(screen, "TRACES_AT_ONCE", 2)

    class Rows:
        def scan(self):
            return iter([{}] * 10)

        def name(self, number):
            return f"row {number}"

        def look(self, number, where, row):
            return screen.ScreenedRow({"row": number, "generations": 0})

    class Verifier:
        def __init__(self, failing_call):
            self.calls, self.failing_call = 0, failing_call

        def score(self, items):
            self.calls += 1
            if self.calls == 1:
                time.sleep(0.2)  # so that a batch waits behind the one that fails
            if self.calls == self.failing_call:
                raise OSError("no process could be started")
            return []

    def rows_after(failing_call):
        with Journal(tmp_path / "journal.jsonl", {}, row=int, generations=int) as journal:
            with contextlib.suppress(OSError):
                screen.screen(Rows(), journal, Rows(), Verifier(failing_call), lambda count: None)
            return [record["row"] for record in journal]

    assert rows_after(failing_call=2) == [0, 1]
    assert rows_after(failing_call=None) == list(range(10))


def test_nothing_left_is_an_error(one_verifier, tmp_path, tokenizer_folder):
    source = write_openr1(tmp_path / "train.parquet", [openr1_row("One", "1", [trace("2")])])
    with pytest.raises(DataError, match="no problem is left to train on; dropped: not_confirmed 1"):
        prepare(source, tokenizer_folder, tmp_path / "out")


def test_held_out_takes_a_share_or_a_number():
    assert [held_out_count(text, 10) for text in ("0", "0.25", "3", "rest")] == [0, 2, 3, 0]
    for text in ("-1", "1.5", "many", "nan", "inf"):
        with pytest.raises(ConfigError, match="--held-out"):
            held_out_count(text, 10)


def test_why_a_problem_has_no_trace():
    assert why_none(["empty"]) == "no_trace"
    assert why_none(["too_long", "cut_off"]) == "too_long"
    assert why_none(["too_long", "wrong"]) == "not_confirmed"
    assert why_none(["error", "error"]) == "unverifiable"
    assert why_none(["ok"]) == "over_split"
    assert screen.verdict_of(Score(1.0)) == "ok" and screen.verdict_of(Score(0.0, "timeout")) == "timeout"


@pytest.mark.parametrize(
    "gold", ["proof", "a) 3; b) 5", "(1) 3 (2) 4", "1. 5, 2. 7", "i) 2 ii) 4", "See solution above"]
)
def test_unverifiable_golds(gold):
    assert screen.is_unverifiable(gold)


@pytest.mark.parametrize(
    "gold",
    [
        "5",
        "(1, 2)",
        "A",
        "yes",
        "0.1, 2.5",
        r"\text{the red one}",
        "x=1 or x=2",
        "(0,1)(1,2)",
        "(0, 1), (1, 2)",
        "[0, 1) and (1, 2)",
        "f(1) or f(2)",
        "1) ",
    ],
)
def test_verifiable_golds(gold):
    assert not screen.is_unverifiable(gold)


@pytest.mark.slow
def test_kill_minus_nine_and_resume(tmp_path, tokenizer_folder):
    rows = [openr1_row(f"What is {i}+{i}?", str(2 * i), [trace(str(2 * i)), trace(f"{i}/7")]) for i in range(1500)]
    source = write_openr1(tmp_path / "train.parquet", rows, 100)
    command = [
        sys.executable,
        "-c",
        "from luffy.cli import main; main()",
        "prepare",
        "openr1",
        source,
        "--tokenizer",
        str(tokenizer_folder),
        "--max-prompt-tokens",
        "2000",
    ]
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    process = subprocess.Popen([*command, "--out", str(tmp_path / "cut")], stderr=subprocess.DEVNULL)
    journal = tmp_path / "cut" / "verified.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 200:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "train.parquet").exists()
    result = subprocess.run([*command, "--out", str(tmp_path / "cut")], check=True, capture_output=True, text=True)
    assert "kept 1,500" in result.stdout
    assert pq.read_table(tmp_path / "cut" / "train.parquet").equals(pq.read_table(tmp_path / "whole" / "train.parquet"))


def test_question_keys_see_through_layout_but_not_signs():
    assert question_key("What is $1+1$?") == question_key("what is  1 + 1")
    assert question_key(r"\left( 1 \right)") == question_key("(1)")
    assert question_key("1+1") != question_key("1-1")
    assert words_of(r"Find $\frac{1}{2}x_1$") == ["find", "frac", "1", "2", "x", "1"]


def test_evaluation_items_match_by_ngram_and_short_ones_as_a_whole():
    index = EvaluationIndex(ngram=4)
    system = Message("system", "always think step by step")
    index.add(Problem("a", (system, Message("user", "How many apples has Ann got")), "3"), "set")
    index.add(Problem("b", "Compute 2+3", "5"), "set")
    assert index.find("Tell me: how MANY apples, has Bob?").ngram == "how many apples has"
    assert index.find("How many pears has Ann got") is None
    assert index.find("always think step by step") is None  # everybody's system prompt is nobody's question
    assert index.find("compute $2 + 3$.").item == "set#b"
    assert index.find("Compute 2-3") is None
    assert index.find("Now compute 2+3 again and again") is None


def test_openr1_on_the_command_line(tmp_path, tokenizer_folder):
    pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")
    rows = [openr1_row(f"What is {i}+{i}?", str(2 * i), [trace(str(2 * i)), trace("x")]) for i in range(5)]
    source = write_openr1(tmp_path / "train.parquet", rows)
    command = ["prepare", "openr1", source, "--tokenizer", tokenizer_folder, "--out", tmp_path / "out"]
    result = luffy(*command, "--max-prompt-tokens", 2000, "--held-out", 2, "--workers", 1)
    assert result.returncode == 0, result.stderr
    assert "rows      read 5, kept 5; dropped: none" in result.stdout
    assert "traces    read 10, kept 5; dropped: wrong 5" in result.stdout
    assert "verified rows 5/5 (100%)" in result.stderr
    assert len(load_problems(tmp_path / "out" / "train.parquet")) == 3
    assert len(load_problems(tmp_path / "out" / "held_out.parquet")) == 2
    result = luffy(*command)
    assert result.returncode == 2
    assert "was made with max_prompt_tokens=2000, now it is 1024" in result.stderr
