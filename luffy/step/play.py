"""Play: planned episodes become finished and scored ones. Training and held-out evaluation go through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import compress
from typing import Any

from torch import Tensor

from luffy.conversations import Conversations, as_seen, played
from luffy.guidance.plan import extended, unwritten
from luffy.models.load import decode
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.run_folder.timing import Stopwatch
from luffy.step.groups import grouped, score, scored_by_both
from luffy.step.run_state import Run, StepBatch
from luffy.types import NO_LIMIT, Completion, Episode, Group, Sampling, Score, Task

Response = tuple[int, Task, Tensor | list[int]]  # its number, the task, its token ids
DECODED_AT_ONCE = 64


class EarlyScores(AbstractContextManager["EarlyScores"]):
    """One thread decodes responses, a part at a time, another scores all that were decoded while it was busy."""

    def __init__(self, verifier: Verifier, tokenizer: Any) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._threads = ThreadPoolExecutor(1, "decoding"), ThreadPoolExecutor(1, "rewards")
        self._decoded: deque[tuple[int, Task, str]] = deque()
        self._calls: list[Future[None]] = []
        self._scores: dict[int, Score] = {}

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def add(self, responses: Sequence[Response]) -> None:
        """Each has a number of its own."""
        for start in range(0, len(responses), DECODED_AT_ONCE):
            part = responses[start : start + DECODED_AT_ONCE]
            self._calls.append(self._threads[0].submit(self._decode, part))

    def in_order(self) -> list[Score]:
        """All scores in the order of their numbers; waits for those that are missing."""
        for call in self._calls:  # one that decodes appends the one that scores
            call.result()
        return [self._scores[number] for number in sorted(self._scores)]

    def _decode(self, part: Sequence[Response]) -> None:
        texts = decode(self._tokenizer, [ids for _, _, ids in part])
        self._decoded.extend((number, task, text) for (number, task, _), text in zip(part, texts, strict=True))
        self._calls.append(self._threads[1].submit(self._score_decoded))

    def _score_decoded(self) -> None:
        decoded = [self._decoded.popleft() for _ in range(len(self._decoded))]
        if decoded:
            scores = self._verifier.score([(task.problem, text, None, task.in_thought) for _, task, text in decoded])
            self._scores |= zip((number for number, _, _ in decoded), scores, strict=True)


Episodes = list[tuple[Episode, ...]]  # by problem
Count = Callable[[int, int], None]


def play(run: Run, planned: Episodes, batch: StepBatch) -> list[Group]:
    """The groups of planned episodes: the engine draws what is missing, the verifier scores every response. With
    `rollout.max_tokens_per_step` an episode gets at most so many tokens; a group has no scores until all have ended."""
    assert run.verifier is not None
    most = run.cfg.rollout.max_tokens_per_step
    player = Player(
        run.engine, run.verifier, run.tokenizer, batch.version, batch.progress, batch.watch, run.conversations
    )
    return player.play(planned, most)


class Player:
    """Plays episodes with an engine, a verifier and, if there are any, environments. ``version``: of the policy that
    the engine has; ``count(done, total)`` hears of each response that ends."""

    def __init__(
        self, engine: Engine, verifier: Verifier, tokenizer: Any, version: int, count: Count,
        watch: Stopwatch | None = None, conversations: Conversations | None = None,
    ) -> None:  # fmt: skip
        self.conversations = conversations
        self.engine, self.verifier, self.tokenizer = engine, verifier, tokenizer
        self.version, self.count, self.watch = version, count, watch or Stopwatch()

    def answer(self, seeds: Sequence[tuple[Task, Sequence[int]]], sampling: Sampling) -> list[Group]:
        """The groups of tasks with one response of the policy alone for each seed."""
        return self.play([tuple(unwritten(task, seed, sampling) for seed in of_task) for task, of_task in seeds])

    def play(self, planned: Episodes, most: int | None = None) -> list[Group]:
        """Every episode to its end, or at most ``most`` tokens of each; a group of which one is not finished has no
        scores. If engine and verifier can, responses are scored while others are being drawn."""
        if self.conversations is not None:
            return self._play_turns(self.conversations, planned, most)
        early = most is None and self.verifier.may_score_early
        if early and type(self.engine) is NativeEngine:  # others do not tell of each that ends
            return self._play_scoring_early(self.engine, planned)
        episodes, asked = self._asked(planned)
        with self.watch("rollout"):
            completions = self.engine.generate([episodes[i].request_for(most or NO_LIMIT) for i in asked], self.count)
            self._extend(episodes, zip(asked, completions, strict=True), in_parts=most is not None)
        return self._scored(regrouped(planned, episodes), lambda groups: score(groups, self.verifier, self.tokenizer))

    def _play_turns(self, rules: Conversations, planned: Episodes, most: int | None) -> list[Group]:
        """Episodes with an environment. A whole trace is played only if the environment has to score it."""
        episodes, asked = self._asked(planned)
        if rules.counts_reward:
            asked = [i for i, e in enumerate(episodes) if e.sampling and (e.finish is None or e.outcome is None)]
        with self.watch("rollout"):
            ended = played(rules, self.engine, [episodes[i] for i in asked], self.version, self.count, most)
        episodes = [as_seen(rules, episode) for episode in episodes]
        for i, episode in zip(asked, ended, strict=True):
            episodes[i] = episode
        groups = self._scored(
            regrouped(planned, episodes), lambda whole: scored_by_both(whole, self.verifier, self.tokenizer, rules)
        )
        # An episode's task has what its environment said first; the group's has not.
        return [replace(group, task=of_plan[0].task) for group, of_plan in zip(groups, planned, strict=True)]

    def _scored(self, groups: Episodes, judge: Callable[[Episodes], list[Group]]) -> list[Group]:
        """The groups with their scores; one that has an unfinished episode gets none."""
        finished = [all(episode.finish is not None for episode in group) for group in groups]
        with self.watch("reward"):
            scored = iter(judge(list(compress(groups, finished))))
        pairs = zip(groups, finished, strict=True)
        return [next(scored) if is_finished else Group(group[0].task, group, ()) for group, is_finished in pairs]

    def _play_scoring_early(self, engine: NativeEngine, planned: Episodes) -> list[Group]:
        episodes, asked = self._asked(planned)
        with EarlyScores(self.verifier, self.tokenizer) as early:

            def judge(numbers: Iterable[int]) -> None:
                early.add([(i, episodes[i].task, episodes[i].token_ids) for i in numbers])

            def take(part: Sequence[tuple[int, Completion]]) -> None:
                self._extend(episodes, ((asked[k], completion) for k, completion in part))
                judge(asked[k] for k, _ in part)

            with self.watch("rollout"):
                judge(i for i, episode in enumerate(episodes) if episode.finish is not None)  # whole traces
                engine.generate([episodes[i].request_for() for i in asked], self.count, take)
            with self.watch("reward"):
                return grouped(regrouped(planned, episodes), early.in_order(), self.verifier)

    def _asked(self, planned: Episodes) -> tuple[list[Episode], list[int]]:
        """All episodes, and the numbers of those that the engine continues. A whole trace gets the current version."""
        every = [episode for group in planned for episode in group]
        now = [replace(e, policy_version=self.version) if e.finish == "trace" else e for e in every]
        return now, [i for i, episode in enumerate(now) if episode.finish is None]

    def _extend(self, episodes: list[Episode], drawn: Iterable[tuple[int, Completion]], in_parts: bool = False) -> None:
        for i, completion in drawn:
            episodes[i] = extended(episodes[i], completion, self.version, in_parts)


def regrouped(planned: Episodes, episodes: Iterable[Episode]) -> Episodes:
    """The episodes in groups as large as the planned ones."""
    following = iter(episodes)
    return [tuple(next(following) for _ in group) for group in planned]
