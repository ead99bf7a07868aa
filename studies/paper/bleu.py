"""How much responses resemble the teacher's traces (paper appendix F.1): corpus BLEU by sacreBLEU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from luffy.data import load_problems
from luffy.errors import UserError
from luffy.evaluation.accuracy import Row
from luffy.evaluation.results import Evaluation
from studies.paper.figures import INSTALL_HINT, Figure, Panel, Series

Traces = Mapping[str, tuple[str, ...]]


def load_traces(data: Path) -> Traces:
    """Text traces by problem id. Recorded token ids have no text without their tokenizer and do not count."""
    traces: dict[str, tuple[str, ...]] = {}
    for problem in load_problems(str(data), require_answer=False):
        texts = tuple(trace.text for trace in problem.traces if trace.text)
        if texts:
            traces[problem.id] = texts
    if not traces:
        raise UserError(f"{data}: no problem has a trace with text; BLEU needs them")
    return traces


def corpus_bleu(responses: Sequence[str], references: Sequence[tuple[str, ...]]) -> float:
    """0 to 100. A problem with several traces counts the nearest n-grams of any of them."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise UserError(f"BLEU needs sacreBLEU ({error}); {INSTALL_HINT}") from error
    streams = [list(stream) for stream in zip_longest(*references)]
    return float(BLEU().corpus_score(list(responses), streams).score)


def matched(rows: Sequence[Row], key: str, traces: Traces) -> tuple[list[str], list[tuple[str, ...]]]:
    known = [row for row in rows if row[key] in traces]
    return [row["response"] for row in known], [traces[row[key]] for row in known]


def bleu_figure(traces: Traces, samples: Mapping[str, Sequence[Row]], evaluations: Mapping[str, Evaluation]) -> Figure:
    """Runs over their steps; an evaluation is one bar."""
    panels = []
    over_steps = [series for name, rows in samples.items() if (series := _bleu_over_steps(name, rows, traces)).x]
    if over_steps:
        panels.append(Panel("own samples in training", "step", "BLEU", tuple(over_steps), y_from_zero=True))
    bars = []
    for place, (name, evaluation) in enumerate(evaluations.items()):
        responses, references = matched(evaluation.rows, "id", traces)
        if responses:
            bars.append(Series(name, (float(place),), (corpus_bleu(responses, references),)))
    if bars:
        panels.append(Panel("evaluations", "evaluation", "BLEU", tuple(bars), kind="bar", y_from_zero=True))
    if not panels:
        named = ", ".join([*samples, *evaluations])
        raise UserError(f"no response of {named} belongs to a problem of --data that has a trace; give their dataset")
    return Figure(
        "bleu",
        "Likeness to the teacher's traces",
        f"Corpus BLEU (sacreBLEU, 13a) of the policy's own responses against the traces of {len(traces)} problems.",
        "appendix F.1 (57.5 for SFT, 8.8 for on-policy RL, 44.8 for LUFFY)",
        tuple(panels),
    )


def _bleu_over_steps(name: str, rows: Sequence[Row], traces: Traces) -> Series:
    """Only what the policy wrote alone: a sample that starts from the trace would resemble it for free."""
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        if not any(row["off_policy"]):
            by_step.setdefault(row["step"], []).append(row)
    points = []
    for step, own in sorted(by_step.items()):
        responses, references = matched(own, "problem", traces)
        if responses:
            points.append((float(step), corpus_bleu(responses, references)))
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points))
