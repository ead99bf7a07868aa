"""``luffy eval golds``: the verifier judged on real data. Every gold must verify against itself in ``\\boxed{}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from luffy.evaluation.benchmarks import Suite
from luffy.rewards import WorkerPool, build_verifier
from luffy.types import Problem, Score

_WORDS = re.compile(r"(?:\\text\{)?[A-Za-z ]+\}?")


@dataclass(frozen=True)
class GoldCheck:
    """One benchmark: ``failed`` lists (item, gold, verdict) of golds that are not right when repeated;
    ``text_only`` the golds that are right, but in which the math reward reads no mathematics."""

    title: str
    reward: str
    checked: int
    failed: tuple[tuple[str, str, Score], ...]
    text_only: tuple[tuple[str, str], ...] = ()


def check_golds(suite: Suite) -> Iterator[GoldCheck]:
    for benchmark in suite.benchmarks:
        with build_verifier(benchmark.reward) as verifier:
            scores = verifier.score([(p, f"The answer is $\\boxed{{{p.answer}}}$.") for p in benchmark.problems])
        failed = tuple(
            (problem.id, problem.answer, score)
            for problem, score in zip(benchmark.problems, scores, strict=True)
            if score.value != 1.0
        )
        text_only = _read_as_text(benchmark.problems) if benchmark.reward == "math" else ()
        yield GoldCheck(benchmark.title, benchmark.reward, len(benchmark.problems), failed, text_only)


def _read_as_text(problems: Sequence[Problem]) -> tuple[tuple[str, str], ...]:
    # words such as "even" are meant as text
    math = [problem for problem in problems if not _WORDS.fullmatch(problem.answer)]
    with WorkerPool("luffy.rewards.math:load_reader", factory_args=()) as pool:
        outcomes = pool.map((problem.answer,) for problem in math)
    return tuple((p.id, p.answer) for p, o in zip(math, outcomes, strict=True) if o.status != "ok" or o.value)
