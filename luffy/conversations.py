"""Episodes with an environment: the engine draws a turn, the environment answers it, and so on to the end.

    start -> [replay turns] -> turn -> reply -> turn -> ... -> reward -> close

Turns that an episode begins with, a teacher's or the policy's own of an earlier step, are replayed: a new environment
answers them, and must answer as recorded.

The engine runs all the while (`Engine.serve`) and asks for requests that are ready. Every call of an environment is
made by a thread under a time limit, so a slow one keeps no other episode waiting. Tokens are appended and never
rendered again: what is trained is what the engine drew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor

from luffy.config import Config, EnvironmentConfig
from luffy.data import Encoder
from luffy.environments.answers import as_reply, as_reward, as_text
from luffy.environments.call_formats import format_of, read_turn
from luffy.environments.kinds import Maker, maker_for
from luffy.environments.protocol import Environment, Reply, Turn
from luffy.environments.workers import Fault, Workers
from luffy.errors import ConfigError, DataError, UserError
from luffy.guidance.plan import as_planned, extended, unwritten, with_reply
from luffy.rollout.engine import Engine
from luffy.types import (
    NO_LIMIT,
    Author,
    Completion,
    Episode,
    EpisodeOutcome,
    Finish,
    Group,
    Message,
    Request,
    Score,
    Task,
    is_drawn,
    spans,
)

CLOSING_S = 5.0  # how long a run that ends waits for its environments to close
ENDS: dict[str, Finish] = {"answer": "stop", "turns": "length", "tokens": "length", "context": "length"}
DIFFERS = "differs"  # the environment answered otherwise than recorded
Span = tuple[int, int]


@dataclass(frozen=True)
class Scoring:
    """How episodes with an environment are scored."""

    cfg: EnvironmentConfig
    maker: Maker
    failure: float  # what an episode scores whose environment fails

    @property
    def counts_reward(self) -> bool:
        """Whether the environment's own reward is part of an episode's."""
        return self.cfg.reward != "verifier" and self.maker.gives_reward

    @property
    def asks_verifier(self) -> bool:
        return self.cfg.reward in ("verifier", "sum") or not self.maker.gives_reward

    @property
    def weight(self) -> float:
        """What the environment's rewards count in an episode's."""
        if not self.counts_reward:
            return 0.0
        return self.cfg.weight if self.asks_verifier else 1.0

    def score(self, outcome: EpisodeOutcome | None, verified: Score) -> Score:
        """The score of an episode from the verifier's and the environment's."""
        if outcome is None:
            return verified
        if outcome.is_failure:
            return Score(self.failure, f"environment_{outcome.end}", f"the environment: {outcome.message}")
        if not self.counts_reward:
            return verified
        own = outcome.reward or 0.0
        if not self.asks_verifier:
            return Score(own)
        parts = {"verifier": verified.value, "environment": own}
        return replace(verified, value=verified.value + self.weight * own, components=parts)


@dataclass(frozen=True)
class Conversations(Scoring):
    """What the episodes of a run are played with."""

    encoder: Encoder
    call_format: str
    most_tokens: int  # behind a prompt, replies included

    @property
    def longest(self) -> int:
        return self.encoder.max_prompt_tokens + self.most_tokens

    def turn(self, token_ids: Sequence[int], in_thought: bool) -> Turn:
        """What the tokens of a turn say. ``in_thought``: it began inside a thought that the template opened."""
        return read_turn(self.encoder.text_of_turn(token_ids), self.call_format, in_thought)


@dataclass
class Seat:
    """An episode that is being played. ``given``: what it begins with, and ``drawn_before`` how many of those tokens
    the policy drew."""

    number: int
    episode: Episode
    environment: Environment | None = None
    is_open: bool = False
    turns: int = 0
    calls: int = 0
    faults: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    messages: list[Message] = field(default_factory=list)  # all turns and replies
    replaying: Literal["", "teacher", "policy"] = ""  # whose turn the environment answers once more
    replayed: int = 0  # tokens that it has answered, with its replies
    trace_left_out: bool = False
    observation: str = ""  # what it said first
    given: Episode = field(init=False)
    drawn_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.drawn_before = self.episode, self.episode.drawn

    @cached_property
    def replies(self) -> list[Span]:
        """Where the environment's replies are recorded in what the episode begins with."""
        return spans(self.given.authors == Author.ENVIRONMENT)

    @property
    def turn_to_replay(self) -> Span | None:
        """Start and end of the next turn that a new environment has not answered."""
        whole = self.given.token_ids.numel()
        start, end = self.replayed, next((start for start, _ in self.replies if start > self.replayed), whole)
        return None if start >= whole or (end == whole and self.goes_on_in_its_turn) else (start, end)

    @property
    def goes_on_in_its_turn(self) -> bool:
        """Whether the last of what it begins with is a part of a turn. Only a part of a trace of several turns, and a
        whole trace, end with a whole turn."""
        trace = None if self.drawn_before else self.given.trace
        return trace is None or (self.given.finish is None and not trace.replies)

    @property
    def recorded_reply(self) -> Tensor:
        """What is recorded behind the turn that was replayed; nothing behind the last one."""
        end = next((end for start, end in self.replies if start == self.replayed), 0)
        return self.given.token_ids[self.replayed : end]

    def anew(self, task: Task) -> Seat:
        """The seat of an episode that the environment did not answer as recorded: one of an earlier step is drawn anew,
        which counts as a fault; one that only begins with a trace becomes one of the policy's own."""
        given = self.given
        assert given.sampling is not None
        if not self.drawn_before:
            taken = 0 if given.finish == "trace" else given.length  # a whole trace took no tokens of the limit
            own = replace(given.sampling, max_tokens=given.sampling.max_tokens + taken)
            return Seat(self.number, unwritten(task, given.seed, own), trace_left_out=True)
        faults = [DIFFERS, *(fault for fault in self.faults if fault == DIFFERS)]
        fresh = replace(as_planned(given), task=task)
        return Seat(self.number, fresh, faults=faults, trace_left_out=self.trace_left_out)

    def outcome(self, end: str, message: str) -> EpisodeOutcome:
        return EpisodeOutcome(
            end, self.turns, self.calls, tuple(self.faults), self.reward, tuple(self.rewards), message,
            tuple(self.messages), self.trace_left_out, self.observation,
        )  # fmt: skip


