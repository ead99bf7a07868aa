"""A model on vLLM servers that generates and keeps its weights: the second model of token overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from luffy.errors import UserError
from luffy.models.load import token_count
from luffy.rollout.engine import Engine, OnProgress, check_request
from luffy.rollout.vllm.frozen_servers import COMPLETIONS, FrozenServers, checked_log_prob
from luffy.rollout.vllm.http_client import Server
from luffy.rollout.vllm.requests import completion, completion_body
from luffy.types import Completion, Request

NEVER = -100.0  # the lowest bias of a logit that vLLM takes: e^-100 is no probability in float32
OWN_WEIGHTS = -1  # the version of a server that no run has pushed weights to


class ServedModel(FrozenServers, Engine):
    """Servers of `luffy serve`: their log-probs are those of the distribution that a token was drawn from, whatever
    the temperature. Rows of padding that would let the model write what the policy cannot read are never drawn.

    ``longest``: tokens of prompt and response that a request may have."""

    def __init__(
        self,
        servers: Sequence[Server],
        tokenizer: Any,
        longest: int,
        *,
        slots: int = 256,
        seeded: bool = True,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.longest, self.seeded, self.vocabulary = longest, seeded, token_count(tokenizer)
        self._bias: dict[Server, dict[str, float]] = {}
        super().__init__(servers, tokenizer, "second model", slots=slots, warn=warn)

    def check(self, server: Server, tokenizer: Any) -> None:
        """Tokens, vocabulary and context fit the policy's, and the weights are those the server was started with."""
        super().check(server, tokenizer)
        for token in sorted(set(tokenizer.all_special_tokens) - {tokenizer.pad_token}):
            self.check_reads(server, tokenizer, token)
        state = server.rpc("luffy_state")
        fields = state.get("config")
        rows, context = fields.get("vocab_size") if isinstance(fields, dict) else None, state.get("max_context")
        if not isinstance(rows, int) or not isinstance(context, int):
            raise server.foreign("collective_rpc", "no vocabulary and context of its model")
        if state.get("version") != OWN_WEIGHTS:
            raise UserError(
                f"{server.url} has weights that a run pushed to it, not the second model's; restart it with `luffy "
                "serve`, and name it in rollout.offpolicy_guidance.servers alone"
            )
        if rows < self.vocabulary:
            raise UserError(
                f"{server.url} has a model of {rows} tokens, fewer than the tokenizer's {self.vocabulary}; serve a "
                "model of the policy's own tokenizer"
            )
        if context < self.longest:
            raise UserError(
                f"{server.url} takes {context} tokens, but data.max_prompt_tokens + rollout.max_tokens = "
                f"{self.longest}; raise rollout.vllm.max_context there"
            )
        self._bias[server] = {str(token): NEVER for token in range(self.vocabulary, rows)}

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        if not requests:
            return []
        for request in requests:
            check_request(request, self.longest, self.vocabulary)
        prompts = [request.prompt_ids for request in requests]
        return self.ask_each(prompts, lambda server, index: self._ask(server, requests[index]), progress)

    def sync(self, version: int) -> None:
        """Do nothing: the servers keep their own weights."""

    def _ask(self, server: Server, request: Request) -> Completion:
        body = completion_body(request, self.names[server], self.seeded)
        if self._bias[server]:
            body["logit_bias"] = self._bias[server]
        choices = server.post(COMPLETIONS, body, choices=list)["choices"]
        choice = server.first(COMPLETIONS, choices, token_ids=list, logprobs=dict)
        tokens, values = choice["token_ids"], choice["logprobs"].get("token_logprobs")
        if not isinstance(values, list) or not 0 < len(tokens) == len(values) <= request.sampling.max_tokens:
            found = len(values) if isinstance(values, list) else 0
            raise server.foreign(COMPLETIONS, f"{len(tokens)} tokens with {found} log-probs")
        strange = next((t for t in tokens if not isinstance(t, int) or not 0 <= t < self.vocabulary), None)
        if strange is not None:
            raise server.foreign(COMPLETIONS, f"a token {str(strange)[:40]} that the policy does not have")
        return completion(
            request, tokens, [checked_log_prob(server, v, t) for v, t in zip(values, tokens, strict=True)]
        )
