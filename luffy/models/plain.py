"""The slower way, for models whose attention or head luffy's own code would get wrong: their whole forward pass,
padded, as `transformers` runs it. Correct for anything that is a causal LM; nothing is packed, fused or shared."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from luffy.core.logprobs import entropy_of
from luffy.errors import UserError
from luffy.models.attention import PackedLayout
from luffy.models.forward import causal_lm, forward_hidden, head_weight_bias, use_luffy_attention

_reasons: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


def runs_plain(model: nn.Module) -> bool:
    return _reasons.get(causal_lm(model)) is not None


def take_same_path(copy: nn.Module, original: nn.Module) -> None:
    """A copy of a model runs as the original does."""
    _reasons[causal_lm(copy)] = _reasons.get(causal_lm(original))


@torch.no_grad()
def choose_path(model: nn.Module) -> None:
    """Luffy's own attention where a trial run of it succeeds, else, with one warning, the model's."""
    causal = causal_lm(model)
    try:
        use_luffy_attention(causal)
        head_weight_bias(causal)
        device = causal.get_input_embeddings().weight.device
        layout = PackedLayout([2], device)
        forward_hidden(causal, torch.zeros(2, dtype=torch.long, device=device), layout.position_ids, layout)
    except UserError as error:
        causal.set_attn_implementation("eager")  # the only one that knows every model's extra terms
        _reasons[causal] = str(error)
        warnings.warn(f"{error}; it runs through its own forward pass instead: correct, but slower", stacklevel=3)
    else:
        _reasons[causal] = None


def plain_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    lengths: Sequence[int],
    predict_from: Tensor,
    targets: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R] of ``targets`` from packed sequences, as `selected_log_probs` gives them."""
    rows = list(input_ids.split(list(lengths)))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(padded.shape[1], device=padded.device)
    mask = places[None, :] < torch.tensor(list(lengths), device=padded.device)[:, None]
    output: Any = model(input_ids=padded, attention_mask=mask.long(), use_cache=False)
    logits = output.logits[mask][predict_from].float()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy_of(log_p)
