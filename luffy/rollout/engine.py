"""The interface of engines, and the checks they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from luffy.errors import UserError
from luffy.metrics import Metric
from luffy.types import Completion, Request

OnProgress = Callable[[int, int], None]
STREAM_PART = 1024  # requests of a stream that an engine without a better way answers at once


@dataclass
class EngineStats:
    """Counts of one call of `generate`. The first token of a response comes from its prefill, so n responses of T
    tokens in n slots take T - 1 decoding steps."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefilled_prompts: int = 0
    decode_steps: int = 0
    preemptions: int = 0  # times a sequence lost its KV cache for want of memory and was prefilled again later
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; 0 before the first call."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class RequestSource(Protocol):
    """Gives an engine requests while it runs, and takes their completions: what a conversation does."""

    most: int  # requests under way at once, at most
    longest: int  # tokens of a request and its completion, at most

    def take(self, wait: bool) -> list[Request] | None:
        """Requests that are ready, perhaps none; None once there will be no more. ``wait``: until there is one."""
        ...

    def finish(self, number: int, completion: Completion) -> None:
        """The completion of a request; they are numbered as they were taken."""
        ...

    def ended(self) -> list[int]:
        """Conversations that have ended since this was last asked: no request will go on with them."""
        ...


class Engine(Protocol):
    """Generates responses. A step calls ``generate``, ``sleep``, updates the policy and calls ``sync``; the defaults
    suit an engine on the policy's own weights.

        >>> request = Request(prompt_ids=(1, 5, 7), seed=0, sampling=Sampling(max_tokens=4))
        >>> (completion,) = engine.generate([request])
        >>> completion.token_ids.shape, completion.log_probs.shape  # [T] each, T at most 4
        (torch.Size([4]), torch.Size([4]))
    """

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        """Completions in the order of the requests; ``progress`` receives (done, total)."""
        ...

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, completion) as responses finish, in any order; for bulk work."""
        source, first = iter(requests), 0
        while part := list(islice(source, STREAM_PART)):
            yield from enumerate(self.generate(part), start=first)
            first += len(part)

    def serve(self, source: RequestSource) -> None:
        """Answer the requests of a source until it has no more. An engine without a better way answers those that are
        ready together, and takes further ones when it has done so."""
        first = 0
        while (ready := source.take(wait=True)) is not None:
            for number, completion in enumerate(self.generate(ready), start=first):
                source.finish(number, completion)
            first += len(ready)

    def sync(self, version: int) -> None:
        """Use the policy's weights, now those of ``version``, for later completions."""

    def agree_on(self, version: int) -> int:
        """Weight version used for the next completions: ``version``, unless another process has the weights."""
        return version

    def sleep(self) -> None:
        """Free memory for the update: no request comes before the next ``sync``."""
        return None

    def metrics(self) -> dict[str, Metric]:
        """Metrics since the last call, by name."""
        return {}

    def close(self) -> None:
        """Release everything at the end of the run."""
        return None


def check_request(request: Request, max_context: int, vocabulary: int) -> None:
    """Refuse a request that no engine can serve; the error names the setting to change."""
    sampling, given = request.sampling, request.given_ids
    if not given:
        raise UserError("a request has no prompt tokens: give at least one (e.g. the BOS token)")
    if sampling.max_tokens < 1:
        raise UserError(f"max_tokens is {sampling.max_tokens}: ask for at least 1 new token")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise UserError(f"temperature is {sampling.temperature}: use 0 (greedy) or a positive number")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UserError(f"top_p is {sampling.top_p}: use a number above 0 and at most 1 (1 is off)")
    if sampling.top_k < 0:
        raise UserError(f"top_k is {sampling.top_k}: use 0 (off) or a positive number")
    if min(given) < 0 or max(given) >= vocabulary:
        raise UserError(
            f"token id {min(given) if min(given) < 0 else max(given)} lies outside the model's vocabulary"
            f" of {vocabulary}: is this the model's own tokenizer?"
        )
    total = len(given) + sampling.max_tokens
    if total > max_context:
        left = max_context - len(given)
        raise UserError(
            f"{len(request.prompt_ids)} prompt + {len(request.prefix_ids)} prefix + {sampling.max_tokens} new tokens"
            f" = {total} exceed the context of {max_context}:"
            f" {f'lower max_tokens to {left} or ' if left > 0 else ''}shorten the prompt"
        )
