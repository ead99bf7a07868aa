"""What drafts save: seconds of the same rollouts without and with them, and tokens kept in a pass.

    python benchmarks/drafts.py real --model FOLDER --data train.parquet
    python benchmarks/drafts.py imposed --shape qwen2-7b --accepted 2.2
    python benchmarks/drafts.py imposed --tiny && python benchmarks/drafts.py real --tiny       # on a CPU, in seconds

``real``: epochs over the first problems of a file, with its traces, in steps as a training makes them; weights do not
change in between. ``imposed``: random weights and lognormal lengths, where no draft could match: how many tokens of a
pass stand is drawn, with the mean that ``--accepted`` gives. Its texts mean nothing, its seconds are those of a
model whose drafts are kept so often.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.lengths import Lognormal
from bench.models import random_model
from torch import nn

from luffy.data import Encoder, load_problems
from luffy.models.load import eos_ids, load_model, load_tokenizer
from luffy.rollout import NativeEngine
from luffy.rollout.native import Drafts, drafted_generation, drafting_decoder
from luffy.rollout.native.decode_graphs import BUCKETS, VERIFIED_ROWS
from luffy.types import Completion, Request, Sampling

Steps = list[list[Request]]


@dataclass
class Row:
    name: str
    seconds: float
    tokens: int
    accepted: float = 0.0
    passes: int = 0
    steps: int = 0
    same: float | None = None  # fraction of the responses that are those without drafts

    def line(self) -> str:
        drafts = f"{self.accepted:9.2f} {self.passes:7d}" if self.passes else f"{'':9} {'':7}"
        same = "" if self.same is None else f"{self.same:6.1%}"
        speed = self.tokens / self.seconds
        return f"{self.name:34} {self.seconds:8.2f} {self.tokens:9d} {speed:8.0f} {self.steps:7d} {drafts} {same}"


HEADER = f"{'':34} {'seconds':>8} {'tokens':>9} {'tok/s':>8} {'steps':>7} {'accepted':>9} {'passes':>7} {'same':>6}"


def run(
    engine: NativeEngine, steps: Steps, name: str, plain: Sequence[Completion] = ()
) -> tuple[Row, list[Completion]]:
    """``plain``: the same steps without drafts."""
    engine.metrics()
    made, seconds, count = [], 0.0, 0
    for requests in steps:
        made += engine.generate(requests)
        seconds += engine.stats.seconds
        count += engine.stats.decode_steps
    metrics = engine.metrics()
    accepted = metrics["rollout/accepted_per_pass"].value if metrics else 0.0
    passes = int(metrics["rollout/draft_passes"].value) if metrics else 0
    row = Row(name, seconds, sum(c.token_ids.numel() for c in made), accepted, passes, count)
    if plain:
        same = sum(torch.equal(a.token_ids, b.token_ids) for a, b in zip(made, plain, strict=True))
        row.same = same / len(made)
    print(row.line(), flush=True)
    return row, made


def warm_up(engine: NativeEngine, request: Request, rows: int, tokens: int) -> None:
    """Compile kernels and capture the graphs of bursts and passes."""
    short = Request(request.prompt_ids, 0, Sampling(12))
    cuda = next(engine.model.parameters()).is_cuda
    for engine.drafts in (None, Drafts(tokens, always=True)):
        for count in (*(n for n in BUCKETS if cuda and n < rows), rows):
            if engine.drafts is None or count <= VERIFIED_ROWS[-1]:
                engine.generate([short] * count)
    engine.drafts = None


def real_steps(args: argparse.Namespace, model: nn.Module) -> Callable[[int], Steps]:
    """The steps of an epoch by its number."""
    if args.tiny:
        rng = random.Random(0)
        prompts = [tuple(rng.randrange(3, 500) for _ in range(12)) for _ in range(args.problems * args.steps)]
        tasks = [(prompt, ()) for prompt in prompts]
        stops: tuple[int, ...] = (7,)
    else:
        tokenizer = load_tokenizer(args.model)
        encoder = Encoder(tokenizer, args.style, eos_ids=eos_ids(model, tokenizer), max_response_tokens=args.tokens)
        problems = list(load_problems(str(args.data), limit=args.problems * args.steps))
        found = [task for task in encoder.encode_all(problems) if task is not None]
        tasks = [(task.prompt_ids, tuple(d.token_ids for d in task.demonstrations)) for task in found]
        stops = encoder.eos_ids
    sampling = Sampling(args.tokens, args.temperature, eos_ids=stops)

    def epoch(number: int) -> Steps:
        requests = [
            Request(prompt, 1000 * number + 100_000 * i + sample, sampling, drafts=traces)
            for i, (prompt, traces) in enumerate(tasks)
            for sample in range(args.samples)
        ]
        size = args.problems * args.samples
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    return epoch


def real(args: argparse.Namespace) -> list[Row]:
    model = random_model("tiny", "float32", "cpu") if args.tiny else load_model(args.model, args.dtype, args.device)
    epoch, rows = real_steps(args, model), []
    engine = NativeEngine(model)
    warm_up(engine, epoch(0)[0][0], args.problems * args.samples, args.draft_tokens)
    ways = {"auto": Drafts(args.draft_tokens), "always where few run": Drafts(args.draft_tokens, always=True)}
    for number in range(args.epochs):
        steps, engine.drafts = epoch(number), None
        row, made = run(engine, steps, f"epoch {number + 1}, without")
        rows.append(row)
        for name, engine.drafts in ways.items():
            rows.append(run(engine, steps, f"epoch {number + 1}, {name}", made)[0])
    return rows


def imposed_standing(mean: float, tokens: int) -> Callable[[Any, np.ndarray], np.ndarray]:
    """In the place of `standing`: tokens stand by the throw of a coin, ``mean`` of passes of ``tokens``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(tokens)) < mean else (low, p)
    rng = np.random.default_rng(0)

    def standing(drafts: Any, drawn: np.ndarray) -> np.ndarray:
        well = rng.random((len(drawn), drawn.shape[1] - 1)) < p
        return 1 + np.logical_and.accumulate(well, axis=1).sum(axis=1)

    return standing


