"""Log-probs and entropies of the response tokens of a micro-batch."""

from __future__ import annotations

from torch import Tensor, nn

from luffy.core.logprobs import selected_log_probs
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.models.plain import plain_log_probs, runs_plain
from luffy.types import MicroBatch


class TokenScorer(nn.Module):
    """The model and what is done with its head, as one module: when it is sharded, calling it is what gathers the
    head's weight, which nothing else may read then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if runs_plain(self.model):
            return plain_log_probs(
                self.model, batch.input_ids, batch.lengths, batch.predict_from, batch.targets, temperature
            )
        layout = PackedLayout(batch.lengths, device=batch.input_ids.device)
        hidden = forward_hidden(self.model, batch.input_ids, batch.position_ids, layout)
        weight, bias = head_weight_bias(self.model)
        scores = selected_log_probs(hidden[batch.predict_from], weight, bias, batch.targets, temperature=temperature)
        return scores[0].clone(), scores[1].clone()  # not views: FSDP2 hangs its hooks on what is returned
