"""Log-probs and entropies of the response tokens of a micro-batch."""

from __future__ import annotations

from torch import Tensor, nn

from luffy.core.logprobs import selected_log_probs
from luffy.models.families import layout_of
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.plain import plain_log_probs, runs_plain
from luffy.types import MicroBatch


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

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if runs_plain(self.model):
            return plain_log_probs(
                self.model, batch.input_ids, batch.lengths, batch.predict_from, batch.targets, temperature
            )
        layout = layout_of(batch.families, batch.input_ids.device)
        hidden = forward_hidden(self.model, batch.input_ids, batch.position_ids, layout)
        weight, bias = head_weight_bias(self.model)
        scores = selected_log_probs(hidden[batch.predict_from], weight, bias, batch.targets, temperature=temperature)
        return scores[0].clone(), scores[1].clone()  # not views: FSDP2 hangs its hooks on what is returned