class Table(AbstractContextManager["Table"]):
    """Plays a number of episodes: what an engine serves. ``version``: of the policy; ``count(done, total)`` hears of
    each episode that ends; ``budget``: tokens that are drawn of an episode, which then goes on another time (None: any
    number)."""

    def __init__(
        self, rules: Conversations, episodes: Sequence[Episode], version: int, count: Callable[[int, int], None],
        budget: int | None = None,
    ) -> None:  # fmt: skip
        self.rules, self.version, self.count, self.budget = rules, version, count, budget
        self.seats = [_seat(i, episode) for i, episode in enumerate(episodes)]
        self._tasks = [episode.task for episode in episodes]  # without what an environment says first
        self.most, self.longest = min(len(self.seats), rules.cfg.at_once), rules.longest
        self._workers = Workers(rules.cfg.at_once, rules.cfg.timeout_s)
        self._waiting = list(reversed(self.seats))
        self._open = 0  # environments
        self._over = 0  # episodes
        self._ready: list[Seat] = []
        self._asked: list[Seat] = []
        self._ended: list[int] = []

    def __exit__(self, *_: object) -> None:
        for seat in self.seats:
            self._close(seat)
        give_up_at = time.monotonic() + CLOSING_S
        while self._workers.outstanding and time.monotonic() < give_up_at:
            time.sleep(0.001)
        self._workers.close()

    # --- the engine's side ---

    def take(self, wait: bool) -> list[Request] | None:
        self._begin()
        self._hear(block=False)
        while wait and not self._ready and self._over < len(self.seats):
            self._hear(block=True)
        if self._over == len(self.seats):
            return None
        ready, self._ready = self._ready, []
        self._asked += ready
        return [self._request(seat) for seat in ready]

    def finish(self, number: int, completion: Completion) -> None:
        seat = self._asked[number]
        seat.replaying = ""
        seat.episode = extended(seat.episode, completion, self.version, in_parts=self.budget is not None)
        if seat.episode.finish is None and self._room(seat) > 0:
            self._pause(seat)
            return
        seat.turns += 1
        if completion.finish == "length":
            self._end(seat, "tokens")
        else:
            self._submit_turn(seat, seat.episode.token_ids[seat.replayed :])

    def ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def _request(self, seat: Seat) -> Request:
        most = min(self._room(seat), self._budget_left(seat))
        return replace(seat.episode.request_for(most), conversation=seat.number)

    def _room(self, seat: Seat) -> int:
        """Tokens that the episode may still have."""
        return self.rules.most_tokens - seat.episode.token_ids.numel()

    def _budget_left(self, seat: Seat) -> int:
        return NO_LIMIT if self.budget is None else self.budget + seat.drawn_before - seat.episode.drawn

    # --- the environments' side ---

    def _begin(self) -> None:
        """Open environments as long as there may be more."""
        while self._waiting and self._open < self.rules.cfg.at_once:
            self._start(self._waiting.pop())

    def _start(self, seat: Seat) -> None:
        self._open, seat.is_open = self._open + 1, True
        self._workers.submit((seat.number, "started"), self._make, seat)

    def _make(self, seat: Seat) -> str:
        seat.environment = environment = self.rules.maker.make()
        if not seat.is_open:  # that took too long, and nobody else knows of it
            environment.close()
            return ""
        return as_text(environment.start(seat.episode.task.problem, seat.episode.seed))

    def _hear(self, block: bool) -> None:
        """Take in what environments have done."""
        for key, result in self._workers.finished(block):
            number, what = cast(tuple[int, str], key)
            seat = self.seats[number]
            if what == "closed":
                continue
            if isinstance(result, Fault) and isinstance(result.error, UserError):
                raise result.error  # it would be the same in every episode
            if not isinstance(result, Fault):
                getattr(self, f"_{what}")(seat, result)
            elif what == "rewarded":
                seat.faults.append(result.kind)
                self._leave(seat, result.kind, result.message)
            else:
                self._end(seat, result.kind, result.message)
        self._begin()

    def _started(self, seat: Seat, text: str) -> None:
        try:
            task = self.rules.encoder.with_observation(seat.episode.task, text) if text else seat.episode.task
        except DataError as error:  # it makes the prompt too long
            if self.rules.encoder.overlong_prompt == "error":
                raise
            self._end(seat, "raised", str(error))
            return
        if seat.given.outcome is not None and seat.given.outcome.observation != text:
            self._begin_anew(seat)
            return
        seat.episode, seat.observation = replace(seat.episode, task=task), text
        self._go_on(seat)

    def _go_on(self, seat: Seat) -> None:
        """Replay the next turn, or have the engine draw one."""
        if (span := seat.turn_to_replay) is None:
            self._ready.append(seat)
            return
        start, seat.replayed = span
        is_own = bool(is_drawn(seat.given.authors[start : seat.replayed]).any())
        seat.replaying, seat.turns = "policy" if is_own else "teacher", seat.turns + is_own
        self._submit_turn(seat, seat.episode.token_ids[start : seat.replayed])

    def _submit_turn(self, seat: Seat, token_ids: Tensor) -> None:
        turn = self.rules.turn(token_ids.tolist(), seat.episode.task.in_thought)
        if seat.replaying != "teacher":
            seat.calls += len(turn.calls)
        seat.messages.append(Message("assistant", turn.text if turn.fault else turn.content, turn.calls))
        if turn.fault and self.rules.cfg.on_bad_call == "end" and not seat.replaying:
            seat.faults.append("unreadable_call")
            self._end(seat, "bad_call", turn.fault)
            return
        assert seat.environment is not None
        self._workers.submit((seat.number, "replied"), self._reply, seat, turn)

    def _reply(self, seat: Seat, turn: Turn) -> tuple[Turn, Reply]:
        assert seat.environment is not None
        return turn, as_reply(seat.environment.reply(turn))

    def _reward(self, seat: Seat) -> float | None:
        assert seat.environment is not None
        return as_reward(seat.environment.reward())

    def _replied(self, seat: Seat, answered: tuple[Turn, Reply]) -> None:
        turn, reply = answered
        seat.faults += () if seat.replaying == "teacher" else reply.faults
        seat.rewards.append(self.rules.weight * (reply.reward or 0.0))
        is_over = reply.done or not reply.messages
        if seat.replaying:
            self._replayed(seat, reply, is_over)
        elif is_over:
            self._end(seat, "answer" if not turn.calls and not turn.fault else "environment")
        elif reply.faults and self.rules.cfg.on_bad_call == "end":
            self._end(seat, "bad_call")
        elif seat.turns >= self.rules.cfg.max_turns:
            self._end(seat, "turns")
        else:
            self._append(seat, reply)

    def _append(self, seat: Seat, reply: Reply) -> None:
        """Put a reply behind the episode, if there is room for it and a turn."""
        ids = torch.tensor(self.rules.encoder.reply_ids(reply.messages), dtype=torch.long)
        episode = seat.episode
        if episode.token_ids.numel() + ids.numel() >= self.rules.most_tokens:
            self._end(seat, "context")
            return
        if episode.sampling is not None and episode.drawn >= episode.sampling.max_tokens:
            self._end(seat, "tokens")
            return
        seat.episode = with_reply(episode, ids)
        seat.messages += reply.messages
        seat.replayed = seat.episode.token_ids.numel()
        if self._budget_left(seat) > 0:
            self._ready.append(seat)
        else:
            self._pause(seat)

    # --- turns that are replayed ---

    def _replayed(self, seat: Seat, reply: Reply, is_over: bool) -> None:
        """The environment answered once more: it must answer as the record has it."""
        recorded, is_last = seat.recorded_reply, seat.replayed == seat.given.token_ids.numel()
        if is_last and seat.episode.finish == "trace":
            self._end(seat, "trace")  # the whole trace
        elif is_over:
            self._begin_anew(seat)
        elif is_last:
            self._append(seat, reply)
        elif recorded.tolist() == list(self.rules.encoder.reply_ids(reply.messages)):
            seat.replayed += recorded.numel()
            seat.messages += reply.messages
            self._go_on(seat)
        else:
            self._begin_anew(seat)

    def _begin_anew(self, seat: Seat) -> None:
        """The environment does not answer as the record says."""
        if seat.given.sampling is None:  # there is nothing to draw it with
            self._end(seat, DIFFERS)
            return
        self._close(seat)
        self.seats[seat.number] = new = seat.anew(self._tasks[seat.number])
        self._start(new)

    # --- the end ---

    def _end(self, seat: Seat, how: str, message: str = "") -> None:
        failed = how in ("raised", "timed_out")
        if failed:
            seat.faults.append(how)
        if failed or not self.rules.counts_reward:
            self._leave(seat, how, message)
            return
        seat.episode = replace(seat.episode, outcome=seat.outcome(how, message))
        self._workers.submit((seat.number, "rewarded"), self._reward, seat)

    def _rewarded(self, seat: Seat, reward: float | None) -> None:
        outcome = seat.episode.outcome
        assert outcome is not None
        seat.reward = reward
        self._leave(seat, outcome.end, outcome.message)

    def _leave(self, seat: Seat, how: str, message: str = "") -> None:
        finish = "trace" if seat.episode.finish == "trace" else ENDS.get(how, "environment")
        self._free(seat, seat.outcome(how, message), finish)

    def _pause(self, seat: Seat) -> None:
        """The episode has had its budget and is not at its end."""
        self._free(seat, seat.outcome("under_way", ""), None)

    def _free(self, seat: Seat, outcome: EpisodeOutcome, finish: Finish | None) -> None:
        seat.episode = replace(seat.episode, outcome=outcome, finish=finish)
        self._over += 1
        self._ended.append(seat.number)
        self._close(seat)
        self.count(self._over, len(self.seats))

    def _close(self, seat: Seat) -> None:
        if seat.is_open:
            self._open, seat.is_open = self._open - 1, False
            if seat.environment is not None:
                self._workers.submit((seat.number, "closed"), seat.environment.close)


