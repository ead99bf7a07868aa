"""Samples laid end to end up to a token budget: no padding, prompts once where they are shared, and the loss
weights fixed beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from luffy.core.reduce import Counts, divided, sequence_denominators
from luffy.types import Author, Family, MicroBatch, Sample, written_by

Bin = list[list[int]]  # samples by their index, those that share a prompt together


def cut(samples: Sequence[Sample], budget: int, share: bool = True) -> list[Bin]:
    """Samples in bins of at most ``budget`` tokens, longest first; with ``share`` samples with the same prompt
    stay together and their prompt counts once.

    Sorting by length keeps neighbours of a bin alike, so attention over it wastes little. Samples of one prompt that
    exceed the budget together are parted, and each part has the prompt; a single sample that exceeds it gets a
    bin of its own.
    """
    pieces = [piece for members in _by_prompt(samples, share) for piece in _parted(samples, members, budget)]
    sizes = [family_of(samples, piece).tokens for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda i: (-sizes[i], pieces[i][0]))
    return [[pieces[i] for i in bin_] for bin_ in _filled(order, sizes, budget)]


def family_of(samples: Sequence[Sample], members: Sequence[int]) -> Family:
    return Family(len(samples[members[0]].prompt_ids), tuple(samples[i].token_ids.numel() for i in members))


def computed_tokens(samples: Sequence[Sample], bins: Sequence[Bin]) -> int:
    """Tokens that go through the model, a shared prompt once a bin."""
    return sum(family_of(samples, members).tokens for bin_ in bins for members in bin_)


def _by_prompt(samples: Sequence[Sample], share: bool) -> list[list[int]]:
    """Indices of the samples of each prompt, longest first; each on its own unless they ``share``."""
    if not share:
        return [[i] for i in range(len(samples))]
    members: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(samples)), key=lambda i: (-len(samples[i]), i)):
        members.setdefault(samples[i].prompt_ids, []).append(i)
    return list(members.values())


def _parted(samples: Sequence[Sample], members: Sequence[int], budget: int) -> list[list[int]]:
    """Samples of one prompt in parts that fit the budget with it."""
    family = family_of(samples, members)
    parts = _filled(range(len(members)), family.responses, budget - family.prompt)
    return [[members[i] for i in part] for part in parts]


def _filled(order: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Neighbours in ``order`` together up to the budget, alone beyond it."""
    groups: list[list[int]] = []
    room = 0
    for i in order:
        if not groups or sizes[i] > room:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= sizes[i]
    return groups


Denominators = tuple[Counts, Counts]  # of the RL and of the SFT tokens


def total_denominators(parts: Sequence[Denominators]) -> Denominators:
    """The denominators of a mini-batch from those of every process."""
    rl, sft = (Counts.total(part) for part in zip(*parts, strict=True))
    return rl, sft


def denominators(samples: Sequence[Sample]) -> Denominators:
    return Counts.of([s.rl_weights for s in samples]), Counts.of([s.sft_weights for s in samples])


def pack(
    samples: Sequence[Sample],
    budget: int,
    reduction: str | None,
    max_response_tokens: int,
    share: bool = True,
) -> MicroBatches:
    """Micro-batches of one mini-batch. Denominators are counted over all of it, so that the sum of the
    micro-batch losses is the mini-batch loss however it was cut. Without a ``reduction`` the weights stay the samples'
    own."""
    return pack_bins(samples, cut(samples, budget, share), reduction, max_response_tokens)


def pack_bins(
    samples: Sequence[Sample],
    bins: list[Bin],
    reduction: str | None,
    max_response_tokens: int,
    whole: Denominators | None = None,
) -> MicroBatches:
    """``pack``, of samples that were cut before; ``whole``: the denominators over all processes."""
    if reduction is None:
        reduction, whole = "token-mean", (Counts(1, 1), Counts(1, 1))
    of_rl, of_sft = denominators(samples) if whole is None else whole
    rl = sequence_denominators([s.rl_weights for s in samples], reduction, max_response_tokens, of_rl)
    sft = sequence_denominators([s.sft_weights for s in samples], "token-mean", max_response_tokens, of_sft)
    return MicroBatches(samples, rl, sft, bins)


class MicroBatches(Sequence[MicroBatch]):
    """Each laid out when it is asked for: on a GPU that is while the one before it is still computed. ``rl`` and
    ``sft``: what the weights of each sample's tokens are divided by."""

    def __init__(self, samples: Sequence[Sample], rl: Sequence[int], sft: Sequence[int], bins: list[Bin]) -> None:
        self._parts, self._bins = (samples, rl, sft), bins

    def __len__(self) -> int:
        return len(self._bins)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [_micro_batch(*self._parts, bin_) for bin_ in self._bins[index]]
        return _micro_batch(*self._parts, self._bins[index])


def _micro_batch(samples: Sequence[Sample], rl: Sequence[int], sft: Sequence[int], bin_: Bin) -> MicroBatch:
    families = tuple(family_of(samples, members) for members in bin_)
    order = tuple(i for members in bin_ for i in members)
    laid = [samples[i] for i in order]
    return MicroBatch(
        input_ids=torch.cat([ids for members in bin_ for ids in _row([samples[i] for i in members])]),
        position_ids=torch.cat([family.positions() for family in families]),
        families=families,
        order=order,
        predict_from=_predict_from(families),
        targets=torch.cat([s.token_ids for s in laid]),
        authors=torch.cat([s.authors for s in laid]),
        rl_weights=divided([s.rl_weights for s in laid], [rl[i] for i in order]),
        sft_weights=divided([s.sft_weights for s in laid], [sft[i] for i in order]),
        advantages=torch.cat([s.advantages for s in laid]),
        behavior_log_probs=torch.cat([s.behavior_log_probs for s in laid]),
        engine_log_probs=torch.cat([s.engine_log_probs for s in laid]),
        old_log_probs=_cat_or_none([s.old_log_probs for s in laid]),
        ref_log_probs=_cat_or_none([s.ref_log_probs for s in laid]),
    )


def _row(members: Sequence[Sample]) -> list[Tensor]:
    return [torch.tensor(members[0].prompt_ids, dtype=torch.long), *(s.token_ids for s in members)]


def _predict_from(families: Sequence[Family]) -> Tensor:
    """Token t of a response is predicted from the hidden state of the token before it."""
    before, firsts, last_of_prompts = [], [], []
    start = laid = 0
    for family in families:
        start += family.prompt
        before.append(torch.arange(start - 1, start + sum(family.responses) - 1))
        for n in family.responses:
            if n:
                firsts.append(laid)
                last_of_prompts.append(start - 1)
            laid += n
        start += sum(family.responses)
    places = torch.cat(before)
    places[firsts] = torch.tensor(last_of_prompts, dtype=torch.long)
    return places


def idle_batch() -> MicroBatch:
    """One token that weighs nothing: what a process runs while others still have micro-batches, because
    sharded layers need every process in every pass."""
    policy = written_by(Author.POLICY, 1)
    nothing = torch.zeros(1)
    sample = Sample((0,), torch.zeros(1, dtype=torch.long), policy, nothing, nothing, nothing, nothing, nothing)
    return _micro_batch([sample], [1], [1], [[0]])


def _cat_or_none(parts: list[Tensor | None]) -> Tensor | None:
    present = [p for p in parts if p is not None]
    assert len(present) in (0, len(parts)), "a mini-batch has these log-probs for all its samples or for none"
    return torch.cat(present) if present else None
