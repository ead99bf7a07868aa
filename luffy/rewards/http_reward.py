"""A reward that is a server: samples are posted as JSON, scores come back (docs/rewards.md has the format).

A request that fails is sent again a few times; then its samples score 0, and one line says so. If the server refuses a
request, its samples are sent one by one. The values of headers come from environment variables and stand in no message.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from luffy.errors import UserError
from luffy.rewards.http_settings import HttpRewardConfig
from luffy.rewards.kinds import Answered
from luffy.rewards.own_function import CALL_FAILED, NOT_SCORED, finite_number, prompt_of, row_of
from luffy.rewards.pool import Outcome
from luffy.rewards.worker import describe
from luffy.web import REFUSED, body_of, pause, retry_after, shown, timed_opener

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 64 << 20
WORTH_ANOTHER_TRY = (408, 425, 429)  # and what is the server's fault: 500 and above


class RequestFailed(Exception):
    """Why a request has no scores. ``again``: whether to send it again; ``after_s``: when, if the server said so;
    ``refused``: the server found fault with what was sent."""

    def __init__(self, why: str, again: bool = True, after_s: float | None = None, refused: bool = False) -> None:
        super().__init__(why)
        self.again, self.after_s, self.refused = again, after_s, refused


def is_address(kind: str) -> bool:
    return kind.startswith(("http://", "https://"))


class HttpReward:
    """Asks the server at ``address`` for scores."""

    one_by_one = False

    def __init__(self, address: str | None, settings: HttpRewardConfig) -> None:
        self._address, self._settings = checked_address(address), settings
        self._headers = headers_from(settings.header_env)
        # No redirect and no proxy of the environment: either would be given the headers.
        self._opener = timed_opener(urllib.request.ProxyHandler({}))
        self._closed = threading.Event()

    def outcomes(self, items: Sequence[Answered]) -> list[Outcome]:
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
        """A request without samples must be answered by no scores."""
        try:
            self._ask_again([])
        except RequestFailed as error:
            raise UserError(f"the reward's server does not work: {error}") from None

    def close(self) -> None:
        """Requests under way are given up."""
        self._closed.set()

    def _ask_all(self, batches: Sequence[Sequence[Answered]]) -> list[list[Outcome]]:
        """In threads that end with the process, whatever a server does."""
        answers: dict[int, list[Outcome]] = {}
        waiting = iter(enumerate(batches))
        taking = threading.Lock()
        broken: list[BaseException] = []

        def work() -> None:
            while True:
                with taking:
                    number, batch = next(waiting, (None, ()))
                if number is None or broken:
                    return
                try:
                    answers[number] = self._outcomes_of(batch)
                except BaseException as error:  # raised below, in the thread that waits
                    broken.append(error)

        threads = [
            threading.Thread(target=work, daemon=True) for _ in range(min(self._settings.concurrency, len(batches)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if broken:
            raise broken[0]
        return [answers[number] for number in range(len(batches))]

    def _outcomes_of(self, batch: Sequence[Answered]) -> list[Outcome]:
        try:
            return [self._outcome(score) for score in self._ask_again(batch)]
        except RequestFailed as error:
            if error.refused and len(batch) > 1:  # one sample may be at fault for all of them
                return [outcome for item in batch for outcome in self._outcomes_of([item])]
            return [Outcome(CALL_FAILED, message=str(error))] * len(batch)

    def _outcome(self, score: Any) -> Outcome:
        if score is None:
            return NOT_SCORED
        if isinstance(score, dict) and "error" in score:
            return Outcome("error", message=self._cleaned(str(score["error"]).encode()))
        try:
            return Outcome("ok", (finite_number(self._address, score), "ok"))
        except (TypeError, ValueError) as error:
            return Outcome("error", message=describe(error))

    def _ask_again(self, batch: Sequence[Answered]) -> list[Any]:
        """The scores of a batch, after as many tries as it takes and the settings allow."""
        samples = [as_json(item) for item in batch]
        content = json.dumps({"samples": samples}, default=str, allow_nan=False).encode()
        for attempt in range(self._settings.retries + 1):
            if self._closed.is_set():
                raise RuntimeError("this reward is closed")
            try:
                return self._scores_in(self._ask(content), len(batch))
            except RequestFailed as error:
                if not error.again or attempt == self._settings.retries:
                    tries = f" (tried {attempt + 1} times)" if attempt else ""
                    why = f"{self._address}: {error}{tries}"
                    raise RequestFailed(why, again=False, refused=error.refused) from None
                self._closed.wait(pause(self._settings.wait_s, attempt, error.after_s))
        raise AssertionError("the last attempt returns or raises")

    def _ask(self, content: bytes) -> bytes:
        request = urllib.request.Request(self._address, content, self._headers, method="POST")
        limit = self._settings.timeout_s
        try:
            with self._opener.open(request, timeout=limit) as response:
                return read_all(response)
        except urllib.error.HTTPError as error:
            raise self._status_failure(error) from None  # its traceback would hold the headers
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise RequestFailed(f"no answer in {limit:g} s") from None
            again = not isinstance(reason, ssl.SSLCertVerificationError)
            raise RequestFailed(f"no connection ({type(reason).__name__}: {reason})", again) from None

    def _status_failure(self, error: urllib.error.HTTPError) -> RequestFailed:
        again = error.code in WORTH_ANOTHER_TRY or error.code >= 500
        refused = error.code in REFUSED
        return RequestFailed(f"HTTP {error.code}: {self._cleaned(body_of(error))}", again, retry_after(error), refused)

    def _scores_in(self, answer: bytes, count: int) -> list[Any]:
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):  # the last: brackets within brackets
            scores = None
        if not isinstance(scores, list) or len(scores) != count:
            found = self._cleaned(answer)
            raise RequestFailed(f'expected {{"scores": [...]}} with {count} entries, found {found}', again=False)
        return scores

    def _cleaned(self, body: bytes) -> str:
        for name in self._settings.header_env:
            body = body.replace(self._headers[name].encode(), b"***")
        return shown(body, None)


def checked_address(address: str | None) -> str:
    if not address:
        raise UserError("reward.kind=http needs reward.http.url, such as http://127.0.0.1:9000/score")
    parts = urllib.parse.urlsplit(address)
    if parts.username or parts.password or parts.query:
        raise UserError("the address of a reward must not hold a key; use reward.http.header_env")
    if not is_address(address) or not parts.hostname:
        raise UserError(f"{address!r} is not the address of a reward, such as http://127.0.0.1:9000/score")
    return address


def headers_from(variables: dict[str, str]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    for name, variable in variables.items():
        value = os.environ.get(variable, "").strip()
        if not value or not value.isascii() or not value.isprintable():
            what = "empty" if not value else "no header's value (one line of ASCII)"
            raise UserError(f"reward.http.header_env: environment variable {variable} of header {name} is {what}")
        headers[name] = value
    return headers


def as_json(item: Answered) -> dict[str, Any]:
    row = row_of(item)
    own = {name: row.pop(name) for name in ("id", "answer")}
    return {**own, "prompt": prompt_of(item), "response": item.response, "columns": without_nan(row)}


def without_nan(value: Any) -> Any:
    """The same with None for every float that JSON has no name for."""
    if isinstance(value, dict):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_all(response: Any) -> bytes:
    """The whole answer."""
    parts, length = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        length += len(part)
        if length > LONGEST_ANSWER:
            raise RequestFailed(f"an answer of more than {LONGEST_ANSWER} bytes", again=False)
    return b"".join(parts)
