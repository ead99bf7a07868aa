"""Samples laid end to end up to a token budget: no padding, and the loss weights fixed beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luffy.core.reduce import Counts, token_weights
from luffy.types import MicroBatch, Sample


def cut(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in bins of at most ``budget`` tokens, longest first.

    Sorting by length keeps neighbours of a bin alike, so attention over it wastes little. A sequence
    longer than the budget gets a bin of its own.
    """
    bins: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or lengths[i] > room:
            bins.append([])
            room = budget
        bins[-1].append(i)
        room -= lengths[i]
    return bins


Denominators = tuple[Counts, Counts]  # of the RL and of the SFT tokens


def denominators(samples: Sequence[Sample]) -> Denominators:
    return Counts.of(s.rl_mask for s in samples), Counts.of(s.sft_mask for s in samples)


def pack(
    samples: Sequence[Sample],
    budget: int,
    reduction: str,
    max_response_tokens: int,
    whole: Denominators | None = None,
) -> list[MicroBatch]:
    """Micro-batches of one mini-batch. Denominators are counted over all of it, so that the sum of the
    micro-batch losses is the mini-batch loss however it was cut; ``whole`` are those over all processes."""
    of_rl, of_sft = denominators(samples) if whole is None else whole
    rl = token_weights([s.rl_mask for s in samples], reduction, max_response_tokens, of_rl)
    sft = token_weights([s.sft_mask for s in samples], "token-mean", max_response_tokens, of_sft)
    return [
        _micro_batch([samples[i] for i in part], [rl[i] for i in part], [sft[i] for i in part])
        for part in cut([len(s) for s in samples], budget)
    ]


def _micro_batch(samples: list[Sample], rl: list[Tensor], sft: list[Tensor]) -> MicroBatch:
    starts = torch.tensor([0] + [len(s) for s in samples]).cumsum(0).tolist()
    sequences = [torch.cat([torch.tensor(s.prompt_ids, dtype=torch.long), s.token_ids]) for s in samples]
    # Token t of a response is predicted from the hidden state of the token before it.
    before = [
        torch.arange(len(s.prompt_ids) - 1, len(s) - 1) + start for s, start in zip(samples, starts[:-1], strict=True)
    ]
    return MicroBatch(
        input_ids=torch.cat(sequences),
        position_ids=torch.cat([torch.arange(len(s)) for s in samples]),
        lengths=tuple(len(s) for s in samples),
        response_lengths=tuple(s.token_ids.numel() for s in samples),
        predict_from=torch.cat(before),
        targets=torch.cat([s.token_ids for s in samples]),
        off_policy=torch.cat([s.off_policy for s in samples]),
        rl_weights=torch.cat(rl),
        sft_weights=torch.cat(sft),
        advantages=torch.cat([s.advantages for s in samples]),
        behavior_log_probs=torch.cat([s.behavior_log_probs for s in samples]),
        engine_log_probs=torch.cat([s.engine_log_probs for s in samples]),
        old_log_probs=_cat_or_none([s.old_log_probs for s in samples]),
        ref_log_probs=_cat_or_none([s.ref_log_probs for s in samples]),
    )


def idle_batch() -> MicroBatch:
    """One token that weighs nothing: what a process runs while others still have micro-batches, because
    sharded layers need every process in every pass."""
    none = torch.zeros(1, dtype=torch.bool)
    nothing = torch.zeros(1)
    sample = Sample((0,), torch.zeros(1, dtype=torch.long), none, none, none, nothing, nothing, nothing)
    return _micro_batch([sample], [nothing], [nothing])


def _cat_or_none(parts: list[Tensor | None]) -> Tensor | None:
    present = [p for p in parts if p is not None]
    assert len(present) in (0, len(parts)), "a mini-batch has these log-probs for all its samples or for none"
    return torch.cat(present) if present else None
