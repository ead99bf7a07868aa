"""Writes metrics.jsonl, samples.jsonl and eval_samples.jsonl of a run, and logs to trackers.

A tracker that fails (full disk, lost network) is switched off with one warning; it never ends a run.
metrics.jsonl is the record itself: its errors are real errors.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from luffy.config import Config
from luffy.files import check_regular, complete_lines, json_object, parse_line, whole_file
from luffy.run_folder.layout import EVAL_SAMPLES, METRICS, SAMPLES
from luffy.run_folder.trackers import Tracker, missing_package, start_tracker
from luffy.types import Author, Episode, EpisodeOutcome, Group, Sample, Score, TokenView, spans

DENSE = (",", ":")  # a list entry a token: the spaces between them would be a sixth of the file

_STEP = re.compile(rb'\{"step": ?(\d{1,18})[,}]')


def _lines_to_keep(path: Path, through_step: int, by_head: bool) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it is complete and of a step up to ``through_step``."""
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        for n, line in enumerate(file, start=1):
            whole = line.endswith(b"\n") and not line.isspace()
            yield line, whole and _step_of(line, f"{path}:{n}", by_head) <= through_step


def _step_of(line: bytes, where: str, by_head: bool) -> int:
    if by_head and (head := _STEP.match(line)):
        return int(head[1])
    return int(json_object(line, where, "fix or remove that line").get("step", 0))


