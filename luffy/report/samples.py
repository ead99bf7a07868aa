"""Recorded groups as HTML: prompt, answer and every response with the teacher's tokens marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, sqrt
from typing import Any

from markupsafe import Markup

from luffy.report.methods import Method
from luffy.report.templates import macro
from luffy.report.text import aligned, legible, number, shorten, show
from luffy.run_folder.runs import GroupKey, RunRecord, is_number, listed, whole

MOST_GROUPS = 12  # in a report
MOST_SAMPLES = 16  # of a group
MOST_COMPONENTS = 12  # rewards of a weighted sum
STEPS_PER_METHOD = 3
LONGEST_PROMPT = 2000  # characters, of a title
LONGEST_SPAN = 20_000  # characters: tokens are a few of them, but nothing keeps one from being a book
ENDS = {  # what ended an episode, where that is no answer of the policy
    "environment": "ended by the environment",
    "turns": "no turns left",
    "tokens": "no tokens left",
    "context": "no room for a reply",
    "bad_call": "ended by a bad call",
    "raised": "environment raised",
    "timed_out": "environment timed out",
}
SHADES = 10  # classes p0 (unlikely) to p9, w0 (no pull) to w9


@dataclass(frozen=True)
class Look:
    """How many tokens of a long response are shown, and whether every token has its numbers as a title."""

    head: int
    tail: int
    apart: bool = False


BRIEF = Look(280, 120)  # on paper and in a file to send
CLOSE = Look(1600, 400, apart=True)  # on the live page


@dataclass(frozen=True)
class Shown:
    """A group chosen for the report."""

    method: Method
    run: RunRecord
    key: GroupKey


def choose_groups(methods: Sequence[Method]) -> tuple[list[Shown], int]:
    """The first problem or two recorded at the first, a middle and the last recorded step of each method, and how
    many recorded groups are left out. Never chosen by outcome."""
    shown: list[Shown] = []
    recorded = 0
    share = max(MOST_GROUPS // max(sum(any(r.samples.places for r in m.runs) for m in methods), 1), 1)
    for method in methods:
        recorded += sum(len(run.samples.places) for run in method.runs)
        run = next((run for run in method.runs if run.samples.places), None)
        if run is not None:
            shown += [Shown(method, run, key) for key in _first_groups(run, share)]
    shown = shown[: max(MOST_GROUPS, len(methods))]
    return shown, recorded - len(shown)


def _first_groups(run: RunRecord, most: int) -> list[GroupKey]:
    steps = run.samples.steps
    middle = [steps[len(steps) // 2]] if most >= STEPS_PER_METHOD else []
    picked = sorted({steps[0], *middle, steps[-1]})[-most:]
    each = max(min(most // len(picked), 2), 1)
    return [key for step in picked for key in run.samples.groups(step)[:each]]


def group_html(shown: Shown) -> Markup:
    """A recorded group of the report."""
    rows, seed = shown.run.samples.group(shown.key), shown.run.seed
    guided = int(any(any(listed(row, "off_policy")) and "reward" in row for row in rows))  # not the traces of SFT
    cards = sample_cards(rows[:MOST_SAMPLES], len(rows), shown.run.success)
    return macro("group", shown, "?" if seed is None else seed, guided, problem_html(rows[0]), cards)


def problem_html(row: Mapping[str, Any]) -> Markup:
    """Problem, prompt and answer; traces of SFT have no answer."""
    return macro("problem", row)


def sample_cards(rows: Sequence[Mapping[str, Any]], total: int, success: float, look: Look = BRIEF) -> Markup:
    """The samples side by side; ``total`` is how many the group has."""
    cards = [(whole(row.get("sample")), list(_chips(row, success)), response_html(row, look)) for row in rows]
    return macro("sample_cards", cards, total)


Chip = tuple[str, str, str]  # class, text, title


def _chips(row: Mapping[str, Any], success: float) -> Iterator[Chip]:
    reward = row.get("reward")
    if is_number(reward):
        solved = reward >= success
        yield "chip good" if solved else "chip bad", f"{'✓' if solved else '✗'} reward {_short(reward)}", ""
    components = row.get("components")
    for name, score in list(components.items())[:MOST_COMPONENTS] if isinstance(components, Mapping) else ():
        if is_number(score):
            yield "chip", f"{shorten(str(name), 40)} {_short(score)}", "before its weight"
    count = len(listed(row, "tokens"))
    replies = _replies(row, count)
    off = listed(row, "off_policy")
    if any(off):
        is_whole = all(flag for at, flag in enumerate(off) if at not in replies)
        yield "chip teacher", "teacher" if is_whole else "teacher prefix", ""
    if any(listed(row, "overrides")):
        yield "chip override", "overridden", ""
    yield from _episode_chips(row)
    if is_number(row.get("hint")):
        yield "chip", f"hint of level {row['hint']}", legible(shorten(str(row.get("prompt", "")), LONGEST_PROMPT))
    if "advantages" in row:  # traces of SFT and held-out problems earn none
        yield "", f"advantage {advantage_of(listed(row, 'advantages'))}", ""
    tokens = f"{count - len(replies)} tokens" + (f" and {len(replies)} of replies" if replies else "")
    yield "", f"{tokens}, finish: {row.get('finish', '?')}", ""
    if row.get("status", "ok") != "ok":
        yield "chip bad", str(row["status"]), ""


def _episode_chips(row: Mapping[str, Any]) -> Iterator[Chip]:
    """What an episode with an environment did; nothing without one."""
    if whole(row.get("turns")):
        calls = f", {_counted(row, 'calls')}" if is_number(row.get("calls")) else ""  # not known of a replayed response
        yield "chip reply", f"{_counted(row, 'turns')}{calls}", ""
    end, said = str(row.get("end", "answer")), legible(shorten(str(row.get("message", "")), LONGEST_PROMPT))
    if end in ENDS:
        yield "chip" if end == "environment" else "chip bad", ENDS[end], said
    for kind, count in Counter(map(str, listed(row, "faults"))).most_common(MOST_COMPONENTS):
        name = shorten(kind, 40).replace("_", " ")
        yield "chip bad", f"{name} ({count} times)" if count > 1 else name, "what went wrong in the environment"
    if is_number(row.get("environment_reward")):
        yield "chip", f"environment's reward {_short(row['environment_reward'])}", ""
    if row.get("trace_left_out") is True:
        yield "chip", "played anew", "the environment did not answer the trace as recorded"


def _counted(row: Mapping[str, Any], name: str) -> str:
    count = whole(row.get(name))
    return f"{count} {name.removesuffix('s') if count == 1 else name}"


def _short(value: float) -> str:
    return number(value, 2).removesuffix(".00")


def advantage_of(given: Sequence[Any]) -> str:
    """One number, or two if teacher and policy tokens have different weights; a rejected group has none."""
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
    texts = [str(token) for token in listed(row, "tokens")]
    if not texts:
        return show(shorten(str(row.get("response", "")), LONGEST_SPAN))
    tokens = _tokens(row, aligned(texts, str(row.get("response", ""))))
    left_out = len(tokens) - look.head - look.tail
    if left_out <= 0:
        return _spans(tokens, look)
    gap = Markup('<span class="gap"> [{:,} tokens left out] </span>').format(left_out)
    return _spans(tokens[: look.head], look) + gap + _spans(tokens[-look.tail :], look)


@dataclass(frozen=True)
class Token:
    """A token to show; ``source`` is teacher, override, reply or, for the policy's, empty."""

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
    def title(self) -> str:
        """The numbers behind the colours."""
        parts = ["environment" if self.source == "reply" else self.source or "policy"]
        parts += [] if self.probability is None else [f"probability {self.probability:.3g}"]
        parts += [] if self.weight is None else [f"gradient weight {self.weight:.3g}"]
        return ", ".join(parts)


