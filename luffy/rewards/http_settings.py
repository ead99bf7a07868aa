"""Knobs of the reward that is a server (``reward.http``)."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.schema import knob


@dataclass(frozen=True)
class HttpRewardConfig:
    url: str | None = knob(None, "the server's address with reward.kind=http; not needed if reward.kind is an address")
    timeout_s: float = knob(60.0, "a request without a complete answer after this long is sent again", gt=0)
    retries: int = knob(3, "how often a request is sent again before its samples score 0", ge=0)
    wait_s: float = knob(1.0, "pause before a request is sent again; it doubles each time, up to 60", ge=0)
    concurrency: int = knob(8, "requests of each process at once", ge=1)
    batch_size: int = knob(16, "samples in a request", ge=1)
    header_env: dict[str, str] = knob(
        factory=dict, help="headers whose values are in environment variables, e.g. {Authorization: MY_VARIABLE}"
    )
