"""Checkpoints of a run: what is saved, when it counts as saved, and how a run is restored from one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from luffy.config import Config
from luffy.distributed.replica import on_host
from luffy.distributed.state import read_tensors, shard_whole
from luffy.distributed.world import World
from luffy.errors import UserError
from luffy.files import json_object, write_atomically
from luffy.models.forward import causal_lm, text_config
from luffy.report.model_card import CARD, CardFacts, lines_of_table, model_card
from luffy.report.runs import flat_config, without_samples
from luffy.schema import to_dict
from luffy.train import setup
from luffy.train.checkpoint import BEST, DISK_ERRORS, Checkpoint, cannot_be_written
from luffy.train.method_memory import under_prefix
from luffy.train.run_state import Run
from luffy.train.saved_state import MemoryCheck, Progress, read_safetensors

FINGERPRINT_VALUES = 64  # of each tensor
SFT = "sft/"  # begins the names of what belongs to the optimizer of sft_steps


def save(run: Run) -> None:
    """A checkpoint of the step that was finished last. Several processes write it in the background."""
    step = run.progress.step
    state = {
        "progress": dict(vars(run.progress)),
        "method": run.method,
        "sampler": dict(run.data_position),
        "data_fingerprint": run.tasks.problems.fingerprint,
        "usable": len(run.tasks),
        "traces": trace_numbering(run),
        "model": model_kind(run.cfg) | ({} if run.base is None else {"base": run.base}),
        "date": run.cfg.data.date,
    }
    tensors = {**dict(run.policy.optimizer.tensors()), **_teacher_tensors(run)}
    if run.policy.sft_optimizer is not None:  # its masters are the policy's
        tensors |= {f"{SFT}{n}": t for n, t in run.policy.sft_optimizer.tensors() if not n.endswith("/master")}
    memory = {f"memory/{name}": t for name, t in run.memory.state_dict().items()}  # the same on every process
    if run.saver is not None:
        tensors |= _sharded_masters(run) | memory
        taken = replace(run.progress)
        run.saver.start(step, tensors, _model_writer(run), state, lambda: tidy(run, taken))
        return
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()} | memory
    try:
        cards = make_cards(run)
        run.store.save(step, lambda folder: write_model(run, folder, run.model, cards), tensors, state)
    except DISK_ERRORS as error:
        raise cannot_be_written(step, run.store.folder, error) from error
    tidy(run)


def _teacher_tensors(run: Run) -> dict[str, torch.Tensor]:
    average = None if run.teacher is None else run.teacher.average
    return {} if average is None else average.tensors()


def save_if_new(run: Run) -> None:
    """A checkpoint of the last finished step, unless there is one."""
    if run.saver is not None:
        run.saver.finish()  # what is still being written counts as there
    if run.progress.step > 0 and not run.world.on_main(lambda: is_saved(run)):
        save(run)


def is_saved(run: Run) -> bool:
    return run.progress.step in [checkpoint.step for checkpoint in run.store]


def tidy(run: Run, progress: Progress | None = None) -> None:
    """Bring ``latest``, ``best.json`` and the checkpoints that are kept in line with those that exist. After a save,
    and at the start, since a kill may have come in between. ``progress``: as it was when the newest checkpoint was
    taken; by default as it is now."""
    now, record = progress or run.progress, run.cfg.folder / BEST
    if now.best_step is not None:
        run.store.tidy(now.best_step)
        write_atomically(record, json.dumps({"step": now.best_step, "accuracy": now.best_accuracy}))
    else:
        run.store.tidy(_recorded_best(record))


def _recorded_best(record: Path) -> int | None:
    """Of before a change of what is measured: kept until another is found. None where no readable file names one."""
    with suppress(OSError, UserError):
        return int(json_object(record.read_bytes(), record, "", step=int)["step"])
    return None


def newest_model(run: Run) -> Path:
    """The model folder of the newest checkpoint."""
    newest = next(iter(run.store), None)
    if newest is None:
        raise UserError(
            f"{run.cfg.folder} has no checkpoint of its own; raise {run.length_knob} to go on from the other run"
        )
    return newest.model


def model_kind(cfg: Config) -> dict[str, Any]:
    """What optimizer state cannot be carried across."""
    return {"dtype": cfg.model.dtype, "lora": to_dict(cfg.model.lora)}


def _sharded_masters(run: Run) -> dict[str, torch.Tensor]:
    """Sharded weights are float32; where the model is of less precision, they are what a checkpoint of a single
    process calls masters."""
    if run.cfg.model.dtype == "float32":
        return {}
    return {f"{name}/master": p.detach() for name, p in run.policy.optimizer.parameters.items()}


def _model_writer(run: Run) -> Callable[[Path], None]:
    """Writes the weights as they are now, whenever it is called; only rank 0 will."""
    if not run.world.is_main:
        return lambda folder: None
    assert run.engines.replica is not None
    model: Any = run.engines.replica.model
    cards = make_cards(run)
    kept, weights = (copy.deepcopy(model), None) if run.cfg.model.lora is not None else (model, on_host(model))
    return lambda folder: write_model(run, folder, kept, cards, weights)


def write_model(
    run: Run, folder: Path, model: Any, cards: Mapping[str, str], weights: dict[str, torch.Tensor] | None = None
) -> None:
    """A Hugging Face folder, adapters merged; with LoRA the adapters by themselves too. With ``cards`` of both.
    ``weights``: those to write, where they are not the model's of now."""
    if run.cfg.model.lora is not None:
        model.save_pretrained(folder / "adapter")
        (folder / "adapter" / CARD).unlink(missing_ok=True)  # peft's own names the base by its path on this machine
        model = copy.deepcopy(model).merge_and_unload()  # a copy: merging in place would round the base
    # Parameters that are views of one memory would be copied on the GPU first, all at once.
    if weights is None and next(model.parameters()).is_cuda:
        weights = on_host(model)
    if model.generation_config is not None:  # a class of one's own may have none
        model.generation_config.eos_token_id = list(run.eos_ids)  # the end of a turn too: who loads it must stop there
    model.save_pretrained(folder / "model", state_dict=weights)
    _tokenizer_as_trained(run).save_pretrained(folder / "model")
    write_cards(folder, cards)


