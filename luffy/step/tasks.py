"""The problems of a run, for training and held out: read, encoded and checked once, before the first step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luffy.config import Config, ModelConfig
from luffy.conversations import tools_of
from luffy.data import Encoder, ProblemDataset, load_problems
from luffy.data.dataset import repeated, shared
from luffy.data.rows import ROW_KEY
from luffy.data.schemas import without_traces
from luffy.errors import ConfigError, DataError
from luffy.guidance.gate import find_gate
from luffy.guidance.row_hints import hints_of
from luffy.models.load import eos_ids_in, token_count, vocabulary_in
from luffy.types import Task


def build_encoder(cfg: Config, tokenizer: Any) -> Encoder:
    """The encoder of a run. Its ``eos_ids`` are what the engine has to stop at: a trace ends as a response does."""
    d, m = cfg.data, cfg.model
    ends = None if tokenizer.eos_token_id is None else eos_ids_in(m.path, tokenizer, m.trust_remote_code)
    return Encoder(
        tokenizer,
        style=d.style,
        system_prompt=d.system_prompt,
        chat_template=d.chat_template,
        max_prompt_tokens=d.max_prompt_tokens,
        overlong_prompt=d.overlong_prompt,
        max_response_tokens=cfg.rollout.max_tokens,
        max_conversation_tokens=cfg.longest_response,
        overlong_trace=d.overlong_trace,
        eos_ids=None if ends is None else [token for token in ends if token < len(tokenizer)],
        date=d.date,
        special_tokens=d.special_tokens,
        tools=tools_of(cfg.environment),
    )


def with_date(cfg: Config, tokenizer: Any, saved: Mapping[str, Any]) -> Config:
    """The config with the date of its prompts: as given, else as in the state of a checkpoint, else today's. Without a
    template that prints the date there is none."""
    if cfg.data.date is not None:
        return cfg
    known = replace(cfg, data=replace(cfg.data, date=saved.get("date")))
    return replace(cfg, data=replace(cfg.data, date=build_encoder(known, tokenizer).prompt_date))


@dataclass
class TaskSet:
    """Problems of a dataset that can be used, encoded when asked for. ``report`` says what was left out,
    ``prompt_hashes`` which prompts are equal."""

    problems: ProblemDataset
    encoder: Encoder
    usable: list[int]
    report: dict[str, int]
    prompt_hashes: array[int]

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, index: int) -> Task:
        task = self.encoder.encode(self.problems[self.usable[index]])
        assert task is not None, "the task was usable when the run began"
        return task

    def at(self, indices: Sequence[int]) -> list[Task]:
        """The tasks of many indices, their texts read by the tokenizer at once."""
        tasks = [task for task in self.encoder.encode_all(self.problems[self.usable[i]] for i in indices) if task]
        assert len(tasks) == len(indices), "the tasks were usable when the run began"
        return tasks


def load_training_tasks(cfg: Config, encoder: Encoder, *, sft: bool) -> TaskSet:
    """Read, encode and check every problem once, before the first step."""
    if not cfg.data.train:
        raise ConfigError("'data.train' is empty; give a file, folder or hub id")
    gate = find_gate(cfg.guidance.gate)
    hinted = not sft and gate is not None and gate.uses_hints
    guided = sft or uses_traces(cfg)
    problems = load_problems_of(cfg, cfg.data.train, cfg.data.split, limit=cfg.data.limit, require_answer=not sft)
    vocabulary = _exceeded_vocabulary(cfg.model, encoder)
    usable, with_traces, with_hints = [], 0, 0
    prompt_hashes = array("Q")
    for index, task in enumerate(encoder.encode_all(problems)):
        if task is None or (sft and not task.demonstrations):
            continue
        usable.append(index)
        prompt_hashes.append(encoder.prompt_hash(task.problem))
        with_traces += bool(task.demonstrations)
        with_hints += hinted and bool(hints_of(task.problem))
        if guided and cfg.algorithm.teacher_probs == "recorded" and not sft:
            _check_recorded(task)
        if vocabulary is not None:
            _check_known(task, vocabulary, guided)
    if guided and with_traces == with_hints == 0:
        raise DataError(_no_trace_message(cfg, problems, encoder, sft))
    report = {"rows": len(problems), "usable": len(usable), "with_traces": with_traces}
    report |= {"rows_skipped": sum(problems.skipped.values()), **encoder.counts}
    if not usable:
        raise DataError(f"no usable problem in {cfg.data.train}: {report}")
    return TaskSet(problems, encoder, usable, report, prompt_hashes)


def _exceeded_vocabulary(cfg: ModelConfig, encoder: Encoder) -> int | None:
    """Size of the model's vocabulary if the tokenizer has more tokens; otherwise None, and no id needs a check."""
    size = vocabulary_in(cfg.path, cfg.trust_remote_code)
    return size if size is not None and size < token_count(encoder.tokenizer) else None


