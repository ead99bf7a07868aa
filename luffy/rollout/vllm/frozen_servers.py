"""vLLM servers whose model never changes: a teacher's log-probs, and the base of the model that overrides tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from luffy.errors import TrainingStopped, UserError
from luffy.rollout.vllm.dispatch import Dispatch, ask_all
from luffy.rollout.vllm.http_client import Server, ServerLost
from luffy.types import NO_LIMIT, Sample

TOKENS_COMPARED = 500  # of the vocabulary
COMPLETIONS = "v1/completions"
LOWEST = -1e30  # log-prob: beyond lie -inf and numbers that no float32 holds
ROUNDING = 1e-3  # by which a log-prob of half-precision logits may exceed 0

A = TypeVar("A")  # an answer


class FrozenServers:
    """``slots`` requests are sent to each server at the same time. ``called``: what the model is to the run, for
    messages. ``context``: tokens of prompt and response that all of them take, as far as they say. ``warn`` hears about
    servers that do not answer."""

    def __init__(
        self,
        servers: Sequence[Server],
        tokenizer: Any,
        called: str,
        *,
        slots: int = 256,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.servers, self.called, self.slots, self.warn = list(servers), called, slots, warn
        try:
            models = {server: server.model_entry() for server in self.servers}
            self.names = {server: model["id"] for server, model in models.items()}
            for server in self.servers:
                self.check(server, tokenizer)
        except ServerLost as error:
            raise UserError(f"the {called}'s vLLM server does not answer: {error}") from None
        contexts = [model["max_model_len"] for model in models.values() if model.get("max_model_len") is not None]
        self.context = min(contexts, default=NO_LIMIT)

    def check(self, server: Server, tokenizer: Any) -> None:
        """Refuse a server that reads a text of tokens from all over the vocabulary otherwise than our tokenizer."""
        plain = [token for token in sorted(tokenizer.get_vocab().values()) if token not in tokenizer.all_special_ids]
        self.check_reads(server, tokenizer, tokenizer.decode(plain[:: max(len(plain) // TOKENS_COMPARED, 1)]))

    def check_reads(self, server: Server, tokenizer: Any, text: str) -> None:
        """Refuse a server that reads ``text`` otherwise than our tokenizer."""
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        body = {"model": self.names[server], "prompt": text, "add_special_tokens": False}
        theirs = server.post("tokenize", body, tokens=list)["tokens"]
        if not all(isinstance(token, int) for token in theirs):
            raise server.foreign("tokenize", "tokens that are no whole numbers")
        if theirs != ours:
            pairs = enumerate(zip_longest(ours, theirs, fillvalue="nothing"))
            place, (our, their) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            raise UserError(
                f"the tokenizers differ: {server.url} reads a text otherwise than the policy (token {place}: "
                f"{our} for the policy, {their} for the {self.called}); both must have the same tokenizer"
            )

    def ask_each(
        self,
        keys: Sequence[Hashable],
        ask: Callable[[Server, int], A],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[A]:
        """``ask(server, index)`` for each of ``keys``, the prompts of the requests. Those of a lost server go to the
        others."""
        alive = [server for server in self.servers if self._is_well(server)]
        if not alive:
            raise TrainingStopped(
                f"no vLLM server of the {self.called} answers, of {', '.join(s.url for s in self.servers)}; start one "
                "again"
            )
        dispatch = Dispatch(keys, alive)
        try:
            answers = ask_all(dispatch, ask, self._is_well, self.slots, progress)
        except ServerLost as error:
            raise TrainingStopped(f"no vLLM server of the {self.called} could answer, the last: {error}") from None
        for server, why in dispatch.lost.items():
            self.warn(f"the {self.called}'s vLLM server {server.url} is lost ({why}); others took its requests")
        return answers

    def _is_well(self, server: Server) -> bool:
        try:
            server.check_health()
        except ServerLost:
            return False
        return True


def checked_log_prob(server: Server, value: Any, token: int) -> float:
    """The log-prob of a token in the answer of a server; a UserError unless it is that of a probability above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise server.foreign(COMPLETIONS, f"no log-prob of token {token}")
    if not LOWEST < value <= ROUNDING:
        shown = str(value)[:40]
        raise server.foreign(COMPLETIONS, f"a log-prob of {shown} for token {token}, which no probability has")
    return float(value)


class ScoringServers(FrozenServers):
    """Log-probs of given tokens from the teacher's servers. ``longest``: tokens of prompt and response that all of them
    score."""

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
