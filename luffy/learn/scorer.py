"""Log-probs and entropies of the response tokens of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from luffy.core.logprobs import Head as Head
from luffy.core.logprobs import anchor_kl, selected_log_probs, top_entropy
from luffy.errors import UserError
from luffy.models.attention import layout_of
from luffy.models.forward import evaluating, forward_hidden, head_weight_bias
from luffy.models.plain import plain_log_probs, runs_plain
from luffy.types import MicroBatch


class Scores(NamedTuple):
    """Values of response tokens, [R] float32; the last three where asked for, ``head`` in place of the others."""

    log_prob: Tensor
    entropy: Tensor
    top_entropy: Tensor | None = None
    anchor_kl: Tensor | None = None
    head: Head | None = None


class TokenScorer(nn.Module):
    """The model and what is done with its head, as one module: when it is sharded, calling it is what gathers the
    head's weight, which nothing else may read then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def shares_prompts(self) -> bool:
        """A model that runs by its own forward pass wants whole sequences: its batches are packed without sharing."""
        return not runs_plain(self.model)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float,
        top: int = 0,
        anchor: Head | None = None,
        read_head: bool = False,
    ) -> Scores:
        """``top``: ask for the entropy of so many likeliest tokens. ``anchor``: for the KL from its distributions.
        ``read_head``: for what the distributions are made of."""
        if runs_plain(self.model):
            if top or anchor or read_head:
                raise UserError(
                    "algorithm.sft_weight=eaft and algorithm.sft_anchor read whole distributions, which a model that "
                    "runs through its own forward pass does not give; set algorithm.sft_weight=none and "
                    "algorithm.sft_anchor=0"
                )
            return Scores(
                *plain_log_probs(
                    self.model, batch.input_ids, batch.lengths, batch.predict_from, batch.targets, temperature
                )
            )
        layout = layout_of(batch.families, batch.input_ids.device)
        hidden = forward_hidden(self.model, batch.input_ids, batch.position_ids, layout)[batch.predict_from]
        weight, bias = head_weight_bias(self.model)
        if read_head:
            kept = weight.clone() if isinstance(self, FSDPModule) else weight  # gathered ones are freed after the pass
            return Scores(hidden.new_zeros(0), hidden.new_zeros(0), head=Head(hidden, kept, bias))
        scores = selected_log_probs(hidden, weight, bias, batch.targets, temperature=temperature)
        return Scores(
            scores[0].clone(),  # not views: FSDP2 hangs its hooks on what is returned
            scores[1].clone(),
            top_entropy(Head(hidden, weight, bias), top, temperature) if top else None,
            None if anchor is None else anchor_kl(Head(hidden, weight, bias), anchor, temperature),
        )


@torch.no_grad()
def read_head(scorer: TokenScorer, batch: MicroBatch, temperature: float) -> Head | None:
    """What the distributions of the response tokens are made of, without gradients."""
    with evaluating(scorer.model):
        scores: Scores = scorer(batch, temperature, read_head=True)
    return scores.head