def _seat(number: int, episode: Episode) -> Seat:
    """The seat of an episode, which may go on from an earlier step."""
    before = episode.outcome or EpisodeOutcome("")
    faults = [fault for fault in before.faults if fault == DIFFERS]  # the others come again
    return Seat(number, episode, faults=faults, trace_left_out=before.trace_left_out)


def played(
    rules: Conversations,
    engine: Engine,
    episodes: Sequence[Episode],
    version: int = 0,
    count: Callable[[int, int], None] = lambda done, total: None,
    budget: int | None = None,
) -> list[Episode]:
    """The episodes, played with an engine to their end, or until ``budget`` tokens of each are drawn."""
    with Table(rules, episodes, version, count, budget) as table:
        if episodes:
            engine.serve(table)
        return [seat.episode for seat in table.seats]


def replayed(rules: Conversations, traces: Sequence[Episode]) -> list[Episode]:
    """Whole traces, played in their environments; no engine is asked."""
    with Table(rules, traces, 0, lambda done, total: None) as table:
        left = table.take(wait=True)
        assert left is None, "a whole trace needs no engine"
        return [seat.episode for seat in table.seats]


def as_seen(rules: Conversations, episode: Episode) -> Episode:
    """A finished episode of an earlier step, with a task that has what its environment said first."""
    if episode.outcome is None or not episode.outcome.observation:
        return episode
    return replace(episode, task=rules.encoder.with_observation(episode.task, episode.outcome.observation))


