"""Recorded groups as HTML: prompt, answer and every response with the teacher's tokens marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, sqrt
from typing import Any

from markupsafe import Markup

from luffy.report.figures import swatch
from luffy.report.methods import Method, Styled
from luffy.report.runs import GroupKey, RunRecord, is_number, listed, whole
from luffy.report.text import aligned, number, shorten, show

MOST_GROUPS = 12  # in a report
MOST_SAMPLES = 16  # of a group
MOST_COMPONENTS = 12  # rewards of a weighted sum
STEPS_PER_METHOD = 3
LONGEST_PROMPT = 2000  # characters
LONGEST_SPAN = 20_000  # characters: tokens are a few of them, but nothing keeps one from being a book
NO_TITLE = Markup("")
SHADES = 10  # classes p0 (unlikely) to p9, w0 (no pull) to w9


@dataclass(frozen=True)
class Look:
    """How much of a longer response is shown, and whether every token says its figures under the pointer."""

    head: int
    tail: int
    apart: bool = False


BRIEF = Look(280, 120)  # on paper and in a file to send
CLOSE = Look(1600, 400, apart=True)  # on the live page


@dataclass(frozen=True)
class Shown:
    """A group chosen for the report."""

    style: int
    method: Method
    run: RunRecord
    key: GroupKey


def choose_groups(methods: Sequence[Styled]) -> tuple[list[Shown], int]:
    """The first problem or two recorded at the first, a middle and the last recorded step of each method, and how
    many recorded groups are left out. Never chosen by outcome: what is seen is what was recorded."""
    shown: list[Shown] = []
    recorded = 0
    share = max(MOST_GROUPS // max(sum(any(r.samples.places for r in m.runs) for _, m in methods), 1), 1)
    for style, method in methods:
        recorded += sum(len(run.samples.places) for run in method.runs)
        run = next((run for run in method.runs if run.samples.places), None)
        if run is not None:
            shown += [Shown(style, method, run, key) for key in _first_groups(run, share)]
    shown = shown[: max(MOST_GROUPS, len(methods))]
    return shown, recorded - len(shown)


def _first_groups(run: RunRecord, most: int) -> list[GroupKey]:
    steps = run.samples.steps
    middle = [steps[len(steps) // 2]] if most >= STEPS_PER_METHOD else []
    picked = sorted({steps[0], *middle, steps[-1]})[-most:]
    each = max(min(most // len(picked), 2), 1)
    return [key for step in picked for key in run.samples.groups(step)[:each]]


def group_html(shown: Shown) -> Markup:
    rows, step = shown.run.samples.group(shown.key), shown.key.step
    head = Markup('<h3>{} {} <span class="sub">seed {}, step {}</span></h3>').format(
        swatch(shown.style), show(shown.method.label), "?" if shown.run.seed is None else shown.run.seed, step
    )
    guided = int(any(any(listed(row, "off_policy")) and "reward" in row for row in rows))  # not the traces of SFT
    opened = Markup('<article class="group" data-method="{}" data-label="{}" data-step="{}" data-teacher="{}">').format(
        shown.style, shown.method.label, step, guided
    )
    cards = sample_cards(rows[:MOST_SAMPLES], len(rows), shown.run.success)
    return opened + head + problem_html(rows[0]) + cards + Markup("</article>")


def problem_html(row: Mapping[str, Any]) -> Markup:
    """Traces of SFT come without an answer."""
    code, text = Markup("<code>{}</code>"), Markup('<pre dir="auto" tabindex="0">{}</pre>')
    entries = [
        Markup("<dt>{}</dt><dd>{}</dd>").format(name.title(), frame.format(show(shorten(str(row[name]), limit))))
        for name, frame, limit in (("problem", code, 120), ("prompt", text, LONGEST_PROMPT), ("answer", code, 300))
        if name in row
    ]
    return Markup("<dl>{}</dl>").format(Markup("").join(entries))


def sample_cards(rows: Sequence[Mapping[str, Any]], of: int, success: float, look: Look = BRIEF) -> Markup:
    """The samples side by side; ``of`` is how many the group has."""
    cards = Markup('<div class="samples">{}</div>').format(
        Markup("").join(sample_html(row, success, look) for row in rows)
    )
    cut = Markup('<p class="note">{} of {} samples shown.</p>').format(len(rows), of) if of > len(rows) else Markup("")
    return cut + cards


def sample_html(row: Mapping[str, Any], success: float, look: Look = BRIEF) -> Markup:
    chips = Markup("").join(_chips(row, success))
    card = (
        '<div class="sample" data-sample="{}"><p class="chips">{}</p>'
        '<pre class="response" dir="auto" tabindex="0">{}</pre></div>'
    )
    return Markup(card).format(whole(row.get("sample")), chips, response_html(row, look))


COLOURS = (("source", "source"), ("probability", "probability"), ("weight", "gradient weight"))


def colour_choice() -> Markup:
    """What ``components.js`` listens to: the choice is an attribute of the section around it."""
    options = Markup("").join(Markup('<option value="{}">{}</option>').format(*colour) for colour in COLOURS)
    return Markup('<label>Colour by <select class="colour">{}</select></label>').format(options)


OR_OVERRIDE = '<span class="override-word"> or override</span>'


def colour_key() -> Markup:
    """The style sheet hides what is said of overrides where no sample has any."""
    return Markup(
        '<p class="key by-source"><mark class="teacher">teacher token</mark> <mark class="override">override by the '
        "second model</mark> <span>policy token</span></p>"
        '<p class="key by-probability"><span>probability under the policy:</span> <span class="p0">near 0</span> '
        '<span class="p4">0.5</span> <span>near 1</span> <mark class="teacher none">teacher'
        + OR_OVERRIDE
        + "</mark></p>"
        '<p class="key by-weight"><span title="|d loss / d logit| of the token per unit of advantage, as the update '
        'saw it">pull on the token per unit of advantage:</span> <span class="w0">0</span> '
        '<span class="w3">0.1</span> <span class="w5">0.3</span> <span class="w9">1</span> '
        '<mark class="teacher none">teacher' + OR_OVERRIDE + "</mark></p>"
    )


def _chips(row: Mapping[str, Any], success: float) -> Iterator[Markup]:
    reward = row.get("reward")
    if is_number(reward):
        solved = reward >= success
        said = ("\u2713" if solved else "\u2717", number(reward, 2).removesuffix(".00"))
        yield Markup('<span class="chip {}">{} reward {}</span>').format("good" if solved else "bad", *said)
    yield from _component_chips(row.get("components"))
    off = listed(row, "off_policy")
    if any(off):
        yield Markup('<span class="chip teacher">{}</span>').format("teacher" if all(off) else "teacher prefix")
    if any(listed(row, "overrides")):
        yield Markup('<span class="chip override">overridden</span>')
    if is_number(row.get("hint")):
        yield Markup('<span class="chip" title="{}">hint of level {}</span>').format(
            show(shorten(str(row.get("prompt", "")), LONGEST_PROMPT)), row["hint"]
        )
    if "advantages" in row:  # traces of SFT and held-out problems earn none
        yield Markup("<span>advantage {}</span>").format(advantage_of(listed(row, "advantages")))
    ends = show(str(row.get("finish", "?")))
    yield Markup("<span>{} tokens, finish: {}</span>").format(len(listed(row, "tokens")), ends)
    if row.get("status", "ok") != "ok":
        yield Markup('<span class="chip bad">{}</span>').format(show(str(row["status"])))


def _component_chips(components: Any) -> Iterator[Markup]:
    """The rewards of a weighted sum, each before its weight."""
    if not isinstance(components, Mapping):
        return
    for name, score in list(components.items())[:MOST_COMPONENTS]:
        if is_number(score):
            said = show(shorten(str(name), 40)), number(score, 2).removesuffix(".00")
            yield Markup('<span class="chip" title="before its weight">{} {}</span>').format(*said)


def advantage_of(given: Sequence[Any]) -> str:
    """One figure, or two where teacher and policy tokens are weighted apart; a rejected group has none."""
    advantages = [value for value in given if is_number(value)]
    if not advantages:
        return "none (group rejected)"
    low, high = min(advantages), max(advantages)
    return _signed(low) if low == high else f"{_signed(low)} to {_signed(high)}"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def response_html(row: Mapping[str, Any], look: Look = BRIEF) -> Markup:
    """Every token with classes for its source, the shade of its probability and that of its gradient weight; the
    style sheet colours by one of them at a time."""
    tokens = [str(token) for token in listed(row, "tokens")]
    if not tokens:
        return show(shorten(str(row.get("response", "")), LONGEST_SPAN))
    parts = aligned(tokens, str(row.get("response", "")))
    if len(parts) <= look.head + look.tail:
        return _spans(_tokens(row, parts, slice(None)), look)
    gap = Markup('<span class="gap"> [{:,} tokens left out] </span>').format(len(parts) - look.head - look.tail)
    head, tail = (_spans(_tokens(row, parts, part), look) for part in (slice(look.head), slice(-look.tail, None)))
    return head + gap + tail


@dataclass(frozen=True)
class Token:
    text: str
    special: bool
    source: str
    probability: float | None
    weight: float | None

    @property
    def classes(self) -> str:
        shades = [_shade("p", self.probability), _shade("w", None if self.weight is None else sqrt(self.weight))]
        return " ".join(name for name in (self.source, *shades, "sp" if self.special else "") if name)

    @property
    def said(self) -> str:
        """For the pointer: what the colours stand for, in figures."""
        parts = [self.source or "policy"]
        parts += [] if self.probability is None else [f"probability {self.probability:.3g}"]
        parts += [] if self.weight is None else [f"gradient weight {self.weight:.3g}"]
        return ", ".join(parts)


def _shade(kind: str, share: float | None) -> str:
    return "" if share is None else f"{kind}{min(int(share * SHADES), SHADES - 1)}"


def _tokens(row: Mapping[str, Any], parts: Sequence[tuple[str, bool]], which: slice) -> list[Token]:
    streams = [
        _stream(listed(row, name), len(parts))[which] for name in ("off_policy", "overrides", "gradient_weights")
    ]
    probabilities = token_probabilities(row, len(parts))[which]
    return [
        Token(text, special, _source(off, override), p, weight if is_number(weight) and weight >= 0 else None)
        for (text, special), off, override, weight, p in zip(parts[which], *streams, probabilities, strict=True)
    ]


def _source(off_policy: int | None, override: int | None) -> str:
    return "teacher" if off_policy else "override" if override else ""


def token_probabilities(row: Mapping[str, Any], count: int) -> list[float | None]:
    """Under the policy. Runs of before it was recorded know it of the policy's own tokens only, by the log-prob
    they were drawn with; a teacher's token had 0 there, which says nothing."""
    if listed(row, "policy_probs"):
        return [p if is_number(p) else None for p in _stream(listed(row, "policy_probs"), count)]
    drawn = zip(_stream(listed(row, "log_probs"), count), _stream(listed(row, "off_policy"), count), strict=True)
    return [exp(min(v, 0.0)) if is_number(v) and not off else None for v, off in drawn]


def _stream(values: Sequence[Any], count: int) -> list[Any]:
    given = list(values[:count])
    return given + [None] * (count - len(given))


def _spans(tokens: Sequence[Token], look: Look) -> Markup:
    """Neighbours that look alike share a span, a third of the size; apart, each says its figures."""
    if look.apart:
        return Markup("").join(_span(token, token.text, Markup(" title='{}'").format(token.said)) for token in tokens)
    alike = [list(run) for _, run in groupby(tokens, key=lambda token: token.classes)]
    return Markup("").join(_span(run[0], "".join(token.text for token in run)) for run in alike)


def _span(token: Token, text: str, title: Markup = NO_TITLE) -> Markup:
    name = "mark" if token.source else "span"
    shown = show(shorten(text, LONGEST_SPAN))
    return Markup("<{0} class='{1}'{2}>{3}</{0}>").format(name, token.classes, title, shown)
