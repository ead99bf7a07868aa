"""Episodes of a teacher behind a server: it calls tools, the environment answers, and so on to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from luffy.conversations import Scoring
from luffy.data.prompts import with_text
from luffy.environments.answers import as_reply, as_reward, as_text
from luffy.environments.protocol import Environment, Turn
from luffy.environments.protocol import Reply as Answer
from luffy.environments.workers import Fault, Workers
from luffy.errors import UserError
from luffy.prepare.endpoint import CUT_OFF, Reply
from luffy.types import EpisodeOutcome, Message, Problem

Chat = tuple[Message, ...]


class Failed(Exception):
    """A call of the environment that raised or took too long."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EndpointEpisode:
    """One episode. ``ask`` gives the server's reply to a chat, ``prompt_of`` the chat of a problem. The server limits
    the tokens of a turn; an episode is limited in turns, and in the time of a call of the environment."""

    def __init__(self, rules: Scoring, ask: Callable[[Chat], Reply], prompt_of: Callable[[Problem], Chat]) -> None:
        self.rules, self.ask, self.prompt_of = rules, ask, prompt_of
        self._workers = Workers(1, rules.cfg.timeout_s)
        self._environment: Environment | None = None
        self._is_over = False
        self._turns = self._calls = 0
        self._faults: list[str] = []
        self._rewards: list[float] = []
        self._messages: list[Message] = []

    def play(self, problem: Problem, seed: int) -> EpisodeOutcome:
        """Play to the end and close the environment; raises what ``ask`` raises."""
        reward = None
        try:
            text = self._call(self._start, problem, seed)
            end, message = self._play_turns(self.prompt_of(with_text(problem, text) if text else problem))
            if self.rules.counts_reward and self._environment is not None:
                reward = self._call(self._reward)
        except Failed as failed:
            end, message = failed.kind, str(failed)
            self._faults.append(end)
        finally:
            self._close()
        return EpisodeOutcome(
            end, self._turns, self._calls, tuple(self._faults), reward, tuple(self._rewards), message,
            tuple(self._messages),
        )  # fmt: skip

    def _play_turns(self, prompt: Chat) -> tuple[str, str]:
        """How the turns end, and why if they fail."""
        while True:
            reply = self.ask((*prompt, *self._messages))
            self._turns += 1
            self._calls += len(reply.calls)
            self._messages.append(Message("assistant", reply.text, reply.calls))
            if reply.fault:
                self._faults.append("unreadable_call")
                return "bad_call", reply.fault
            if reply.finish in CUT_OFF:
                return "tokens", ""
            answered: Answer = self._call(self._reply, Turn(reply.text, reply.calls))
            self._faults += answered.faults
            self._rewards.append(answered.reward or 0.0)
            if answered.done or not answered.messages:
                return "environment" if reply.calls else "answer", ""
            if answered.faults and self.rules.cfg.on_bad_call == "end":
                return "bad_call", ""
            if self._turns >= self.rules.cfg.max_turns:
                return "turns", ""
            self._messages += answered.messages

    def _start(self, problem: Problem, seed: int) -> str:
        self._environment = environment = self.rules.maker.make()
        if self._is_over:  # that took too long, and perhaps nobody else knows of it
            environment.close()
            return ""
        return as_text(environment.start(problem, seed))

    def _reply(self, turn: Turn) -> Answer:
        assert self._environment is not None
        return as_reply(self._environment.reply(turn))

    def _reward(self) -> float | None:
        assert self._environment is not None
        return as_reward(self._environment.reward())

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call under the time limit."""
        self._workers.submit("", function, *args)
        ((_, result),) = self._workers.finished(block=True)
        if not isinstance(result, Fault):
            return result
        if isinstance(result.error, UserError):
            raise result.error  # it would be the same in every episode
        raise Failed(result.kind, result.message)

    def _close(self) -> None:
        self._is_over = True
        if self._environment is not None:
            self._workers.submit("", self._environment.close)
            self._workers.finished(block=True)
        self._workers.close()