def _check_known(task: Task, vocabulary: int, guided: bool) -> None:
    """Raise a DataError for a token id that the model has no embedding for."""
    texts = {"prompt": [task.prompt_ids], "trace": [d.token_ids for d in task.demonstrations] if guided else []}
    for what, streams in texts.items():
        largest = max((max(ids) for ids in streams), default=0)
        if largest >= vocabulary:
            raise DataError(
                f"a {what} of problem {task.problem.id!r} has token id {largest}, which lies outside the model's "
                f"vocabulary of {vocabulary}: is this the model's own tokenizer (model.tokenizer)?"
            )


def uses_traces(cfg: Config) -> bool:
    """Whether RL has a use for traces."""
    return bool(_trace_users(cfg))


def _trace_users(cfg: Config) -> list[str]:
    """Settings that make RL use traces, each written so that it is off."""
    gate = find_gate(cfg.guidance.gate)
    used = {
        "guidance.n_prefix=0": cfg.guidance.n_prefix > 0,
        "guidance.gate=none": gate is not None and (gate.uses_traces or gate.uses_hints),
        "batch.expert_share=0": cfg.batch.expert_share > 0,
        "sft_steps.buffer=0": cfg.sft_steps.buffer > 0,
        "teacher.shown=sibling": cfg.teacher.shown == "solution",
    }
    return [off for off, is_used in used.items() if is_used]


def _no_trace_message(cfg: Config, problems: ProblemDataset, encoder: Encoder, sft: bool) -> str:
    dropped = encoder.counts["traces_dropped"]
    if dropped:
        return (
            f"all {dropped} traces of {cfg.data.train} are longer than rollout.max_tokens={cfg.rollout.max_tokens}; "
            f"raise it or set data.overlong_trace=truncate"
        )
    without = "" if sft else f", or set {' and '.join(_trace_users(cfg))} to train without traces"
    return (
        f"no problem of {cfg.data.train} (read as {', '.join(problems.schemas)}) has a trace; name the column with "
        f"data.columns={{traces: ...}}{without}"
    )


def _check_recorded(task: Task) -> None:
    if any(d.log_probs is None for d in task.demonstrations):
        raise DataError(
            f"algorithm.teacher_probs=recorded, but a trace of problem {task.problem.id!r} has no recorded "
            f"log-probs; record them (luffy prepare traces --tokenizer) or set algorithm.teacher_probs=one"
        )


def load_eval_tasks(cfg: Config, encoder: Encoder) -> dict[str, list[Task]]:
    """Held-out tasks by the name of their set; ``core`` is ``data.eval``."""
    if cfg.data.eval is None:
        return {}
    sets: dict[str, Any] = {"core": cfg.data.eval, **cfg.data.eval_also}
    return {name: _load_eval_set(cfg, path, encoder) for name, path in sets.items()}


