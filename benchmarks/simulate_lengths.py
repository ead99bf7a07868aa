"""How long a step takes when responses differ in length, simulated from what one H200 measured (no GPU is needed).

    python benchmarks/simulate_lengths.py --problems 128

Lengths are lognormal (median 800, sigma 1, at most 8,192 tokens). Each row of the table is one value of
`rollout.max_tokens_per_step`; 8,192 is a rollout in which everybody waits for the last response.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from itertools import pairwise

# Qwen2.5-1.5B in bfloat16 on one H200 (docs/results/performance.md): milliseconds of a decoding step by its rows, less
# what reading the cache takes; cached bytes of a token; bytes read a second; tokens that an update with recomputation
# takes in a second, short and long. It is four forward passes, and prefilling is one.
DECODE_MS = ((0, 2.1), (64, 2.35), (256, 3.1), (1024, 8.8), (4096, 31.6))
TOKEN_BYTES, BANDWIDTH = 28_672, 4.2e12
UPDATE, UPDATE_AT_8192 = 48_110, 29_501
OUTSIDE = 0.03  # of a step: planning, rewards, packing, writing metrics
WINDOW = 16  # decoding steps that are counted at once
FEW = 0.25  # waiting: fewer than this share of a batch's responses are under way


@dataclass(frozen=True)
class SimulatedResponse:
    problem: int
    prompt: int
    length: int
    done: int = 0


@dataclass
class SimulatedStep:
    decode: float = 0.0
    prefill: float = 0.0
    update: float = 0.0
    waiting: float = 0.0
    groups: int = 0
    tokens: int = 0
    age: int = 0

    @property
    def seconds(self) -> float:
        return (self.decode + self.prefill + self.update) / (1 - OUTSIDE)

    @property
    def busy(self) -> float:
        return 1 - OUTSIDE - self.waiting / self.seconds


def decode_seconds(rows: int, cached: int) -> float:
    """One decoding step of so many rows, which read so many cached tokens."""
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(DECODE_MS) if rows <= pair[1][0])
    milliseconds = y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
    return milliseconds / 1000 + cached * TOKEN_BYTES / BANDWIDTH


def update_seconds(lengths: list[int]) -> float:
    slower = (1 / UPDATE_AT_8192 - 1 / UPDATE) / 8192
    return sum(n / UPDATE + n * n * slower for n in lengths)


def roll_out(
    under_way: list[SimulatedResponse], budget: int, slots: int, few: float, step: SimulatedStep
) -> list[SimulatedResponse]:
    """Up to ``budget`` more tokens of every response; a free slot takes the next one."""
    left = [min(budget, r.length - r.done) for r in under_way]
    queue = list(range(len(under_way)))[::-1]
    live: dict[int, int] = {}
    while queue or live:
        while queue and len(live) < slots:
            index = queue.pop()
            live[index] = left[index]
        cached = sum(under_way[i].prompt + under_way[i].done + left[i] - n for i, n in live.items())
        ticks = min(WINDOW, max(live.values()))
        took = ticks * decode_seconds(len(live), cached)
        step.decode += took
        step.waiting += took if len(live) < few else 0.0
        live = {i: n - ticks for i, n in live.items() if n > ticks}
    step.prefill = update_seconds([r.prompt + r.done for r in under_way]) / 4
    return [replace(r, done=r.done + n) for r, n in zip(under_way, left, strict=True)]


def simulate(
    problems: int, samples: int, prompt: int, slots: int, budget: int, steps: int, seed: int
) -> list[SimulatedStep]:
    chance, made = random.Random(seed), []
    under_way: list[SimulatedResponse] = []
    begun: dict[int, int] = {}
    finished: dict[int, list[int]] = {}
    for number in range(steps):
        step = SimulatedStep()
        for problem in range(number * problems, (number + 1) * problems):
            begun[problem], finished[problem] = number, []
            lengths = [min(max(int(chance.lognormvariate(6.6846, 1.0)), 1), 8192) for _ in range(samples)]
            under_way += [SimulatedResponse(problem, prompt, length) for length in lengths]
        under_way = roll_out(under_way, budget, slots, FEW * min(slots, problems * samples), step)
        for r in under_way:
            if r.done == r.length:
                finished[r.problem].append(r.length)
        under_way = [r for r in under_way if r.done < r.length]
        whole = [problem for problem, lengths in finished.items() if len(lengths) == samples]
        step.groups, step.age = len(whole), max((number - begun[p] for p in whole), default=0)
        lengths = [prompt + n for p in whole for n in finished.pop(p)]
        step.tokens, step.update = sum(lengths), update_seconds(lengths)
        made.append(step)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--budgets", default="8192,4096,3072,2048,1536,1024,512")
    args = parser.parse_args()
    print("tokens/step  decode s  prefill s  update s  step s  waiting  busy  tokens/s  groups  age")
    for budget in map(int, args.budgets.split(",")):
        start = -(-8192 // budget) - 1  # as many steps until the oldest response is as old as any will be
        steps = simulate(args.problems, args.samples, args.prompt_tokens, args.slots, budget, start + 4, 0)[start:]
        mean = {name: sum(getattr(s, name) for s in steps) / len(steps) for name in vars(steps[0])}
        seconds = sum(s.seconds for s in steps) / len(steps)
        print(
            f"{budget:11,}  {mean['decode']:8.1f}  {mean['prefill']:9.1f}  {mean['update']:8.1f}  {seconds:6.1f}"
            f"  {mean['waiting'] / (mean['decode'] + mean['prefill']):7.0%}"
            f"  {1 - OUTSIDE - mean['waiting'] / seconds:4.0%}"
            f"  {mean['tokens'] / seconds:8,.0f}  {mean['groups']:6.0f}  {max(s.age for s in steps):3}"
        )


if __name__ == "__main__":
    main()
