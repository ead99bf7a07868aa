"""Cost model: bytes moved and seconds taken by a training step, checked against measurements on one GPU
(benchmarks/cost_tables.py).

Times are lower bounds that contain a measured fraction of the peak; overlap is taken as perfect. The point is not the
third digit but which term is the largest, and which limit is reached first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

TIMED_ENGINES = ("native", "vllm")  # whose rollouts the model stands for


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU; the defaults are an H200 as measured, in a machine of eight (`docs/results/cost.md`)."""

    flops: float = 790e12  # bf16 matrix products, measured
    memory_bandwidth: float = 4.2e12  # device copy, measured
    memory: float = 150e9  # measured
    usable: float = 0.95  # of the memory: activations of an engine, fragments and the runtime have the rest
    nvlink: float = 450e9  # to the other GPUs of the machine, one direction
    network: float = 50e9  # to other machines, one direction: a 400 Gbit/s port for each GPU
    host_link: float = 50e9  # to host memory
    update_share: float = 0.65  # of flops, attention counted
    product_share: float = 0.85  # decoding: of memory_bandwidth for the weights, or of flops
    layer_seconds: float = 29e-6  # decoding: kernels of a layer that neither read nor multiply much, and their starts
    per_machine: int = 8


# Only the first is measured. The others have the same fractions of their data sheets: 0.80 of the bf16 rate without
# sparsity (989, 989 and 312 TFLOP/s) and 0.875 of the memory bandwidth (4.8, 3.35 and 2.04 TB/s).
GPUS = {
    "h200": Gpu(),
    "h100": Gpu(memory_bandwidth=2.93e12, memory=85e9),
    "a100": Gpu(flops=250e12, memory_bandwidth=1.78e12, memory=85e9, nvlink=300e9, network=25e9, host_link=25e9),
}


@dataclass(frozen=True)
class Model:
    """Shape of a model."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_width: int  # key-value heads times head size
    outside: float = 0.0  # parameters outside the decoder layers: embeddings, last norm, head
    itemsize: int = 2  # bytes of a weight when it computes

    @property
    def weights(self) -> float:
        return self.itemsize * self.parameters

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token in the cache."""
        return 2 * 2 * self.layers * self.kv_width


