"""Problems with responses that are not finished when a step ends (`rollout.max_tokens_per_step`), as memory and
checkpoints keep them. The same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from luffy.guidance import Planner
from luffy.guidance.plan import appended
from luffy.types import Author, Episode, Finish, Task

FINISHES: tuple[Finish | None, ...] = (
    None,
    "stop",
    "length",
    "trace",
    "environment",
)  # in a checkpoint: the place in this list
STREAMS = {"token_ids": torch.long, "log_probs": torch.float32, "versions": torch.long}


@dataclass(frozen=True, eq=False)
class InFlight:
    """A problem by its row in the data, how often it was drawn before, the step that drew it, and its n responses.

    A response begins with ``prefix`` tokens of the problem's trace number ``trace`` (-1: none). The streams hold the
    tokens that the engine drew, response after response.
    """

    row: int
    visit: int
    step: int
    responses: Tensor  # [n, 5] long: trace, prefix, seed, place in FINISHES, number of drawn tokens
    token_ids: Tensor  # [T] long
    log_probs: Tensor  # [T] float32
    versions: Tensor  # [T] long: of the policy that drew each token

    @staticmethod
    def of(row: int, visit: int, step: int, episodes: Sequence[Episode]) -> InFlight:
        responses, streams = [], []
        for episode in episodes:
            trace = -1 if episode.trace is None else episode.task.demonstrations.index(episode.trace)
            finish = FINISHES.index(episode.finish)
            responses.append((trace, episode.prefix, episode.seed, finish, episode.drawn))
            if episode.drawn:
                assert episode.token_versions is not None
                of_episode = episode.token_ids, episode.engine_log_probs, episode.token_versions
                streams.append([stream[episode.prefix :] for stream in of_episode])
        nothing = [torch.empty(0, dtype=dtype) for dtype in STREAMS.values()]
        joined = [torch.cat(parts) for parts in zip(nothing, *streams, strict=True)]
        return InFlight(row, visit, step, torch.tensor(responses), *joined)

    def episodes(self, task: Task, planner: Planner) -> tuple[Episode, ...]:
        """The responses so far, planned as when the problem was drawn."""
        rows = self.responses.tolist()
        lengths = [drawn for *_, drawn in rows]
        streams = zip(*(s.split(lengths) for s in (self.token_ids, self.log_probs, self.versions)), strict=True)
        return tuple(
            _continued(
                planner.planned(task, None if trace < 0 else task.demonstrations[trace], prefix, seed),
                FINISHES[finish],
                *of_response,
            )
            for (trace, prefix, seed, finish, _), of_response in zip(rows, streams, strict=True)
        )

    @property
    def uses_trace(self) -> bool:
        return bool((self.responses[:, 0] >= 0).any())

    @property
    def unfinished(self) -> int:
        return int((self.responses[:, 3] == 0).sum())

    @property
    def continued_tokens(self) -> int:
        """Drawn tokens of the responses that go on: they are prefilled again, as the weights have changed."""
        return int(self.responses[self.responses[:, 3] == 0, 4].sum())


def _continued(begun: Episode, finish: Finish | None, ids: Tensor, log_probs: Tensor, versions: Tensor) -> Episode:
    """A planned episode with tokens that earlier steps drew."""
    if not ids.numel():
        return replace(begun, finish=finish)
    every = torch.cat([torch.full((begun.prefix,), -1), versions])
    changes = {"finish": finish, "policy_version": int(versions[-1]), "token_versions": every}
    return appended(begun, ids, Author.POLICY, log_probs, **changes)


def state_of(problems: Sequence[InFlight]) -> dict[str, Tensor]:
    """Tensors that `problems_of` takes; none without elements."""
    if not problems:
        return {}
    state = {
        "problems": torch.tensor([(p.row, p.visit, p.step, len(p.responses)) for p in problems]),
        **{name: torch.cat([getattr(p, name) for p in problems]) for name in ("responses", *STREAMS)},
    }
    return {name: tensor for name, tensor in state.items() if tensor.numel()}


def problems_of(state: Mapping[str, Tensor]) -> list[InFlight]:
    """The problems whose `state_of` this is."""
    if not state:
        return []
    rows = state["problems"].tolist()
    responses = state["responses"].split([count for *_, count in rows])
    lengths = [int(of_problem[:, 4].sum()) for of_problem in responses]
    streams = [state.get(name, torch.empty(0, dtype=dtype)).split(lengths) for name, dtype in STREAMS.items()]
    return [
        InFlight(row, visit, step, *(tensor.clone() for tensor in tensors))
        for (row, visit, step, _), *tensors in zip(rows, responses, *streams, strict=True)
    ]
