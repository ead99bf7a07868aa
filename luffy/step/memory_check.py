"""Checks of a checkpoint's memory tensors before they are used: its files may come from a stranger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luffy.errors import UserError
from luffy.run_folder.saved_state import REMEDY
from luffy.step.in_flight import FINISHES

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
        if "experts" in names:
            self._rows("experts", 2, flat=True)
        for row, trace in self._rows("lessons", 2):
            self._require("lessons", self._is_row(row) and trace >= 0 and self._is_prefix(row, trace, 0))
        if any(name.startswith("under_way/") for name in names):
            self._under_way()

    def _replay(self) -> None:
        self._rows("replay/begun", 1, flat=True, required=True)
        retired = self.tensors.get("replay/retired", torch.empty(0, dtype=torch.long))
        whole = not retired.is_floating_point() and not retired.is_complex() and retired.ndim == 1
        self._require("replay/retired", whole and all(map(self._is_row, retired.tolist())))
        known = {row: solved for row, solved in self._rows("replay/problems", 2)}
        self._require("replay/problems", all(self._is_row(row) and solved > 0 for row, solved in known.items()))
        responses = self._rows("replay/responses", 3)
        self._require("replay/responses", all(r in known and step >= 0 and n > 0 for r, step, n in responses))
        tokens = sum(length for *_, length in responses)
        self._streams("replay/", tokens)
        replies = self.tensors.get("replay/replies", torch.zeros(tokens, dtype=torch.bool))
        self._require("replay/replies", replies.shape == (tokens,) and replies.dtype == torch.bool)
        prompts = self._rows("replay/prompts", len(responses), flat=True) or [0] * len(responses)
        self._require("replay/prompts", min(prompts, default=0) >= 0)
        self._ids("replay/prompt_ids", sum(prompts))
        rewards = self.tensors.get("replay/rewards", torch.empty(len(responses)))
        self._require("replay/rewards", rewards.shape == (len(responses),) and rewards.is_floating_point())

    def _under_way(self) -> None:
        responses = self._rows("under_way/responses", 5, required=True)
        problems = self._rows("under_way/problems", 4, required=True)
        fits = all(self._is_row(row) and min(visit, step) >= 0 and count > 0 for row, visit, step, count in problems)
        self._require("under_way/problems", fits and sum(count for *_, count in problems) == len(responses))
        owners = [row for row, _, _, count in problems for _ in range(count)]
        for row, (trace, prefix, _, finish, length) in zip(owners, responses, strict=True):
            fits = self._is_prefix(row, trace, prefix) and 0 <= finish < len(FINISHES) and length >= 0
            self._require("under_way/responses", fits)
        self._streams("under_way/", sum(length for *_, length in responses), "versions")

    def _streams(self, prefix: str, tokens: int, *more: str) -> None:
        """Token ids, log-probs and ``more`` of all responses, end to end; what has no elements is not saved."""
        nothing = torch.empty(0, dtype=torch.long)
        for name in ("log_probs", *more):
            stream = self.tensors.get(prefix + name, nothing)
            whole = not stream.is_floating_point() and not stream.is_complex()
            self._require(prefix + name, stream.shape == (tokens,) and (whole or name == "log_probs"))
        self._ids(prefix + "token_ids", tokens)
        log_probs = self.tensors.get(prefix + "log_probs", nothing)
        wrong = log_probs.isinf() | (log_probs > ROUNDING)  # NaN: an engine does not know them
        self._require(prefix + "log_probs", (log_probs.is_floating_point() or not tokens) and not wrong.any())

    def _ids(self, name: str, tokens: int) -> None:
        """Token ids of the vocabulary."""
        ids = self.tensors.get(name, torch.empty(0, dtype=torch.long))
        whole = not ids.is_floating_point() and not ids.is_complex() and ids.shape == (tokens,)
        self._require(name, whole and bool(((ids >= 0) & (ids < self.vocabulary)).all()))

    def _rows(self, name: str, columns: int, flat: bool = False, required: bool = False) -> list[Any]:
        """Rows of a table of whole numbers; with ``flat`` a single row."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self._require(name, not required)
            return []
        whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
        self._require(name, whole and tensor.shape[-1:] == (columns,) and tensor.ndim == (1 if flat else 2))
        return tensor.tolist()

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
