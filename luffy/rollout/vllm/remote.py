"""vLLM servers by URL behind the engine protocol: requests balanced, weights pushed, lost servers made up for.

Nothing of vLLM is needed here. A server is asked for its version of the weights before every batch: one that was
restarted meanwhile answers with the weights it was started with, and nothing in its samples would tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue

from torch import nn

from luffy.errors import TrainingStopped, UserError
from luffy.metrics import Mean, Metric, Sum
from luffy.models.forward import causal_lm, text_config
from luffy.rollout.engine import Engine, EngineStats, OnProgress, RequestSource, check_request
from luffy.rollout.policy_weights import PushCheck
from luffy.rollout.vllm.dispatch import ATTEMPTS, Dispatch, ask_all
from luffy.rollout.vllm.http_client import Server, ServerLost, ServerTimeout
from luffy.rollout.vllm.requests import completion, completion_body
from luffy.rollout.vllm.transfer import Transfer, on_all_servers
from luffy.rollout.vllm.worker_extension import model_fields
from luffy.types import Completion, Request

LOOK_EVERY_S = 0.005


class RemoteEngine(Engine):
    """``slots`` requests are sent to each server at the same time. ``warn`` hears about servers lost and found."""

    def __init__(
        self,
        policy: nn.Module,
        servers: Sequence[Server],
        transfer: Transfer,
        *,
        max_context: int,
        slots: int = 256,
        seeded: bool = True,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.model, self.servers, self.transfer = policy, list(servers), transfer
        self.max_context, self.slots, self.seeded, self.warn = max_context, slots, seeded, warn
        self.version = 0
        self.stats = EngineStats()
        self._check = PushCheck(policy)
        self._out: set[Server] = set()  # servers that are lost for now
        self._resent = self._lost = 0  # since `metrics` was asked last
        for server in self.servers:
            self._check_fit(server)
        self._names = {server: server.model_entry()["id"] for server in self.servers}

    def sync(self, version: int) -> None:
        self._check(self.model, version)
        self._push(version, self.servers)
        self.version = version

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        if not requests:
            return []
        vocabulary = text_config(causal_lm(self.model).config).vocab_size
        for request in requests:
            check_request(request, self.max_context, vocabulary)
        started = time.perf_counter()
        dispatch = Dispatch([r.prompt_ids for r in requests], self._ready())
        answers = self._run(dispatch, requests, progress)
        for server, why in dispatch.lost.items():
            self._lose(server, why)
        self._resent += dispatch.resent
        made = sum(answer.token_ids.numel() for answer in answers)
        self.stats = EngineStats(generated_tokens=made, seconds=time.perf_counter() - started)
        return answers

    def serve(self, source: RequestSource) -> None:
        """A request goes to a server as soon as it is there; a conversation stays on one, which has its prefix."""
        vocabulary = text_config(causal_lm(self.model).config).vocab_size
        started, made, count, waiting = time.perf_counter(), 0, 0, 0
        answers: Queue[tuple[int, Completion | Exception]] = Queue()
        servers = self._ready()

        def answer(number: int, request: Request) -> None:
            try:
                answers.put((number, self._ask_any(servers, request)))
            except Exception as error:  # carried to the thread that waits
                answers.put((number, error))

        with ThreadPoolExecutor(min(self.slots * len(servers), source.most), "vllm") as pool:
            while (ready := source.take(wait=not waiting)) is not None:
                for request in ready:
                    check_request(request, self.max_context, vocabulary)
                    pool.submit(answer, count, request)
                    count, waiting = count + 1, waiting + 1
                with suppress(Empty):  # look for new requests again soon
                    number, completed = answers.get(timeout=LOOK_EVERY_S)
                    waiting -= 1
                    if isinstance(completed, Exception):
                        raise completed
                    made += completed.token_ids.numel()
                    source.finish(number, completed)
        self.stats = EngineStats(generated_tokens=made, seconds=time.perf_counter() - started)

    def _ask_any(self, servers: Sequence[Server], request: Request) -> Completion:
        """The answer of the request's own server, or of the next one that is not lost."""
        lost: Exception = ServerLost("all were lost before")
        first = hash(request.prompt_ids if request.conversation is None else request.conversation)
        for place in range(len(servers)):
            server = servers[(first + place) % len(servers)]
            for _ in range(0 if server in self._out else ATTEMPTS):
                try:
                    return self._ask(server, request)
                except ServerLost as error:
                    lost = error
                    if isinstance(error, ServerTimeout) or not self._is_ours(server):
                        self._lose(server, str(error))
                        break
            self._resent += 1
        raise TrainingStopped(f"no vLLM server could answer, the last: {lost}")

    def metrics(self) -> dict[str, Metric]:
        alive, lost, resent = len(self.servers) - len(self._out), self._lost, self._resent
        self._lost = self._resent = 0
        return {
            "rollout/servers": Mean(alive),
            "rollout/servers_lost": Sum(lost),
            "rollout/requests_resent": Sum(resent),
        }

    # ---- servers

    def _check_fit(self, server: Server) -> None:
        """A push of another shape would break the server for good; better to see now that it has another model."""
        try:
            state = server.rpc("luffy_state")
        except ServerLost as error:
            raise UserError(f"vLLM server does not answer: {error}") from None
        ours, theirs = model_fields(causal_lm(self.model).config), state["config"]
        different = [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]
        if different:
            name = sorted(different)[0]
            raise UserError(
                f"{server.url} serves another model: its {name} is {theirs[name]}, the policy's is {ours[name]}; "
                f"start it with the same model.path"
            )
        if state["max_context"] < self.max_context:
            raise UserError(
                f"{server.url} takes {state['max_context']} tokens, but {self.max_context} are needed for the longest "
                f"prompt and response; raise rollout.vllm.max_context there"
            )

    def _ready(self) -> list[Server]:
        """Servers that answer and have our weights. One that came back or was restarted gets them again."""
        stale: list[Server] = []

        def look(server: Server) -> None:
            self._check_if_lost(server)
            if server.rpc("luffy_state")["version"] != self.version or server in self._out:
                stale.append(server)

        lost = on_all_servers(self.servers, look)
        for server in lost:
            self._lose(server, "it does not answer")
        if stale:
            self.warn(
                f"vLLM server {', '.join(s.url for s in stale)} has other weights: pushing version {self.version}"
            )
            self._push(self.version, stale)
        return self._alive()

    def _push(self, version: int, servers: Sequence[Server]) -> None:
        lost = on_all_servers(servers, self._check_if_lost)
        reached = [server for server in servers if server not in lost]
        lost += self.transfer.push(self.model, version, reached) if reached else []
        pushed = [server for server in servers if server not in lost]
        lost += on_all_servers(pushed, lambda server: server.post("reset_prefix_cache", {}))
        for server in servers:
            if server in lost:
                self._lose(server, "it was lost while weights were pushed")
            elif server in self._out:
                self._out.discard(server)
                self.warn(f"vLLM server {server.url} is back with version {version}")
        self._alive()

    def _check_if_lost(self, server: Server) -> None:
        """One that is stuck would take the time of a response, again at every step; asked for its health it has
        seconds."""
        if server in self._out:
            server.check_health()

    def _lose(self, server: Server, why: str) -> None:
        if server not in self._out:
            self._out.add(server)
            self._lost += 1
            self.warn(f"vLLM server {server.url} is lost ({why}); its requests go to the others")

    def _alive(self) -> list[Server]:
        alive = [server for server in self.servers if server not in self._out]
        if not alive:
            raise TrainingStopped(
                f"no vLLM server is left of {', '.join(s.url for s in self.servers)}; start one again"
            )
        return alive

    # ---- requests

    def _run(
        self, dispatch: Dispatch[Server], requests: Sequence[Request], progress: OnProgress | None
    ) -> list[Completion]:
        def ask(server: Server, index: int) -> Completion:
            return self._ask(server, requests[index])

        try:
            return ask_all(dispatch, ask, self._is_ours, self.slots, progress)
        except ServerLost as error:
            for server, why in dispatch.lost.items():
                self._lose(server, why)
            slow = isinstance(error, ServerTimeout)
            remedy = "; raise rollout.vllm.timeout_s if its responses are that long" if slow else ""
            raise TrainingStopped(f"no vLLM server could answer, the last: {error}{remedy}") from None

    def _is_ours(self, server: Server) -> bool:
        """A server that was restarted meanwhile is well but has other weights: it is lost until the next sync."""
        try:
            server.check_health()
            return bool(server.rpc("luffy_state")["version"] == self.version)
        except (ServerLost, UserError):
            return False

    def _ask(self, server: Server, request: Request) -> Completion:
        body = completion_body(request, server.adapter or self._names[server], self.seeded)
        choice = server.post("v1/completions", body)["choices"][0]
        return completion(request, choice["token_ids"], choice["logprobs"]["token_logprobs"])
