"""The native engine with a second model that may override the policy token by token.

How a round runs is `luffy.rollout.overrides.overriding_decoder`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from luffy.core.override_rules import Rule
from luffy.models.forward import causal_lm, evaluating, text_config
from luffy.rollout.engine import Engine, OnProgress, check_request
from luffy.rollout.native.native_engine import NativeEngine, finished_of, in_order, uses_pages
from luffy.rollout.native.slot_generation import SlotGeneration, SlotPlan
from luffy.rollout.overrides.overriding_decoder import OverrideSettings, OverridingDecoder, SpeculativeStats
from luffy.rollout.overrides.pair import check_exact, check_pair, check_same_device, check_settings
from luffy.rollout.overrides.propose import Round
from luffy.rollout.sampling import draw_tokens
from luffy.types import Completion, Request

if TYPE_CHECKING:
    from luffy.rollout.overrides.round_graphs import RoundGraphs


class SpeculativeEngine(Engine):
    """Responses of the policy under token overrides, with the exact probability of every token.

    Both models share a tokenizer (`check_same_tokenizer`). The second model may have fewer rows of padding: to it
    the rest of the policy's vocabulary has probability 0. The policy's distribution is never cut, for it is the one
    that is trained.

    ``rule`` may be replaced between calls (schedules). After ``max_overrides`` overrides a response is the draft's
    alone. The draft runs at the request's temperature, and so does the second model unless ``second_temperature`` is
    given. ``settings`` are those of `NativeEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        second_model: nn.Module,
        rule: Rule,
        k: int = 4,
        max_overrides: int | None = None,
        second_temperature: float | None = None,
        **settings: Any,
    ) -> None:
        self.policy = NativeEngine(model, **settings)
        check_settings(k, max_overrides, second_temperature)
        check_pair(model, second_model, self.policy.max_context)
        self.second_model = second_model
        self.rule = rule
        self.k = k
        self.max_overrides = max_overrides
        self.second_temperature = second_temperature
        self.stats = SpeculativeStats()
        self._graphs: RoundGraphs | None = None

    def sync(self, version: int) -> None:
        self.policy.sync(version)

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        """Completions in the order of ``requests``; ``progress`` hears (finished, all)."""
        if not requests:
            return []
        self._check(requests)
        started = time.perf_counter()
        with torch.no_grad(), evaluating(self.policy.model), evaluating(self.second_model):
            decoder = self._decoder(requests)
            generation = SlotGeneration(requests, decoder, self.policy.prompt_budget)
            completions = in_order(finished_of(generation), len(requests), progress)
        self.stats = decoder.stats
        self.stats.seconds = time.perf_counter() - started
        return completions

    def _check(self, requests: Sequence[Request]) -> None:
        for model in self._models:
            vocabulary = text_config(causal_lm(model).config).vocab_size
            for request in requests:
                check_request(request, self.policy.max_context, vocabulary)
        for request in requests:
            check_exact(request)
        check_same_device(*self._models)

    @property
    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self.policy.model, self.second_model

    def _decoder(self, requests: Sequence[Request]) -> OverridingDecoder:
        policy = self.policy
        plan = SlotPlan.of(requests, policy.max_slots, policy.batch_invariant, lookahead=self.k - 1)
        graphs = self.round_graphs(plan.slots, plan.capacity)
        if graphs is not None:
            round_ = graphs.round
        else:
            caches = [plan.cache_for(model) for model in self._models]
            round_ = Round(*self._models, caches, policy.max_context, draw_tokens)
        settings = OverrideSettings(self.rule, self.k, self.max_overrides, self.second_temperature)
        return OverridingDecoder(round_, plan, settings, graphs)

    def round_graphs(self, slots: int, capacity: int) -> RoundGraphs | None:
        """Graphs with caches for up to ``slots`` sequences, as memory allows; None if decoding runs without graphs."""
        policy = self.policy
        if not uses_pages(self._models, policy.decoding, policy.batch_invariant):
            return None
        from luffy.rollout.native.decode_graphs import bucket_for
        from luffy.rollout.overrides.round_graphs import RoundGraphs, slots_available

        if self._graphs is not None:
            self._graphs.release()  # a call that broke off may have left its caches allocated
        # Scores are there for every row of a graph, with or without a sequence in it.
        wanted = bucket_for(slots, policy.max_slots)
        rows = slots_available(wanted, self._models, capacity, self.k, policy.memory_share)
        slots = min(slots, rows)
        if self._graphs is None or not self._graphs.serves(slots, self.k):
            self._graphs = None  # their memory first
            self._graphs = RoundGraphs(*self._models, rows, self.k, policy.max_context)
        self._graphs.allocate(slots, capacity)
        return self._graphs
