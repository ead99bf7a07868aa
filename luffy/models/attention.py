"""One attention function for training, prefill and decoding, over tokens laid end to end.

The model's own modules and weights run unchanged: `transformers` lets a model look its attention
function up by name, and ours is registered as "luffy". Every forward pass takes a flat row of N
tokens, and a *layout* (which tokens belong together, and where their keys and values live) travels
to the attention layers as a keyword argument. So padding exists at most inside attention.

No mask function is registered on purpose: `transformers` then builds no mask at all, which saves an
[N, N] tensor and the search for packed sequences in every forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from luffy.errors import UserError
from luffy.models.flash import Reach, bounds_of, flash_kernel, heads_of
from luffy.types import Family, to_device

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: the padded path serves
    varlen_attn = None  # type: ignore[assignment]

# Fewer key heads than query heads have always been fine with the kernel; newer torch wants to be told.
_PARAMETERS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}

ATTENTION_NAME = "luffy"
LAYOUT_KEY = "luffy_layout"
SDPA_HINT = "call model.set_attn_implementation('sdpa') before running it outside luffy"

# Terms some architectures add to attention. Leaving one out would give wrong numbers in silence.
UNSUPPORTED_TERMS = ("softcap", "s_aux", "position_bias", "attention_bias", "head_mask")


class KVSink(Protocol):
    """Takes keys and values of slots: token i goes to (slots[i], positions[i])."""

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None: ...


class KVStore(KVSink, Protocol):
    """Shows them too: ``read`` gives the first ``span`` positions of the first ``rows`` slots as
    [rows, KV heads, span, D], uncopied."""

    def read(self, layer: int, rows: int, span: int) -> tuple[Tensor, Tensor]: ...


class Layout(Protocol):
    """How a flat row of tokens attends. Tensors are [N, heads, D]; ``calls`` counts attention layers."""

    calls: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor: ...


class PackedLayout:
    """Whole sequences end to end, each causal and blind to the others: training and prefill.

    With a ``store`` the keys and values are kept as well, sequence i in slot ``slots[i]``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        store: KVSink | None = None,
        slots: Sequence[int] = (),
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed layout needs sequences of at least one token, got lengths {list(lengths)}")
        assert store is None or len(slots) == len(lengths)
        self.lengths = tuple(int(n) for n in lengths)
        self.longest = max(self.lengths)
        self.device = torch.device(device)
        self.calls = 0
        self._store = store
        self._slots = tuple(slots)
        self._bands: dict[int, Tensor] = {}
        self._reaches: dict[tuple[tuple[int, ...], int | None], Reach] = {}

    @cached_property
    def position_ids(self) -> Tensor:
        """[N]: counts from 0 in every sequence."""
        return to_device(torch.cat([torch.arange(n) for n in self.lengths]), self.device)

    @cached_property
    def last_tokens(self) -> Tensor:
        """[S]: where each sequence ends in the flat row."""
        return to_device(torch.tensor(self.lengths).cumsum(0) - 1, self.device)

    @cached_property
    def _token_rows(self) -> Tensor:
        """[N]: the number of the sequence a token belongs to."""
        lengths = torch.tensor(self.lengths)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return to_device(rows, self.device)

    @cached_property
    def _token_slots(self) -> Tensor:
        return to_device(torch.tensor(self._slots), self.device)[self._token_rows]

    @cached_property
    def bounds(self) -> Tensor:
        return bounds_of(self.lengths, self.device)

    def over(self, asked: PackedLayout, window: int | None) -> Reach:
        """Each of these stretches as the end of its sequence of ``asked``; the same for every layer."""
        key = (asked.lengths, window)
        if key not in self._reaches:
            self._reaches[key] = Reach((self.bounds, asked.bounds), (self.lengths, asked.lengths), window)
        return self._reaches[key]

    @cached_property
    def _to_padded(self) -> Tensor:
        """[S * L]: the flat token at each padded place. Padding repeats the last token of its own
        sequence: any finite value does, since causality hides what lies to the right."""
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        within = torch.minimum(torch.arange(self.longest)[None, :], lengths[:, None] - 1)
        return to_device((starts[:, None] + within).flatten(), self.device)

    @cached_property
    def _from_padded(self) -> Tensor:
        """[N]: the padded place of each flat token."""
        return self._token_rows * self.longest + self.position_ids

    @property
    def _is_rectangular(self) -> bool:
        return min(self.lengths) == self.longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self._store is not None:
            self._store.write(layer, key, value, self._token_slots, self.position_ids)
        if varlen_serves(query):
            return causal_varlen(query, key, value, self, self, scale, window)
        return self._attend_padded(query, key, value, scale, narrowing(window, self.longest))

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            self._pad(query),
            self._pad(key),
            self._pad(value),
            attn_mask=None if window is None else self._band(window),
            is_causal=window is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self._unpad(out)

    def _pad(self, flat: Tensor) -> Tensor:
        """[N, H, D] -> [S, H, L, D]."""
        tokens = flat if self._is_rectangular else flat.index_select(0, self._to_padded)
        return tokens.reshape(len(self.lengths), self.longest, *flat.shape[1:]).transpose(1, 2)

    def _unpad(self, padded: Tensor) -> Tensor:
        """[S, H, L, D] -> [N, H, D]."""
        tokens = padded.transpose(1, 2).flatten(0, 1)
        return tokens if self._is_rectangular else tokens.index_select(0, self._from_padded)

    def _band(self, window: int) -> Tensor:
        """[L, L] bool: a token sees itself and the ``window - 1`` before it."""
        if window not in self._bands:
            at = torch.arange(self.longest, device=self.device)
            distance = at[:, None] - at[None, :]
            self._bands[window] = (distance >= 0) & (distance < window)
        return self._bands[window]


