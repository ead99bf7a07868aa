"""What a run leaves behind: metrics.jsonl always, samples.jsonl, TensorBoard, W&B.

A tracker that fails (full disk, lost network) is switched off with one warning; it never ends a run.
metrics.jsonl is the record itself: its errors are real errors.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from luffy.config import Config
from luffy.errors import UserError
from luffy.schema import to_dict
from luffy.types import Group, Sample

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file of JSON lines; each line is on the disk when ``write`` returns."""

    def __init__(self, path: Path, keep_through_step: int) -> None:
        rows = [r for r in read_json_lines(path) if r.get("step", 0) <= keep_through_step]
        aside = path.with_name(f".{path.name}.writing")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing, or whose writer was killed in mid-line."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON ({error}); mend or remove that line") from None
    return rows


class TensorBoardTracker:
    def __init__(self, folder: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, cfg: Config) -> None:
        import wandb

        run_id = str(cfg.folder).replace(os.sep, "-")
        self._run: Any = wandb.init(
            project=cfg.record.wandb_project, name=cfg.name, id=run_id, resume="allow", config=to_dict(cfg)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Recorder:
    """``start_step`` is the last step already done: rows after it (of a run that was killed) are dropped."""

    def __init__(self, cfg: Config, start_step: int, warn: Callable[[str], None]) -> None:
        self.cfg, self.warn = cfg, warn
        folder = cfg.folder
        self.metrics = JsonLines(folder / METRICS, start_step)
        self.samples = JsonLines(folder / SAMPLES, start_step)
        self.trackers: dict[str, Tracker] = {}
        if cfg.record.tensorboard:
            self._start("TensorBoard", lambda: TensorBoardTracker(folder / "tensorboard", start_step + 1))
        if cfg.record.wandb:
            self._start("W&B", lambda: WandbTracker(cfg))

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self.trackers[name] = make()
        except Exception as error:
            self.warn(f"{name} is off: {type(error).__name__}: {error}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.write([{"step": step, "time": round(time.time(), 3), **values}])
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.log(step, values)
            except Exception as error:
                del self.trackers[name]
                self.warn(f"{name} failed and is off from step {step}: {type(error).__name__}: {error}")

    def wants_samples(self, step: int) -> bool:
        every = self.cfg.record.samples_every
        return every > 0 and (step == 1 or step % every == 0)

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self.warn(f"{name} did not close: {type(error).__name__}: {error}")


def sample_rows(
    step: int, groups: Sequence[Group], credit: Sequence[Sequence[Sample]], tokenizer: Any
) -> list[dict[str, Any]]:
    """One row a sample: tokens with their text, source and log-prob, reward, advantage.

    ``credit`` is empty for a group that was rejected: its advantages are null.
    """
    rows = []
    for g, group in enumerate(groups):
        samples = credit[g] if g < len(credit) else []
        for k, (rollout, verdict) in enumerate(zip(group.rollouts, group.scores, strict=True)):
            ids = rollout.token_ids.tolist()
            sample = samples[k] if samples else None
            rows.append(
                {
                    "step": step,
                    "problem": group.task.problem.id,
                    "sample": k,
                    "prompt": tokenizer.decode(list(group.task.prompt_ids)),
                    "answer": group.task.problem.answer,
                    "response": tokenizer.decode(ids, skip_special_tokens=True),
                    "token_ids": ids,
                    "tokens": [tokenizer.decode([i]) for i in ids],
                    "off_policy": rollout.off_policy.int().tolist(),
                    "overrides": rollout.overrides.int().tolist(),
                    "log_probs": [round(v, 5) for v in rollout.behavior_log_probs.tolist()],
                    "reward": verdict.value,
                    "status": verdict.status,
                    "finish": rollout.finish,
                    "prefix_ratio": rollout.prefix_ratio,
                    "advantages": None if sample is None else [round(v, 6) for v in sample.advantages.tolist()],
                    "policy_version": rollout.policy_version,
                }
            )
    return rows


def trace_rows(step: int, samples: Sequence[Sample], tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of an SFT step: every token is a teacher's, and nobody gave a reward."""
    rows = []
    for k, sample in enumerate(samples):
        ids = sample.token_ids.tolist()
        prompt = tokenizer.decode(list(sample.prompt_ids))
        rows.append(
            {
                "step": step,
                "problem": prompt,
                "sample": k,
                "prompt": prompt,
                "response": tokenizer.decode(ids, skip_special_tokens=True),
                "token_ids": ids,
                "tokens": [tokenizer.decode([i]) for i in ids],
                "off_policy": [1] * len(ids),
                "finish": "trace",
            }
        )
    return rows
