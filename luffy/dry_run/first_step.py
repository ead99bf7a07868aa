"""The first step of a run: its plan, and the rewards of its traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from luffy.config import Config
from luffy.conversations import build_conversations
from luffy.data import ProblemSampler
from luffy.guidance import Planner, given
from luffy.rewards import Verifier
from luffy.step.draws import draw_batch, plan
from luffy.step.groups import trace_scores, verified
from luffy.step.memory import MethodMemory
from luffy.step.tasks import TaskSet, uses_traces
from luffy.types import Author, Episode, Task

PROBLEMS_LOOKED_AT, TRACES_VERIFIED = 1000, 64
FEW_CORRECT = 0.8  # of them: fewer is worth a remark


def check_reward(cfg: Config, method: str, tasks: TaskSet, tokenizer: Any, verifier: Verifier) -> str:
    """The rewards of the first traces, as the update would see them."""
    if method == "sft":
        return "not verified: SFT learns from all of them"
    if not uses_traces(cfg):
        return "not used"
    looked_at = (tasks[i] for i in range(min(len(tasks), PROBLEMS_LOOKED_AT)))
    some = list(islice((replace(t, demonstrations=(d,)) for t in looked_at for d in t.demonstrations), TRACES_VERIFIED))
    if not some:
        return f"none with the first {min(len(tasks), PROBLEMS_LOOKED_AT)} problems"
    conversations = build_conversations(cfg, tasks.encoder)
    if conversations is not None and conversations.counts_reward:
        scores = [score for task in some for score in trace_scores(task, verifier, tokenizer, conversations)]
    else:
        scores = verified([(task, task.demonstrations[0].answer_ids) for task in some], verifier, tokenizer)
    correct, failed = sum(cfg.reward.solved(s.value) for s in scores), sum(not s.is_verdict for s in scores)
    doubt = ""
    if failed:
        doubt = f"; {failed} COULD NOT BE SCORED: look at the reward (luffy verify)"
    elif (best := max(s.value for s in scores)) < cfg.reward.success and best > cfg.reward.failure:
        doubt = f"; THE BEST SCORE IS {best:g}, below reward.success={cfg.reward.success:g}"
    elif correct < FEW_CORRECT * len(some):
        doubt = "; CHECK THEM: only correct traces help (luffy prepare check)"
    return f"{correct} of the first {len(some)} are correct by reward {cfg.reward.name}{doubt}"


class FirstStep:
    """The objects that a run plans its first step with."""

    def __init__(self, cfg: Config, tasks: TaskSet, planner: Planner, verifier: Verifier, tokenizer: Any) -> None:
        self.cfg, self.tasks, self.planner = cfg, tasks, planner
        self.sampler, self.memory = ProblemSampler(len(tasks), cfg.seed), MethodMemory(cfg, len(tasks))
        self._scoring = verifier, tokenizer, build_conversations(cfg, tasks.encoder)

    def trace_rewards(self, task: Task) -> list[float]:
        """The reward of each trace of a problem."""
        return [score.value for score in trace_scores(task, *self._scoring)]

    def plan(self) -> list[tuple[Episode, ...]]:
        """The plan of all processes together."""
        return plan(self, draw_batch(self, 0, 0), 0)


def first_traces(cfg: Config, tasks: TaskSet) -> list[Task]:
    """The first batch of SFT."""
    return tasks.at(ProblemSampler(len(tasks), cfg.seed).next(cfg.batch.problems))


def first_turns(tasks: Sequence[Task], tokenizer: Any) -> list[str]:
    """The first trace of several turns, turn by turn with its author; nothing where there is none."""
    found = next(((t, d) for t in tasks for d in t.demonstrations if d.replies), None)
    if found is None:
        return []
    episode = given(*found)
    runs = [list(run) for _, run in groupby(range(episode.token_ids.numel()), key=lambda i: int(episode.authors[i]))]
    said = [(Author(int(episode.authors[run[0]])), tokenizer.decode(episode.token_ids[run])) for run in runs]
    who = {Author.TEACHER: "teacher, trained", Author.ENVIRONMENT: "environment, not trained"}
    return ["first trace, turn by turn:", *(f"--- {who[author]}\n{text.strip()}" for author, text in said)]
