import threading

import pytest

from luffy.errors import UserError
from luffy.rewards import build_verifier
from luffy.rewards import verifier as verifier_module
from luffy.rewards.kinds import Answered
from luffy.types import Problem, Score


def problem_with_answer(answer, **meta):
    return Problem(id="p1", prompt="2+3?", answer=answer, meta=meta)


def test_weighted_sum_and_first_status_that_is_not_ok():
    with build_verifier(weights={"gsm8k": 1.0, "format": 0.25, "choice": -2.0}) as verifier:
        scores = verifier.score(
            [
                (problem_with_answer("#### 5"), "<think>a</think>\n#### 5"),
                (problem_with_answer("B"), "<think>a</think>\\boxed{B}"),
                (problem_with_answer("5"), "so\n#### 5"),
            ]
        )
        # 5 is no letter and B is no number: those terms are errors and add 0.
        assert scores == [Score(1.25, "error"), Score(0.25 - 2.0, "error"), Score(1.0, "error")]
    with build_verifier(weights={"format": 0.1, "gsm8k": 1.0}) as verifier:
        scores = verifier.score(
            [
                (problem_with_answer("5"), "<think>a</think>#### 5"),
                (problem_with_answer("5"), "<think>a</think> five"),
                (problem_with_answer("5"), "#### 5"),
            ]
        )
        assert scores == [Score(1.1, "ok"), Score(0.1, "no_answer"), Score(1.0, "ok")]
        assert [(s.components["format"], s.components["gsm8k"]) for s in scores] == [(1, 1), (1, 0), (0, 1)]
        assert verifier.counts == {"ok": 2, "no_answer": 1}


def test_an_error_of_a_reward_in_this_process_says_what_it_was():
    def refuses(answer, response):
        raise ValueError(f"gold {answer} is no number")

    (outcome,) = verifier_module.InProcessReward(refuses).outcomes([Answered(problem_with_answer("five"), "5")])
    assert outcome.status == "error" and "gold five is no number" in outcome.message


def test_counts_accumulate_over_calls():
    with build_verifier("numeric") as verifier:
        verifier.score([(problem_with_answer("5"), "5"), (problem_with_answer("5"), "none")])
        verifier.score([(problem_with_answer("5"), "6")])
        assert verifier.score([]) == []
        assert verifier.counts == {"ok": 2, "no_answer": 1}


def test_an_own_function_in_all_its_moods(caplog):
    with build_verifier("reward_functions:length_reward", timeout_s=2.0) as verifier:
        responses = ["four", "nan", "text", "raise", "hang", "abcdefgh"]
        scores = verifier.score([(problem_with_answer("x"), response) for response in responses])
        assert scores == [
            Score(0.4),
            Score(0.0, "error"),
            Score(0.0, "error"),
            Score(0.0, "error"),
            Score(0.0, "timeout"),
            Score(0.8),
        ]
        assert verifier.score([(problem_with_answer("bonus", bonus=2), "abcde")]) == [Score(2.5)]
        assert verifier.counts == {"ok": 3, "error": 3, "timeout": 1}
    assert len(caplog.records) == 2  # one per status, not one per failure
    assert "must return a finite number, found nan" in caplog.text


def test_the_bool_of_an_own_function_is_a_number():
    with build_verifier("reward_functions:true_reward", workers=1) as verifier:
        assert verifier.score([(problem_with_answer("a"), "a"), (problem_with_answer("a"), "b")]) == [
            Score(1.0),
            Score(0.0),
        ]


def test_a_worker_does_not_load_torch_for_a_function_that_does_not():
    with build_verifier("reward_functions:torch_is_loaded", workers=1) as verifier:
        assert verifier.score([(problem_with_answer("a", bonus=1), "a")]) == [Score(0.0)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "maths",
            r"unknown reward 'maths' \(did you mean 'math'\?\); known: math, http, gsm8k, numeric, reasoning_gym, choice, format",
        ),
        ("zzz", r"unknown reward 'zzz'; known"),
        ("module:function", "unknown reward"),
        ("no_such_module:f", "cannot import 'no_such_module'.*No module named 'no_such_module'"),
        ("reward_functions:missing", "has no 'missing'"),
        ("reward_functions:two_arguments", r"cannot be called as function\(response, answer, problem\)"),
    ],
)
def test_a_reward_that_cannot_be_built_is_one_clear_error(kind, message):
    with pytest.raises(UserError, match=message):
        build_verifier(kind, workers=1)


@pytest.mark.parametrize("weights", [{}, {"math": float("nan")}, {"math": "1"}, {"math": True}, {"nope": 1.0}])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(UserError, match="reward"):
        build_verifier(weights=weights)


def test_self_check_catches_a_verifier_that_is_wrong(monkeypatch):
    pytest.importorskip("math_verify")
    real = verifier_module.WorkerPool

    def pool_that_always_agrees(path, *args, **options):
        assert path == "luffy.rewards.math:load"
        return real("reward_functions:always_right_factory", *args, **options)

    monkeypatch.setattr(verifier_module, "WorkerPool", pool_that_always_agrees)
    with pytest.raises(UserError, match=r"gold 1 against \\boxed\{2\} gave \(1.0, 'ok'\), expected 0.*antlr4_13_2"):
        build_verifier("math", workers=1)


def test_missing_math_verify_says_what_to_install(monkeypatch):
    monkeypatch.setattr(verifier_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "math-verify\[antlr4_13_2\]==0.9.0"'):
        build_verifier("math")


def test_math_works_off_the_main_thread():
    pytest.importorskip("math_verify")
    scores = []

    def work():
        with build_verifier("math", workers=1) as verifier:
            scores.extend(
                verifier.score(
                    [
                        (problem_with_answer("1/3"), r"\boxed{\frac{2}{6}}"),
                        (problem_with_answer("1"), r"\boxed{(10^9)!}"),
                    ]
                )
            )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert scores == [Score(1.0), Score(0.0, "timeout")]


def test_worker_environment_keeps_gmpy2_out():
    """With gmpy2 installed, sympy would use it and defeat the alarm of a formula; workers are told not to."""
    pytest.importorskip("math_verify")
    with verifier_module.WorkerPool("subprocess:getoutput", workers=1) as pool:
        [outcome] = pool.map([("echo $SYMPY_GROUND_TYPES $MPMATH_NOGMPY $OMP_NUM_THREADS",)])
    assert outcome.value == "python 1 1"
