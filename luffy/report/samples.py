"""Recorded groups as HTML: prompt, answer and every response with the teacher's tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp
from typing import Any

from markupsafe import Markup

from luffy.report.figures import swatch
from luffy.report.methods import Method
from luffy.report.runs import RunRecord, is_number
from luffy.report.text import aligned, number, shorten, show

MOST_GROUPS = 12  # in a report
MOST_SAMPLES = 16  # of a group
STEPS_PER_METHOD = 3
HEAD_TOKENS, TAIL_TOKENS = 280, 120  # of a longer response
LONGEST_PROMPT = 2000  # characters
SHADES = 10  # classes p0 (unlikely) to p9


@dataclass(frozen=True)
class Shown:
    """A group chosen for the report."""

    style: int
    method: Method
    run: RunRecord
    step: int
    problem: str


def choose_groups(methods: Sequence[Method], most: int = MOST_GROUPS) -> tuple[list[Shown], int]:
    """The first problem recorded at the first, a middle and the last recorded step of each method, and how
    many recorded groups are left out. Never chosen by outcome: what is seen is what was recorded."""
    shown: list[Shown] = []
    recorded = 0
    share = max(most // max(sum(any(r.samples.places for r in m.runs) for m in methods), 1), 1)
    for style, method in enumerate(methods):
        recorded += sum(len(run.samples.places) for run in method.runs)
        run = next((run for run in method.runs if run.samples.places), None)
        if run is not None:
            shown += [Shown(style, method, run, step, problem) for step, problem in _first_groups(run, share)]
    shown = shown[:most]
    return shown, recorded - len(shown)


def _first_groups(run: RunRecord, most: int) -> list[tuple[int, str]]:
    steps = run.samples.steps
    middle = [steps[len(steps) // 2]] if most >= STEPS_PER_METHOD else []
    picked = sorted({steps[0], *middle, steps[-1]})[-most:]
    each = max(min(most // len(picked), 2), 1)
    return [(step, problem) for step in picked for problem in run.samples.problems(step)[:each]]


def group_html(shown: Shown) -> Markup:
    rows = shown.run.samples.group(shown.step, shown.problem)
    success = shown.run.config.get("reward.success", 1.0)
    cards = Markup('<div class="samples">{}</div>').format(
        Markup("").join(sample_html(row, success) for row in rows[:MOST_SAMPLES])
    )
    cut = Markup("")
    if len(rows) > MOST_SAMPLES:
        cut = Markup('<p class="note">{} of {} samples shown.</p>').format(MOST_SAMPLES, len(rows))
    head = Markup('<h3>{} {} <span class="sub">seed {}, step {}</span></h3>').format(
        swatch(shown.style), show(shown.method.label), "?" if shown.run.seed is None else shown.run.seed, shown.step
    )
    guided = int(any(any(row.get("off_policy") or ()) for row in rows))
    opened = Markup('<article class="group" data-method="{}" data-label="{}" data-step="{}" data-teacher="{}">').format(
        shown.style, shown.method.label, shown.step, guided
    )
    return opened + head + _problem_html(rows[0], shown.problem) + cut + cards + Markup("</article>")


def _problem_html(row: Mapping[str, Any], problem: str) -> Markup:
    prompt = shorten(str(row.get("prompt", "")), LONGEST_PROMPT)
    answer = shorten(str(row.get("answer", "")), 300)
    return Markup(
        "<dl><dt>Problem</dt><dd><code>{}</code></dd>"
        '<dt>Prompt</dt><dd><pre dir="auto">{}</pre></dd><dt>Answer</dt><dd><code>{}</code></dd></dl>'
    ).format(show(shorten(problem, 120)), show(prompt), show(answer))


def sample_html(row: Mapping[str, Any], success: float) -> Markup:
    chips = Markup("").join(_chips(row, success))
    body = response_html(row)
    return Markup('<div class="sample"><p class="chips">{}</p><pre class="response" dir="auto">{}</pre></div>').format(
        chips, body
    )


def _chips(row: Mapping[str, Any], success: float) -> Iterator[Markup]:
    reward = row.get("reward")
    if is_number(reward):
        solved = reward == success
        said = ("\u2713" if solved else "\u2717", number(float(reward), 2).removesuffix(".00"))  # type: ignore[arg-type]
        yield Markup('<span class="chip {}">{} reward {}</span>').format("good" if solved else "bad", *said)
    off = row.get("off_policy") or []
    if any(off):
        yield Markup('<span class="chip teacher">{}</span>').format("teacher" if all(off) else "teacher prefix")
    yield Markup("<span>advantage {}</span>").format(advantage_of(row.get("advantages")))
    ends = show(str(row.get("finish", "?")))
    yield Markup("<span>{} tokens, finish: {}</span>").format(len(row.get("tokens") or []), ends)
    if row.get("status", "ok") != "ok":
        yield Markup('<span class="chip bad">{}</span>').format(show(str(row["status"])))


def advantage_of(advantages: Sequence[float] | None) -> str:
    """One figure, or two where teacher and policy tokens are weighted apart; a rejected group has none."""
    if not advantages:
        return "none (group rejected)"
    low, high = min(advantages), max(advantages)
    return _signed(low) if low == high else f"{_signed(low)} to {_signed(high)}"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def response_html(row: Mapping[str, Any]) -> Markup:
    """Teacher tokens as <mark>; the policy's own carry a class for the shade of their probability."""
    tokens = [str(token) for token in row.get("tokens") or []]
    if not tokens:
        return show(shorten(str(row.get("response", "")), 4 * (HEAD_TOKENS + TAIL_TOKENS)))
    parts = aligned(tokens, str(row.get("response", "")))
    pieces = [(text, cls) for (text, _), cls in zip(parts, _classes(row, parts), strict=True)]
    if len(pieces) <= HEAD_TOKENS + TAIL_TOKENS:
        return _spans(pieces)
    missing = len(pieces) - HEAD_TOKENS - TAIL_TOKENS
    gap = Markup('<span class="gap"> [{:,} tokens left out] </span>').format(missing)
    return _spans(pieces[:HEAD_TOKENS]) + gap + _spans(pieces[-TAIL_TOKENS:])


def _classes(row: Mapping[str, Any], parts: Sequence[tuple[str, bool]]) -> list[str]:
    n = len(parts)
    off = list(row.get("off_policy") or [])[:n]
    log_probs = list(row.get("log_probs") or [])[:n]
    off += [0] * (n - len(off))
    log_probs += [None] * (n - len(log_probs))
    return [_class(*token) for token in zip(off, log_probs, (special for _, special in parts), strict=True)]


def _class(off_policy: int, log_prob: float | None, special: bool) -> str:
    eos = " sp" if special else ""
    if off_policy:
        return f"teacher{eos}"
    if not is_number(log_prob):
        return eos.strip()
    return f"p{min(int(exp(min(log_prob, 0.0)) * SHADES), SHADES - 1)}{eos}"  # type: ignore[arg-type, type-var]


def _spans(pieces: Sequence[tuple[str, str]]) -> Markup:
    """Neighbours of the same class share a span: a third of the size."""
    out = []
    for cls, run in groupby(pieces, key=lambda piece: piece[1]):
        text = show("".join(text for text, _ in run))
        name = "mark" if cls.startswith("teacher") else "span"
        out.append(Markup("<{0} class='{1}'>{2}</{0}>").format(name, cls, text))
    return Markup("").join(out)
