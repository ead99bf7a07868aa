"""What the base does with the run's problems before any training: how many it solves, how likely the traces are to it.

It decides which methods docs/choose.md names for it, in a table that is here too. It is bounded: some problems, some
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from luffy.config import Config
from luffy.conversations import build_conversations
from luffy.guidance.plan import given
from luffy.models.load import eos_ids, load_model
from luffy.models.machine import pick_device
from luffy.rollout.native import NativeEngine
from luffy.seeds import seed_of
from luffy.step.play import Player
from luffy.step.tasks import TaskSet
from luffy.train.build_engines import scores_of
from luffy.types import Demonstration, Group, Request, Sampling, Score, Task

PROBLEMS, SECONDS = 32, 60.0  # at most
TRACE_SECONDS = 20.0  # of them for the traces
FIRST_WAVE = {"cpu": 2, "cuda": 16}  # problems sampled at once; then twice as many, while there is time
PAGE = "docs/choose.md"
TRIES = 8  # samples of a problem, which is solved if one of them is correct
FEW, MANY = 0.05, 0.5  # of the problems, solved: so few, and so many
RARE = 0.05  # a token with a lower probability is unlikely to the base
UNLIKELY = 0.05  # traces with such a fraction of unlikely tokens are
NEVER = 1e-5  # a token with a lower probability is hardly ever sampled, and RL with traces hardly raises it
NEW_TOKENS = 0.002  # traces with such a fraction of these tokens teach something new


class TimeUp(Exception):
    """Raised inside the model when the time of the measurement is over."""


@dataclass(frozen=True)
class Found:
    """``solved`` of ``problems``, those that were sampled in time out of ``asked``. ``probs``: of the tokens of so many
    ``traces``, if the data has any. ``scores``: of all samples."""

    asked: int
    problems: int
    solved: int
    has_traces: bool
    traces: int
    probs: torch.Tensor
    scores: tuple[Score, ...]

    @property
    def solved_share(self) -> float | None:
        return self.solved / self.problems if self.problems else None

    @property
    def unlikely(self) -> float | None:
        """The fraction of tokens below RARE; None if no trace was measured."""
        return self._below(RARE) if self.traces else None

    @property
    def never(self) -> float:
        """The fraction of tokens below NEVER."""
        return self._below(NEVER) if self.traces else 0.0

    def _below(self, limit: float) -> float:
        return float((self.probs < limit).float().mean())

    @property
    def case(self) -> Case | None:
        return case_of(self.solved_share, self.unlikely, self.has_traces, self.never)


def measure(cfg: Config, method: str, tasks: TaskSet, some: Sequence[Task]) -> Found:
    """Loads the weights, and lets go of them. Problems without an answer are not sampled."""
    device, m = pick_device(cfg.model.device), cfg.model
    model = load_model(m.path, m.dtype, device, m.trust_remote_code, m.four_bits)
    began = time.monotonic()
    until = began + TRACE_SECONDS

    def look(*_: object) -> None:
        if time.monotonic() > until:
            raise TimeUp

    model.get_input_embeddings().register_forward_pre_hook(look)
    temperature = cfg.rollout.temperature if method == "rl" else 1.0
    likely = _trace_probs(model, temperature, cfg.batch.tokens, [(t, d) for t in some for d in t.demonstrations])
    until = began + SECONDS
    asked = [task for task in some if task.problem.answer]
    groups = _answered(cfg, tasks, asked, model, FIRST_WAVE[device], look) if asked else []
    solved = sum(any(cfg.reward.solved(score.value) for score in group.scores) for group in groups)
    probs = torch.cat([torch.zeros(0), *likely])
    scores = tuple(score for group in groups for score in group.scores)
    return Found(len(asked), len(groups), solved, tasks.report["with_traces"] > 0, len(likely), probs, scores)


def _trace_probs(
    model: Any, temperature: float, budget: int, traces: Sequence[tuple[Task, Demonstration]]
) -> list[torch.Tensor]:
    """The probability of each token that a teacher wrote, by trace, as far as the time goes."""
    score, out = scores_of(model, temperature, budget), list[torch.Tensor]()
    with suppress(TimeUp):
        for task, trace in traces[:PROBLEMS]:
            whole = given(task, trace)
            (log_probs,) = score([Request(task.prompt_ids, 0, Sampling(1))], [whole.token_ids])
            out.append(log_probs[whole.off_policy].exp())
    return out


def _answered(
    cfg: Config, tasks: TaskSet, some: Sequence[Task], model: Any, wave: int, look: Callable[..., None]
) -> list[Group]:
    """The groups of the problems that were finished in time, each of TRIES responses as the run would sample them."""
    tokenizer, encoder, done = tasks.encoder.tokenizer, tasks.encoder, list[Group]()
    sampling = replace(cfg.sampling, eos_ids=encoder.stops(eos_ids(model, tokenizer)))
    engine, conversations = NativeEngine(model, max_slots=cfg.rollout.slots), build_conversations(cfg, encoder)
    left = [(task, [seed_of(f"base:{cfg.seed}:{task.problem.id}:{k}") for k in range(TRIES)]) for task in some]
    with cfg.reward.verifier(workers=1) as verifier, suppress(TimeUp):
        player = Player(engine, verifier, tokenizer, 0, look, conversations=conversations)
        while left:
            done += player.answer(left[:wave], sampling)
            left, wave = left[wave:], 2 * wave
    return done


# ---- the methods for it


@dataclass(frozen=True)
class Case:
    """A row of the page's table: ``when`` it holds, and what to ``take``."""

    when: str
    take: str


CLOSE = Case(f"at least {MANY:.0%} solved, less than {UNLIKELY:.0%} of tokens unlikely", "SFT, then RL: `sft_rl`")
FAR = Case(
    f"at least {MANY:.0%} solved, at least {UNLIKELY:.0%} of tokens unlikely", "not measured: `sft_rl` or `luffy`"
)
SOME = Case(f"between {FEW:.0%} and {MANY:.0%} solved", "traces only for failed problems: `ampo`, `ghpo`, `relift`")
STUCK = Case(f"at most {FEW:.0%} solved", "traces in the group: `luffy`; or `sft_rl`")
NO_TRACES = Case("no traces", "`on_policy`, `dapo`, `maxrl`")
NEW = Case(f"at least {NEW_TOKENS:.1%} of tokens below {NEVER:.5f}", "SFT first: `sft_rl`")
CASES = (NO_TRACES, NEW, CLOSE, FAR, SOME, STUCK)


def case_of(solved: float | None, unlikely: float | None, has_traces: bool = True, never: float = 0.0) -> Case | None:
    """The case of a base that solves the fraction ``solved`` of the problems and finds the fraction ``unlikely`` of the
    traces' tokens so, and the fraction ``never`` of them out of reach; None if a fraction that decides is not known."""
    if not has_traces:
        return NO_TRACES
    if never >= NEW_TOKENS:
        return NEW
    if solved is None:
        return None
    if solved < MANY:
        return STUCK if solved <= FEW else SOME
    if unlikely is None:
        return None
    return CLOSE if unlikely < UNLIKELY else FAR
