"""Random input to whatever reads text that others wrote: it is read, or refused in one line; never a traceback."""

from __future__ import annotations

import os

import pytest
from fuzz import CORPUS, Broken, fuzz

from luffy.config import load_config
from luffy.data import load_problems
from luffy.errors import ConfigError, DataError
from luffy.rewards import choice, format, numeric
from luffy.rewards.extract import boxed_answer, boxes, last_boxed, tail
from luffy.rewards.math import as_boxed, normalise, same_text

ROUNDS = int(os.environ.get("LUFFY_FUZZ_ROUNDS", "20000"))
SEED = int(os.environ.get("LUFFY_FAULT_SEED", "0"))
FEW = 300

CONFIG_WORDS = [
    b"base: tiny/luffy\n", b"name: ", b"optim: {lr: ", b"1e-6", b".nan", b".inf", b"null", b"true", b"~", b"[]", b"{}", b"- ", b": ", b"\n  ",
    b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"!!binary ", b"!!set ", b"!!timestamp ", b"2020-13-45", b"12:30:45", b"0x", b"0o9",
    b"? ", b"| \n", b"> \n", b"---\n", b"...\n", b"%YAML 9.9\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"9" * 5000, b"[" * 200, b"data: {train: ",
    b"reward: {weights: {", b"rollout: {n: ", b"guidance: {n_prefix: ", b"'", b'"', b"\\", b"\t", b"model: {lora: ", b"eval_also: {",
]  # fmt: skip
DATA_WORDS = [
    b'{"prompt": "', b'"answer": ', b'"traces": [', b'"token_ids": [', b'"log_probs": [', b'"role": "', b'"content": ', b'"id": ', b"null", b"true",
    b"NaN", b"-Infinity", b"1e999", b"-0.0", b"\\ud800", b"\\u0000", b"{}", b"[]", b"}\n{", b'","', b'":', b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\x00",
    b"9" * 5000, b"[" * 300, b'"question": "', b"#### 5", b"<<1+1=2>>", b'"reward_model": {"ground_truth": ', b'"problem": ', b'"generations": [',
    b'"completion": ', b'"target": ', b'"correctness_math_verify": [', b'"teacher": ',
]  # fmt: skip
ANSWER_WORDS = [
    rb"\boxed{", b"}", b"{", rb"\fbox {", rb"\}", rb"\{", rb"\frac{", rb"\dfrac", rb"\left(", rb"\text{ and }", b" or ", b"####", b"answer is ",
    b"$", b"$$", rb"\(", rb"\)", b"1,000", b"-", b"1e9", b"1/", b"%", rb"\%", b"A", b"(B)", b"<think>", b"</think>", b"\n", "½".encode(),
    "٣".encode(), "\u2212".encode(), "€".encode(), b"\x00", b"\xed\xa0\x80", rb"\,", b"~", b"x_{max} = ", b"np.", b"9" * 400, b" " * 50, b",", b"**",
]  # fmt: skip


@pytest.fixture
def scratch(tmp_path):
    """``scratch(data, suffix)``: a file that holds the input."""

    def write(data, suffix):
        path = tmp_path / f"input{suffix}"
        path.write_bytes(data)
        return path

    return write


def type_and_line(error):
    assert "\n" not in str(error), str(error)[:300]
    return f"{type(error).__name__} {error}"


def reads_config(scratch):
    def target(data):
        try:
            config = load_config(scratch(data, ".yaml"))
            return f"read, n={config.rollout.n > 1}"
        except ConfigError as error:
            return type_and_line(error)

    return target


def reads_override(scratch):
    def target(data):
        try:
            load_config(None, data.decode("utf-8", "replace").splitlines()[:3])
            return "read"
        except ConfigError as error:
            return type_and_line(error)

    return target


def reads_data(scratch):
    def target(data):
        path = scratch(data, ".jsonl")
        try:
            problems = load_problems(str(path), bad_rows="skip")
            assert all(isinstance(p.answer, str) and p.id for p in problems)
            return f"{problems.schemas} {sorted(problems.skipped)}"
        except DataError as error:
            return type_and_line(error)

    return target


def reads_answers(scratch):
    def target(data):
        text = data.decode("utf-8", "surrogateescape")
        shape = f"{len(boxes(text)) > 0} {last_boxed(text) is None} {boxed_answer(text) is None} {bool(normalise(text[:500]))}"
        as_boxed(tail(text))
        same_text(tail(text), "1/2")
        verdicts = [scorer("5", text) for scorer in (numeric.score_strict, numeric.score_lenient, format.score)]
        verdicts.append(choice.score("C", text))
        assert all(value in (0.0, 1.0) and status in ("ok", "no_answer") for value, status in verdicts)
        return " ".join([shape, *(f"{status}{'+' if value else '-'}" for value, status in verdicts)])

    return target


TARGETS = {
    "config": (reads_config, CONFIG_WORDS),
    "overrides": (reads_override, CONFIG_WORDS),
    "data": (reads_data, DATA_WORDS),
    "answers": (reads_answers, ANSWER_WORDS),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_a_few_changes_of_it(scratch, name):
    make, words = TARGETS[name]
    fuzz(name, make(scratch), words, FEW, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TARGETS)
def test_many_changes_of_the_corpus(scratch, name):
    make, words = TARGETS[name]
    tried, ways = fuzz(name, make(scratch), words, ROUNDS, SEED)
    print(f"\n{name}: {tried} inputs, {ways} ways to end, none broke it")


def test_the_fuzzer_finds_and_keeps_what_breaks(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.CORPUS", tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "seed").write_bytes(b"abc")

    def breaks_on_x(data):
        if b"x" in data:
            raise KeyError("x")
        return "fine"

    with pytest.raises(Broken, match="crash-.*KeyError"):
        fuzz("toy", breaks_on_x, [b"x"], 1000)
    assert any(b"x" in p.read_bytes() for p in (tmp_path / "toy").glob("crash-*"))
    assert all((CORPUS / name).is_dir() for name in TARGETS)
