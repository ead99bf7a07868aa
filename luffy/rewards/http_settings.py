"""Knobs of the reward that is a server (``reward.http``)."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.schema import knob


@dataclass(frozen=True)
class HttpRewardConfig:
    url: str | None = knob(
        None, "address that scores are asked of, for reward.kind=http; an address as reward.kind does without it"
    )
    timeout_s: float = knob(60.0, "a request without an answer for so long is sent again", gt=0)
    retries: int = knob(3, "how often a request is sent again before its samples score 0", ge=0)
    wait_s: float = knob(1.0, "pause before a request is sent again; it doubles each time, up to 60", ge=0)
    concurrency: int = knob(8, "requests that each process has under way at once", ge=1)
    batch_size: int = knob(16, "samples in a request", ge=1)
    header_env: dict[str, str] = knob(
        factory=dict, help="headers whose values are in environment variables, e.g. {Authorization: MY_VARIABLE}"
    )
