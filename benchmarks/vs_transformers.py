"""New tokens per second of the native engine against `generate` of transformers, same prompts, in one process.

    python benchmarks/vs_transformers.py [--shape 30m] [--device cpu] [--threads 2] [--run 32x64x64]

Both sample at temperature 1 and keep the log-probs of what they drew; they take turns, the best of each
counts, and the ratio comes last.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from bench.models import random_model
from bench.rollout import RolloutRun

from luffy.models.attention import ATTENTION_NAME
from luffy.models.machine import synchronize
from luffy.rollout import NativeEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="30m")
    parser.add_argument("--run", default="32x64x64", help="PROMPTSxPROMPT_TOKENSxNEW_TOKENS")
    parser.add_argument("--samples", type=int, default=1, help="samples of each prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = random_model(args.shape, args.dtype, args.device)
    run = RolloutRun.parse(args.run, args.samples)
    best = {"luffy": float("inf"), "transformers": float("inf")}
    for repeat in range(args.repeats + 1):  # the first warms up
        seconds = {"luffy": ours(model, run, repeat), "transformers": theirs(model, run, repeat, args.device)}
        if repeat:
            best = {name: min(best[name], seconds[name]) for name in best}
    tokens = run.prompts * run.samples * run.new_tokens
    for name, took in best.items():
        print(f"{name:14} {tokens / took:10,.0f} tokens/s")
    print(f"luffy / transformers = {best['transformers'] / best['luffy']:.2f} ({torch.get_num_threads()} threads)")


def ours(model: Any, run: RolloutRun, seed: int) -> float:
    model.set_attn_implementation(ATTENTION_NAME)
    engine = NativeEngine(model)
    engine.generate(run.requests(model.config.vocab_size, seed))
    return engine.stats.seconds


def theirs(model: Any, run: RolloutRun, seed: int, device: str) -> float:
    model.set_attn_implementation("sdpa")
    requests = run.requests(model.config.vocab_size, seed)
    ids = torch.tensor([request.prompt_ids for request in requests], device=device)
    synchronize(torch.device(device))
    started = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=run.new_tokens, min_new_tokens=run.new_tokens, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    drawn = out.sequences[:, run.prompt_tokens :]
    for step, logits in enumerate(out.logits):
        torch.log_softmax(logits.float(), dim=-1).gather(1, drawn[:, step, None])
    synchronize(torch.device(device))
    assert drawn.shape[1] == run.new_tokens
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
