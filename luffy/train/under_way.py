"""Problems whose responses are not all finished when a step ends (`rollout.max_tokens_per_step`): what the next step
needs to go on with them. The same on every rank, and in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luffy.types import Completion, Finish, Request

FINISHES: tuple[Finish | None, ...] = (None, "stop", "length", "trace")  # in a checkpoint: the place in this list


@dataclass(frozen=True, eq=False)
class PartialResponse:
    """A response so far. It begins with ``prefix`` tokens of its problem's trace number ``trace`` (-1: none); the
    streams are of the policy's own tokens. ``finish`` is None while it goes on."""

    trace: int
    prefix: int
    seed: int
    finish: Finish | None
    token_ids: Tensor  # [T] long
    log_probs: Tensor  # [T] float32
    versions: Tensor  # [T] long: of the policy that drew each token

    @property
    def completion(self) -> Completion:
        """All of it; requires that it is finished."""
        assert self.finish is not None
        return Completion(self.token_ids, self.log_probs, self.finish, versions=self.versions)

    def next_request(self, whole: Request, most: int) -> Request:
        """Asks for at most ``most`` further tokens; ``whole`` asks for all of the response."""
        left = whole.sampling.max_tokens - self.token_ids.numel()
        # At least one: a resumed run may have a lower rollout.max_tokens than the response has tokens.
        sampling = replace(whole.sampling, max_tokens=max(min(left, most), 1))
        return replace(whole, prefix_ids=whole.prefix_ids + tuple(self.token_ids.tolist()), sampling=sampling)

    def extended(self, more: Completion, longest: int, version: int) -> PartialResponse:
        """With the tokens that the policy of ``version`` drew next; it ends with an EOS, or with ``longest`` tokens."""
        ids = torch.cat([self.token_ids, more.token_ids.cpu()])
        stopped = more.finish == "stop" or ids.numel() >= longest
        return replace(
            self,
            finish=more.finish if stopped else None,
            token_ids=ids,
            log_probs=torch.cat([self.log_probs, more.log_probs.float().cpu()]),
            versions=torch.cat([self.versions, torch.full((more.token_ids.numel(),), version)]),
        )


@dataclass(frozen=True)
class UnderWay:
    """A problem by its row in the data, how often it was drawn before, and the step that drew it."""

    row: int
    visit: int
    step: int
    responses: tuple[PartialResponse, ...]

    @property
    def is_whole(self) -> bool:
        return all(response.finish is not None for response in self.responses)

    @property
    def unfinished(self) -> int:
        return sum(response.finish is None for response in self.responses)

    @property
    def continued_tokens(self) -> int:
        """Own tokens of the responses that go on: they are prefilled again, as the weights have changed."""
        return sum(r.token_ids.numel() for r in self.responses if r.finish is None)


def state_of(problems: Sequence[UnderWay]) -> dict[str, Tensor]:
    """Tensors that `problems_of` takes; none without elements."""
    every = [r for problem in problems for r in problem.responses]
    if not every:
        return {}
    rows = [(r.trace, r.prefix, r.seed, FINISHES.index(r.finish), r.token_ids.numel()) for r in every]
    state = {
        "problems": torch.tensor([(p.row, p.visit, p.step, len(p.responses)) for p in problems]),
        "responses": torch.tensor(rows),
        "token_ids": torch.cat([r.token_ids for r in every]),
        "log_probs": torch.cat([r.log_probs for r in every]),
        "versions": torch.cat([r.versions for r in every]),
    }
    return {name: tensor for name, tensor in state.items() if tensor.numel()}


def problems_of(state: Mapping[str, Tensor]) -> list[UnderWay]:
    if not state:
        return []
    rows = state["responses"].tolist()
    lengths = [length for *_, length in rows]
    empty = {"token_ids": torch.empty(0).long(), "log_probs": torch.empty(0), "versions": torch.empty(0).long()}
    streams = [state.get(name, nothing).split(lengths) for name, nothing in empty.items()]
    responses = iter(
        PartialResponse(trace, prefix, seed, FINISHES[finish], ids.clone(), log_probs.clone(), versions.clone())
        for (trace, prefix, seed, finish, _), ids, log_probs, versions in zip(rows, *streams, strict=True)
    )
    return [
        UnderWay(row, visit, step, tuple(next(responses) for _ in range(count)))
        for row, visit, step, count in state["problems"].tolist()
    ]
