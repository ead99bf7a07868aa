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
from luffy.models.forward import (
    causal_lm,
    check_supported,
    evaluating,
    forward_hidden,
    head_weight_bias,
    text_config,
    use_luffy_attention,
)

TRIED = (2, 4)  # sequences, tokens of each
# Of the logits' norm. Half precision is off by a few hundredths; a layer left out by about 1.
TOLERANCE = 0.1

_reasons: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


def runs_plain(model: nn.Module) -> bool:
    return _reasons.get(causal_lm(model)) is not None


def take_same_path(copy: nn.Module, original: nn.Module) -> None:
    """A copy of a model runs as the original does."""
    _reasons[causal_lm(copy)] = _reasons.get(causal_lm(original))


@torch.no_grad()
def choose_path(model: nn.Module) -> None:
    """Luffy's own attention where a trial run of it gives the model's own logits, else, with one warning, the
    model's."""
    causal = causal_lm(model)
    reason: str | None = None
    try:
        with evaluating(causal):
            _try_luffy_attention(causal)
    except UserError as error:
        reason = str(error)
    except (AttributeError, TypeError, LookupError, ValueError) as error:  # of a model that is made otherwise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        reason = f"{type(causal).__name__} does not run with luffy's attention ({said})"
    _reasons[causal] = reason
    if reason is not None:
        causal.set_attn_implementation("eager")  # the only one that knows every model's extra terms
        with evaluating(causal):
            _check_own_forward(causal)
        warnings.warn(f"{reason}; it runs through its own forward pass instead: correct, but slower", stacklevel=3)


def _try_luffy_attention(causal: Any) -> None:
    """Switch the model to luffy's attention; raise what speaks against it."""
    check_supported(causal)
    weight, bias = head_weight_bias(causal)
    ids = _tried_tokens(causal)
    own = _own_logits(causal, ids)
    use_luffy_attention(causal)
    layers = TriedLayers(name := type(causal).__name__)
    layout = PackedLayout([TRIED[1]] * TRIED[0], ids.device, layers, range(TRIED[0]))
    hidden = forward_hidden(causal, ids.flatten(), layout.position_ids, layout)
    if sorted(layers.found) != list(range(len(layers.found))):
        raise UserError(f"{name} runs layers more than once, so their keys have no place of their own")
    fits = hidden.shape[-1] == weight.shape[-1]
    if not fits or (own is not None and differ(nn.functional.linear(hidden, weight, bias).view(*TRIED, -1), own)):
        raise UserError(f"{name} computes other logits than its layers and vocabulary head alone give")


def _check_own_forward(causal: Any) -> None:
    """Errors for models that are no causal LM, or whose positions an engine would get wrong."""
    name, ids = type(causal).__name__, _tried_tokens(causal)
    own, begun = _own_logits(causal, ids), _own_logits(causal, ids[:, :-1])
    if own is None or begun is None:
        return
    if differ(begun, own[:, :-1]):
        raise UserError(f"{name} lets tokens see later ones: it is not a causal LM (is_decoder in its config.json?)")
    counted = _own_logits(causal, ids, position_ids=torch.arange(TRIED[1], device=ids.device).expand(TRIED))
    if counted is not None and differ(counted, own):
        raise UserError(f"{name} does not count its positions from 0, which luffy does not support")


def _tried_tokens(causal: Any) -> Tensor:
    device = causal.get_input_embeddings().weight.device
    return (torch.arange(TRIED[0] * TRIED[1], device=device) + 1).view(TRIED) % text_config(causal.config).vocab_size


def _own_logits(causal: Any, ids: Tensor, **more: Tensor) -> Tensor | None:
    """[B, T, V], by the model's own attention; None where it needs more than tokens."""
    try:
        output = causal(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more)
        logits: Tensor = output.logits
    except Exception:  # whatever a model of another making raises: there is nothing to compare with then
        return None
    return logits


def differ(ours: Tensor, theirs: Tensor) -> bool:
    """Whether rows of logits differ by more than rounding, up to a constant in each. Of ``theirs`` that are not finite
    or all alike nothing can be said."""
    if ours.shape != theirs.shape:
        return True
    rounding = 8 * torch.finfo(theirs.dtype).eps * theirs.float().norm()
    ours, theirs = (rows.float() - rows.float().mean(dim=-1, keepdim=True) for rows in (ours, theirs))
    size = theirs.norm()
    if not torch.isfinite(size) or size == 0:
        return False
    return not bool((ours - theirs).norm() <= TOLERANCE * size + rounding)


class TriedLayers:
    """Checks keys and values as an engine's cache would, and keeps none."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.found: list[int] = []
        self._shape: tuple[torch.Size, torch.dtype] | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        fault = "keys and values of different sizes" if keys.shape != values.shape else None
        if self._shape not in (None, (keys.shape, keys.dtype)):
            fault = "layers with different KV heads or head sizes"
        if fault is not None:
            raise UserError(f"{self._model} has {fault}, which luffy's cache does not support")
        self._shape = keys.shape, keys.dtype
        self.found.append(layer)


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
