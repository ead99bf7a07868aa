"""What a checkpoint keeps of a run besides the model's weights, and how a run is restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from luffy.config import Config
from luffy.distributed.state import read_tensors, shard_whole
from luffy.errors import UserError
from luffy.models.forward import causal_lm, text_config
from luffy.run_folder.checkpoint import Checkpoint
from luffy.run_folder.saved_state import Progress
from luffy.schema import to_dict
from luffy.step.memory import under_prefix
from luffy.step.memory_check import MemoryCheck
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
    return {"dtype": cfg.model.dtype, "lora": to_dict(cfg.model.lora)}


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
