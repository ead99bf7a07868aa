"""Algorithm state carried between steps besides weights and optimizer:

    replay      solved responses of the policy's own (`replay`, or a gate that recalls them)
    experts     how far the sampler of the expert batch has come (`batch.expert_share`)
    lessons     traces of problems that the policy failed, until there are enough for an SFT step (`sft_steps`)
    in_flight   problems whose responses are not all finished (`rollout.max_tokens_per_step`)

It is the same on every rank, and in the checkpoint.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from luffy.config import Config
from luffy.config.knobs import ReplayConfig
from luffy.data import ProblemSampler
from luffy.guidance import Planner, given
from luffy.guidance.plan import appended, as_planned
from luffy.schema import build, to_dict
from luffy.seeds import seed_of
from luffy.types import Author, Demonstration, Episode, EpisodeOutcome, Finish, Task, spans, written_by


@dataclass(frozen=True, eq=False)
class Success:
    """A response of the policy's own that solved its problem: the log-probs it was drawn with, the step of that, which
    tokens an environment wrote, its prompt if that had more than the task's (else nothing), and what the environment
    gave for it."""

    token_ids: Tensor  # [T] int32
    log_probs: Tensor  # [T] float32
    step: int
    replies: Tensor  # [T] bool
    prompt_ids: Tensor  # [P] int32
    reward: float | None = None

    @staticmethod
    def of(episode: Episode, task: Task, step: int) -> Success:
        """An episode of the task that solved it."""
        seen = episode.task.prompt_ids
        prompt = torch.tensor(() if seen == task.prompt_ids else seen, dtype=torch.int32)
        reward = None if episode.outcome is None else episode.outcome.reward
        ids, log_probs = episode.token_ids.int(), episode.behavior_log_probs
        return Success(ids, log_probs, step, episode.authors == Author.ENVIRONMENT, prompt, reward)

    def seen(self, task: Task) -> Task:
        """The task with the prompt that it had."""
        return replace(task, prompt_ids=tuple(self.prompt_ids.tolist())) if self.prompt_ids.numel() else task

    def episode(self, task: Task) -> Episode:
        """The response, whole, as one to a task."""
        whole = given(self.seen(task), self.as_trace, author=Author.REPLAY)
        return whole if self.reward is None else replace(whole, outcome=EpisodeOutcome("trace", reward=self.reward))

    @property
    def as_trace(self) -> Demonstration:
        """The response as a trace, to be replayed as one."""
        ids, log_probs = tuple(self.token_ids.tolist()), tuple(self.log_probs.tolist())
        return Demonstration(ids, log_probs, tuple(spans(self.replies)))


@dataclass(frozen=True)
class Attempt:
    """What the policy made of one problem in a step: ``fresh`` responses, those that solved it, and whether an earlier
    one was replayed beside them, which had solved it."""

    row: int
    fresh: int
    successes: tuple[Success, ...] = ()
    replayed: bool = False
    lesson: int | None = None  # number of the trace to learn from, where every fresh response failed

    @property
    def samples(self) -> int:
        return self.fresh + self.replayed

    @property
    def solved(self) -> int:
        return len(self.successes) + self.replayed


@dataclass
class Remembered:
    """A problem in the replay: how many of its samples solved it last time, and its responses, the oldest first."""

    solved: int
    successes: list[Success] = field(default_factory=list)


class Replay:
    """Solved responses of the policy's own that later steps learn from again (ExGRPO): problems by their row in the
    data, the one whose last success is longest ago first.

    Nothing is remembered until the replay has begun. From then on a problem enters with those of its responses that
    solved it, unless all or none did; one that is solved by all of them retires for good. A step draws problems by how
    many of their samples solved them last time: most of all those that half of them did.

    For a gate that recalls successes (BEPA) nothing is drawn: it remembers from the first step on, whatever was solved.
    """

    def __init__(self, cfg: ReplayConfig, n: int) -> None:
        self.cfg, self.n = cfg, n
        self.begun = not self.draws
        self.retired: set[int] = set()
        self.problems: dict[int, Remembered] = {}

    @property
    def draws(self) -> bool:
        """Whether steps draw problems from it."""
        return self.cfg.share > 0

    def __len__(self) -> int:
        return len(self.problems)

    def draw(self, count: int, key: str) -> list[int]:
        """Rows of ``count`` different problems, or of all there are. ``key`` is the seed: one of the bucket, in which
        problems have equally many solved samples k, by the weight N(k; n/2, 1), then one of the problem in it."""
        buckets: dict[int, list[int]] = {}
        for row, remembered in sorted(self.problems.items()):
            buckets.setdefault(remembered.solved, []).append(row)
        chance = random.Random(f"replay:{key}")
        drawn: list[int] = []
        while buckets and len(drawn) < count:
            solved = sorted(buckets)
            weights = [math.exp(-0.5 * (k - self.n / 2) ** 2) for k in solved]  # the constant does not count
            (k,) = chance.choices(solved, weights if any(weights) else None)  # far from n/2 all round to 0
            drawn.append(buckets[k].pop(chance.randrange(len(buckets[k]))))
            if not buckets[k]:
                del buckets[k]
        return drawn

    def remember(self, attempts: Iterable[Attempt]) -> None:
        """Take in what a step found, of all ranks and in the order of the step. The replay begins when more than
        ``replay.start`` of the fresh samples of a step are right; that step itself is not remembered."""
        attempts = list(attempts)
        fresh = sum(a.fresh for a in attempts)
        if not self.begun:
            self.begun = fresh > 0 and sum(len(a.successes) for a in attempts) > self.cfg.start * fresh
            return
        for attempt in attempts:
            self._take_in(attempt)
        while len(self.problems) > self.cfg.problems:
            del self.problems[next(iter(self.problems))]

    def _take_in(self, attempt: Attempt) -> None:
        if attempt.solved == 0 or attempt.row in self.retired:
            return
        known = self.problems.pop(attempt.row, Remembered(0)).successes
        if self.draws and attempt.solved == attempt.samples:
            self.retired.add(attempt.row)
            return
        for success in attempt.successes:
            if not any(torch.equal(success.token_ids, other.token_ids) for other in known):
                known.append(success)
        self.problems[attempt.row] = Remembered(attempt.solved, known[-self.cfg.responses :])

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that ``load_state_dict`` takes; one without elements is left out."""
        every = [(row, s) for row, remembered in self.problems.items() for s in remembered.successes]
        state = {
            "begun": torch.tensor([int(self.begun)]),
            "retired": torch.tensor(sorted(self.retired), dtype=torch.long),
            "problems": torch.tensor([(row, r.solved) for row, r in self.problems.items()], dtype=torch.long),
            "responses": torch.tensor([(row, s.step, s.token_ids.numel()) for row, s in every], dtype=torch.long),
            "token_ids": torch.cat([torch.empty(0, dtype=torch.int32), *(s.token_ids for _, s in every)]),
            "log_probs": torch.cat([torch.empty(0), *(s.log_probs for _, s in every)]),
            "replies": torch.cat([torch.empty(0, dtype=torch.bool), *(s.replies for _, s in every)]),
            "prompts": torch.tensor([len(s.prompt_ids) for _, s in every]),
            "prompt_ids": torch.cat([torch.empty(0, dtype=torch.int32), *(s.prompt_ids for _, s in every)]),
            "rewards": torch.tensor([math.nan if s.reward is None else s.reward for _, s in every]),
        }
        if not state["replies"].any():
            del state["replies"]
        if not state["prompt_ids"].numel():
            del state["prompts"]
        if state["rewards"].isnan().all():
            del state["rewards"]
        return {name: tensor for name, tensor in state.items() if tensor.numel()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        self.begun = bool(state["begun"].item())
        self.retired = set(_rows(state, "retired"))
        self.problems = {row: Remembered(solved) for row, solved in _rows(state, "problems")}
        responses = _rows(state, "responses")
        if responses:
            lengths = [length for _, _, length in responses]
            nowhere, none = torch.zeros(sum(lengths), dtype=torch.bool), torch.zeros(len(lengths), dtype=torch.long)
            streams = (state[name].split(lengths) for name in ("token_ids", "log_probs"))
            masks = state.get("replies", nowhere).split(lengths)
            prompts = state.get("prompt_ids", none[:0].int()).split(state.get("prompts", none).tolist())
            rewards = state.get("rewards", none * math.nan).tolist()
            for (row, step, _), ids, log_probs, mask, prompt, reward in zip(
                responses, *streams, masks, prompts, rewards, strict=True
            ):
                given_by = None if math.isnan(reward) else reward
                success = Success(ids.clone(), log_probs.clone(), step, mask.clone(), prompt.clone(), given_by)
                self.problems[row].successes.append(success)
        self.problems = {row: remembered for row, remembered in self.problems.items() if remembered.successes}


def _rows(state: Mapping[str, Tensor], name: str) -> list[Any]:
    return state[name].tolist() if name in state else []


def least_entropy(successes: Sequence[Success], entropies: Sequence[Tensor]) -> Success:
    """The response whose mean entropy under the policy is least, of the tokens that no environment wrote; of equals the
    oldest."""
    pairs = zip(successes, entropies, strict=True)
    return min(pairs, key=lambda pair: float(pair[1][~pair[0].replies].mean()))[0]


FINISHES: tuple[Finish | None, ...] = (
    None,
    "stop",
    "length",
    "trace",
    "environment",
)  # in a checkpoint: the place in this list
STREAMS = {"token_ids": torch.long, "log_probs": torch.float32, "versions": torch.long}


@dataclass(frozen=True, eq=False)
class InFlight:
    """A problem with responses that are not finished when a step ends (`rollout.max_tokens_per_step`): its row in the
    data, how often it was drawn before, the step that drew it, and its n responses. The same on every rank.

    A response begins with ``prefix`` tokens of the problem's trace number ``trace`` (-1: none). The streams hold the
    tokens behind it, response after response: those that the engine drew, and an environment's, which have no version
    (-1). ``outcomes``: what became of each response in its environment; nothing where none has one.
    """

    row: int
    visit: int
    step: int
    responses: Tensor  # [n, 5] long: trace, prefix, seed, place in FINISHES, number of tokens behind the prefix
    token_ids: Tensor  # [T] long
    log_probs: Tensor  # [T] float32
    versions: Tensor  # [T] long: of the policy that drew each token
    outcomes: tuple[EpisodeOutcome | None, ...] = ()

    @staticmethod
    def of(row: int, visit: int, step: int, episodes: Sequence[Episode]) -> InFlight:
        responses, streams = [], []
        for episode in episodes:
            trace = -1 if episode.trace is None else episode.task.demonstrations.index(episode.trace)
            finish, given = FINISHES.index(episode.finish), as_planned(episode).token_ids.numel()
            behind = episode.token_ids.numel() - given
            responses.append((trace, given, episode.seed, finish, behind))
            if behind:
                assert episode.token_versions is not None
                of_episode = episode.token_ids, episode.engine_log_probs, episode.token_versions
                streams.append([stream[given:] for stream in of_episode])
        nothing = [torch.empty(0, dtype=dtype) for dtype in STREAMS.values()]
        ids, log_probs, versions = (torch.cat(parts) for parts in zip(nothing, *streams, strict=True))
        outcomes = tuple(episode.outcome for episode in episodes)
        every = outcomes if any(outcomes) else ()
        return InFlight(row, visit, step, torch.tensor(responses), ids, log_probs, versions, every)

    def episodes(self, task: Task, planner: Planner) -> tuple[Episode, ...]:
        """The responses so far, planned as when the problem was drawn."""
        rows = self.responses.tolist()
        lengths = [drawn for *_, drawn in rows]
        streams = zip(*(s.split(lengths) for s in (self.token_ids, self.log_probs, self.versions)), strict=True)
        outcomes = self.outcomes or (None,) * len(rows)
        return tuple(
            _continued(
                planner.planned(task, None if trace < 0 else task.demonstrations[trace], prefix, seed),
                FINISHES[finish],
                outcome,
                *of_response,
            )
            for (trace, prefix, seed, finish, _), outcome, of_response in zip(rows, outcomes, streams, strict=True)
        )

    @property
    def uses_trace(self) -> bool:
        return bool((self.responses[:, 0] >= 0).any())

    @property
    def unfinished(self) -> int:
        return int((self.responses[:, 3] == 0).sum())

    @property
    def continued_tokens(self) -> int:
        """Tokens behind the prefixes of responses that go on: they are prefilled again, as the weights have changed."""
        return int(self.responses[self.responses[:, 3] == 0, 4].sum())


def _continued(
    begun: Episode, finish: Finish | None, outcome: EpisodeOutcome | None, ids: Tensor, log_probs: Tensor,
    versions: Tensor,
) -> Episode:  # fmt: skip
    """A planned episode with what earlier steps put behind it."""
    begun = replace(begun, finish=finish, outcome=outcome)
    if not ids.numel():
        return begun
    authors = written_by(Author.POLICY, ids.numel()).masked_fill(versions < 0, Author.ENVIRONMENT)
    return appended(begun, ids, authors, log_probs, versions, policy_version=int(versions.max()))


def state_of(problems: Sequence[InFlight]) -> dict[str, Tensor]:
    """Tensors that `problems_of` takes; none without elements. ``outcomes`` are JSON as bytes, a list a problem."""
    if not problems:
        return {}
    outcomes = json.dumps([to_dict(p.outcomes) for p in problems]) if any(p.outcomes for p in problems) else ""
    state = {
        "problems": torch.tensor([(p.row, p.visit, p.step, len(p.responses)) for p in problems]),
        **{name: torch.cat([getattr(p, name) for p in problems]) for name in ("responses", *STREAMS)},
        "outcomes": torch.tensor(bytearray(outcomes.encode()), dtype=torch.uint8),
    }
    return {name: tensor for name, tensor in state.items() if tensor.numel()}


def outcomes_of(state: Mapping[str, Tensor], problems: int) -> list[tuple[EpisodeOutcome | None, ...]]:
    """The outcomes of each problem in a `state_of`. Raises ValueError or TypeError where they cannot be read."""
    if "outcomes" not in state:
        return [()] * problems
    read = json.loads(state["outcomes"].to(torch.uint8).numpy().tobytes())
    return [tuple(None if one is None else build(EpisodeOutcome, one) for one in of_problem) for of_problem in read]


def problems_of(state: Mapping[str, Tensor]) -> list[InFlight]:
    """The problems whose `state_of` this is."""
    if not state:
        return []
    rows = state["problems"].tolist()
    responses = state["responses"].split([count for *_, count in rows])
    lengths = [int(of_problem[:, 4].sum()) for of_problem in responses]
    streams = [state.get(name, torch.empty(0, dtype=dtype)).split(lengths) for name, dtype in STREAMS.items()]
    outcomes = outcomes_of(state, len(rows))
    return [
        InFlight(row, visit, step, of_row.clone(), ids.clone(), log_probs.clone(), versions.clone(), of_problem)
        for (row, visit, step, _), of_row, ids, log_probs, versions, of_problem in zip(
            rows, responses, *streams, outcomes, strict=True
        )
    ]


class MethodMemory:
    """``problems``: how many there are in the training data. Parts that the config does not use are None or empty."""

    def __init__(self, cfg: Config, problems: int) -> None:
        recalls = cfg.guidance.gate.part.recalls
        self.replay = Replay(cfg.replay, cfg.rollout.n) if cfg.replay.share or recalls else None
        self.experts = ProblemSampler(problems, seed_of(f"{cfg.seed}:experts")) if cfg.batch.expert_share else None
        self.lessons: list[tuple[int, int]] = []  # row of the problem, number of its trace
        self.in_flight: list[InFlight] = []  # the oldest first
        self._buffer = cfg.sft_steps.buffer
        self._position = (0, 0)  # of the experts' sampler where the next step begins: epoch and place in it

    @property
    def is_used(self) -> bool:
        return self.replay is not None or self.experts is not None or self._buffer > 0

    def remember(self, attempts: Sequence[Attempt]) -> None:
        """Take in what a step found, of all ranks and in the order of the step. Nothing else changes what is saved."""
        if self.replay is not None:
            self.replay.remember(attempts)
        if self.experts is not None:
            now = self.experts.state_dict()
            self._position = now["epoch"], now["position"]
        self.lessons += [(a.row, a.lesson) for a in attempts if a.lesson is not None]

    def take_lessons(self) -> list[list[tuple[int, int]]]:
        """Remove and return row and trace of every SFT step that is due; fewer than a step takes stay."""
        due = len(self.lessons) // self._buffer if self._buffer else 0
        steps = [self.lessons[i * self._buffer : (i + 1) * self._buffer] for i in range(due)]
        self.lessons = self.lessons[due * self._buffer :]
        return steps

    def rewind(self) -> None:
        """Undo the draws of the current step: it will not be finished."""
        if self.experts is not None:
            epoch, position = self._position
            self.experts.load_state_dict({**self.experts.state_dict(), "epoch": epoch, "position": position})

    def forget_traces(self) -> tuple[int, int]:
        """Drop what refers to a trace by its number; returns how many unfinished problems and how many SFT traces."""
        kept = [problem for problem in self.in_flight if not problem.uses_trace]
        dropped = len(self.in_flight) - len(kept), len(self.lessons)
        self.in_flight, self.lessons = kept, []
        return dropped

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name, none without elements."""
        state = {} if self.replay is None else {f"replay/{k}": v for k, v in self.replay.state_dict().items()}
        if self.experts is not None:
            state["experts"] = torch.tensor(self._position)
        if self.lessons:
            state["lessons"] = torch.tensor(self.lessons)
        return state | {f"under_way/{k}": v for k, v in state_of(self.in_flight).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """``state`` of a checkpoint; what it lacks stays as it is at the start of a run."""
        if self.replay is not None:
            self.replay.load_state_dict(under_prefix(state, "replay/"))
        if self.experts is not None and "experts" in state:
            epoch, position = state["experts"].tolist()
            self._position = epoch, position
            self.rewind()
        if self._buffer and "lessons" in state:
            self.lessons = [(row, trace) for row, trace in state["lessons"].tolist()]
        self.in_flight = problems_of(under_prefix(state, "under_way/"))

    def unused(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Parts of ``state`` that the config does not use, in words, with the setting that turns each off."""
        known = [state[key] for key in ("replay/problems", "replay/retired") if key in state]
        found = {}
        if known and self.replay is None:
            found[f"{sum(map(len, known))} problems in the replay"] = "replay.share"
        if "lessons" in state and not self._buffer:
            found[f"{len(state['lessons'])} traces that waited for an SFT step"] = "sft_steps.buffer"
        return found


def under_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