@dataclass(frozen=True)
class StepPlan:
    """A step: ``problems * samples`` responses on ``gpus``, rolled out by groups of ``width`` GPUs."""

    model: Model
    gpus: int
    problems: int
    samples: int = 8
    prompt: int = 1024
    response: int = 4096  # the mean
    longest: float = 2.0  # response, in means
    width: int = 1
    hybrid: bool = False  # sharded inside each machine, copied over machines
    micro_batch: int = 32768
    updates: int = 1  # mini-batches
    gathered_once: bool = False  # `parallel.gather`: weights and gradients travel once per mini-batch
    adapters: bool = False  # LoRA: the weights are frozen
    offloaded: bool = False  # masters and moments are in the host's memory
    recomputed: float = 0.0  # share of the tokens whose activations are computed again in the backward pass
    scored: float = 0  # forward passes over all tokens before the update: old log-probs, the reference's, a teacher's
    trained_tokens: float | None = None  # of the updates, where they are not those of the rollout

    @property
    def responses(self) -> int:
        return self.problems * self.samples

    @property
    def tokens(self) -> float:
        """Tokens that an update computes: a group's prompt once."""
        rolled_out = self.problems * self.prompt + self.responses * self.response
        return rolled_out if self.trained_tokens is None else self.trained_tokens

    @property
    def passes(self) -> float:
        """Work of an update in forward passes: a backward pass takes two."""
        return 3 + self.recomputed + self.scored

    @property
    def context(self) -> float:
        """Tokens that a token of a response attends to, in the mean of responses of equal length."""
        return self.prompt + self.response / 2

    @property
    def machines(self) -> float:
        return self.gpus / Gpu.per_machine

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the weights."""
        return min(self.gpus, Gpu.per_machine) if self.hybrid else self.gpus

    @property
    def micro_batches(self) -> int:
        """Passes of one GPU in a mini-batch."""
        return math.ceil(self.tokens / self.updates / self.gpus / self.micro_batch)


def decode_step(model: Model, rows: float, context: float, gpu: Gpu, width: int = 1) -> float:
    """Seconds to make one token for each of ``rows`` sequences. Products either wait for the weights or multiply; the
    cache is read once, at the full bandwidth."""
    products = max(model.weights / gpu.memory_bandwidth, 2 * model.parameters * rows / gpu.flops) / gpu.product_share
    cache = rows * context * model.kv_bytes / gpu.memory_bandwidth
    reduce = 0.0 if width == 1 else 2 * model.layers * (2 * rows * model.hidden * 2 / gpu.nvlink + 10e-6)
    return (products + cache) / width + model.layers * gpu.layer_seconds + reduce


def rollout(plan: StepPlan, gpu: Gpu) -> float:
    """Seconds for the prompts, each once for all its samples, and then until the longest response ends or all have had
    a place in the cache, whichever is later."""
    rows = plan.responses / (plan.gpus / plan.width)
    steps = plan.response * max(plan.longest, rows / max(places(plan, gpu), 1))
    mean_rows = rows * plan.response / steps
    decode = steps * decode_step(plan.model, mean_rows, plan.context, gpu, plan.width)
    prompts = plan.problems * plan.prompt / plan.gpus
    return decode + 2 * plan.model.parameters * prompts / (gpu.flops * gpu.update_share)


def update(plan: StepPlan, gpu: Gpu) -> float:
    """Seconds of matrix products, or of moving the weights and gradients by FSDP2, whichever takes longer."""
    compute = training_flops(plan) * plan.tokens / plan.gpus / (gpu.flops * gpu.update_share)
    inside, between = fsdp_bytes(plan)
    return max(compute, inside / gpu.nvlink, between / gpu.network)


def training_flops(plan: StepPlan) -> float:
    """Operations per token. A pass takes 2 per parameter; attention takes 4 for every token of the context and every
    number of a hidden state, in every layer. Frozen weights have no gradient, which saves a pass; on several GPUs,
    where peft multiplies, that was not measured (docs/results/cost.md)."""
    attention = 4 * plan.context * plan.model.layers * plan.model.hidden
    of_weights = plan.passes - 1 if plan.adapters and plan.gpus == 1 else plan.passes
    return of_weights * 2 * plan.model.parameters + plan.passes * attention


class Traffic(NamedTuple):
    """Collectives of one GPU in the updates of a step, and bytes that it receives by each kind."""

    gathers: float
    gathered: float
    reductions: float  # reduce-scatters; with several copies of the weights as many all-reduces besides
    reduced: float
    summed: float  # by all-reduces between the copies


def fsdp_traffic(
    model: Model, shards: int, copies: int = 1, *, updates: int = 1, passes: int = 1, scored: float = 0,
    once: bool = False, adapters: bool = False,
) -> Traffic:  # fmt: skip
    """``passes`` forward and backward in each of ``updates`` mini-batches. ``scored``: how often the layers are
    gathered without a backward pass, to score tokens.

    A pass gathers every unit in the forward pass and the decoder layers again in the backward pass; scoring gathers the
    layers, because embeddings and head stay for the update that follows. Gradients are reduced in float32. Gathered
    ``once``, the passes of a mini-batch share one gather and one reduction. Of what n ranks gather or scatter, one
    receives (n - 1) / n. Adapters are too small to count.
    """
    if shards * copies == 1:
        return Traffic(0, 0.0, 0, 0.0, 0.0)
    layers = model.itemsize * (model.parameters - model.outside)
    gradients = 0.0 if adapters else 4 * model.parameters
    rounds = updates * (1 if once else passes)
    more = scored + (0 if once else rounds)  # gathers of the layers alone
    part = (shards - 1) / shards
    return Traffic(
        gathers=rounds * (model.layers + 1) + more * model.layers,
        gathered=part * (rounds * model.weights + more * layers),
        reductions=rounds * (model.layers + (not adapters)),
        reduced=part * rounds * gradients,
        summed=2 * (copies - 1) / copies * rounds * gradients / shards,
    )


def fsdp_bytes(plan: StepPlan) -> tuple[float, float]:
    """Bytes that a GPU receives in the updates of a step: first those that stay in a machine, then those that come from
    another. Sharded over several machines, everything waits for the network; hybrid, only the sum of the gradients over
    the machines does."""
    scored = plan.scored if plan.gathered_once else plan.scored * plan.updates * plan.micro_batches
    moved = fsdp_traffic(
        plan.model, plan.shards, plan.gpus // plan.shards, updates=plan.updates, passes=plan.micro_batches,
        scored=scored, once=plan.gathered_once, adapters=plan.adapters,
    )  # fmt: skip
    sharded = moved.gathered + moved.reduced
    return (sharded, moved.summed) if plan.machines <= 1 or plan.hybrid else (0.0, sharded)


def synced_bytes(plan: StepPlan) -> float:
    """Bytes of trained weights that a GPU receives for its copy that rolls out; a single GPU has them already."""
    return 0.0 if plan.gpus == 1 else plan.model.weights * (plan.shards - 1) / plan.shards


def weight_sync(plan: StepPlan, gpu: Gpu) -> float:
    """Seconds to send the trained weights to every copy that rolls out."""
    return synced_bytes(plan) / (gpu.nvlink if plan.machines <= 1 or plan.hybrid else gpu.network)


def memory(plan: StepPlan) -> float:
    """Bytes of a GPU that are taken before the cache is: masters, moments, gradients (offloaded, the gradients alone;
    with LoRA the masters alone, and on one GPU none: it trains beside the copy that rolls out), and that copy."""
    trained = (4 if plan.gpus > 1 else 0) if plan.adapters else 4 if plan.offloaded else 16
    return trained * plan.model.parameters / plan.shards + plan.model.weights / plan.width


def fits_gathered(plan: StepPlan, gpu: Gpu) -> bool:
    """Whether all weights and their gradients fit on every GPU besides, if activations are recomputed."""
    gathered = plan.model.weights + (0 if plan.adapters else 4 * plan.model.parameters)
    activations = plan.model.itemsize * plan.model.hidden * plan.model.layers * plan.micro_batch
    return memory(plan) + gathered + activations <= gpu.usable * gpu.memory


def places(plan: StepPlan, gpu: Gpu) -> float:
    """Sequences of mean length whose cache a group of ``width`` GPUs holds at once."""
    left = max(gpu.usable * gpu.memory - memory(plan), 0.0) * plan.width
    return left / ((plan.prompt + plan.response) * plan.model.kv_bytes)
