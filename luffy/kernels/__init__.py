"""Triton kernels for the places where `transformers` launches many small ones or reads memory twice.

Each kernel computes what the modules it stands for compute, in the same order of roundings, so that a
model run with or without them gives the same numbers up to the order of sums. Without Triton, or
without a GPU, nothing here is imported and the modules themselves run.
"""

from __future__ import annotations

import importlib.util

import torch

# Tests set this where Triton interprets kernels on a CPU: right, but slow.
interpreted = False


def kernels_serve(device: torch.device) -> bool:
    """Whether Triton is there and runs on this device."""
    if device.type != "cuda" and not interpreted:
        return False
    return importlib.util.find_spec("triton") is not None
