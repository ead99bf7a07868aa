"""Trainers and rollout servers on separate GPUs, up to 1,024: a simulation on paper (no GPU is needed).

    python benchmarks/simulate_scale.py [--plot docs/images/scale.png]

It prints the tables of docs/results/scale.md, which names every assumption. Times of a decoding step and of an update
are those of the cost model (`luffy.dry_run.cost`). Responses differ in length, a batch may begin up to `staleness`
versions early, new weights travel to the servers after every update, and single GPUs fail.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cost_tables import QWEN_7B, QWEN_32B
from luffy.dry_run.cost import Gpu, Model, StepPlan, decode_step, fits_gathered, fsdp_bytes, memory, training_flops

MEDIAN, SIGMA = 2000, 1.0  # tokens of a response: lognormal
PROMPT, SAMPLES = 512, 8
MESSAGE_S = 50e-6  # a collective over machines, however small
MTBF_H = 50_000.0  # hours between two failures of one GPU
RESTART_S = 300.0  # until a process computes again
CHECKPOINT_EVERY = 20  # steps
MEASURED = 10  # steps, after those that the first batches fill: batches that begin together end together for a while
SIZES = (16, 64, 256, 1024)
STALENESS = (0, 1, 4)
MODELS = (QWEN_7B, QWEN_32B)
CASES = [(model, staleness) for model in MODELS for staleness in STALENESS]


@dataclass(frozen=True)
class Cluster:
    """``trainers`` GPUs that update, ``servers`` engines of ``width`` GPUs each; a batch of ``problems`` a step."""

    model: Model
    trainers: int
    servers: int
    width: int
    staleness: int
    problems: int = 512
    longest: int = 16384
    trainer: Gpu = field(default_factory=Gpu)
    server: Gpu = field(default_factory=Gpu)

    @property
    def gpus(self) -> int:
        return self.trainers + self.servers * self.width

    @property
    def skipped(self) -> int:
        """Steps before those that are measured."""
        return self.staleness + 1

    @property
    def steps(self) -> int:
        return self.skipped + MEASURED

    @property
    def slots(self) -> int:
        """Sequences whose cache a server holds, at the mean length."""
        left = self.server.usable * self.server.memory * self.width - self.model.weights
        return int(max(left, 0) / ((PROMPT + mean_length(self.longest)) * self.model.kv_bytes))

    @property
    def transfer(self) -> float:
        """Seconds until all servers have new weights: a pipelined broadcast through one network port, a message for
        each of about 12 tensors of a layer."""
        return self.model.weights / self.trainer.network + 12 * self.model.layers * MESSAGE_S


@cache
def mean_length(longest: int) -> float:
    chance = random.Random(1)
    return sum(length(chance, longest) for _ in range(20_000)) / 20_000


def length(chance: random.Random, longest: int) -> int:
    return min(max(int(chance.lognormvariate(math.log(MEDIAN), SIGMA)), 1), longest)


@cache
def lengths_of(batches: int, responses: int, longest: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[length(chance, longest) for _ in range(responses)] for _ in range(batches)]


@cache
def update_plan(cluster: Cluster) -> StepPlan | None:
    """How the trainers share the weights: the way that takes the least time of those that fit; None if none does."""
    response = round(mean_length(cluster.longest))
    plan = StepPlan(
        cluster.model,
        cluster.trainers,
        cluster.problems,
        SAMPLES,
        PROMPT,
        response,
        width=10**9,
        scored=1,
        recomputed=1,
    )  # no copy for rollouts, hence the width
    gpu = cluster.trainer
    ways = [replace(plan, hybrid=hybrid) for hybrid in (False, True) if not hybrid or plan.machines > 1]
    ways = [way for way in ways if memory(way) < 0.8 * gpu.usable * gpu.memory]
    ways += [replace(way, gathered_once=True) for way in ways if fits_gathered(way, gpu)]
    return min(ways, key=lambda way: sum(_parts(way, cluster, way.tokens / way.gpus)), default=None)


def _parts(plan: StepPlan, cluster: Cluster, tokens: float) -> tuple[float, float]:
    """Seconds that the trainer with most ``tokens`` computes, and seconds of communication beyond that."""
    gpu = cluster.trainer
    compute = training_flops(plan) * tokens / (gpu.flops * gpu.update_share)
    inside, between = fsdp_bytes(plan)
    passes = plan.updates * (1 if plan.gathered_once else plan.micro_batches)
    moved = max(inside / gpu.nvlink, between / gpu.network) + 4 * passes * plan.model.layers * MESSAGE_S
    return compute, max(moved - compute, 0.0)


def update_seconds(cluster: Cluster, lengths: Sequence[int]) -> float:
    """A response is on one trainer, so none has less to do than the longest one asks for."""
    plan = update_plan(cluster)
    assert plan is not None
    total = cluster.problems * PROMPT + sum(lengths)
    return sum(_parts(plan, cluster, max(total / cluster.trainers, PROMPT + max(lengths))))


@dataclass
class Server:
    """An engine. All its sequences make a token in every decoding step; ``finishing`` has (step, batch, length)."""

    cluster: Cluster
    now: float = 0.0
    tick: int = 0
    context: float = 0.0  # cached tokens
    busy: float = 0.0
    delay: float = 0.0  # seconds of work that is no decoding: prefilling, receiving weights
    finishing: list[tuple[int, int, int]] = field(default_factory=list)
    version: int = 0  # of its plan: an older event is void

    def add(self, batch: int, tokens: int) -> None:
        heapq.heappush(self.finishing, (self.tick + tokens, batch, tokens))
        self.context += PROMPT
        self.delay += self.prefill(PROMPT / SAMPLES)

    def prefill(self, tokens: float) -> float:
        c = self.cluster
        return 2 * c.model.parameters * tokens / (c.server.flops * c.server.update_share) / c.width

    def next_end(self) -> tuple[float, int]:
        """When the next response ends, and the decoding steps until then, each at the context of their middle."""
        rows, ticks, c = len(self.finishing), self.finishing[0][0] - self.tick, self.cluster
        each = decode_step(c.model, rows, self.context / rows + ticks / 2, c.server, c.width)
        return self.now + self.delay + ticks * each, ticks

    def advance(self, until: float, ticks: int) -> list[tuple[int, int, int]]:
        """Make ``ticks`` tokens of every sequence; what ends."""
        self.busy += until - self.now
        self.now, self.tick, self.delay = until, self.tick + ticks, 0.0
        self.context += ticks * len(self.finishing)
        ended = []
        while self.finishing and self.finishing[0][0] <= self.tick:
            ended.append(heapq.heappop(self.finishing))
            self.context -= PROMPT + ended[-1][2]
        return ended


@dataclass
class Simulation:
    """``lost``: what fails at the middle of the run: "server", "trainer" or nothing."""

    cluster: Cluster
    lost: str = ""
    updated: list[float] = field(default_factory=list)  # when each update ended
    tokens: list[int] = field(default_factory=list)
    training: float = 0.0

    def run(self) -> Simulation:
        c = self.cluster
        batches = lengths_of(c.steps + c.staleness, c.problems * SAMPLES, c.longest)
        self.slots = c.slots
        self.servers = [Server(c) for _ in range(c.servers)]
        self.left = [len(batch) for batch in batches]
        self.queue: deque[tuple[int, int]] = deque()
        self.events: list[tuple[float, int, int, int]] = []  # time, server (-1: an update ends), its version, ticks
        self.training_now, self.failed = False, False
        for number in range(c.staleness + 1):
            self.queue.extend((number, tokens) for tokens in batches[number])
        self._hand_out(0.0)
        while len(self.updated) < c.steps:
            now, index, version, ticks = heapq.heappop(self.events)
            if index < 0:
                self._version_made(now, batches)
            elif version == self.servers[index].version:
                for _, batch, _ in self.servers[index].advance(now, ticks):
                    self.left[batch] -= 1
                self._fill(index)
            self._maybe_train(now, batches)
        return self

    def _maybe_train(self, now: float, batches: list[list[int]]) -> None:
        step = len(self.updated)
        if self.training_now or step >= self.cluster.steps or self.left[step]:
            return
        took = update_seconds(self.cluster, batches[step])
        self.training += took
        if self.lost == "trainer" and step == self.cluster.steps // 2:  # half an interval is computed again
            took += RESTART_S + CHECKPOINT_EVERY / 2 * took
        self.training_now = True
        self.tokens.append(self.cluster.problems * PROMPT + sum(batches[step]))
        heapq.heappush(self.events, (now + took, -1, 0, 0))

    def _version_made(self, now: float, batches: list[list[int]]) -> None:
        """The servers take the new weights and compute the cache of what they are at again; a further batch begins."""
        c = self.cluster
        self.training_now = False
        self.updated.append(now + c.transfer)
        number = len(self.updated) + c.staleness
        if number < len(batches):
            self.queue.extend((number, tokens) for tokens in batches[number])
        for server in self.servers:
            self._bring_up_to(server, now)
            server.delay += c.transfer + server.prefill(server.context)
        if self.lost == "server" and not self.failed and len(self.updated) == c.steps // 2:
            self.failed = True
            self._lose(self.servers[0])
        self._hand_out(now)

    def _bring_up_to(self, server: Server, now: float) -> None:
        """Count the decoding steps that a server has made of those it was at."""
        if not server.finishing:
            server.now = max(server.now, now)
            return
        end, ticks = server.next_end()
        start = server.now + server.delay
        done = int(ticks * (now - start) / (end - start)) if now > start else 0
        rest = max(start - now, 0.0)
        for _, batch, _ in server.advance(now, done):
            self.left[batch] -= 1
        server.delay = rest

    def _lose(self, server: Server) -> None:
        """Its responses begin again elsewhere; it is back after a while."""
        self.queue.extendleft((batch, tokens) for _, batch, tokens in server.finishing)
        server.finishing, server.context, server.delay = [], 0.0, RESTART_S

    def _hand_out(self, now: float) -> None:
        """Every response in the queue to the server with the fewest, while there is a slot."""
        order = [(len(s.finishing), s.delay, i) for i, s in enumerate(self.servers)]
        heapq.heapify(order)
        while self.queue and order and order[0][0] < self.slots:
            rows, delay, index = heapq.heappop(order)
            server = self.servers[index]
            if not server.finishing:
                server.now = max(server.now, now)
            server.add(*self.queue.popleft())
            heapq.heappush(order, (rows + 1, delay, index))
        for index in range(len(self.servers)):
            self._plan(index)

    def _fill(self, index: int) -> None:
        server = self.servers[index]
        while self.queue and len(server.finishing) < self.slots:
            server.add(*self.queue.popleft())
        self._plan(index)

    def _plan(self, index: int) -> None:
        server = self.servers[index]
        server.version += 1
        if server.finishing:
            when, ticks = server.next_end()
            heapq.heappush(self.events, (when, index, server.version, ticks))

    @property
    def step(self) -> float:
        """Seconds of a step, once the run has settled."""
        return (self.updated[-1] - self.updated[self.cluster.skipped - 1]) / MEASURED

    @property
    def speed(self) -> float:
        """Trained tokens a second on each GPU."""
        return sum(self.tokens[self.cluster.skipped :]) / MEASURED / self.step / self.cluster.gpus

    @property
    def trainers_wait(self) -> float:
        return max(0.0, 1 - self.training / self.cluster.steps / self.step)

    @property
    def servers_idle(self) -> float:
        """Share of the time in which a server has no response at all."""
        return max(0.0, 1 - sum(s.busy for s in self.servers) / len(self.servers) / self.updated[-1])


@cache
def simulated(cluster: Cluster, lost: str = "") -> Simulation:
    return Simulation(cluster, lost).run()


def splits(model: Model, gpus: int, staleness: int) -> Iterator[Cluster]:
    """A few ways to share GPUs out: whole machines train, engines of 4 (7B) or 8 GPUs roll out."""
    for share in (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8):
        trainers = max(8, 8 * round(gpus * share / 8))
        width = 4 if model == QWEN_7B else 8
        cluster = Cluster(model, trainers, (gpus - trainers) // width, width, staleness)
        if cluster.servers > 0 and cluster.slots > 0 and update_plan(cluster) is not None:
            yield cluster


@cache
def best(model: Model, gpus: int, staleness: int) -> Simulation | None:
    found = [simulated(cluster) for cluster in dict.fromkeys(splits(model, gpus, staleness))]
    return max(found, key=lambda one: one.speed, default=None)


def failures(cluster: Cluster) -> float:
    """Share of the time that failures cost: how often one happens times how long it holds up the run, simulated."""
    total = simulated(cluster).updated[-1]
    late = {lost: max(simulated(cluster, lost).updated[-1] - total, 0.0) for lost in ("trainer", "server")}
    rate = cluster.trainers * late["trainer"] + cluster.servers * cluster.width * late["server"]
    return rate / (3600 * MTBF_H)


def faster(gpu: Gpu) -> Gpu:
    return replace(
        gpu, flops=2 * gpu.flops, memory_bandwidth=2 * gpu.memory_bandwidth, layer_seconds=gpu.layer_seconds / 2
    )


WHAT_IF: dict[str, Callable[[Cluster], Cluster]] = {
    "decoding": lambda c: replace(c, server=faster(c.server)),
    "updating": lambda c: replace(c, trainer=replace(c.trainer, flops=2 * c.trainer.flops)),
    "network": lambda c: replace(c, trainer=replace(c.trainer, network=2 * c.trainer.network)),
    "longest response": lambda c: replace(c, longest=c.longest // 2),
    "batch": lambda c: replace(c, problems=2 * c.problems),
}


def gains(cluster: Cluster) -> dict[str, float]:
    """How much faster the cluster trains, in tokens a second, if one thing is twice as good (the longest response: half
    as long; the batch: twice as large)."""
    base = simulated(cluster).speed
    return {name: simulated(change(cluster)).speed / base - 1 for name, change in WHAT_IF.items()}


HEADER = (
    "GPUs", "model", "staleness", "trainers + servers x width", "step", "trained tokens/s a GPU",
    "of that on the fewest", "trainers wait", "servers empty", "lost to failures",
)  # fmt: skip


def size_row(model: Model, gpus: int, staleness: int) -> list[str]:
    found = best(model, gpus, staleness)
    if found is None:
        return [f"{gpus:,}", model.name, str(staleness), "does not fit", *["-"] * 6]
    first = next(one for size in SIZES if (one := best(model, size, staleness)) is not None)
    c = found.cluster
    return [
        f"{gpus:,}", model.name, str(staleness), f"{c.trainers} + {c.servers} x {c.width}", f"{found.step:.0f} s",
        f"{found.speed:,.0f}", f"{found.speed / first.speed:.0%}", f"{found.trainers_wait:.0%}",
        f"{found.servers_idle:.0%}", f"{failures(c):.2%}",
    ]  # fmt: skip


def what_if_row(model: Model, gpus: int, staleness: int) -> list[str]:
    found = best(model, gpus, staleness)
    if found is None:
        return []
    gained = gains(found.cluster)
    most = max(gained, key=lambda name: gained[name])
    return [f"{gpus:,}", model.name, str(staleness), *(f"{g:+.0%}" for g in gained.values()), most]


@dataclass(frozen=True)
class Series:
    """What one model and one staleness give at all sizes: rows of both tables; GPUs with trained tokens a second."""

    rows: list[list[str]]
    what_if: list[list[str]]
    speeds: list[tuple[int, float]]


def series(case: tuple[Model, int]) -> Series:
    model, staleness = case
    found = [(gpus, best(model, gpus, staleness)) for gpus in SIZES]
    return Series(
        [size_row(model, gpus, staleness) for gpus in SIZES],
        [row for gpus in SIZES if staleness != 1 and (row := what_if_row(model, gpus, staleness))],
        [(gpus, gpus * one.speed) for gpus, one in found if one is not None],
    )


def lines(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *body))


def plot(path: Path, every: Sequence[Series]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    for (model, staleness), one in zip(CASES, every, strict=True):
        axis = axes[MODELS.index(model)]
        gpus, speeds = zip(*one.speeds, strict=True)
        axis.plot(gpus, [speed / 1e6 for speed in speeds], "o-", label=f"staleness {staleness}")
        if staleness == STALENESS[-1]:
            ideal = [speeds[0] * n / gpus[0] / 1e6 for n in gpus]
            axis.plot(gpus, ideal, ":", color="grey", label="proportional")
            axis.set(xscale="log", yscale="log", title=f"{model.name}, 4,096 responses a step", xlabel="GPUs")
            axis.set_xticks(SIZES, [f"{n:,}" for n in SIZES])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("trained tokens/s, millions")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with ProcessPoolExecutor(len(CASES), mp_context=get_context("spawn")) as pool:
        every = list(pool.map(series, CASES))
    print(lines([HEADER, *by_size(one.rows for one in every)]))
    print(lines([["GPUs", "model", "staleness", *WHAT_IF, "most"], *by_size(one.what_if for one in every)]), end="")
    if args.plot:
        plot(args.plot, every)


def by_size(parts: Iterable[list[list[str]]]) -> list[list[str]]:
    """Rows ordered by model, then by number of GPUs."""
    rows = [row for part in parts for row in part]
    return sorted(rows, key=lambda row: (float(row[1].rstrip("B")), int(row[0].replace(",", ""))))


if __name__ == "__main__":
    main()