class ExtendLayout:
    """``k`` new tokens for each of the first B slots, on top of what the slots hold: token (i, j) stands
    at ``positions[i, j]`` of slot i and sees the cache up to itself, its own neighbours included.

    ``span`` is how many cached positions are looked at: at least the longest sequence, new tokens included. Tokens
    come flat, slot by slot. Whatever the cache held at these positions or after them is overwritten or not looked at,
    so taking tokens back needs no work: the next ones replace them. Query heads that share a key head become rows of
    one small matrix, so keys and values are read in place and never repeated.
    """

    def __init__(self, store: KVStore, positions: Tensor, span: int) -> None:
        self.calls = 0
        self.span = span
        self.positions = positions
        self._store = store
        rows, self._count = positions.shape
        self._slots = torch.arange(rows, device=positions.device).repeat_interleave(self._count)
        self._places = positions.flatten()
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        rows, (tokens, heads, dim) = len(self.positions), query.shape
        self._store.write(layer, key, value, self._slots, self._places)
        keys, values = self._store.read(layer, rows, self.span)
        shared = keys.shape[1]
        # [B, k, KV, G * D] -> [B, KV, k * G, D]: the new tokens of all heads that share a key head. With one token a
        # slot they lie so already, and a tiny model would notice the further views.
        if self._count > 1:
            query = query.reshape(rows, self._count, shared, -1).transpose(1, 2)
        split, mask = query.reshape(rows, shared, -1, dim), self._mask(heads // shared, window)
        out = F.scaled_dot_product_attention(split, keys, values, attn_mask=mask, scale=scale)
        if self._count > 1:
            out = out.reshape(rows, shared, self._count, -1).transpose(1, 2)
        return out.reshape(tokens, heads, dim)

    def _mask(self, sharing: int, window: int | None) -> Tensor:
        """[B, 1, k * G, span] bool: the cached positions each new token sees, for every head of a group; k = 1: for
        all heads of a slot at once, [B, 1, 1, span]."""
        if (sharing, window) not in self._masks:
            seen = _seen(self.positions, self.span, window)
            each = seen.repeat_interleave(sharing, dim=1) if self._count > 1 else seen
            self._masks[sharing, window] = each[:, None]
        return self._masks[sharing, window]


def _seen(positions: Tensor, span: int, window: int | None) -> Tensor:
    """[..., span] bool: the first ``span`` positions a token at ``positions`` looks at."""
    distance = positions[..., None] - torch.arange(span, device=positions.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def varlen_serves(query: Tensor) -> bool:
    """The flash kernel behind ``varlen_attn`` takes half precision on CUDA and usual head sizes."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def narrowing(window: int | None, longest: int) -> int | None:
    """The window, if any sequence is longer: others need not hear of it."""
    return window if window is not None and window < longest else None


def causal_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: PackedLayout,
    asked: PackedLayout,
    scale: float,
    window: int | None,
) -> Tensor:
    """Each stretch of ``asking`` is the end of its sequence of ``asked``."""
    window = narrowing(window, asked.longest)
    kernel = flash_kernel(heads_of(query, key, window, asked.longest), torch_varlen) or torch_varlen
    return kernel(query, key, value, asking.over(asked, window), scale)


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float) -> Tensor:
    band = (-1 if reach.window is None else reach.window - 1, 0)  # the kernel counts the tokens beside the query's own
    out = varlen_attn(query, key, value, *reach.bounds, *reach.longest, scale=scale, window_size=band, **VARLEN_GQA)
    assert isinstance(out, Tensor)
    return out


def luffy_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that the model's modules call: heads [1, H, N, D] in, [1, N, H, D] out."""
    layout: Layout | None = kwargs.get(LAYOUT_KEY)
    _check_call(module, layout, attention_mask, dropout, sliding_window, kwargs)
    assert layout is not None
    layout.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    out = layout.attend(_layer_index(module), q, k, v, scale, sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, luffy_attention)


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UserError(f"{type(module).__name__} has no layer_idx, so its keys have no place: unsupported model")
    return index


def _check_call(
    module: nn.Module,
    layout: Layout | None,
    attention_mask: Tensor | None,
    dropout: float,
    window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what would be computed wrongly rather than not at all."""
    name = type(module).__name__
    if layout is None or attention_mask is not None:
        raise UserError(f"{name} was called without a luffy layout; {SDPA_HINT}")
    if dropout:
        field = _dropout_field(module, dropout)
        raise UserError(f"{name} asks for attention dropout {dropout}: set {field} to 0 in the model's config.json")
    terms = [term for term in UNSUPPORTED_TERMS if kwargs.get(term) is not None]
    if terms:
        raise UserError(f"{name} uses {', '.join(terms)} in attention, which luffy does not support")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError(f"{name} is not causal attention, which luffy does not support")
    if window is None and _is_sliding_layer(module):
        raise UserError(f"{name} is a sliding-window layer that does not pass its window on: unsupported model")


def _dropout_field(module: nn.Module, dropout: float) -> str:
    """Name of the attention dropout in the model's config: attention_dropout, attn_pdrop, ..."""
    values = vars(getattr(module, "config", None) or nn.Module())
    names = [name for name, value in values.items() if "att" in name and "drop" in name and value == dropout]
    return names[0] if names else "attention_dropout"


def _is_sliding_layer(module: nn.Module) -> bool:
    kinds: list[str] = getattr(getattr(module, "config", None), "layer_types", None) or []
    return bool(kinds) and kinds[_layer_index(module)] == "sliding_attention"


def layout_of(families: Sequence[Family], device: torch.device | str) -> Layout:
    """Layout of families in one row; without a shared prompt nothing is copied."""
    if all(len(family.responses) == 1 for family in families):
        return PackedLayout([family.tokens for family in families], device)
    return FamilyLayout(families, device)


class FamilyLayout:
    """Families end to end: a prompt, then its responses, each blind to the others. Norms, linear layers and MLP see a
    shared prompt once; attention alone needs it before every response: keys and values are copied into whole sequences.

    Queries stay where they are. The first response follows its prompt in the row, so the two are one stretch of
    queries; every further response is one of its own, whose keys begin with the prompt's.
    """

    def __init__(self, families: Sequence[Family], device: torch.device | str) -> None:
        self.calls = 0
        asking, rows = zip(*_sequences(families), strict=True)
        self._stretches = PackedLayout(asking, device)
        self._whole = PackedLayout([len(row) for row in rows], device)
        self._copies = Copies(torch.cat(rows), sum(asking), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self._copies.of(key), self._copies.of(value)
        if varlen_serves(query):
            return causal_varlen(query, keys, values, self._stretches, self._whole, scale, window)
        out = self._whole.attend(layer, self._copies.of(query), keys, values, scale, window)
        return out.index_select(0, self._copies.first)


def _sequences(families: Sequence[Family]) -> Iterator[tuple[int, Tensor]]:
    """Length of each stretch of queries, and the rows of its whole sequence; empty responses have none."""
    start = 0
    for family in families:
        prompt = torch.arange(start, start + family.prompt)
        start += family.prompt
        for i, n in enumerate(family.responses):
            if i == 0 or n:
                yield n + (family.prompt if i == 0 else 0), torch.cat([prompt, torch.arange(start, start + n)])
            start += n


class Copies:
    """Rows copied to several places, and the way back for gradients: the sum over a row's places, always in the
    same order, where adding into the row from all places at once would not give the same bits twice on a GPU."""

    def __init__(self, rows: Tensor, count: int, device: torch.device | str) -> None:
        """``rows[i]`` is the row that goes to place i; each of the ``count`` rows goes somewhere."""
        times = torch.bincount(rows, minlength=count)
        places = rows.argsort(stable=True)  # row by row
        starts = times.cumsum(0) - times
        several = (times > 1).nonzero().flatten()
        nth = torch.arange(int(times.max()))
        absent = nth[None, :] >= times[several, None]
        at = (starts[several, None] + nth[None, :]).clamp(max=len(rows) - 1)
        self.rows = to_device(rows, device)
        self.first = to_device(places[starts], device)
        self._several = to_device(several, device)
        self._places = to_device(places[at], device)
        self._absent = to_device(absent[:, :, None, None], device) if absent.any() else None

    def of(self, flat: Tensor) -> Tensor:
        """[N, H, D] -> [places, H, D]."""
        copied: Tensor = _Copied.apply(flat, self)  # type: ignore[no-untyped-call]
        return copied

    def summed(self, gradient: Tensor) -> Tensor:
        """[places, H, D] -> [N, H, D]; half precision is summed in float32."""
        out = gradient.index_select(0, self.first)
        parts = gradient[self._places]
        if self._absent is not None:
            parts.masked_fill_(self._absent, 0)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return out.index_copy_(0, self._several, parts.sum(1, dtype=wide).to(gradient.dtype))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return flat.index_select(0, copies.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.summed(gradients[0]), None
