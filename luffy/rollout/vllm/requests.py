"""Requests and completions in vLLM's terms, the same for an engine in our process and for a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from luffy.types import Completion, Finish, Request

INT64 = 1 << 63


def sampling_arguments(request: Request, seeded: bool = True) -> dict[str, Any]:
    """Arguments that both ``SamplingParams`` and a server's ``/v1/completions`` take.

    ``ignore_eos`` leaves the ends of a response to ``stop_token_ids``: vLLM would otherwise stop at its own idea of
    the model's EOS. ``logprobs=0`` is the sampled token's alone. Everything is said, because a server fills what is
    left open from the model's generation_config.json.
    """
    s = request.sampling
    return {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed % INT64 if seeded else None,
        "max_tokens": s.max_tokens,
        "stop_token_ids": list(s.eos_ids),
        "ignore_eos": True,
        "logprobs": 0,
    }


def completion_body(request: Request, model: str, seeded: bool) -> dict[str, Any]:
    """Body of a request to ``/v1/completions`` that asks for token ids."""
    asked = {"model": model, "prompt": list(request.given_ids)}
    return {**sampling_arguments(request, seeded), **asked, "return_token_ids": True, "skip_special_tokens": False}


def completion(request: Request, token_ids: Sequence[int], log_probs: Sequence[float]) -> Completion:
    """vLLM's processed log-probs are those of the distribution it drew from: tempered, and under top-p or top-k
    renormalised over the tokens that were left. Then they are the behaviour, and the policy's own are unknown."""
    ids = torch.tensor(token_ids, dtype=torch.long)
    drawn_with = torch.tensor(log_probs, dtype=torch.float32)
    if ids.numel() != drawn_with.numel() or not ids.numel():
        raise RuntimeError(f"vLLM gave {ids.numel()} tokens with {drawn_with.numel()} log-probs")
    if drawn_with.isnan().any():
        raise FloatingPointError("vLLM gave NaN log-probs: its weights or its KV cache hold NaN")
    finish: Finish = "stop" if int(ids[-1]) in request.sampling.eos_ids else "length"
    if not request.sampling.is_filtered:
        return Completion(ids, drawn_with, finish)
    return Completion(ids, torch.full_like(drawn_with, torch.nan), finish, behavior_log_probs=drawn_with)
