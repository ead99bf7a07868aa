"""Decodes with two models: the draft (the policy) proposes k tokens, the second model may override them.

A round, for all live slots at once:

    propose   the draft decodes k tokens                                    k small steps
    score     the second model reads them all                               one forward pass
    verify    the rule keeps them up to the first it rejects, and replaces that one

Both caches then hold a few positions too many. Nothing is cleared: attention looks no further than a
token's own position, and the next tokens overwrite what was rejected.

A position in a response has three noises of its own (proposal, acceptance, override), each a function of
seed and position alone. So neither k nor the neighbours change what is drawn, and where no rule ever
overrides the tokens are those of `NativeEngine`.

To propose and to score is `luffy.rollout.overrides.propose`, on a GPU one graph launch; to verify is
`luffy.rollout.overrides.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from luffy.core.override_rules import Rule
from luffy.rollout.engine import EngineStats
from luffy.rollout.native.scheduler import SequenceState
from luffy.rollout.native.slot_cache import Slots
from luffy.rollout.native.slot_generation import DecodeBatch, SlotPlan
from luffy.rollout.overrides.propose import Proposals, Round, RoundRows
from luffy.rollout.overrides.verify import Verified, verify
from luffy.rollout.sampling import SamplingRows, tempered
from luffy.types import Completion

if TYPE_CHECKING:
    from luffy.rollout.overrides.round_graphs import RoundGraphs


@dataclass
class SpeculativeStats(EngineStats):
    """Counts of one call of `generate`; ``decode_steps`` are the draft's.

    The first token of a response is proposed and verified at the prefill, outside any round: it counts in
    ``proposals``, ``accepted`` and ``overrides``, not in the counts per round. Proposals after a rejected one or after
    an end are dropped and count only in ``proposals``.
    """

    second_passes: int = 0
    proposals: int = 0
    accepted: int = 0
    overrides: int = 0
    sequence_rounds: int = 0
    accepted_in_rounds: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """Draft tokens that a sequence keeps from a round: between 0 and k."""
        return self.accepted_in_rounds / self.sequence_rounds if self.sequence_rounds else 0.0


@dataclass(eq=False)
class OverriddenSequence(SequenceState):
    """A response being generated, with the second model's part in it."""

    overrides: list[bool] = field(default_factory=list)
    behavior_log_probs: list[float] = field(default_factory=list)
    guidance_log_probs: list[float] = field(default_factory=list)

    def completion(self) -> Completion:
        return replace(
            super().completion(),
            overrides=torch.tensor(self.overrides, dtype=torch.bool),
            behavior_log_probs=torch.tensor(self.behavior_log_probs, dtype=torch.float32),
            guidance_log_probs=torch.tensor(self.guidance_log_probs, dtype=torch.float32),
        )


@dataclass(frozen=True)
class OverrideSettings:
    """``rule`` decides over tokens, ``k`` proposals a round. After ``max_overrides`` overrides a response is the
    draft's alone. The second model runs at ``second_temperature``, or at the request's where that is None."""

    rule: Rule
    k: int
    max_overrides: int | None
    second_temperature: float | None


