"""The native engine with a guidance model beside the policy: it may override the policy token by token.

A round, for all live slots at once:

    propose   the policy (the draft) decodes k tokens                       k small steps
    score     the guidance model sees them all                              one forward pass
    judge     the rule keeps them up to the first it rejects, and replaces that one

Both caches then hold a few positions too many. Nothing is cleared: attention looks no further than a
token's own place, and the next tokens overwrite what was rejected.

A place in a response has three noises of its own (proposal, acceptance, override), each a function of
seed and position alone. So neither k nor the neighbours change what is drawn, and where no rule ever
overrides the tokens are those of `NativeEngine`.

To propose and to score is `luffy.rollout.overrides.rounds`, on a GPU one graph launch; to judge is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from luffy.core.override_rules import Rule
from luffy.errors import UserError
from luffy.models.forward import causal_lm, head_weight_bias
from luffy.rollout.engine import EngineStats, check_request
from luffy.rollout.native.native_engine import DecodeBatch, Generation, NativeEngine, cache_for, evaluating
from luffy.rollout.native.scheduler import SequenceState
from luffy.rollout.native.slot_cache import Slots
from luffy.rollout.overrides.rounds import Draw, Proposals, Round, RoundRows
from luffy.rollout.sampling import SamplingRows, draw_tokens, tempered, token_bits
from luffy.types import Completion, Request

if TYPE_CHECKING:
    from luffy.rollout.overrides.round_graphs import RoundGraphs

# Any two numbers far apart will do: the seeds are hashed after these are mixed in.
ACCEPT_STREAM = 0x2545F4914F6CDD1D
OVERRIDE_STREAM = 0x5851F42D4C957F2D


@dataclass
class SpeculativeStats(EngineStats):
    """What one call of `generate` did; ``decode_steps`` are the draft's.

    The first token of a response is proposed and judged at the prefill, outside any round: it counts
    in ``proposals``, ``accepted`` and ``overrides``, and not in what is said per round. Proposals
    beyond a rejected one or an end were made in vain and count in ``proposals`` alone.
    """

    guidance_passes: int = 0
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
class GuidedSequence(SequenceState):
    """A response in the making, with the part of the guidance model in it."""

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


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a round made of B x k proposals; of row i the first ``taken[i]`` tokens count."""

    tokens: Tensor  # [B, k] long
    overrides: Tensor  # [B, k] bool
    taken: Tensor  # [B] long
    log_probs: Tensor  # [B, k] float32, the draft's
    behavior_log_probs: Tensor  # [B, k] float32
    guidance_log_probs: Tensor  # [B, k] float32

    def to_host(self, rows: int) -> list[list[list[float]]]:
        """Everything in one transfer (ids are exact in float64): [6][rows][k]."""
        parts = [self.tokens, self.overrides, self.taken[:, None].expand_as(self.tokens)]
        parts += [self.log_probs, self.behavior_log_probs, self.guidance_log_probs]
        numbers: list[list[list[float]]] = torch.stack([part[:rows].double() for part in parts]).tolist()
        return numbers