class JsonLinesWriter:
    """An append-only file of JSON lines; each line is on the disk when ``write`` returns. Of what the file has already,
    rows beyond a step, blank lines and one that was torn by a kill are dropped. ``by_head``: the step is the first
    entry of a line, and the rest, which may be millions of tokens in all, is not parsed."""

    def __init__(
        self,
        path: Path,
        keep_through_step: int,
        separators: tuple[str, str] = (", ", ": "),
        by_head: bool = False,
    ) -> None:
        self._separators = separators
        if not path.exists() or not all(kept for _, kept in _lines_to_keep(path, keep_through_step, by_head)):
            # Aside and not in place: whoever follows the file sees that it is another.
            with whole_file(path) as temporary, temporary.open("wb") as file:
                file.writelines(line for line, kept in _lines_to_keep(path, keep_through_step, by_head) if kept)
        self._file = path.open("a", encoding="utf-8")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.writelines(map(self._line, rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _line(self, row: Mapping[str, Any]) -> str:
        return json.dumps(row, ensure_ascii=False, separators=self._separators) + "\n"

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path, **kinds: type) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing, or whose writer was killed in mid-line; ``kinds`` as
    ``as_object`` takes them."""
    return [parse_line(line, path, **kinds) for _, line in complete_lines(path)]


class Recorder:
    """``start_step`` is the last step already done: rows after it (of a run that was killed) are dropped. ``also``
    stands in every row of the metrics."""

    def __init__(
        self, cfg: Config, start_step: int, warn: Callable[[str], None], also: Mapping[str, str] | None = None
    ) -> None:
        self.warn, self.also, folder = warn, also or {}, cfg.folder
        self.metrics = JsonLinesWriter(folder / METRICS, start_step)
        self.samples = JsonLinesWriter(folder / SAMPLES, start_step, DENSE, by_head=True)
        self.eval_samples = JsonLinesWriter(folder / EVAL_SAMPLES, start_step, DENSE, by_head=True)
        self.trackers: dict[str, Tracker] = {}
        for chosen in cfg.record.chosen_trackers:
            if not missing_package(chosen):
                name = chosen.part.title or chosen
                with self._or_off(name, "is off"):
                    self.trackers[name] = start_tracker(chosen, cfg, start_step)

    @contextmanager
    def _or_off(self, name: str, what: str) -> Iterator[None]:
        """Switch off a tracker that fails, with a warning of ``what`` happened."""
        try:
            yield
        except Exception as error:
            self.trackers.pop(name, None)
            self.warn(f"{name} {what}: {type(error).__name__}: {error}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.write([{"step": step, "time": round(time.time(), 3), **self.also, **values}])
        for name, tracker in list(self.trackers.items()):
            with self._or_off(name, f"failed and is off from step {step}"):
                tracker.log(step, values)

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()
        self.eval_samples.close()
        for name, tracker in list(self.trackers.items()):
            with self._or_off(name, "did not close"):
                tracker.close()


def sample_rows(
    step: int, group: Group, samples: Sequence[Sample] | None, tokenizer: Any, views: Sequence[TokenView]
) -> list[dict[str, Any]]:
    """One row a sample of the group: tokens with their text, source and log-prob, reward, advantage.

    ``samples`` is None for a group that was rejected: its advantages are null, and so are its gradient weights.
    """
    rows = _rows(step, group.task.problem.id, group, tokenizer)
    return [
        row
        | {
            "advantages": _rounded(samples[k].advantages, 6) if samples else None,
            "policy_version": rollout.policy_version,
            "versions": rollout.versions.tolist(),
        }
        | _viewed(views[k] if views else None, counted=bool(samples))
        for k, (row, rollout) in enumerate(zip(rows, group.rollouts, strict=True))
    ]


def evaluation_rows(step: int, set_name: str, group: Group, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of a held-out problem: the policy's own tokens, nothing is learned from them. Two sets may count their
    problems alike, so a problem goes by the name of its set too."""
    return _rows(step, f"{set_name}/{group.task.problem.id}", group, tokenizer)


def _rows(step: int, problem: str, group: Group, tokenizer: Any) -> list[dict[str, Any]]:
    return [
        _head(step, problem, k, rollout, verdict)
        | _texts(group, rollout, tokenizer)
        | _conversation(rollout)
        | _components(verdict)
        for k, (rollout, verdict) in enumerate(zip(group.rollouts, group.scores, strict=True))
    ]


def trace_rows(
    step: int, samples: Sequence[Sample], tokenizer: Any, views: Sequence[TokenView], first: int
) -> list[dict[str, Any]]:
    """Rows of an SFT step, numbered from ``first``: all tokens are a teacher's, or an environment's replies to it, and
    there is no reward."""
    rows = []
    for k, sample in enumerate(samples):
        ids = sample.token_ids.tolist()
        prompt = tokenizer.decode(list(sample.prompt_ids))
        row = {
            "step": step,
            "problem": prompt,
            "sample": first + k,
            "finish": "trace",
            "length": (own := int(sample.off_policy.sum())),
            "off_policy_tokens": own,
            **_turns(sample.authors, sample.calls),
            "prompt": prompt,
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "token_ids": ids,
            "tokens": [tokenizer.decode([i]) for i in ids],
            "off_policy": sample.off_policy.int().tolist(),
            **_replies(sample.authors),
        }
        rows.append(row | _viewed(views[k] if views else None, counted=True))
    return rows


def _head(step: int, problem: str, k: int, rollout: Episode, verdict: Score) -> dict[str, Any]:
    """What a list of samples needs, first in the line: a reader finds it without parsing the tokens behind."""
    calls = rollout.trace.calls if rollout.trace is not None and rollout.finish == "trace" else None
    return {
        "step": step,
        "problem": problem,
        "sample": k,
        "reward": verdict.value,
        "status": verdict.status,
        "finish": rollout.finish,
        "length": rollout.length,
        "off_policy_tokens": rollout.prefix,
        "override_tokens": int(rollout.overrides.sum()),
        **_turns(rollout.authors, calls, rollout.outcome),
    }


def _turns(authors: Tensor, calls: int | None, outcome: EpisodeOutcome | None = None) -> dict[str, Any]:
    """Numbers of an episode with an environment. ``turns``: a teacher's too, unlike those of the outcome. ``calls``: of
    a whole trace."""
    replies = spans(authors == Author.ENVIRONMENT)
    if outcome is None and not replies:
        return {}
    after_last = not replies or replies[-1][1] < authors.numel()
    turns = {"turns": len(replies) + after_last}
    if outcome is not None:
        return {**turns, "calls": outcome.calls, "end": outcome.end}
    return turns if calls is None else {**turns, "calls": calls}


def _replies(authors: Tensor) -> dict[str, Any]:
    """Start and end of each stretch of tokens that an environment wrote."""
    replies = spans(authors == Author.ENVIRONMENT)
    return {"replies": replies} if replies else {}


def _conversation(rollout: Episode) -> dict[str, Any]:
    """The replies, and what the environment says of an episode."""
    outcome = rollout.outcome
    if outcome is None:
        return _replies(rollout.authors)
    return {
        **_replies(rollout.authors),
        **({"faults": list(outcome.faults)} if outcome.faults else {}),
        **({"environment_reward": outcome.reward} if outcome.reward is not None else {}),
        **({"turn_rewards": list(outcome.turn_rewards)} if any(outcome.turn_rewards) else {}),
        **({"message": outcome.message} if outcome.message else {}),
        **({"trace_left_out": True} if outcome.trace_left_out else {}),
    }


def _texts(group: Group, rollout: Episode, tokenizer: Any) -> dict[str, Any]:
    ids = rollout.token_ids.tolist()
    hint = {"hint": rollout.task.hint} if rollout.task.hint else {}
    return {
        "prefix_ratio": rollout.prefix_ratio,
        **hint,
        "prompt": tokenizer.decode(list(rollout.task.prompt_ids)),
        "answer": group.task.problem.answer,
        "response": tokenizer.decode(ids, skip_special_tokens=True),
        "token_ids": ids,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "off_policy": rollout.off_policy.int().tolist(),
        "overrides": rollout.overrides.int().tolist(),
        "log_probs": _rounded(rollout.behavior_log_probs, 5),
    }


def _components(verdict: Score) -> dict[str, Any]:
    """The parts of a weighted sum of rewards; they come after the texts, since the head has numbers and texts alone."""
    return {"components": dict(verdict.components)} if verdict.components else {}


def _viewed(view: TokenView | None, counted: bool) -> dict[str, Any]:
    """Probabilities and gradient weights of the tokens, rounded to three significant digits."""
    if view is None:
        return {}
    return {
        "policy_probs": _significant(view.log_probs.exp()),
        "gradient_weights": _significant(view.gradient_weights) if counted else None,
    }


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(v, digits) for v in values.tolist()]


def _significant(values: Tensor) -> list[float]:
    return [float(f"{v:.3g}") for v in values.tolist()]
