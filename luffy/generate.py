"""Sampling from a model outside training, with the same engine, prompts and log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from luffy.data import Encoder, load_problems
from luffy.data.data_files import DATA_SUFFIXES
from luffy.data.encode import resolve_style
from luffy.errors import ConfigError, UserError
from luffy.evaluation.engines import load_native
from luffy.evaluation.plan import room_for, tasks_of
from luffy.evaluation.trained_with import prompt_as_trained, said_of, training_of
from luffy.models.machine import pick_device
from luffy.seeds import seed_of
from luffy.types import Problem, Request, Sampling

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
) -> Iterator[dict[str, Any]]:
    """One row a response, prompts in order, the ``n`` samples of each together."""
    if not problems:
        return
    loaded = load_native(path, dtype=dtype, device=pick_device(device), trust_remote_code=trust_remote_code)
    tokenizer, context = loaded.tokenizer, loaded.context
    limits: dict[str, Any] = {"max_prompt_tokens": context - 1, "overlong_prompt": "drop"}
    encoder = Encoder(tokenizer, resolve_style(style, tokenizer), system_prompt, **limits)
    problems = [replace(problem, traces=()) for problem in problems]
    all_ids = [task.prompt_ids for task in tasks_of(encoder, problems)]
    room_for(max_tokens, MAX_TOKENS, context, max(map(len, all_ids)))  # an error names the longest prompt
    stops = encoder.stops(loaded.eos_ids)
    requests, owners = [], []
    for problem, prompt_ids in zip(problems, all_ids, strict=True):
        budget = room_for(max_tokens, MAX_TOKENS, context, len(prompt_ids))
        sampling = Sampling(budget, temperature, top_p, top_k, stops)
        requests += [Request(prompt_ids, seed_of(f"{seed}:{problem.id}:{k}"), sampling) for k in range(n)]
        owners += [problem] * n
    completions = loaded.engine.generate(requests)
    for k, (problem, completion) in enumerate(zip(owners, completions, strict=True)):
        ids = completion.token_ids.tolist()
        yield {
            "id": problem.id,
            "sample": k % n,
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "finish": completion.finish,
            "token_ids": ids,
            "log_probs": completion.log_probs.tolist(),
        }