class OverridingDecoder:
    """The `SlotDecoder` of both models. ``graphs`` run the rounds where there are any, else ``round_`` as it is.

    ``round_`` holds both models and their caches.
    """

    sequence_type = OverriddenSequence

    def __init__(
        self, round_: Round, plan: SlotPlan, settings: OverrideSettings, graphs: RoundGraphs | None = None
    ) -> None:
        self.stats = SpeculativeStats()
        self._round, self._plan, self._settings, self._graphs = round_, plan, settings, graphs
        self.caches: Sequence[Slots] = round_.caches
        self.device = round_.draft.device
        self._batch: DecodeBatch | None = None

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """[S, 2, V]: the draft's logits and the second model's."""
        both = [runner.prefill(prompts, slots).float() for runner in (self._round.draft, self._round.second)]
        return torch.stack(both, dim=1)

    def start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        log_d = tempered(logits[:, 0], rows.temperatures)
        tokens = self._round.draw(log_d, rows.seeds, positions)
        proposals = Proposals(tokens[:, None], log_d[:, None], logits[:, 1:])
        allowed = self._may_override(sequences, len(sequences))
        verified = self._verify(proposals, rows, positions[:, None], allowed)
        self.stats.proposals += len(sequences)
        self._record(sequences, verified)

    def step(self, sequences: Sequence[SequenceState]) -> None:
        batch = self._batch
        if batch is None or not batch.holds(sequences):
            batch = self._batch = DecodeBatch.of(sequences, self._plan.idle_rows(len(sequences)), self.device)
        count = self._round_length(sequences)
        # Sent first: the host would wait for the round if it came later.
        allowed = self._may_override(sequences, len(batch.tokens))
        proposals = self._propose(batch, count)
        places = batch.positions[:, None] + torch.arange(1, count + 1, device=batch.positions.device)
        verified = self._verify(proposals, batch.sampling, places, allowed)
        batch.tokens = verified.tokens.gather(1, verified.taken[:, None] - 1).squeeze(1)
        batch.positions = batch.positions + verified.taken
        accepted_before = self.stats.accepted
        self._record(sequences, verified)
        self.stats.decode_steps += count
        self.stats.second_passes += 1
        self.stats.proposals += len(sequences) * count
        self.stats.sequence_rounds += len(sequences)
        self.stats.accepted_in_rounds += self.stats.accepted - accepted_before

    def close(self) -> None:
        """Caches of graphs outlive the call; their memory goes to the update."""
        if self._graphs is not None:
            self._graphs.release()

    def _round_length(self, sequences: Sequence[SequenceState]) -> int:
        """No more proposals than the longest remaining response; always k where every bit counts, and from graphs."""
        if self._plan.exact or self._graphs is not None:
            return self._settings.k
        return min(self._settings.k, max(s.request.sampling.max_tokens - len(s.token_ids) for s in sequences))

    def _propose(self, batch: DecodeBatch, count: int) -> Proposals:
        rows = RoundRows(batch.tokens, batch.positions, batch.sampling.seeds, batch.sampling.temperatures)
        if self._graphs is not None:
            return self._graphs.run(rows)
        longest = max(sequence.length for sequence in batch.sequences)
        return self._round(rows, [self._plan.span(longest + ahead) for ahead in range(count)])

    def _verify(self, proposals: Proposals, rows: SamplingRows, places: Tensor, allowed: Tensor) -> Verified:
        """``places`` [B, k] are where the proposed tokens will stand."""
        own = self._settings.second_temperature
        log_g = tempered(proposals.second_logits, rows.temperatures[:, None] if own is None else own)
        tokens, log_d, _ = proposals
        return verify(self._settings.rule, tokens, log_d, log_g, rows.seeds, places, allowed, self._round.draw)

    def _may_override(self, sequences: Sequence[SequenceState], rows: int) -> Tensor:
        """[rows] bool: which rows have overrides left. A round makes at most one, so asking once is enough."""
        budget = self._settings.max_overrides
        if budget is None:
            return torch.ones(rows, dtype=torch.bool, device=self.device)
        left = [sum(sequence.overrides) < budget for sequence in _overridden(sequences)]
        return torch.tensor(left + [False] * (rows - len(left)), device=self.device)

    def _record(self, sequences: Sequence[SequenceState], verified: Verified) -> None:
        columns = verified.to_host(len(sequences))
        for index, sequence in enumerate(_overridden(sequences)):
            tokens, overrides, taken, *log_probs = (column[index] for column in columns)
            for place in range(int(taken[0])):
                if sequence.finish is None:
                    self._append(sequence, int(tokens[place]), bool(overrides[place]), [x[place] for x in log_probs])

    def _append(self, sequence: OverriddenSequence, token: int, override: bool, log_probs: Sequence[float]) -> None:
        policy, behavior, second = log_probs
        if policy != policy or second != second:
            raise sequence.nan_logits("policy" if policy != policy else "second model")
        sequence.append(token, policy)
        sequence.overrides.append(override)
        sequence.behavior_log_probs.append(behavior)
        sequence.guidance_log_probs.append(second)
        self.stats.generated_tokens += 1
        self.stats.overrides += override
        self.stats.accepted += not override


def _overridden(sequences: Sequence[SequenceState]) -> Sequence[OverriddenSequence]:
    """The sequences with their actual type, for the type checker."""
    return cast(Sequence[OverriddenSequence], sequences)
