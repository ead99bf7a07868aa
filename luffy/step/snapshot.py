"""What a checkpoint keeps of a run besides the model's weights, and how a run is restored from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from luffy.config import Config
from luffy.distributed.state import read_tensors, shard_whole
from luffy.errors import UserError
from luffy.models.forward import causal_lm, text_config
from luffy.run_folder.checkpoint import Checkpoint
from luffy.run_folder.saved_state import REMEDY, Progress
from luffy.schema import to_dict
from luffy.step.memory import FINISHES, outcomes_of, under_prefix
from luffy.step.run_state import Run

SFT = "sft/"  # begins the names of what belongs to the optimizer of sft_steps


def state_of(run: Run, base: str | None) -> dict[str, Any]:
    """The content of state.json. ``base``: with LoRA, the fingerprint of the weights below the adapters."""
    return {
        "progress": dict(vars(run.progress)),
        "method": run.method,
        "sampler": dict(run.data_position),
        "data_fingerprint": run.tasks.problems.fingerprint,
        "usable": len(run.tasks),
        "traces": trace_numbering(run),
        "model": model_kind(run.cfg) | ({} if base is None else {"base": base}),
        "date": run.cfg.data.date,
        **({} if run.span is None else {"stage": run.span.stage.name}),
    }


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Optimizer state, the averaged teacher and the memory by name; those of a sharded run stay on their devices."""
    policy, average = run.policy, None if run.teacher is None else run.teacher.average
    tensors = dict(policy.optimizer.tensors()) | ({} if average is None else average.tensors())
    if policy.sft_optimizer is not None:  # its masters are the policy's
        tensors |= {f"{SFT}{n}": t for n, t in policy.sft_optimizer.tensors() if not n.endswith("/master")}
    if not run.world.joined:
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    elif run.cfg.model.dtype != "float32":  # sharded weights are float32: what one process calls masters
        tensors |= {f"{name}/master": p.detach() for name, p in policy.optimizer.parameters.items()}
    return tensors | {f"memory/{name}": t for name, t in run.memory.state_dict().items()}  # equal on every process


def model_kind(cfg: Config) -> dict[str, Any]:
    """Settings of the model that its optimizer state depends on."""
    lora = cfg.model.lora
    adapters = None if lora is None else {k: v for k, v in to_dict(lora).items() if v is not None}  # old: no quantize
    return {"dtype": cfg.model.dtype, "lora": adapters}


def restore(run: Run, checkpoint: Checkpoint, allow_changed_data: bool) -> bool:
    """Restore all but the weights: sampler, optimizer, memory, counters. Returns whether the checkpoint is this run's
    own."""
    state = checkpoint.state()
    tensors = _load_tensors(run, checkpoint)
    same = state["data_fingerprint"] == run.tasks.problems.fingerprint and state["usable"] == len(run.tasks)
    if same:
        run.sampler.load_state_dict(state["sampler"])
        run.data_position = run.sampler.state_dict()
        _restore_memory(run, checkpoint, under_prefix(tensors, "memory/"))
    elif not allow_changed_data:
        raise UserError(
            f"the training data changed since {checkpoint.path} was saved; restore the old file, or pass "
            f"--allow-changed-data to go on with a fresh order over the new one"
        )
    run.policy.optimizer.load_tensors(tensors)
    if run.policy.sft_optimizer is not None:
        run.policy.sft_optimizer.load_tensors(under_prefix(tensors, SFT))
    average = None if run.teacher is None else run.teacher.average
    if average is not None and not average.load_tensors(tensors):
        run.messages.warn(f"{checkpoint.path} has no averaged teacher: it begins with the policy's weights")
    run.progress = progress_of(run.cfg, state)
    run.messages.facts.append(f"resumed at step {run.progress.step} from {checkpoint.path}")
    return checkpoint.path.parent.resolve() == (run.cfg.folder / "checkpoints").resolve()


def progress_of(cfg: Config, state: Mapping[str, Any]) -> Progress:
    """The counters in the state of a checkpoint, or those of a new run; older checkpoints do not count problems."""
    saved = state.get("progress", {})
    return Progress(**{"problems": saved.get("step", 0) * cfg.batch.problems, **saved})


