"""Log-probs of given tokens under the model of vLLM servers, which keep their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from luffy.rollout.vllm.frozen_servers import COMPLETIONS, FrozenServers, checked_log_prob
from luffy.rollout.vllm.http_client import Server
from luffy.types import Sample


class ScoringServers(FrozenServers):
    """The teacher's servers. ``longest``: tokens of prompt and response that all of them score."""

    def __init__(
        self,
        servers: Sequence[Server],
        tokenizer: Any,
        *,
        slots: int = 256,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        super().__init__(servers, tokenizer, "teacher", slots=slots, warn=warn)
        self.longest = self.context - 1  # it has to generate a token

    def log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """[T] of the response tokens of each sample, at temperature 1."""
        if not samples:
            return []
        prompts = [sample.prompt_ids for sample in samples]
        return self.ask_each(prompts, lambda server, index: self._ask(server, samples[index]))

    def _ask(self, server: Server, sample: Sample) -> Tensor:
        ids = [*sample.prompt_ids, *sample.token_ids.tolist()]
        body = {"model": self.names[server], "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = server.post(COMPLETIONS, body, choices=list)
        places = server.first(COMPLETIONS, answer["choices"], prompt_logprobs=list)["prompt_logprobs"]
        if len(places) != len(ids):
            raise server.foreign(COMPLETIONS, f"{len(places)} log-probs of a prompt of {len(ids)} tokens")
        start = len(sample.prompt_ids)
        found = [_log_prob(server, places[i], ids[i]) for i in range(start, len(ids))]
        return torch.tensor(found, dtype=torch.float32)


def _log_prob(server: Server, place: Any, token: int) -> float:
    found = place.get(str(token)) if isinstance(place, dict) else None
    return checked_log_prob(server, found.get("logprob") if isinstance(found, dict) else None, token)
