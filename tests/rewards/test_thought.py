"""An answer counts when it stands after the last closed thought."""

import contextlib
import json
import sys

import pytest
from builders import write_rows

from luffy.cli import main
from luffy.config import load_config
from luffy.rewards import after_thought, build_verifier
from luffy.types import Problem

ANSWERS = {  # kind: (gold, a right answer, a wrong one)
    "math": ("42", r"\boxed{42}", r"\boxed{41}"),
    "gsm8k": ("42", "#### 42", "#### 41"),
    "numeric": ("42", "The answer is 42.", "The answer is 41."),
    "choice": ("B", "The answer is (B).", "The answer is (C)."),
}
# text: what counts of it; R is a right answer, W a wrong one
CASES = {
    "R": 1, "W": 0, "first W, no: R": 1,
    "<think>so R</think> W": 0, "<think>so W</think> R": 1,
    "<think>so R</think> I do not know.": 0, "<think>so R</think>": 0, "<think>so R": 0, "R <think>": 0,
    "so R</think> W": 0, "so W</think>\n\nR": 1, "so R</think>": 0,  # the prompt opened the thought
    "<think>R</think> R <think>W</think> W": 0, "<think>W</think> W <think>W</think> R": 1,
    "<think>W</think> R <think>and again": 0, "<think>a <think>R</think> W</think> R": 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_stands_after_the_last_closed_thought_counts(request, kind):
    gold, right, wrong = ANSWERS[kind]
    problem = Problem("p", "?", gold)
    texts = [case.replace("R", right).replace("W", wrong) for case in CASES]
    with contextlib.ExitStack() as stack:
        if kind == "math":
            verifier = request.getfixturevalue("math_verifier")
        else:
            verifier = stack.enter_context(build_verifier(kind))
        scores = verifier.score([(problem, text) for text in texts])
    assert [score.value for score in scores] == [float(expected) for expected in CASES.values()]
    assert {score.status for score in scores} == {"ok", "no_answer"}


# the same where the prompt ended with <think>
OPENED = CASES | {"R": 0, "first W, no: R": 0}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_thought_that_the_prompt_opened_must_be_closed(request, kind):
    gold, right, wrong = ANSWERS[kind]
    texts = [case.replace("R", right).replace("W", wrong) for case in OPENED]
    items = [(Problem("p", "?", gold), text, None, True) for text in texts]
    with contextlib.ExitStack() as stack:
        if kind == "math":
            verifier = request.getfixturevalue("math_verifier")
        else:
            verifier = stack.enter_context(build_verifier(kind))
            ignoring = stack.enter_context(build_verifier(kind, prompt_opens_thought=False))
            assert [score.value for score in ignoring.score(items)] == [float(value) for value in CASES.values()]
        assert [score.value for score in verifier.score(items)] == [float(value) for value in OPENED.values()]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_model_may_answer_inside(kind):
    gold, right, wrong = ANSWERS[kind]
    texts = [f"<think>so {right}</think>", f"<think>so {right}", f"<think>{wrong}</think> {right}"]
    with build_verifier(kind, workers=1, answer_in_thought=True) as verifier:
        assert [score.value for score in verifier.score([(Problem("p", "?", gold), text) for text in texts])] == [
            1.0
        ] * 3


def test_a_thought_longer_than_what_is_read_of_an_answer():
    problem = Problem("p", "?", "42")
    with build_verifier("numeric") as verifier:
        long, beyond = "thinking " * 2000, " and so on" * 1000
        texts = [f"<think>42 {long}", f"{long}</think> 42", f"<think>{long}</think> 42 {beyond}"]
        assert [score.value for score in verifier.score([(problem, text) for text in texts])] == [0.0, 1.0, 0.0]


def test_format_and_own_rewards_see_the_whole_response():
    text = "<think>2+3</think> #### 5"
    with build_verifier(
        weights={"gsm8k": 1.0, "format": 0.5, "reward_functions:characters": 1.0}, workers=1
    ) as verifier:
        (score,) = verifier.score([(Problem("p", "?", "5"), text)])
    assert score.value == 1.5 + len(text)


def test_the_part_that_counts():
    assert after_thought("no tags at all ") == "no tags at all "
    assert after_thought("a</think> b") == " b"
    assert after_thought("<think>a") == after_thought("a</think> b <think> c") == ""
    assert after_thought("no tags at all", in_thought=True) == ""
    assert after_thought("a</think> b", in_thought=True) == " b"


def test_the_setting_reaches_the_run_and_the_shell(tmp_path, monkeypatch, capsys):
    assert load_config(None).reward.answer_in_thought is False
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"answer": "42", "response": "<think>#### 42"}) + "\n")
    found = []
    for more in ([], ["--answer-in-thought"]):
        monkeypatch.setattr(sys, "argv", ["luffy", "verify", str(rows), "--reward", "gsm8k", *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        found.append(json.loads(capsys.readouterr().out)["score"])
    assert found == [0.0, 1.0]


def test_rows_of_luffy_verify_say_what_the_prompt_opened(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    prompts = ["2+3=?", "2+3=? <think>\n", "Write <think> first."]
    lines = [{"prompt": prompt, "answer": "42", "response": "#### 42"} for prompt in prompts]
    write_rows(rows, lines)
    recipe = tmp_path / "old.yaml"
    recipe.write_text("reward: {kind: gsm8k, prompt_opens_thought: false}\n")
    for options, expected in ((["--reward", "gsm8k"], [1.0, 0.0, 1.0]), (["--reward-of", str(recipe)], [1.0] * 3)):
        monkeypatch.setattr(sys, "argv", ["luffy", "verify", str(rows), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()] == expected