def trace_numbering(run: Run) -> dict[str, Any]:
    """Settings that decide, besides the data, the number and the length of each trace of a problem. ``left_out``: how
    many traces were dropped or cut; if none, every trace keeps its number."""
    report = run.tasks.report
    left_out = report.get("traces_dropped", 0) + report.get("traces_truncated", 0)
    r, d = run.cfg.rollout, run.cfg.data
    return {"rollout.max_tokens": r.max_tokens, "data.overlong_trace": d.overlong_trace, "left_out": left_out}


def _restore_memory(run: Run, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    memory, vocabulary = run.memory, text_config(causal_lm(run.model).config).vocab_size
    now = trace_numbering(run)
    saved = checkpoint.state().get("traces", now)  # older checkpoints do not have it
    renumbered = saved != now and (saved["left_out"] or now["left_out"])

    def trace_lengths(row: int) -> list[int]:
        return [len(trace.token_ids) for trace in run.tasks[row].demonstrations]

    lengths = None if renumbered else trace_lengths
    MemoryCheck(tensors, checkpoint.path, len(run.tasks), vocabulary, lengths).run()
    memory.load_state_dict(tensors)
    for unused, knob in memory.unused(tensors).items():
        run.messages.warn(f"{unused} of {checkpoint.path} are left out ({knob}=0)")
    if renumbered:
        problems, lessons = memory.forget_traces()
        changed = ", ".join(f"{key} {saved[key]} -> {now[key]}" for key in now if saved[key] != now[key])
        forgotten = [f"{problems} problems with unfinished responses"] * bool(problems)
        forgotten += [f"{lessons} traces that waited for an SFT step"] * bool(lessons)
        if forgotten:
            run.messages.warn(
                f"{' and '.join(forgotten)} of {checkpoint.path} are left out: traces are dropped or cut otherwise now "
                f"({changed}), and which ones they had is not known any more"
            )
    if memory.in_flight and run.cfg.rollout.max_tokens_per_step is None:
        raise UserError(
            f"{checkpoint.path} has {len(memory.in_flight)} problems with unfinished responses; set "
            f"rollout.max_tokens_per_step ({run.cfg.rollout.max_tokens} ends all of them in one step)"
        )


def _load_tensors(run: Run, checkpoint: Checkpoint) -> dict[str, Tensor]:
    if not run.world.joined:
        return checkpoint.tensors()
    parameters = run.policy.optimizer.parameters
    parameters = parameters | {f"{SFT}{name}": p for name, p in parameters.items()}
    if checkpoint.shards.is_dir():
        return read_tensors(checkpoint.shards, parameters)
    return shard_whole(checkpoint.tensors(), parameters)


ROUNDING = 1e-3  # by which a log-prob may exceed 0


class MemoryCheck:
    """Whether tensors fit what a method remembers between steps (memory.py). ``problems``: how many the data
    has; ``vocabulary``: of the policy; ``traces(row)``: the length of each trace of a problem, None where they are
    numbered otherwise now. A UserError names the checkpoint and the first tensor that does not fit."""

    def __init__(
        self, tensors: Mapping[str, Tensor], path: Path, problems: int, vocabulary: int,
        traces: Callable[[int], list[int]] | None,
    ) -> None:  # fmt: skip
        self.tensors, self.path = tensors, path
        self.problems, self.vocabulary, self.traces = problems, vocabulary, traces

    def run(self) -> None:
        names = self.tensors.keys()
        if any(name.startswith("replay/") for name in names):
            self._replay()
        self._tensor("experts", "whole", 2)
        for row, trace in self._tensor("lessons", "whole", None, 2).tolist():
            self._require("lessons", self._is_row(row) and trace >= 0 and self._is_prefix(row, trace, 0))
        if any(name.startswith("under_way/") for name in names):
            self._under_way()

    def _replay(self) -> None:
        self._tensor("replay/begun", "whole", 1, required=True)
        retired = self._tensor("replay/retired", "whole", None).tolist()
        self._require("replay/retired", all(map(self._is_row, retired)))
        known = dict(self._tensor("replay/problems", "whole", None, 2).tolist())
        self._require("replay/problems", all(self._is_row(row) and solved > 0 for row, solved in known.items()))
        responses = self._tensor("replay/responses", "whole", None, 3).tolist()
        self._require("replay/responses", all(r in known and step >= 0 and n > 0 for r, step, n in responses))
        tokens = sum(length for *_, length in responses)
        self._streams("replay/", tokens)
        self._tensor("replay/replies", "bool", tokens)
        prompts = self._tensor("replay/prompts", "whole", len(responses)).tolist()
        self._require("replay/prompts", min(prompts, default=0) >= 0)
        self._ids("replay/prompt_ids", sum(prompts))
        self._tensor("replay/rewards", "float", len(responses))

    def _under_way(self) -> None:
        responses = self._tensor("under_way/responses", "whole", None, 5, required=True).tolist()
        problems = self._tensor("under_way/problems", "whole", None, 4, required=True).tolist()
        fits = all(self._is_row(row) and min(visit, step) >= 0 and count > 0 for row, visit, step, count in problems)
        self._require("under_way/problems", fits and sum(count for *_, count in problems) == len(responses))
        owners = [row for row, _, _, count in problems for _ in range(count)]
        for row, (trace, prefix, _, finish, length) in zip(owners, responses, strict=True):
            fits = self._is_prefix(row, trace, prefix) and 0 <= finish < len(FINISHES) and length >= 0
            self._require("under_way/responses", fits)
        self._streams("under_way/", sum(length for *_, length in responses), "versions")
        self._outcomes([count for *_, count in problems])

    def _outcomes(self, counts: Sequence[int]) -> None:
        """Nothing, or one of each response, of each problem in which any has one."""
        self._tensor("under_way/outcomes", "whole", None)
        try:
            outcomes = outcomes_of(under_prefix(self.tensors, "under_way/"), len(counts))
        except (ValueError, TypeError, RecursionError):
            outcomes = []
        lengths = [len(of_problem) for of_problem in outcomes]
        fits = len(lengths) == len(counts) and all(n in (0, count) for n, count in zip(lengths, counts, strict=True))
        self._require("under_way/outcomes", fits)

    def _streams(self, prefix: str, tokens: int, *more: str) -> None:
        """Token ids, log-probs and ``more`` of all responses, end to end."""
        log_probs = self._tensor(prefix + "log_probs", "float", tokens, required=tokens > 0)
        wrong = log_probs.isinf() | (log_probs > ROUNDING)  # NaN: an engine does not know them
        self._require(prefix + "log_probs", not wrong.any())
        for name in more:
            self._tensor(prefix + name, "whole", tokens, required=tokens > 0)
        self._ids(prefix + "token_ids", tokens)

    def _ids(self, name: str, tokens: int) -> None:
        """Token ids of the vocabulary."""
        ids = self._tensor(name, "whole", tokens, required=tokens > 0)
        self._require(name, bool(((ids >= 0) & (ids < self.vocabulary)).all()))

    def _tensor(
        self, name: str, kind: Literal["whole", "float", "bool"], *shape: int | None, required: bool = False
    ) -> Tensor:
        """The tensor of that name, of whole numbers, floats or truth values (bool) and of this shape (None: of any
        size); what has no elements is not saved, so one that is missing is empty."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self._require(name, not required)
            return torch.empty(0)
        is_bool, is_float = tensor.dtype == torch.bool, tensor.is_floating_point()
        kinds = {"bool": is_bool, "float": is_float, "whole": not (is_bool or is_float or tensor.is_complex())}
        sizes = [None if wanted is None else size for size, wanted in zip(tensor.shape, shape, strict=False)]
        self._require(name, kinds[kind] and tensor.ndim == len(shape) and sizes == list(shape))
        return tensor

    def _is_prefix(self, row: int, trace: int, tokens: int) -> bool:
        """Whether a problem has a trace of this number with so many tokens; -1 is none."""
        if trace == -1 or self.traces is None:
            return trace >= -1 and tokens >= 0 and (trace >= 0 or tokens == 0)
        lengths = self.traces(row)
        return 0 <= trace < len(lengths) and 0 <= tokens <= lengths[trace]

    def _is_row(self, row: int) -> bool:
        return 0 <= row < self.problems

    def _require(self, name: str, fits: bool) -> None:
        if not fits:
            raise UserError(f"checkpoint {self.path}: its memory/{name} does not fit this run; {REMEDY}")
