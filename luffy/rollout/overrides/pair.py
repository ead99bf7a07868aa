"""Two engines of which the second may override the first's tokens."""

from __future__ import annotations

from dataclasses import replace

from luffy.metrics import Metric
from luffy.rollout.engine import Engine
from luffy.types import Request


class OverridingPair(Engine):
    """``draft`` has the policy's weights: sync, sleep and metrics are the draft's. ``second`` never changes."""

    def __init__(self, draft: Engine, second: Engine) -> None:
        self.draft, self.second = draft, second

    def sync(self, version: int) -> None:
        self.draft.sync(version)

    def sleep(self) -> None:
        self.draft.sleep()

    def metrics(self) -> dict[str, Metric]:
        return self.draft.metrics()


def at_temperature(request: Request, temperature: float | None) -> Request:
    """The request at another temperature; None: as it is."""
    if temperature is None:
        return request
    return replace(request, sampling=replace(request.sampling, temperature=temperature))