def judge(
    rule: Rule,
    proposals: Tensor,
    log_d: Tensor,
    log_g: Tensor,
    seeds: Tensor,
    positions: Tensor,
    may_override: Tensor,
    draw: Draw,
) -> Verdict:
    """Keep the proposals [B, k] of every row up to the first the rule rejects, and replace that one.

    ``log_d`` and ``log_g`` are [B, k, V], ``positions`` [B, k] where the tokens will stand. A row of
    ``may_override`` [B] that is False belongs to the draft alone.
    """
    count = proposals.shape[1]
    chance = rule.accept_probability(log_d, log_g, proposals)
    accepted = (uniforms(seeds ^ ACCEPT_STREAM, positions) < chance) | ~may_override[:, None]
    kept = accepted.long().cumprod(dim=1).sum(dim=1)
    # A row that keeps everything draws an override too, for nothing: asking first would wait for the device.
    at = kept.clamp(max=count - 1)
    row = torch.arange(len(at), device=at.device)
    instead = rule.override_log_probs(log_d[row, at], log_g[row, at])
    drawn = draw(instead, seeds ^ OVERRIDE_STREAM, positions[row, at])
    overrides = torch.arange(count, device=at.device) == kept[:, None]
    tokens = torch.where(overrides, drawn[:, None], proposals)
    policy, guidance = (x.gather(-1, tokens[..., None]).squeeze(-1) for x in (log_d, log_g))
    behavior = torch.where(may_override[:, None], rule.behavior_log_probs(log_d, log_g, tokens), policy)
    return Verdict(tokens, overrides, (kept + 1).clamp(max=count), policy, behavior, guidance)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[B, k] float64 strictly between 0 and 1: what is accepted with probability 1 or 0 always or never is."""
    flat = token_bits(seeds[:, None].expand(positions.shape).flatten(), positions.flatten(), 1)
    return ((flat & 0x7FFFFFFF).double() + 0.5).view(positions.shape) / 2**31


class SpeculativeGeneration(Generation):
    """One call of `generate` with both models."""

    stats: SpeculativeStats
    _state = GuidedSequence
    _graphs: RoundGraphs | None = None

    def __init__(self, engine: SpeculativeEngine, requests: Sequence[Request]) -> None:
        super().__init__(engine, requests, lookahead=engine.k - 1)
        self._rule, self._k, self._budget = engine.rule, engine.k, engine.max_overrides
        self._guidance_temperature = engine.guidance_temperature
        if self._graphs is not None:
            self._round = self._graphs.round
        else:
            self._round = Round(engine.model, engine.guidance_model, self._caches, engine.max_context, draw_tokens)
        self.stats = SpeculativeStats()

    def _make_caches(self, engine: NativeEngine, slots: int, capacity: int) -> list[Slots]:
        assert isinstance(engine, SpeculativeEngine)
        self._graphs = engine.round_graphs(slots, capacity)
        if self._graphs is not None:
            return list(self._graphs.caches)
        return [cache_for(model, slots, capacity) for model in (engine.model, engine.guidance_model)]

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.release()

    def _prompt_logits(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """[S, 2, V]: the draft's and the guidance model's."""
        both = [runner.prefill(prompts, slots).float() for runner in (self._runner, self._round.guidance)]
        return torch.stack(both, dim=1)

    def _start(self, sequences: Sequence[SequenceState], logits: Tensor, rows: SamplingRows, positions: Tensor) -> None:
        log_d = tempered(logits[:, 0], rows.temperatures)
        tokens = self._round.draw(log_d, rows.seeds, positions)
        proposals = Proposals(tokens[:, None], log_d[:, None], logits[:, 1:])
        allowed = self._may_override(sequences, len(sequences))
        verdict = self._judge(proposals, rows, positions[:, None], allowed)
        self.stats.proposals += len(sequences)
        self._record_round(sequences, verdict)

    def _step(self) -> None:
        batch = self._decode_batch()
        count = self._round_length(batch.sequences)
        # Sent first: the host would wait for the round if it came later.
        allowed = self._may_override(batch.sequences, len(batch.tokens))
        proposals = self._propose(batch, count)
        places = batch.positions[:, None] + torch.arange(1, count + 1, device=batch.positions.device)
        verdict = self._judge(proposals, batch.sampling, places, allowed)
        batch.tokens = verdict.tokens.gather(1, verdict.taken[:, None] - 1).squeeze(1)
        batch.positions = batch.positions + verdict.taken
        accepted_before = self.stats.accepted
        self._record_round(batch.sequences, verdict)
        self._count_round(len(batch.sequences), count, self.stats.accepted - accepted_before)

    def _round_length(self, sequences: Sequence[SequenceState]) -> int:
        """No more proposals than somebody has room for; to the bit, and from graphs, always as many."""
        if self._exact or self._graphs is not None:
            return self._k
        return min(self._k, max(s.request.sampling.max_tokens - len(s.token_ids) for s in sequences))

    def _propose(self, batch: DecodeBatch, count: int) -> Proposals:
        rows = RoundRows(batch.tokens, batch.positions, batch.sampling.seeds, batch.sampling.temperatures)
        if self._graphs is not None:
            return self._graphs.run(rows)
        longest = max(sequence.length for sequence in batch.sequences)
        return self._round(rows, [self._rounded(longest + ahead) for ahead in range(count)])

    def _judge(self, proposals: Proposals, rows: SamplingRows, places: Tensor, allowed: Tensor) -> Verdict:
        """``places`` [B, k] are where the proposed tokens will stand."""
        own = self._guidance_temperature
        log_g = tempered(proposals.guidance_logits, rows.temperatures[:, None] if own is None else own)
        tokens, log_d, _ = proposals
        return judge(self._rule, tokens, log_d, log_g, rows.seeds, places, allowed, self._round.draw)

    def _may_override(self, sequences: Sequence[SequenceState], rows: int) -> Tensor:
        """[rows] bool: who has overrides left. One round makes at most one, so asking once is enough."""
        device = self._runner.device
        if self._budget is None:
            return torch.ones(rows, dtype=torch.bool, device=device)
        left = [sum(sequence.overrides) < self._budget for sequence in _guided(sequences)]
        return torch.tensor(left + [False] * (rows - len(left)), device=device)

    def _record_round(self, sequences: Sequence[SequenceState], verdict: Verdict) -> None:
        columns = verdict.to_host(len(sequences))
        for index, sequence in enumerate(_guided(sequences)):
            tokens, overrides, taken, *log_probs = (column[index] for column in columns)
            for place in range(int(taken[0])):
                if sequence.finish is None:
                    self._take(sequence, int(tokens[place]), bool(overrides[place]), [x[place] for x in log_probs])

    def _take(self, sequence: GuidedSequence, token: int, override: bool, log_probs: Sequence[float]) -> None:
        policy, behavior, guidance = log_probs
        if policy != policy or guidance != guidance:
            raise sequence.nan_logits("policy" if policy != policy else "guidance model")
        sequence.append(token, policy)
        sequence.overrides.append(override)
        sequence.behavior_log_probs.append(behavior)
        sequence.guidance_log_probs.append(guidance)
        self.stats.generated_tokens += 1
        self.stats.overrides += override
        self.stats.accepted += not override

    def _count_round(self, rows: int, count: int, accepted: int) -> None:
        self.stats.decode_steps += count
        self.stats.guidance_passes += 1
        self.stats.proposals += rows * count
        self.stats.sequence_rounds += rows
        self.stats.accepted_in_rounds += accepted


def _guided(sequences: Sequence[SequenceState]) -> Sequence[GuidedSequence]:
    """What the scheduler makes here, said to the type checker."""
    return cast(Sequence[GuidedSequence], sequences)


class SpeculativeEngine(NativeEngine):
    """Responses of the policy under token-level guidance, with the exact probability of every token.

    Both models share a tokenizer (`check_same_tokenizer`). The guidance model may have fewer rows of padding: to it
    the rest of the policy's vocabulary has probability 0. The policy's distribution is never cut, for it is the one
    that is trained.

    ``rule`` may be replaced between calls (schedules). After ``max_overrides`` overrides a response
    belongs to the draft alone. The draft runs at the request's temperature, and so does the guidance
    model unless ``guidance_temperature`` is given.
    """

    stats: SpeculativeStats

    def __init__(
        self,
        model: nn.Module,
        guidance_model: nn.Module,
        rule: Rule,
        k: int = 4,
        max_overrides: int | None = None,
        guidance_temperature: float | None = None,
        max_slots: int | None = None,
        max_context: int | None = None,
        prefill_tokens: int | None = None,
        batch_invariant: bool = False,
        decoding: Literal["auto", "slots", "pages"] = "auto",
        memory_share: float = 1.0,
    ) -> None:
        super().__init__(model, max_slots, max_context, prefill_tokens, batch_invariant, decoding, memory_share)
        _check_settings(k, max_overrides, guidance_temperature)
        _check_pair(model, guidance_model, self.max_context)
        self.guidance_model = guidance_model
        self.rule = rule
        self.k = k
        self.max_overrides = max_overrides
        self.guidance_temperature = guidance_temperature
        self._graphs: RoundGraphs | None = None
        self.stats = SpeculativeStats()

    def _check(self, requests: Sequence[Request]) -> None:
        super()._check(requests)
        readable = causal_lm(self.guidance_model).config.vocab_size
        for request in requests:
            check_request(request, self.max_context, readable)
            check_exact(request)
        devices = [head_weight_bias(model)[0].device for model in (self.model, self.guidance_model)]
        if devices[0] != devices[1]:
            raise UserError(f"the policy lies on {devices[0]}, the guidance model on {devices[1]}: move one of them")

    def _ready(self) -> AbstractContextManager[None]:
        return _both_evaluating(self.model, self.guidance_model)

    def _generation(self, requests: Sequence[Request]) -> Generation:
        return SpeculativeGeneration(self, requests)

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.guidance_model

    def round_graphs(self, slots: int, capacity: int) -> RoundGraphs | None:
        """With caches for up to ``slots`` sequences, as memory allows; None where decoding runs without graphs."""
        if not self._uses_pages():
            return None
        from luffy.rollout.native.decode_graphs import bucket_for
        from luffy.rollout.overrides.round_graphs import RoundGraphs, slots_available

        if self._graphs is not None:
            self._graphs.release()  # what a call that broke off may have left is not missing here
        # Scores are there for every row of a graph, with or without a sequence in it.
        rows = slots_available(bucket_for(slots, self.max_slots), self._models(), capacity, self.k, self.memory_share)
        slots = min(slots, rows)
        if self._graphs is None or not self._graphs.serves(slots, self.k):
            self._graphs = None  # their memory first
            self._graphs = RoundGraphs(*self._models(), rows, self.k, self.max_context)
        self._graphs.allocate(slots, capacity)
        return self._graphs


@contextmanager
def _both_evaluating(model: nn.Module, guidance_model: nn.Module) -> Iterator[None]:
    with evaluating(model), evaluating(guidance_model):
        yield


def _check_settings(k: int, max_overrides: int | None, guidance_temperature: float | None) -> None:
    if k < 1:
        raise UserError(f"k is {k}: the draft proposes at least 1 token in a round")
    if max_overrides is not None and max_overrides < 0:
        raise UserError(f"max_overrides is {max_overrides}: use 0 or more, or None for no limit")
    if guidance_temperature is not None and not 0.0 < guidance_temperature < float("inf"):
        raise UserError(f"guidance_temperature is {guidance_temperature}: use a positive number")


def _check_pair(model: nn.Module, guidance_model: nn.Module, max_context: int) -> None:
    """What two models need to speak about the same tokens."""
    draft, guidance = causal_lm(model).config, causal_lm(guidance_model).config
    if draft.vocab_size < guidance.vocab_size:
        raise UserError(
            f"the policy has a vocabulary of {draft.vocab_size} tokens, the guidance model of {guidance.vocab_size}:"
            " if both have the same tokenizer, cut the guidance model's with luffy.models.drop_padding_tokens"
        )
    if guidance.max_position_embeddings < max_context:
        raise UserError(
            f"the guidance model takes {guidance.max_position_embeddings} tokens, less than the context of"
            f" {max_context}: set max_context to at most {guidance.max_position_embeddings}"
        )


def check_exact(request: Request) -> None:
    """Refuse sampling under which the behaviour would not be the distribution that is reported."""
    sampling = request.sampling
    if sampling.temperature == 0:
        raise UserError(
            "temperature is 0: under guidance tokens must be drawn from a distribution; sample with a positive"
            " temperature, or decode greedily without guidance"
        )
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise UserError(
            f"top_p is {sampling.top_p} and top_k is {sampling.top_k}: under guidance the probability of every token"
            " must be exact, so leave both off (top_p 1, top_k 0)"
        )


def check_same_tokenizer(draft_tokenizer: Any, guidance_tokenizer: Any) -> None:
    """Both models must mean the same by every token id; the error names the first difference."""
    draft, guidance = draft_tokenizer.get_vocab(), guidance_tokenizer.get_vocab()
    names = [{token_id: token for token, token_id in vocab.items()} for vocab in (draft, guidance)]
    for token_id in sorted(names[0].keys() | names[1].keys()):
        _check_same(f"token id {token_id}", names[0].get(token_id), names[1].get(token_id))
    # Padding is left out: no model ever reads or writes it here.
    for kind in ("eos_token", "bos_token", "unk_token"):
        _check_same(kind, getattr(draft_tokenizer, kind, None), getattr(guidance_tokenizer, kind, None))
    special = [set(t.all_special_tokens) - {t.pad_token} for t in (draft_tokenizer, guidance_tokenizer)]
    for token in sorted(special[0] ^ special[1]):
        _check_same(f"{token!r} as a special token", *("there" if token in kept else None for kept in special))


def _check_same(what: str, draft: object, guidance: object) -> None:
    if draft != guidance:
        raise UserError(
            f"the tokenizers differ: {what} is {_named(draft)} for the policy and {_named(guidance)} for the guidance"
            " model; token-level guidance needs the same tokenizer"
        )


def _named(value: object) -> str:
    return "missing" if value is None else repr(value)