def _load_eval_set(cfg: Config, path: Any, encoder: Encoder) -> list[Task]:
    mapped = replace(cfg, data=replace(cfg.data, columns=without_traces(cfg.data.columns)))
    problems = load_problems_of(mapped, path, cfg.data.eval_split, limit=cfg.eval.limit, require_answer=True)
    tasks = list(encoder.encode_all(replace(problem, traces=()) for problem in problems))
    usable = [task for task in tasks if task is not None]
    if not usable:
        raise DataError(
            f"all {len(tasks)} held-out prompts of {path} are longer than data.max_prompt_tokens="
            f"{cfg.data.max_prompt_tokens}; raise it"
        )
    return usable


def load_problems_of(cfg: Config, path: Any, split: str, *, limit: int | None, require_answer: bool) -> ProblemDataset:
    """The problems of a file of the run, read as its config says."""
    d = cfg.data
    return load_problems(
        path,
        split,
        schema=d.format,
        columns=d.columns or None,
        bad_rows=d.bad_rows,
        strip_calculator=d.strip_calculator,
        limit=limit,
        require_answer=require_answer,
        turns=d.turns,
    )


def left_out(train: dict[str, int], held_out: dict[str, int]) -> list[str]:
    """Lines on the data that was dropped or cut, with the setting that decides it."""
    spoken = {
        "rows_skipped": "row(s) skipped as unusable (data.bad_rows)",
        "prompts_dropped": "prompt(s) dropped as longer than data.max_prompt_tokens",
        "traces_dropped": "trace(s) dropped as longer than rollout.max_tokens",
        "traces_truncated": "trace(s) cut at rollout.max_tokens",
        "traces_cut_at_end": "trace(s) cut at an end token inside them",
        "traces_open_thought": "trace(s) with a <think> that the prompt does not open: the policy learns to write it",
        "texts_left_out": "text(s) next to tool calls left out: the chat template has no place for them",
        "special_as_text": "prompt(s) or trace(s) that spell out special tokens, read as text (data.special_tokens)",
        "special_as_control": "prompt(s) or trace(s) with special tokens in them (data.special_tokens=control)",
    }
    return [
        f"{name} data: " + ", ".join(f"{counts[key]} {text}" for key, text in spoken.items() if counts.get(key))
        for name, counts in (("training", train), ("held-out", held_out))
        if any(counts.get(key) for key in spoken)
    ]


def repeated_problems(cfg: Config, problems: int) -> list[str]:
    """A line if a batch is larger than the data, so that it repeats problems."""
    if cfg.batch.problems <= problems:
        return []
    times = cfg.batch.problems / problems
    return [
        f"batch.problems={cfg.batch.problems}, but only {problems} usable: every step takes each about {times:.3g} "
        "times; lower batch.problems or add data"
    ]


def equal_prompts(tasks: TaskSet, eval_tasks: Mapping[str, Sequence[Task]]) -> list[str]:
    """A line for training problems that repeat an earlier one, and for each held-out set with problems of them."""

    def row(index: int) -> str:
        return str(tasks.problems[tasks.usable[index]].meta[ROW_KEY])

    said = []
    if found := repeated(tasks.prompt_hashes):
        first = f"{row(found[0][0])} = {row(found[0][1])}"
        said.append(f"{len(found)} of {len(tasks)} training problems repeat an earlier one, first: {first}")
    for name, held_out in eval_tasks.items():
        hashes = array("Q", (tasks.encoder.prompt_hash(task.problem) for task in held_out))
        if found := shared(hashes, tasks.prompt_hashes):
            knob = "data.eval" if name == "core" else f"data.eval_also.{name}"
            first = f"{held_out[found[0][0]].problem.meta[ROW_KEY]} = {row(found[0][1])}"
            counts = f"{len(found)} of {len(held_out)} held-out problems ({knob})"
            said.append(f"{counts} are in the training set too, first: {first}")
    return said
