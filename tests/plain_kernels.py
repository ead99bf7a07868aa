"""What the engine's kernels do, in plain torch: fast on a CPU, where Triton's interpreter is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from luffy.rollout.sampling import SamplingRows, draw_tokens, sample

PAGE = 64
BLOCKS: dict[int, Tensor] = {}  # caches by their address


def add_rms_norm(x, residual, weight, eps):
    x = x.sum(0) if x.ndim == 3 else x
    total = x if residual is None else x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total


def add_rms_norm_quantized(x, residual, weight, eps):
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed), total


def swiglu(gate, up):
    return F.silu(gate) * up


def swiglu_quantized(gate, up):
    return quantize_rows(swiglu(gate, up))


def quantize_rows(x, out=None):
    scales = x.float().abs().amax(1).clamp(min=1e-12) / 448
    rows = (x.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    if out is not None:
        out.values.copy_(rows)
        out.scales.copy_(scales)
    return rows, scales


def rotate(x, cos, sin):
    return apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)[0]


def rotary_angles(positions, frequencies, scale, dtype):
    angles = positions.float()[:, None] * frequencies.float()
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def store(k, v, address, tables, rows, positions, layer, page_stride, angles=None):
    block = BLOCKS[int(address)]
    pages = tables[rows, positions // PAGE].long()
    block[pages, layer, 0, :, positions % PAGE] = k if angles is None else rotate(k, *angles)
    block[pages, layer, 1, :, positions % PAGE] = v


def attend(
    q, address, tables, positions, layer, page_stride, kv_heads, scale, window, splits, angles=None, newest=None
):
    if newest is not None:
        rows = torch.arange(len(q), device=q.device)
        store(*newest, address, tables, rows, positions, layer, page_stride, angles)
    q = q if angles is None else rotate(q, *angles)
    block, queries = BLOCKS[int(address)], len(q) // len(tables)
    out = []
    for row, position in enumerate(positions.tolist()):
        pages = tables[row // queries, : position // PAGE + 1].long()
        keys, values = block[pages, layer].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, : position + 1]
        start = 0 if window is None else max(0, position + 1 - window)
        heads = (x[start:].transpose(0, 1)[None] for x in (keys, values))
        out.append(F.scaled_dot_product_attention(q[row][None, :, None], *heads, scale=scale, enable_gqa=True)[0, :, 0])
    return torch.stack(out)


def attend_last(query, keys, values, scale, window):
    """One stretch of queries [n, H, D] at the end of its sequence."""
    at = torch.arange(len(keys), device=keys.device)
    distance = at[len(keys) - len(query) :, None] - at[None, :]
    seen = (distance >= 0) & (distance < (window or len(keys)))
    heads = (x.transpose(0, 1)[None] for x in (query, keys, values))
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def varlen_attn(query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, scale, window_size, **_):
    """What torch documents of its function: causality and window aligned to the end of queries and keys; the window
    is the number of tokens before a query's own, -1 for all."""
    before, after = window_size
    assert after == 0 and before >= -1
    lengths_q, lengths_k = bounds_q.diff().tolist(), bounds_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (longest_q, longest_k)
    parts = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    return torch.cat([attend_last(q, k, v, scale, before + 1) for q, k, v in parts])


def sample_and_advance(
    logits, seeds, temperatures, greedy, tokens, positions, limits, step, all_tokens, all_log_probs
):  # fmt: skip
    n = len(logits)
    nothing = torch.empty(0)
    rows = SamplingRows(
        seeds[:n], temperatures[:n, None], greedy[:n], bool(greedy[:n].any()), bool(greedy[:n].all()), None,
        nothing, nothing,
    )  # fmt: skip
    drawn, log_probs = sample(logits, rows, positions[:n] + 1)
    all_tokens[step, :n], all_log_probs[step, :n] = drawn, log_probs
    tokens[:n] = drawn
    positions[:n] = torch.minimum(positions[:n] + 1, limits[:n])
    step += 1


def install(monkeypatch):
    """Put these in the kernels' places."""
    import luffy.kernels
    import luffy.kernels.elementwise
    import luffy.kernels.norm
    import luffy.kernels.quantize
    from luffy.rollout.native import decode_graphs, paged_cache
    from luffy.rollout.overrides import round_graphs

    monkeypatch.setattr(luffy.kernels, "interpreted", True)
    for name in ("add_rms_norm", "add_rms_norm_quantized"):
        monkeypatch.setattr(luffy.kernels.norm, name, globals()[name])
    for name in ("swiglu", "swiglu_quantized", "rotate", "rotary_angles"):
        monkeypatch.setattr(luffy.kernels.elementwise, name, globals()[name])
    monkeypatch.setattr(luffy.kernels.quantize, "quantize_rows", quantize_rows)
    for name in ("store", "attend"):
        monkeypatch.setattr(paged_cache, name, globals()[name])
    monkeypatch.setattr(decode_graphs, "sample_and_advance", sample_and_advance)
    monkeypatch.setattr(round_graphs, "draw_tokens", draw_tokens)
    plain = paged_cache.PagedCache.allocate

    def allocate(self, pages):
        plain(self, pages)
        BLOCKS[int(self.address)] = self._block

    monkeypatch.setattr(paged_cache.PagedCache, "allocate", allocate)
