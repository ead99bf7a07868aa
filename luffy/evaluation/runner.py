"""``luffy eval``: one stream of responses, scored and saved as they finish; go on where a killed evaluation stopped.

OUT/settings.json   what decides the responses
OUT/items.jsonl     one line per (benchmark, item, sample)
OUT/result.json     the figures; result.md shows them
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from luffy.config import RewardConfig
from luffy.data import Encoder
from luffy.data.encode import resolve_style, where
from luffy.errors import UserError
from luffy.evaluation.accuracy import SUCCESS, is_right
from luffy.evaluation.background_work import BackgroundWork
from luffy.evaluation.benchmarks import Suite, load_suite
from luffy.evaluation.engines import LoadedModel, default_slots, load_engine, model_identity
from luffy.evaluation.eval_view import EvalView
from luffy.evaluation.results import ITEMS, Result, build_result, model_label, read_items, write_result
from luffy.evaluation.settings import Settings, alone_in, claim, problems_hash, recorded
from luffy.files import write_atomically
from luffy.models.load import decode
from luffy.models.threads import default_workers
from luffy.report.recorder import JsonLinesWriter
from luffy.report.runs import CONFIG, read_config
from luffy.rewards import Verifier, build_verifier
from luffy.rewards.own_function import CALL_FAILED
from luffy.rewards.verifier import GO_ON, why_every_call_failed, why_nothing_was_scored
from luffy.seeds import seed_of
from luffy.types import Completion, Problem, Request, Sampling, Task

PAPER_MAX_TOKENS = 8192

logger = logging.getLogger(__name__)


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
    prompt_opens_thought: bool = True
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


@dataclass(frozen=True)
class PlannedResponse:
    """One response to make."""

    benchmark: str
    problem: Problem
    sample: int
    prompt_ids: tuple[int, ...]
    in_thought: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.benchmark, self.problem.id, self.sample

    def seed(self, seed: int) -> int:
        """A function of its arguments alone: the order in which responses are made changes nothing."""
        return seed_of(f"eval:{seed}:{self.benchmark}:{self.problem.id}:{self.sample}")


Response = tuple[PlannedResponse, Completion]


def run_evaluation(options: Options) -> Result:
    """Everything that can be wrong with the data is found before the model is loaded."""
    given = options.reward_settings
    if given is not None:
        options = replace(
            options, reward=given.name, answer_in_thought=given.answer_in_thought,
            prompt_opens_thought=given.prompt_opens_thought,
        )  # fmt: skip
    suite = load_suite(
        options.suite, options.data, k=options.k, reward=options.reward, seed=options.seed,
        shuffle=options.shuffle, limit=options.limit, columns=options.columns,
    )  # fmt: skip
    for name in suite.missing:
        logger.warning("not evaluated, because there is nothing to read: %s", name)
    for row in suite.left_out:
        logger.warning("a row is not evaluated: %s", row)
    rewards = {benchmark.reward for benchmark in suite.benchmarks}
    assert len(rewards) == 1, "a suite has one reward"
    out = options.out or default_out(options.model, options.suite)
    with alone_in(out), verifier_of(options, rewards.pop()) as verifier:
        options = with_defaults(options, out)
        assert options.dtype is not None and options.slots is not None
        loaded = load_engine(
            options.engine, options.model, dtype=options.dtype, device=options.device, slots=options.slots,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        encoder = encoder_of(options, suite, loaded)
        loaded = replace(loaded, eos_ids=encoder.stops(loaded.eos_ids))
        jobs = planned_responses(suite, encoder)
        lengths = [len(job.prompt_ids) for job in jobs if job.sample == 0]
        default = recorded(out, "max_tokens", int) or PAPER_MAX_TOKENS
        max_tokens = longest_response(options.max_tokens, default, loaded.context, lengths)
        settings = settings_of(options, suite, encoder, max_tokens, any(job.in_thought for job in jobs))
        claim(out, settings)
        warn_of_another_prompt(settings)
        score_again(jobs, verifier, settings, out)
        run_jobs(jobs, loaded, verifier, settings, out, options.chunk)
        rows = read_items(out)
        if failed := sum(row["status"] == CALL_FAILED for row in rows):
            logger.warning("%d responses have no score and count as wrong; the same command asks for it again", failed)
        result = build_result(suite, settings, rows)
        write_result(result, out)
    return result


def verifier_of(options: Options, kind: str) -> Verifier:
    settings = options.reward_settings
    workers = options.workers or (settings and settings.workers) or default_workers(options.device)
    if settings is not None:
        return settings.verifier(workers)
    return build_verifier(kind, workers=workers, answer_in_thought=options.answer_in_thought)


def with_defaults(options: Options, out: Path) -> Options:
    """What is left open: as an evaluation in ``out`` has it, else what the device does best."""
    dtype = options.dtype or recorded(out, "dtype", str) or ("bfloat16" if options.device == "cuda" else "float32")
    slots = options.slots or default_slots(options.engine, options.device)
    return replace(options, dtype=dtype, slots=slots, date=options.date or recorded(out, "date", str))


def default_out(model: str, suite: str) -> Path:
    return Path("evals") / f"{model_label(model)}-{Path(suite).stem}"


def encoder_of(options: Options, suite: Suite, loaded: LoadedModel) -> Encoder:
    style = resolve_style(options.style, loaded.tokenizer, paper=suite.is_builtin)
    return Encoder(
        loaded.tokenizer,
        style,
        options.system_prompt,
        chat_template=options.chat_template,
        max_prompt_tokens=loaded.context - 1,
        overlong_prompt="drop",
        date=options.date,
    )


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
            planned = partial(PlannedResponse, benchmark.name, task.problem)
            jobs += [planned(sample, task.prompt_ids, task.in_thought) for sample in range(benchmark.k)]
    return jobs


def settings_of(options: Options, suite: Suite, encoder: Encoder, max_tokens: int, in_thought: bool) -> Settings:
    return Settings(
        model=options.model,
        model_identity=model_identity(options.model),
        suite=suite.name,
        problems=problems_hash(suite),
        k={benchmark.name: benchmark.k for benchmark in suite.benchmarks},
        reward=suite.benchmarks[0].reward,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=max_tokens,
        seed=options.seed,
        style=str(encoder.style),
        system_prompt=options.system_prompt,
        shuffle_options=options.shuffle,
        limit=options.limit,
        dtype=str(options.dtype),
        engine=options.engine,
        chat_template=encoder.chat_template,
        date=encoder.prompt_date,
        answer_in_thought=options.answer_in_thought,
        success=options.reward_settings.success if options.reward_settings else SUCCESS,
        prompt_opens_thought=in_thought and not options.answer_in_thought and options.prompt_opens_thought,
    )


def warn_of_another_prompt(settings: Settings) -> None:
    """Than the run had whose checkpoint this is: a trained model answers best to what it was trained on."""
    checkpoint = Path(settings.model).resolve().parent
    if checkpoint.parent.name != "checkpoints":
        return
    try:
        trained = read_config(checkpoint.parent.parent / CONFIG)
    except UserError:  # another tool's file
        return
    for option, now in {"style": settings.style, "system_prompt": settings.system_prompt}.items():
        before = trained.get(f"data.{option}", now)
        if before != now:
            flag = "--" + option.replace("_", "-")
            logger.warning("the run trained with %s %r, this evaluation has %r", flag, before, now)


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


def score_again(jobs: Sequence[PlannedResponse], verifier: Verifier, settings: Settings, out: Path) -> None:
    """Score anew the saved responses whose call of the reward failed. One may fail again, and is saved as before."""
    rows, by_key = read_items(out), {job.key: job for job in jobs}
    failed = [row for row in rows if row["status"] == CALL_FAILED]
    if not failed:
        return
    asked = [by_key[key_of(row)] for row in failed]
    scores = verifier.score(
        [
            (job.problem, row["response"], row.get("token_ids"), job.in_thought)
            for job, row in zip(asked, failed, strict=True)
        ]
    )
    for row, score in zip(failed, scores, strict=True):
        row.update(score=score.value, right=score.value >= settings.success, status=score.status)
        if score.status != CALL_FAILED:
            row.pop("token_ids", None)
    write_atomically(out / ITEMS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["benchmark"], row["id"], row["sample"]


def run_jobs(
    jobs: Sequence[PlannedResponse], loaded: LoadedModel, verifier: Verifier, settings: Settings, out: Path, chunk: int
) -> None:
    """Make the responses that are not there yet, and save them ``chunk`` at a time as they finish."""
    path = out / ITEMS
    done = set(map(key_of, read_items(out)))
    todo = [job for job in jobs if job.key not in done]
    view = EvalView(model_label(settings.model), len(jobs), len(jobs) - len(todo))
    items = JsonLinesWriter(path, keep_through_step=0)

    def save(responses: Sequence[Response]) -> None:
        rows, failure = scored(responses, loaded.tokenizer, verifier, settings, is_first=not done)
        items.write(rows)
        done.update(map(key_of, rows))
        view.saved(len(rows), sum(r["tokens"] for r in rows), sum(map(is_right, rows)), rows[-1]["benchmark"])
        if failure is not None:
            raise UserError(failure)

    try:
        with BackgroundWork() as background:
            for responses in finished_in_parts(todo, loaded, settings, chunk, view):
                background.submit(save, responses)
    finally:
        items.close()
        view.close()


def finished_in_parts(
    jobs: Sequence[PlannedResponse], loaded: LoadedModel, settings: Settings, chunk: int, view: EvalView
) -> Iterator[list[Response]]:
    """Responses in the order in which they finish; ``chunk`` of them at a time."""

    @cache  # an engine checks requests with the same tokens and sampling once
    def sampling(prompt_length: int) -> Sampling:
        most = min(settings.max_tokens, loaded.context - prompt_length)
        return Sampling(most, settings.temperature, settings.top_p, settings.top_k, loaded.eos_ids)

    requests = (Request(job.prompt_ids, job.seed(settings.seed), sampling(len(job.prompt_ids))) for job in jobs)
    part: list[Response] = []
    for count, (index, completion) in enumerate(loaded.engine.stream(requests), start=1):
        part.append((jobs[index], completion))
        view.working(count)
        if len(part) == chunk or count == len(jobs):
            yield part
            part = []


def scored(
    responses: Sequence[Response], tokenizer: Any, verifier: Verifier, settings: Settings, is_first: bool
) -> tuple[list[dict[str, Any]], str | None]:
    """A line of items.jsonl for each response; it has the token ids where the reward must be asked again. And why to
    stop when they are saved: every call of the reward failed. Where nothing in the first part was scored for other
    reasons, which nobody asks about again, a UserError."""
    ids = [completion.token_ids.tolist() for _, completion in responses]
    texts = decode(tokenizer, ids)
    scores = verifier.score(
        [(job.problem, text, own, job.in_thought) for (job, _), text, own in zip(responses, texts, ids, strict=True)]
    )
    several = len({job.problem.id for job, _ in responses}) > 1  # a single one may be at fault itself
    no_call = why_every_call_failed(scores)
    reason = no_call or (why_nothing_was_scored(scores) if is_first and several else None)
    failure = reason and f"the reward failed on all {len(scores)} responses, first: {reason}; {GO_ON}"
    if failure is not None and no_call is None:
        raise UserError(failure)
    rows = [
        {
            "benchmark": job.benchmark,
            "id": job.problem.id,
            "sample": job.sample,
            "seed": job.seed(settings.seed),
            "response": text,
            "tokens": len(completion.token_ids),
            "finish": completion.finish,
            "answer": job.problem.answer,
            "score": score.value,
            "right": score.value >= settings.success,
            "status": score.status,
            **({"token_ids": own} if score.status == CALL_FAILED else {}),
        }
        for (job, completion), text, own, score in zip(responses, texts, ids, scores, strict=True)
    ]
    return rows, failure
