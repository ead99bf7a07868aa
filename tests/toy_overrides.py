"""A toy small enough to enumerate: two models, every sequence of at most 3 of 6 tokens, of which one ends it."""

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from builders import make_model, make_request
from scipy.stats import chisquare

from luffy.core.override_rules import Rule
from luffy.models.load import drop_padding_tokens
from luffy.rollout import SpeculativeEngine
from luffy.types import Completion, Request

RULES = {
    "speculative": Rule("speculative"),
    "threshold": Rule("threshold", tau=0.2),
    "mixture": Rule("mixture", eps=0.5),
}
VOCABULARY, EOS, LENGTH, GIVEN = 6, 1, 3, (3, 4)
TEMPERATURE, SECOND_TEMPERATURE = 1.6, 2.0
SAMPLES = 4000


def plain_log_probs(model, ids, start: int, temperature: float = 1.0) -> torch.Tensor:
    """[T, V] of the tokens from ``start`` on: `transformers` with its own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, start - 1 :].float()
    return torch.log_softmax(logits / temperature, -1)


@cache
def toy_models(known: int = VOCABULARY):
    """Draft and second model; of the second model's tokens only the first ``known`` are left."""
    draft, second = (
        make_model(name, seed=seed, vocab_size=VOCABULARY, eos_token_id=EOS, initializer_range=0.1)
        for name, seed in (("qwen2", 1), ("llama", 2))
    )
    drop_padding_tokens(second, known)
    return draft, second


@cache
def toy_tables(known: int = VOCABULARY) -> tuple[dict, dict]:
    """Log-probs [V] of draft and second model after every beginning of a sequence, in float64."""
    contexts = [c for n in range(LENGTH) for c in itertools.product(range(VOCABULARY), repeat=n) if EOS not in c]
    tables = []
    for model, temperature in zip(toy_models(known), (TEMPERATURE, SECOND_TEMPERATURE), strict=True):
        size = model.config.vocab_size
        ids = [(*GIVEN, *(min(token, size - 1) for token in c)) for c in contexts]
        rows = [plain_log_probs(model, i, len(i), temperature)[-1].double() for i in ids]
        padded = [torch.nn.functional.pad(row, (0, VOCABULARY - size), value=-math.inf) for row in rows]
        tables.append(dict(zip(contexts, padded, strict=True)))
    return tuple(tables)


@cache
def toy_sequences() -> list[tuple[int, ...]]:
    ended = [(*c, EOS) for c in toy_tables()[0]]
    full = [(*c, y) for c in toy_tables()[0] if len(c) == LENGTH - 1 for y in range(VOCABULARY) if y != EOS]
    return ended + full


@cache
def exact_moments(
    rule: Rule, budget: int | None, known: int = VOCABULARY
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Of every sequence its probability and E[w^2; sequence], w the product of d / b, by enumeration of
    proposals, verdicts and overrides. The state is how many overrides were spent: b depends on it."""
    out = {}
    for sequence in toy_sequences():
        spent = {0: (1.0, 1.0)}
        for place, token in enumerate(sequence):
            stay, replaced, draft = branches(rule, sequence[:place], token, known)
            after: dict[int, tuple[float, float]] = {}
            for count, (weight, squared) in spent.items():
                free = budget is None or count < budget
                ways = ((count, stay), (count + 1, replaced)) if free else ((count, draft),)
                total = sum(chance for _, chance in ways)
                importance = draft / total if total else 0.0
                for then, chance in ways:
                    p, q = after.get(then, (0.0, 0.0))
                    after[then] = (p + weight * chance, q + squared * chance * importance**2)
            spent = after
        out[sequence] = tuple(map(sum, zip(*spent.values(), strict=True)))
    assert sum(p for p, _ in out.values()) == pytest.approx(1.0, abs=1e-6)
    return out


def branches(rule: Rule, context: tuple[int, ...], token: int, known: int) -> tuple[float, float, float]:
    """Probability that ``token`` is proposed and kept, that it takes a rejected one's place, and d(token)."""
    log_d, log_g = (table[context] for table in toy_tables(known))
    every = torch.arange(VOCABULARY)
    keep = rule.accept_probability(log_d.expand(VOCABULARY, -1), log_g.expand(VOCABULARY, -1), every)
    rejected = (log_d.exp() * (1 - keep)).sum()
    d, override = log_d.exp()[token], rule.override_log_probs(log_d, log_g).exp()[token]
    return float(d * keep[token]), float(rejected * override), float(d)


def exact_distribution(rule: Rule, budget: int | None, known: int = VOCABULARY) -> dict[tuple[int, ...], float]:
    return {sequence: p for sequence, (p, _) in exact_moments(rule, budget, known).items()}


DRAFT_ALONE = Rule("mixture", eps=0.0)


def toy_samples(name: str, budget: int | None, known: int = VOCABULARY) -> tuple[Completion, ...]:
    return _drawn(name, budget, known)  # a cache takes a default for another argument


@cache
def _drawn(name: str, budget: int | None, known: int) -> tuple[Completion, ...]:
    engine = SpeculativeEngine(
        *toy_models(known),
        RULES[name],
        k=2,
        max_overrides=budget,
        second_temperature=SECOND_TEMPERATURE,
        max_slots=800,
    )
    return tuple(engine.generate(toy_requests()))


def toy_requests() -> list[Request]:
    return [make_request(GIVEN, LENGTH, seed=s, temperature=TEMPERATURE, eos_ids=(EOS,)) for s in range(SAMPLES)]


def count(completions) -> dict[tuple[int, ...], int]:
    return dict(Counter(tuple(c.token_ids.tolist()) for c in completions))


def chi_square(counts: dict, expected: dict) -> float:
    often = [s for s in expected if expected[s] * SAMPLES >= 5]
    observed = [counts.get(s, 0) for s in often]
    wanted = [expected[s] * SAMPLES for s in often]
    assert len(often) > 15
    rest = SAMPLES - sum(wanted)
    if rest > 1:
        observed.append(SAMPLES - sum(observed))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [w * scale for w in wanted]).pvalue)
