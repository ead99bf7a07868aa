"""Tokens per second of decoding with overrides, against the second model alone and the draft alone.

    python benchmarks/overrides.py                                                     # CPU, tiny models
    python benchmarks/overrides.py --draft qwen2-0.5b --second qwen2-1.5b --device cuda --dtype bfloat16

Weights are random, so speed is real and agreement is chosen. Random models are nearly flat, and a higher --temperature
makes any two of them agree more. --second copy takes the draft's own weights with --noise (relative) on them instead.
What matters for speed is how many proposals a round keeps, and that is in the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from luffy.core.override_rules import RULES, Rule
from luffy.rollout import EngineStats, NativeEngine, SpeculativeEngine, SpeculativeStats
from luffy.types import Request, Sampling

CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 512),
    "tiny-large": Shape(256, 8, 8, 2, 768, 512),
    "qwen2-0.5b": Shape(896, 24, 14, 2, 4864, 151_936),
    "qwen2-1.5b": Shape(1536, 28, 12, 2, 8960, 151_936),
}


@dataclass(frozen=True)
class Row:
    """``accepted_length`` is what a sequence keeps of a round's k proposals."""

    engine: str
    tokens_per_second: float
    against_second: float
    accepted_length: float | None = None
    override_share: float | None = None


def build(shape: Shape, seed: int, device: str, dtype: torch.dtype) -> nn.Module:
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        make: Any = AutoModelForCausalLM.from_config
        model: nn.Module = make(config)
    for parameter in model.parameters():  # and not the buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def noisy_copy(model: nn.Module, noise: float, seed: int) -> nn.Module:
    """Every matrix with noise of ``noise`` times its own spread."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn_like(parameter) * parameter.float().std().to(parameter.dtype) * noise)
    return other


def make_requests(count: int, prompt: int, tokens: int, temperature: float, vocabulary: int) -> list[Request]:
    """Prompts of their own, and no end: every engine makes the same number of tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (count, prompt), generator=generator).tolist()
    return [Request(tuple(ids), seed, Sampling(tokens, temperature)) for seed, ids in enumerate(prompts)]


def speeds(engines: dict[str, NativeEngine], requests: Sequence[Request], repeats: int) -> dict[str, float]:
    """Median tokens per second. Engines take turns, so that other load hits them all; the first run is not counted
    (kernels are chosen, memory is taken)."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats + 1):
        for name, engine in engines.items():
            engine.generate(requests)
            found[name].append(engine.stats.tokens_per_second)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def make_engines(args: argparse.Namespace) -> dict[str, NativeEngine]:
    dtype = getattr(torch, args.dtype)
    draft = build(SHAPES[args.draft], 1, args.device, dtype)
    if args.second == "copy":
        second = noisy_copy(draft, args.noise, 2)
    else:
        second = build(SHAPES[args.second], 2, args.device, dtype)
    rule, slots = Rule(args.rule, tau=args.tau, eps=args.eps), args.sequences
    engines = {f"{rule.name}, k={k}": SpeculativeEngine(draft, second, rule, k=k, max_slots=slots) for k in args.k}
    return {"second alone": NativeEngine(second, slots), "draft alone": NativeEngine(draft, slots), **engines}


def measure(args: argparse.Namespace) -> list[Row]:
    engines = make_engines(args)
    vocabulary = SHAPES[args.draft].vocabulary
    requests = make_requests(args.sequences, args.prompt, args.tokens, args.temperature, vocabulary)
    found = speeds(engines, requests, args.repeats)
    alone = found["second alone"]
    return [Row(name, found[name], found[name] / alone, *agreement(engine.stats)) for name, engine in engines.items()]


def agreement(stats: EngineStats) -> tuple[float | None, float | None]:
    """Accepted length and share of overrides, where somebody was overridden."""
    if not isinstance(stats, SpeculativeStats):
        return None, None
    return stats.mean_accepted_length, stats.overrides / stats.generated_tokens


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':18}{'tokens/s':>10}{'x second':>12}{'accepted':>10}{'overrides':>11}"]
    for row in rows:
        line = f"{row.engine:18}{row.tokens_per_second:>10,.0f}{row.against_second:>12.2f}"
        if row.accepted_length is not None and row.override_share is not None:
            line += f"{row.accepted_length:>10.2f}{row.override_share:>11.1%}"
        lines.append(line)
    return "\n".join(lines)


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of token overrides.")
    parser.add_argument("--draft", choices=SHAPES, default="tiny")
    parser.add_argument("--second", choices=[*SHAPES, "copy"], default="tiny-large")
    parser.add_argument("--noise", type=float, default=0.1, help="of --second copy, relative to each matrix's spread")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rule", choices=RULES, default="speculative")
    parser.add_argument("--tau", type=float, default=0.1, help="of rule threshold")
    parser.add_argument("--eps", type=float, default=0.1, help="of rule mixture")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8], help="proposals a round")
    parser.add_argument("--sequences", type=int, default=16, help="decoded at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--temperature", type=float, default=1.0, help="higher: random models agree more")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmark-overrides.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows = measure(args)
    settings: dict[str, Any] = {name: value for name, value in vars(args).items() if name != "json"}
    result = {
        "settings": settings,
        "machine": machine(args.device),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.draft} under {args.second}, {machine(args.device)}, {args.dtype}: {args.json}")
    print(table(rows))


if __name__ == "__main__":
    main()
