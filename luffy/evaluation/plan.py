"""Plan of an evaluation: its options, the prompts to answer, and the settings that decide the responses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from luffy.config import EnvironmentConfig, RewardConfig, build
from luffy.data import Encoder
from luffy.data.prompts import where
from luffy.errors import UserError
from luffy.evaluation.benchmarks import Suite, label_of
from luffy.evaluation.engines import default_slots, model_identity
from luffy.evaluation.results import Settings, model_label, problems_hash, recorded
from luffy.models.machine import default_workers
from luffy.seeds import seed_of
from luffy.types import Problem, Task

logger = logging.getLogger(__name__)


SAME = (  # in the options and in the settings
    "model", "temperature", "top_p", "top_k", "seed", "system_prompt", "limit", "dtype", "engine",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The command's options; ``None`` leaves the choice to the suite or the model."""

    model: str
    suite: str
    out: Path | None = None
    data: Path | None = None
    k: int | None = None
    temperature: float = 0.6
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int = 0
    style: str = "auto"
    system_prompt: str | None = None
    chat_template: str | None = None
    date: str | None = None
    reward: str | None = None
    answer_in_thought: bool = False
    shuffle: bool = True
    limit: int | None = None
    engine: str = "native"
    dtype: str | None = None
    device: str = "cpu"
    slots: int | None = None
    trust_remote_code: bool = False
    chunk: int = 256
    workers: int | None = None
    columns: Mapping[str, str] | None = None
    reward_settings: RewardConfig | None = None  # a recipe's, in place of `reward`
    environment: EnvironmentConfig | None = None  # what answers the model's turns


@dataclass(frozen=True)
class PlannedResponse:
    """One response to make."""

    benchmark: str
    task: Task
    sample: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.benchmark, self.task.problem.id, self.sample

    def seed(self, seed: int) -> int:
        """A function of its arguments alone: the order in which responses are made changes nothing."""
        return seed_of(f"eval:{seed}:{self.benchmark}:{self.task.problem.id}:{self.sample}")


def default_out(model: str, suite: str) -> Path:
    return Path("evals") / f"{model_label(model)}-{label_of(suite)}"


def reward_of(options: Options, kind: str) -> RewardConfig:
    """How responses are scored, and by how many processes. ``kind``: the suite's, where no recipe says all."""
    own = {"kind": kind, "answer_in_thought": options.answer_in_thought}
    reward = options.reward_settings or build(RewardConfig, own, "reward")
    return replace(reward, workers=options.workers or reward.workers or default_workers(options.device))


def with_defaults(options: Options, out: Path) -> Options:
    """Options with defaults filled in: from an evaluation in ``out``, else what suits the device."""
    dtype = options.dtype or recorded(out, "dtype", str) or ("bfloat16" if options.device == "cuda" else "float32")
    slots = options.slots or default_slots(options.engine, options.device)
    return replace(options, dtype=dtype, slots=slots, date=options.date or recorded(out, "date", str))


def tasks_of(encoder: Encoder, problems: Sequence[Problem]) -> Iterator[Task]:
    """Each problem as the model sees it; a prompt that fills the context is an error."""
    for problem, task in zip(problems, encoder.encode_all(problems), strict=True):
        if task is None:
            context = encoder.max_prompt_tokens + 1
            raise UserError(f"{where(problem)}: the prompt leaves no room in the model's context of {context} tokens")
        yield task


def planned_responses(suite: Suite, encoder: Encoder) -> list[PlannedResponse]:
    """Every response to make, in order."""
    jobs = []
    for benchmark in suite.benchmarks:
        for task in tasks_of(encoder, benchmark.problems):
            jobs += [PlannedResponse(benchmark.name, task, sample) for sample in range(benchmark.k)]
    return jobs


def settings_of(
    options: Options, reward: RewardConfig, suite: Suite, encoder: Encoder, max_tokens: int, in_thought: bool
) -> Settings:
    return Settings(
        **{name: getattr(options, name) for name in SAME},
        model_identity=model_identity(options.model),
        suite=suite.name,
        problems=problems_hash(suite),
        k={benchmark.name: benchmark.k for benchmark in suite.benchmarks},
        reward=suite.benchmarks[0].reward,
        max_tokens=max_tokens,
        style=str(encoder.style),
        shuffle_options=options.shuffle,
        chat_template=encoder.chat_template,
        date=encoder.prompt_date,
        success=reward.success,
        cut_off=reward.cut_off,
        answer_in_thought=reward.answer_in_thought,
        environment=None if options.environment is None else asdict(options.environment),
        prompt_opens_thought=in_thought and not reward.answer_in_thought and reward.prompt_opens_thought,
    )


def longest_response(given: int | None, default: int, context: int, prompt_lengths: Sequence[int]) -> int:
    """Tokens of the longest response to prompts of these lengths. A prompt that leaves less gets less; a warning says
    so, unless the context is the only limit."""
    shortest = min(prompt_lengths)
    longest = room_for(given, default, context, shortest, "shortest")
    tight = sum(context - length < longest for length in prompt_lengths)
    if tight and (given is not None or longest < context - shortest):
        logger.warning(
            "%d of %d prompts leave less than %d tokens of the model's context: their responses may be cut off sooner",
            tight, len(prompt_lengths), longest,
        )  # fmt: skip
    return longest


def room_for(given: int | None, default: int, context: int, prompt_length: int, which: str = "longest") -> int:
    """Tokens of the longest response: as ``given``, else ``default`` or what the context leaves of it. ``which`` prompt
    has this length, for the error."""
    room = context - prompt_length
    if given is not None and given > room:
        raise UserError(
            f"--max-tokens {given} and the {which} prompt of {prompt_length} tokens exceed the model's context of "
            f"{context}; give at most {room}"
        )
    return given or min(default, room)
