"""Sampling from a model outside training, with the same engine, prompts and log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from luffy.config import EnvironmentConfig
from luffy.data import load_problems
from luffy.data.data_files import DATA_SUFFIXES
from luffy.errors import ConfigError, UserError
from luffy.evaluation.engines import load_native
from luffy.evaluation.plan import room_for, tasks_of
from luffy.evaluation.responses import conversations_for, encoder_for, finished_in_parts
from luffy.evaluation.trained_with import prompt_as_trained, said_of, training_of
from luffy.guidance.plan import unwritten
from luffy.seeds import seed_of
from luffy.types import Problem, Sampling

MAX_TOKENS = 256


def read_prompts(prompt: str | None, file: Path | None, stdin: TextIO) -> list[Problem]:
    """Prompts from the argument, a file (text: one per line; a data file: its problems), or standard input."""
    if prompt is not None and file is not None:
        raise UserError("give a prompt or --file, not both")
    if file is not None and file.suffix.lower() in DATA_SUFFIXES:
        return list(load_problems(str(file), require_answer=False))
    if file is not None and not file.is_file():
        raise UserError(f"--file {file}: no such file")
    if prompt is not None:
        texts = [prompt]
    elif file is not None:
        try:
            lines = file.read_bytes().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"--file {file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
        texts = [line.removesuffix("\r") for line in lines if line.strip()]
    else:
        texts = [stdin.read().strip()]
    if not any(texts):
        raise UserError("no prompt: give one as an argument, with --file, or on standard input")
    return [Problem(id=str(i), prompt=text, answer="") for i, text in enumerate(texts)]


def as_trained(model: str, style: str | None, system_prompt: str | None) -> tuple[str, str | None, str | None]:
    """Style and system prompt as given, else as the model's training has them; and a line on what was taken from it."""
    given = {name for name, value in (("style", style), ("system_prompt", system_prompt)) if value is not None}
    try:
        training = training_of(model)
        taken = {} if training is None else prompt_as_trained(training, given)
    except ConfigError as error:  # another tool's file, or another version's
        return style or "auto", system_prompt, f"not as trained: {error}"
    said = None if training is None else said_of({n.replace("_", " "): repr(v) for n, v in taken.items()}, training)
    return taken.get("style", style or "auto"), taken.get("system_prompt", system_prompt), said


def generate_texts(
    path: str,
    problems: Sequence[Problem],
    *,
    n: int,
    max_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    style: str,
    system_prompt: str | None,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    environment: EnvironmentConfig | None = None,
) -> Iterator[dict[str, Any]]:
    """One row a response, prompts in order, the ``n`` samples of each together. With an environment the response is the
    whole conversation."""
    if not problems:
        return
    loaded = load_native(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokenizer, context = loaded.tokenizer, loaded.context
    encoder = encoder_for(loaded, style, system_prompt, environment)
    problems = [replace(problem, traces=()) for problem in problems]
    tasks = list(tasks_of(encoder, problems))
    longest = max(len(task.prompt_ids) for task in tasks)
    room_for(max_tokens, MAX_TOKENS, context, longest)  # an error names the longest prompt
    stops = encoder.stops(loaded.eos_ids)
    begun = []
    for task in tasks:
        budget = room_for(max_tokens, MAX_TOKENS, context, len(task.prompt_ids))
        sampling = Sampling(budget, temperature, top_p, top_k, stops)
        begun += [unwritten(task, seed_of(f"{seed}:{task.problem.id}:{k}"), sampling) for k in range(n)]
    rules = conversations_for(environment, encoder, max_tokens or MAX_TOKENS, context - longest)
    parts = finished_in_parts(replace(loaded, conversations=rules), begun, chunk=len(begun))
    for number, episode in sorted(chain.from_iterable(parts), key=itemgetter(0)):
        ids = episode.token_ids.tolist()
        yield {
            "id": episode.task.problem.id,
            "sample": number % n,
            "response": tokenizer.decode(ids, skip_special_tokens=rules is None),
            "finish": episode.finish,
            "token_ids": ids,
            "log_probs": episode.engine_log_probs.tolist(),
            **({} if rules is None else {"authors": episode.authors.tolist()}),
        }