def _shade(kind: str, share: float | None) -> str:
    return "" if share is None else f"{kind}{min(int(share * SHADES), SHADES - 1)}"


def _tokens(row: Mapping[str, Any], parts: Sequence[tuple[str, bool]]) -> list[Token]:
    names = ("off_policy", "overrides", "gradient_weights", "policy_probs", "log_probs")
    streams = [_stream(listed(row, name), len(parts)) for name in names]
    recorded = bool(listed(row, "policy_probs"))
    replies = _replies(row, len(parts))
    tokens = []
    for at, ((text, special), off, override, weight, probability, log_prob) in enumerate(
        zip(parts, *streams, strict=True)
    ):
        if at in replies:  # in no loss
            tokens.append(Token(text, special, "reply", None, None))
            continue
        if not recorded:  # older runs: from the log-prob that an on-policy token was drawn with
            probability = exp(min(log_prob, 0.0)) if is_number(log_prob) and not off else None
        source = "teacher" if off else "override" if override else ""
        probability = probability if is_number(probability) else None
        tokens.append(Token(text, special, source, probability, weight if is_number(weight) and weight >= 0 else None))
    return tokens


def _replies(row: Mapping[str, Any], count: int) -> set[int]:
    """Places of the tokens that an environment wrote."""
    pairs = [pair for pair in listed(row, "replies") if isinstance(pair, list) and len(pair) == 2]
    return {at for start, end in pairs for at in range(max(whole(start), 0), min(whole(end), count))}


def _stream(values: Sequence[Any], count: int) -> list[Any]:
    return [*values[:count], *[None] * (count - len(values))]


def _spans(tokens: Sequence[Token], look: Look) -> Markup:
    """Neighbours that look alike share a span, a third of the size; apart, each has its numbers as a title."""
    alike = [[token] for token in tokens]
    if not look.apart:
        alike = [list(run) for _, run in groupby(tokens, key=lambda token: token.classes)]
    return Markup("").join(_span(run, look.apart) for run in alike)


def _span(run: Sequence[Token], titled: bool) -> Markup:
    name = "mark" if run[0].source else "span"
    title = Markup(" title='{}'").format(run[0].title) if titled else ""
    text = show(shorten("".join(token.text for token in run), LONGEST_SPAN))
    return Markup("<{0} class='{1}'{2}>{3}</{0}>").format(name, run[0].classes, title, text)