def _tokenizer_as_trained(run: Run) -> Any:
    """With the chat template of the run's prompts: whoever loads the model asks it as the training did."""
    template = run.tasks.encoder.chat_template
    if template is None:
        return run.tokenizer
    tokenizer = copy.copy(run.tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def make_cards(run: Run) -> dict[str, str]:
    """The text of a model card by folder of the checkpoint. A card that cannot be made is not worth a training."""
    libraries = {"model": "transformers"} | ({"adapter": "peft"} if run.cfg.model.lora is not None else {})
    step = run.progress.step
    try:
        record = without_samples(run.cfg.folder, flat_config(run.cfg), step, lines_of_table)
        facts = CardFacts(record, step, run.data_report())
        return {folder: model_card(replace(facts, library=name)) for folder, name in libraries.items()}
    except Exception as error:
        run.messages.warn(f"the checkpoint of step {step} has no model card: {type(error).__name__}: {error}")
        return {}


def write_cards(folder: Path, cards: Mapping[str, str]) -> None:
    for name, text in cards.items():
        (folder / name / CARD).write_text(text, encoding="utf-8")


def load_weights(cfg: Config, method: str, world: World, device: str, checkpoint: Checkpoint | None) -> nn.Module:
    """The model to train: the config's, or a checkpoint's if that is of the same method and kind of model."""
    if checkpoint is not None:
        check_same_kind(cfg, method, checkpoint)
    place = "cpu" if world.joined else device  # sharding takes them to the device, layer by layer
    if checkpoint is None:
        return setup.load_policy(cfg.model, place)
    if cfg.model.lora is None:
        return setup.load_policy(replace(cfg.model, path=str(checkpoint.model)), place)
    model = setup.load_policy(cfg.model, place)
    load_adapter(model, checkpoint.adapter)
    return model


def check_same_kind(cfg: Config, method: str, checkpoint: Checkpoint) -> None:
    state = checkpoint.state()
    if state["method"] != method:
        commands = {"rl": "luffy train", "sft": "luffy sft"}
        raise UserError(
            f"checkpoint {checkpoint.path} was made by `{commands[state['method']]}`, this is "
            f"`{commands[method]}`; start a new run with model.path={checkpoint.model}"
        )
    saved, now = state["model"], model_kind(cfg)
    differ = [f"model.{key} {saved.get(key)} -> {now[key]}" for key in now if saved.get(key) != now[key]]
    if differ:
        raise UserError(
            f"checkpoint {checkpoint.path} is of another kind of model: {', '.join(differ)}; set that as it was, "
            f"or start a new run with model.path={checkpoint.model}"
        )


def base_of(cfg: Config, model: nn.Module, checkpoint: Checkpoint | None) -> str | None:
    """What the weights below the adapters are known by; None without LoRA. Those of a checkpoint's adapters must be the
    same. ``model`` is whole, as it was loaded."""
    if cfg.model.lora is None:
        return None
    base = fingerprint(parameter for parameter in model.parameters() if not parameter.requires_grad)
    saved = None if checkpoint is None else checkpoint.state()["model"].get("base")  # older ones do not say
    if checkpoint is not None and saved not in (None, base):
        raise UserError(
            f"checkpoint {checkpoint.path} has LoRA adapters of another base model than model.path={cfg.model.path}; "
            f"set model.path as it was (the same weights in another folder will do), or start a new run with "
            f"model.path={checkpoint.model}"
        )
    return base


def fingerprint(weights: Iterable[torch.Tensor]) -> str:
    """Of the shapes of all tensors and of some values of each, whatever their names and order: tells one model from
    another without reading every weight."""
    parts = []
    for weight in weights:
        values = weight.detach().reshape(-1)
        values = values[:: max(values.numel() // FINGERPRINT_VALUES, 1)][:FINGERPRINT_VALUES].float().cpu()
        parts.append(str(tuple(weight.shape)).encode() + values.numpy().tobytes())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in sorted(parts))).hexdigest()


def load_adapter(model: nn.Module, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    result: Any = set_peft_model_state_dict(model, read_safetensors(folder / "adapter_model.safetensors"))
    if result.unexpected_keys:
        raise UserError(f"adapter {folder} does not fit model.lora: unexpected {result.unexpected_keys[:3]}")


def restore(run: Run, checkpoint: Checkpoint, allow_changed_data: bool) -> bool:
    """Everything but the weights, which are there: sampler, optimizer, counters. Returns whether the checkpoint is this
    run's own."""
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
    return checkpoint.path.parent.resolve() == run.store.folder.resolve()


def progress_of(cfg: Config, state: Mapping[str, Any]) -> Progress:
    """The counters in the state of a checkpoint, or of none; older ones do not count problems."""
    saved = state.get("progress", {})
    return Progress(**{"problems": saved.get("step", 0) * cfg.batch.problems, **saved})


def trace_numbering(run: Run) -> dict[str, Any]:
    """What the number of a trace among its problem's, and its length, follow from besides the data. ``left_out``:
    traces that were dropped or cut; where none is, every trace keeps its number."""
    report = run.tasks.report
    left_out = report.get("traces_dropped", 0) + report.get("traces_truncated", 0)
    r, d = run.cfg.rollout, run.cfg.data
    return {"rollout.max_tokens": r.max_tokens, "data.overlong_trace": d.overlong_trace, "left_out": left_out}


def _restore_memory(run: Run, checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
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
    if memory.under_way and run.cfg.rollout.max_tokens_per_step is None:
        raise UserError(
            f"{checkpoint.path} has {len(memory.under_way)} problems with unfinished responses; set "
            f"rollout.max_tokens_per_step ({run.cfg.rollout.max_tokens} ends all of them in one step)"
        )


def _load_tensors(run: Run, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    if not run.world.joined:
        return checkpoint.tensors()
    parameters = run.policy.optimizer.parameters
    parameters = parameters | {f"{SFT}{name}": p for name, p in parameters.items()}
    if checkpoint.shards.is_dir():
        return read_tensors(checkpoint.shards, parameters)
    return shard_whole(checkpoint.tensors(), parameters)
