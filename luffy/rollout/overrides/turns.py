"""Two engines take turns at one response: the rule `mixture` for engines that show only what they drew.

The rule's coin does not look at the tokens, so all coins of a response can fall before its first token. Where they
say so the second engine writes, elsewhere the policy's; each is asked to continue the text so far for as long as
its turn lasts, and to give the log-probs of its own tokens. Sequences are distributed as under the native `mixture`.

The behaviour reported is the one given the coins: g(y) where the second engine wrote, d(y) where the policy did.
Weights d/g and 1 are unbiased, for the coins are independent of everything. The native engine sees both distributions
and reports (1 - eps) d + eps g, which is unbiased too and varies less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.rollout.engine import Engine, OnProgress
from luffy.rollout.overrides.pair import OverridingPair, check_exact
from luffy.rollout.overrides.verify import ACCEPT_STREAM, uniforms
from luffy.rollout.sampling import GOLDEN, SamplingRows
from luffy.types import Completion, Finish, Request, Sampling

# What the other rules do with the policy's whole distribution, and what to set instead.
NEEDS_DISTRIBUTIONS = {
    "speculative": ("to replace a rejected token", "eps=1, which draws from the same distribution"),
    "threshold": ("to know how much of it lies below tau", "a small eps"),
}


def check_takes_turns(rule: str, engine: str) -> None:
    """Refuse rules that need more than the log-probs of the tokens that were drawn."""
    if rule in NEEDS_DISTRIBUTIONS:
        purpose, eps = NEEDS_DISTRIBUTIONS[rule]
        raise UserError(
            f"rule {rule} cannot be honoured with the engine {engine}: it needs the policy's whole distribution "
            f"{purpose}, and this engine gives the log-probs of its own tokens alone; set rule=mixture with {eps}, "
            "or let the native engine roll out"
        )


def check_log_probs(engine: Engine, sampling: Sampling) -> None:
    """Draw one token: an engine that gives no log-probs is found before the first step."""
    (completion,) = engine.generate([Request((0,), 0, replace(sampling, max_tokens=1))])
    _check_known(engine, completion)


@dataclass(eq=False)
class Turns:
    """One response being generated. ``coins`` [max_tokens] are True where the second engine writes."""

    request: Request
    coins: list[bool]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def overridden(self) -> bool:
        """Whether the second engine writes the next token."""
        return self.coins[len(self.token_ids)]

    def ask(self, temperature: float | None, readable: int | None) -> Request:
        """Continue until the coin changes. An engine may draw its noise from the seed alone, so every turn has one of
        its own; ids that the second model has no row for (the policy's padding) are read as its last."""
        start, request = len(self.token_ids), self.request
        turn = next((t for t in range(start, len(self.coins)) if self.coins[t] != self.overridden), len(self.coins))
        sampling = replace(request.sampling, max_tokens=turn - start)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        written = self.token_ids if readable is None else [min(token, readable - 1) for token in self.token_ids]
        seed = (request.seed + GOLDEN * start) % 2**63
        return Request(request.prompt_ids, seed, sampling, (*request.prefix_ids, *written))

    def take(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids.tolist()
        self.log_probs += completion.log_probs.tolist()
        if completion.finish == "stop":
            self.finish = "stop"
        elif len(self.token_ids) == len(self.coins):
            self.finish = "length"

    def completion(self) -> Completion:
        assert self.finish is not None
        behavior = torch.tensor(self.log_probs, dtype=torch.float32)
        overrides = torch.tensor(self.coins[: len(self.token_ids)])
        return Completion(
            token_ids=torch.tensor(self.token_ids, dtype=torch.long),
            log_probs=behavior.masked_fill(overrides, torch.nan),
            finish=self.finish,
            overrides=overrides,
            behavior_log_probs=behavior,
            guidance_log_probs=behavior.masked_fill(~overrides, torch.nan),
        )


class TurnsEngine(OverridingPair):
    """Token overrides from any two engines. ``rule`` (a mixture) may be replaced between calls (schedules).

    ``second_vocabulary`` is the number of tokens the second engine can read, where the policy may write more.
    """

    def __init__(
        self,
        draft: Engine,
        second: Engine,
        rule: Rule,
        max_overrides: int | None = None,
        second_temperature: float | None = None,
        second_vocabulary: int | None = None,
    ) -> None:
        check_takes_turns(rule.name, type(draft).__name__)
        super().__init__(draft, second)
        self.rule = rule
        self.max_overrides = max_overrides
        self.second_temperature = second_temperature
        self.second_vocabulary = second_vocabulary

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        if not requests:
            return []
        for request in requests:
            check_exact(request)
        responses = [Turns(r, coins) for r, coins in zip(requests, self._coins(requests), strict=True)]
        while any(r.finish is None for r in responses):
            for overridden in (False, True):
                self._turn([r for r in responses if r.finish is None and r.overridden is overridden], overridden)
            if progress is not None:
                progress(sum(r.finish is not None for r in responses), len(responses))
        return [r.completion() for r in responses]

    def _coins(self, requests: Sequence[Request]) -> list[list[bool]]:
        """Coins of each response, the native engine's: a function of seed and position."""
        rows = SamplingRows.of(requests, torch.device("cpu"))
        first = torch.tensor([request.start for request in requests])
        longest = max(r.sampling.max_tokens for r in requests)
        overrides = uniforms(rows.seeds ^ ACCEPT_STREAM, first[:, None] + torch.arange(longest)) >= 1.0 - self.rule.eps
        if self.max_overrides is not None:
            overrides &= overrides.cumsum(dim=1) <= self.max_overrides
        return [coins[: r.sampling.max_tokens] for coins, r in zip(overrides.tolist(), requests, strict=True)]

    def _turn(self, responses: Sequence[Turns], overridden: bool) -> None:
        if not responses:
            return
        engine = self.second if overridden else self.draft
        temperature = self.second_temperature if overridden else None
        readable = self.second_vocabulary if overridden else None
        answers = engine.generate([r.ask(temperature, readable) for r in responses])
        for response, answer in zip(responses, answers, strict=True):
            _check_known(engine, answer)
            response.take(answer)


def _check_known(engine: Engine, completion: Completion) -> None:
    tokens, log_probs = completion.token_ids, completion.log_probs
    if tokens.numel() == 0 or log_probs.numel() != tokens.numel() or bool(log_probs.isnan().any()):
        raise UserError(
            f"{type(engine).__name__} gave {tokens.numel()} tokens with {int((~log_probs.isnan()).sum())} log-probs: "
            "token overrides need one for every token; switch them on in that engine or use the native one"
        )
