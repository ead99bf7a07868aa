"""Play: planned episodes become finished and scored ones. Training and held-out evaluation go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from luffy.conversations import Conversations, played
from luffy.guidance.plan import extended, unwritten
from luffy.rewards import Verifier
from luffy.rollout.engine import Engine
from luffy.rollout.native import NativeEngine
from luffy.run_folder.timing import Stopwatch
from luffy.step.batch import StepBatch
from luffy.step.early_scores import EarlyScores
from luffy.step.groups import grouped, score, scored_by_both
from luffy.step.run_state import Run
from luffy.types import Completion, Episode, Group, Sampling, Task

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
    return player.play(planned) if most is None else player.play_in_parts(planned, most)


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

    def play(self, planned: Episodes) -> list[Group]:
        """Every episode to its end. If engine and verifier can, responses are scored while others are being drawn."""
        if self.conversations is not None:
            return self._play_turns(self.conversations, planned)
        if type(self.engine) is NativeEngine and self.verifier.may_score_early:  # others do not tell of each that ends
            return self._play_scoring_early(self.engine, planned)
        episodes, asked = self._asked(planned)
        with self.watch("rollout"):
            completions = self.engine.generate([episodes[i].request_for() for i in asked], self.count)
            self._extend(episodes, zip(asked, completions, strict=True))
        with self.watch("reward"):
            return score(regrouped(planned, episodes), self.verifier, self.tokenizer)

    def _play_turns(self, rules: Conversations, planned: Episodes) -> list[Group]:
        """Episodes with an environment. A whole trace is played only if the environment has to score it."""
        episodes, asked = self._asked(planned)
        if rules.counts_reward:
            asked = [i for i, episode in enumerate(episodes) if episode.sampling is not None]
        with self.watch("rollout"):
            ended = played(rules, self.engine, [episodes[i] for i in asked], self.version, self.count)
        for i, episode in zip(asked, ended, strict=True):
            episodes[i] = episode
        with self.watch("reward"):
            return scored_by_both(regrouped(planned, episodes), self.verifier, self.tokenizer, rules)

    def play_in_parts(self, planned: Episodes, most: int) -> list[Group]:
        """At most ``most`` tokens of every episode; a group of which one is not finished has no scores."""
        episodes, asked = self._asked(planned)
        with self.watch("rollout"):
            completions = self.engine.generate([episodes[i].request_for(most) for i in asked], self.count)
            self._extend(episodes, zip(asked, completions, strict=True), in_parts=True)
        groups = regrouped(planned, episodes)
        finished = [all(episode.finish is not None for episode in group) for group in groups]
        with self.watch("reward"):
            whole = [group for group, is_whole in zip(groups, finished, strict=True) if is_whole]
            scored = iter(score(whole, self.verifier, self.tokenizer))
        pairs = zip(groups, finished, strict=True)
        return [next(scored) if is_whole else Group(group[0].task, group, ()) for group, is_whole in pairs]

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
