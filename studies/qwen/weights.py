"""The tensors of a Qwen2 GGUF file as bfloat16 safetensors, dequantised by several processes.

    python -m studies.qwen.weights IN.gguf OUT/model.safetensors

Published files hold the tied embedding twice, as ``token_embd`` (coarser) and ``output`` (finer); the finer one is
taken where it is there. Config and tokenizer come from elsewhere, e.g. from transformers' own reading of the file.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OTHERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
EMBEDDING, FINER = "token_embd.weight", "output.weight"


def name_of(name: str) -> str:
    """The name that transformers gives to a tensor of the GGUF file."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return OTHERS[name]
    return f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"


def values_of(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of some names as the bits of bfloat16, rounded to nearest even."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found = {}
    for name in names:
        tensor = tensors[FINER if name == EMBEDDING and FINER in tensors else name]
        bits = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).view(np.uint32)
        found[name_of(name)] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return found


def convert(path: Path, out: Path, processes: int) -> None:
    import torch
    from safetensors.torch import save_file

    sizes = {t.name: t.n_elements for t in GGUFReader(path).tensors if t.name != FINER}
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    parts = [largest_first[:1], *(largest_first[i::processes] for i in range(1, processes))]
    parts[-1] = [*parts[-1], *largest_first[processes::processes]]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [item for part in pool.map(partial(values_of, path), parts) for item in part.items()]
    assert len(found) == len(sizes)
    tensors = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in found}
    save_file(tensors, out, metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    args = parser.parse_args()
    convert(args.gguf, args.out, args.processes)