def imposed(args: argparse.Namespace) -> list[Row]:
    model = random_model("tiny" if args.tiny else args.shape, args.dtype, args.device)
    lengths, rng = Lognormal(args.median, 1.0, args.tokens), random.Random(0)
    prompts = [tuple(rng.randrange(3, 500) for _ in range(args.prompt_tokens)) for _ in range(args.problems)]
    requests = [
        Request(prompt, i, Sampling(lengths.draw(i)))
        for i, prompt in enumerate(prompt for prompt in prompts for _ in range(args.samples))
    ]
    rows = []
    for module in (drafted_generation, drafting_decoder):
        module.standing = imposed_standing(args.accepted, args.draft_tokens)  # type: ignore[attr-defined]
    engine = NativeEngine(model)
    warm_up(engine, requests[0], len(requests), args.draft_tokens)
    if not args.skip_plain:
        rows.append(run(engine, [requests], "without")[0])
    engine.drafts = Drafts(args.draft_tokens)
    rows.append(run(engine, [requests], f"auto, IMPOSED {args.accepted} of {args.draft_tokens}")[0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("real", "imposed"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--style", default="chat")
    parser.add_argument("--shape", default="qwen2-7b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--problems", type=int, help="of a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="longest response")
    parser.add_argument("--median", type=float, default=800, help="of imposed lengths")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-tokens", type=int, default=8, help="rollout.drafts.tokens")
    parser.add_argument("--accepted", type=float, default=2.2, help="tokens that stand of a pass, imposed")
    parser.add_argument("--skip-plain", action="store_true")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.tiny:
        args.problems, args.samples, args.tokens, args.median = args.problems or 3, 4, args.tokens or 60, 20
    args.problems = args.problems or (64 if args.what == "real" else 128)
    args.tokens = args.tokens or (512 if args.what == "real" else 8192)
    print(HEADER)
    rows = real(args) if args.what == "real" else imposed(args)
    print("", HEADER, *(row.line() for row in rows), sep="\n")


if __name__ == "__main__":
    main()
