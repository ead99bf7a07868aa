"""A sharded run starts only if its gradients are those of one process.

Every process computes the run's own loss of small fixed batches with the sharded model, and the main process computes
all of them with its whole copy of the model. The gradients of the last decoder layer and of the head must agree. A
fault of a stream, a collective or a driver shows here, and not as a model that does not learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from luffy.distributed.shard import decoder_layers, whole
from luffy.errors import TrainingStopped
from luffy.learn.packing import pack
from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.models.forward import causal_lm, text_config
from luffy.types import Author, MicroBatch, Sample, written_by

# Largest relative error of a gradient, by the dtype that layers compute in.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
PASSES = 2  # of every process: a second gather into the memory of the first is where a race shows
DIFFERENT = 4  # batches; the process of rank r computes those of rank r % DIFFERENT, however many there are
PROMPT, RESPONSE = 4, 12  # tokens


def check_gradients(policy: Policy, copy: nn.Module) -> None:
    """Raise on every process if the gradients of all differ from those of one. ``copy`` has the policy's weights and is
    whole; the main process alone reads it."""
    world = policy.world
    names = world.from_main(_compared(policy.model, copy) if world.is_main else [])
    ours = sharded_gradients(policy, names)
    errors = world.from_main(_relative_errors(ours, whole_gradients(policy, copy, names)) if world.is_main else {})
    name = max(errors, key=lambda name: errors[name])
    bound = TOLERANCE[policy.cfg.model.dtype]
    if not errors[name] <= bound:  # NaN too
        raise TrainingStopped(
            f"stopped before the first step: on {world.size} processes the gradient of {name} differs from that of one "
            f"process by {errors[name]:.2g} of its norm (at most {bound:g}), so the run would learn noise; find the "
            f"cause with `luffy doctor`, or set parallel.check_gradients=false to train all the same"
        )


def _compared(sharded: nn.Module, copy: nn.Module) -> list[str]:
    """Names of the trained parameters of the last decoder layer, and of the head if it is trained. Sharded layers no
    longer have the class that says what they are, so they are found in the copy."""
    trained = {name for name, p in sharded.named_parameters() if p.requires_grad}
    parts = (decoder_layers(copy)[-1], causal_lm(copy).get_output_embeddings())
    chosen = {id(p) for part in parts for p in part.parameters()}
    return [name for name, p in copy.named_parameters() if name in trained and id(p) in chosen]


def sharded_gradients(policy: Policy, names: Sequence[str]) -> dict[str, Tensor]:
    """The sum of the gradients of all processes by parameter name, whole; all must call this."""
    for batch in _batches(policy, policy.world.rank):
        _loss(policy, policy.scorer, batch.to(policy.device)).backward()
    grads = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    found = {name: whole(grads[name]).to(policy.device, torch.float32) for name in names}
    policy.optimizer.zero_grad()
    return found


def whole_gradients(policy: Policy, copy: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """The same sum, computed by one process on the whole ``copy``. Batches that several processes have are computed
    once and counted as often."""
    parameters = dict(copy.named_parameters())
    chosen = [parameters[name].requires_grad_(True) for name in names]
    sums = [torch.zeros_like(p, dtype=torch.float32, device=policy.device) for p in chosen]
    scorer, size = TokenScorer(copy), policy.world.size
    # A layer with a hook is run as the module that it is. So are sharded ones; fused kernels would round otherwise.
    hook = decoder_layers(copy)[-1].register_forward_hook(lambda layer, args, output: None)
    for rank in range(min(size, DIFFERENT)):
        times = len(range(rank, size, DIFFERENT))
        for batch in _batches(policy, rank):
            loss = _loss(policy, scorer, batch.to(chosen[0].device))
            for total, grad in zip(sums, torch.autograd.grad(loss, chosen, materialize_grads=True), strict=True):
                total.add_(grad.to(total.device), alpha=times)
    hook.remove()
    copy.requires_grad_(False)
    return dict(zip(names, sums, strict=True))


def _batches(policy: Policy, rank: int) -> Iterator[MicroBatch]:
    """Two responses to one prompt: the policy's, and a teacher's that counts in both terms of the loss."""
    vocabulary = text_config(policy.model.config).vocab_size
    generator = torch.Generator().manual_seed(rank % DIFFERENT)
    for _ in range(PASSES):
        ids = torch.randint(vocabulary, (PROMPT + 2 * RESPONSE,), generator=generator)
        prompt, *responses = ids.split([PROMPT, RESPONSE, RESPONSE])
        samples = [_sample(tuple(prompt.tolist()), response, off_policy=i) for i, response in enumerate(responses)]
        yield from pack(samples, ids.numel() + PROMPT, None, RESPONSE, share=policy.scorer.shares_prompts)


def _sample(prompt_ids: tuple[int, ...], token_ids: Tensor, off_policy: int) -> Sample:
    ones, off = torch.ones(RESPONSE), torch.full((RESPONSE,), float(off_policy))
    log_probs, authors = -ones, written_by(Author.TEACHER if off_policy else Author.POLICY, RESPONSE)
    return Sample(prompt_ids, token_ids, authors, ones, off, ones, log_probs, log_probs)


def _loss(policy: Policy, scorer: TokenScorer, batch: MicroBatch) -> Tensor:
    scores = scorer(batch, policy.temperature)
    loss, _ = policy.objective.of_tokens_alone(batch, scores.log_prob, scores.entropy)
    return loss


def _relative_errors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """||ours - expected|| / ||expected|| of every parameter; the largest norm of all in place of one that is 0."""
    largest = max(float(value.norm()) for value in expected.values())
    return {
        n: float((ours[n] - value).norm()) / (float(value.norm()) or largest or 1.0) for n, value in expected.items()
    }
