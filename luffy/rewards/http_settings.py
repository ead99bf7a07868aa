"""Knobs of the reward that is a server (``reward.http``)."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.schema import knob


@dataclass(frozen=True)
class HttpRewardConfig:
    """Settings of a reward server (``reward.http``)."""

    url: str | None = knob(None, "the server's address, if reward.kind=http")
    timeout_s: float = knob(60.0, "limit for a complete answer", gt=0)
    retries: int = knob(3, "times to send a request again; then its samples get 0", ge=0)
    wait_s: float = knob(1.0, "first pause before a retry; doubles, up to 60", ge=0)
    concurrency: int = knob(8, "requests at once, per process", ge=1)
    batch_size: int = knob(16, "samples in a request", ge=1)
    header_env: dict[str, str] = knob(
        factory=dict, help="headers from environment variables, e.g. {Authorization: MY_VARIABLE}"
    )
