"""``luffy eval golds``: the verifier judged on real data. Every gold must verify against itself in ``\\boxed{}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from luffy.cli import main
from luffy.evaluation.benchmarks import Suite, load_suite
from luffy.rewards import build_verifier
from luffy.rewards.pool import WorkerPool
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


# ---- the command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    suites: Annotated[list[str] | None, typer.Argument(help="suites or files; default: math6 ood gsm8k")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the benchmarks; default: $LUFFY_DATA")] = None,
    reward: Annotated[str | None, typer.Option(help="another reward than the suite's own")] = None,
) -> None:
    """Judge the verifier: every gold must verify against itself in a box. Exit code 1 if one does not."""
    failures = 0
    for suite in (load_suite(name, data, reward=reward) for name in suites or ("math6", "ood", "gsm8k")):
        for check in check_golds(suite):
            typer.echo(f"{check.title}: {check.checked - len(check.failed)} of {check.checked} ({check.reward})")
            for item, gold, verdict in check.failed:
                typer.echo(f"  FAILED {item}  {gold!r}  score {verdict.value:g}, {verdict.status}")
            for item, gold in check.text_only:
                typer.echo(f"  text only {item}  {gold!r}")
            failures += len(check.failed)
        for name in suite.missing:
            typer.echo(f"{name}: not checked, the file is missing")
        for row in suite.left_out:
            typer.echo(f"  FAILED {row}")
        failures += len(suite.left_out)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
