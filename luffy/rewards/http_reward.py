"""A reward server: samples are posted as JSON, scores come back (docs/rewards.md has the format).

A request that fails is sent again a few times; then its samples score 0, with one warning. If the server refuses a
request, its samples are sent one by one. Header values come from environment variables and appear in no message.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from luffy.errors import UserError
from luffy.rewards.kinds import Answered, HttpRewardConfig, Reward
from luffy.rewards.own_function import CALL_FAILED, outcome_of, prompt_of, row_of
from luffy.rewards.pool import Outcome
from luffy.web import Client, RequestFailed, checked_address, with_retries

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 64 << 20
EXAMPLE = "http://127.0.0.1:9000/score"


def is_address(kind: str) -> bool:
    """Whether a reward's name is the address of a server."""
    return kind.startswith(("http://", "https://"))


class HttpReward(Reward):
    """Asks the server at ``address`` for scores."""

    def __init__(self, address: str | None, settings: HttpRewardConfig) -> None:
        if not address:
            raise UserError(f"reward.kind=http needs reward.http.url, such as {EXAMPLE}")
        checked_address(address, "reward", EXAMPLE, "reward.http.header_env")
        self._address, self._settings = address, settings
        headers = headers_from(settings.header_env)
        self._client = Client(headers, tuple(headers.values()), longest_answer=LONGEST_ANSWER)
        self._closed = threading.Event()

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
        """Outcomes of the items, in requests of ``batch_size`` samples."""
        size = self._settings.batch_size
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        outcomes = [outcome for of_batch in self._ask_all(batches) for outcome in of_batch]
        failed = [outcome.message for outcome in outcomes if outcome.status == CALL_FAILED]
        if failed:
            logger.warning(
                "requests to the reward's server failed; %d of %d samples score 0 (the last: %s)",
                len(failed), len(items), failed[-1],
            )  # fmt: skip
        return outcomes

    def self_check(self) -> None:
        """Send a request without samples, which must return no scores."""
        try:
            self._scores([])
        except RequestFailed as error:
            raise UserError(f"the reward's server does not work: {self._address}: {error}") from None

    def close(self) -> None:
        """End waiting retries."""
        self._closed.set()

    def _ask_all(self, batches: Sequence[Sequence[Answered]]) -> list[list[Outcome]]:
        """Outcomes of each batch, asked for in daemon threads: no server can keep the process alive."""
        answers: list[Future[list[Outcome]]] = [Future() for _ in batches]
        waiting = deque(zip(answers, batches, strict=True))

        def work() -> None:
            while True:
                try:
                    answer, batch = waiting.popleft()
                except IndexError:
                    return
                try:
                    answer.set_result(self._outcomes_of(batch))
                except BaseException as error:
                    waiting.clear()
                    answer.set_exception(error)

        for _ in range(min(self._settings.concurrency, len(batches))):
            threading.Thread(target=work, daemon=True).start()
        return [answer.result() for answer in answers]

    def _outcomes_of(self, batch: Sequence[Answered]) -> list[Outcome]:
        try:
            return [self._outcome(score) for score in self._scores(batch)]
        except RequestFailed as error:
            if error.refused and len(batch) > 1:  # one sample may be at fault for all of them
                return [outcome for item in batch for outcome in self._outcomes_of([item])]
            return [Outcome(CALL_FAILED, message=f"{self._address}: {error}")] * len(batch)

    def _outcome(self, score: Any) -> Outcome:
        if isinstance(score, dict) and "error" in score:
            return Outcome("error", message=self._client.shown(str(score["error"]).encode()))
        return outcome_of(self._address, score)

    def _scores(self, batch: Sequence[Answered]) -> list[Any]:
        """Scores of a batch as the server sent them, after retries."""
        samples = [as_json(item) for item in batch]
        content = json.dumps({"samples": samples}, default=str, allow_nan=False).encode()

        def ask() -> list[Any]:
            return self._parsed(self._client.send(self._address, content, self._settings.timeout_s), len(batch))

        return with_retries(ask, self._settings.retries, self._settings.wait_s, self._closed)

    def _parsed(self, answer: bytes, count: int) -> list[Any]:
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: brackets within brackets
            scores = None
        if not isinstance(scores, list) or len(scores) != count:
            found = self._client.shown(answer)
            raise RequestFailed(f'expected {{"scores": [...]}} with {count} entries, found {found}')
        return scores


def headers_from(variables: dict[str, str]) -> dict[str, str]:
    """Headers whose values are in the named environment variables."""
    headers = {}
    for name, variable in variables.items():
        value = os.environ.get(variable, "").strip()
        if not value or not value.isascii() or not value.isprintable():
            what = "empty" if not value else "no header's value (one line of ASCII)"
            raise UserError(f"reward.http.header_env: environment variable {variable} of header {name} is {what}")
        headers[name] = value
    return headers


def as_json(item: Answered) -> dict[str, Any]:
    """Sample as the server gets it."""
    row = row_of(item)
    own = {name: row.pop(name) for name in ("id", "answer")}
    return {**own, "prompt": prompt_of(item.problem), "response": item.response, "columns": without_nan(row)}


def without_nan(value: Any) -> Any:
    """The value with None for every NaN and infinity, which JSON has no name for."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
