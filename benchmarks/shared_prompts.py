"""What computing a group's prompt once saves: the same update with and without sharing, taking turns in one process.

    python benchmarks/shared_prompts.py --shape 30m --prompt-tokens 128 --response-tokens 128

Both run the trainer's own code on the same samples; without sharing every sample brings its prompt. On a CPU the time
is the process's own, so that a busy machine blurs it less; on a GPU it is the clock's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench.models import random_model
from bench.update import random_samples, update_config

from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.models.machine import synchronize


class WholeScorer(TokenScorer):
    shares_prompts = False


def seconds(run: Callable[[], object], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    synchronize(device)
    started = clock()
    run()
    synchronize(device)
    return clock() - started


def compare(args: argparse.Namespace) -> dict[str, object]:
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    cfg = update_config(args.tokens, args.response_tokens, "auto", False, 0, dtype, args.device)
    model = random_model(args.shape, dtype, args.device)
    sizes = (args.samples, args.group, args.prompt_tokens, args.response_tokens)
    samples = random_samples(*sizes, model.config.vocab_size)
    policy = Policy(model, cfg)
    scorers = {"shared": TokenScorer(model), "whole": WholeScorer(model)}
    took: dict[str, list[float]] = {name: [] for name in scorers}
    computed = {}
    for turn in range(args.repeats + 1):
        for name, policy.scorer in scorers.items():
            spent = seconds(lambda: computed.update({name: policy.update(samples, 1e-6)}), policy.device)  # noqa: B023
            if turn:  # the first of each warms up
                took[name].append(spent)
    best = {name: min(times) for name, times in took.items()}
    return {
        **vars(args),
        "computed_tokens": {name: metrics["perf/computed_tokens"].value for name, metrics in computed.items()},
        "seconds": took, "best": best, "ratio": best["whole"] / best["shared"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="30m")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384, help="batch.tokens")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = compare(args)
    text = json.dumps(result, indent=1, default=str)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