def without_failures(rules: Conversations | None, group: Group) -> Group:
    """The group without episodes whose environment failed, if they are to be left out, unless that is all of them."""
    if rules is None or rules.cfg.on_failure != "leave_out":
        return group
    kept = [i for i, r in enumerate(group.rollouts) if r.outcome is None or not r.outcome.is_failure]
    if not kept:
        return group
    return Group(group.task, tuple(group.rollouts[i] for i in kept), tuple(group.scores[i] for i in kept))


def build_conversations(cfg: Config, encoder: Encoder) -> Conversations | None:
    """What the episodes of a run are played with; None without an environment."""
    return conversations_of(cfg.environment, encoder, cfg.longest_response, cfg.reward.failure)


def conversations_of(
    e: EnvironmentConfig | None, encoder: Encoder, most_tokens: int, failure: float = 0.0
) -> Conversations | None:
    if e is None:
        return None
    call_format = format_of(str(encoder.prompts.template or "")) if e.calls == "auto" else e.calls
    maker = maker_of(e)
    if e.reward in ("environment", "sum") and not maker.gives_reward:
        raise ConfigError(
            f"'environment.reward' is {e.reward}, but {e.name} gives no reward; give it get_reward, or set auto"
        )
    return Conversations(e, maker, failure, encoder, call_format, most_tokens)


def maker_of(e: EnvironmentConfig) -> Maker:
    return maker_for(e.name, e.arguments, e.max_reply_chars)


def tools_of(e: EnvironmentConfig | None) -> tuple[Mapping[str, Any], ...]:
    """The tools that the prompts of a run show."""
    return () if e is None else maker_of(e).tools
