"""Problems by index: every row is checked once, in a streaming pass, and read again when it is asked for; which of
them are there twice, and which come next."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luffy.data.rows import ABSENT, ReadOptions, RowView, lookup, one_of
from luffy.data.schemas import CHATS, READERS, check_columns, detect, overlooked_trace, unknown_layout
from luffy.data.sources import Row, RowError, RowSource, open_source
from luffy.errors import ConfigError, DataError, UserError
from luffy.types import Message, Problem

SHOWN_MESSAGES = 5


class ProblemDataset:
    """The usable problems of a source.

    ``bad_rows="error"`` stops at the first unusable row; ``"skip"`` counts them in ``skipped`` (by column) and
    keeps the first messages in ``messages``. ``turns``: which assistant turns of a chat are its trace, the "last" one
    or "all"; of a chat with tools always all. Memory: sixteen bytes per row while checking, eight afterwards.
    """

    def __init__(
        self,
        source: RowSource,
        schema: str = "auto",
        columns: Mapping[str, str] | None = None,
        bad_rows: str = "error",
        strip_calculator: bool = True,
        limit: int | None = None,
        require_traces: bool = False,
        require_answer: bool = True,
        turns: str = "last",
    ) -> None:
        self.source = source
        self._schema = _checked_schema(schema, columns)
        self._bad_rows = one_of("data.bad_rows", bad_rows, ("error", "skip"))
        if limit is not None and limit < 1:
            raise ConfigError(f"data.limit={limit} leaves no problem; give 1 or more, or leave it out")
        self._limit = limit
        one_of("data.turns", turns, ("last", "all"))
        self._options = ReadOptions(require_answer, require_traces, strip_calculator, dict(columns or {}), turns)
        self._schema_of_part: dict[int, str] = {}
        self.skipped: Counter[str] = Counter()
        self.messages: list[str] = []
        self._good = array("q")
        self._several_turns = array("q")
        self._check_rows()

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> Problem:
        row = self._good[index]
        return self._problem(row, self.source[row])

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))

    def named_rows(self) -> Iterator[tuple[str, Row]]:
        """The usable rows as the file has them, each with its name for messages."""
        return ((self.source.name(row), self.source[row]) for row in self._good)

    @property
    def schemas(self) -> tuple[str, ...]:
        """The layouts that were recognised, one per file."""
        return tuple(self._schema_of_part[part] for part in sorted(self._schema_of_part))

    @property
    def turns_notices(self) -> list[str]:
        """A line if chats have assistant turns before the last: nothing is learned from those."""
        rows = self._several_turns
        if not rows:
            return []
        counted = f"{len(rows)} of {len(self)} problems are chats with several assistant turns"
        what = "only the last turn is the trace, the earlier ones are prompt: set data.turns=all to train on every turn"
        return [f"{counted}, first: {self.source.name(rows[0])}; {what}"]

    @property
    def fingerprint(self) -> str:
        """Changes when the bytes do, or an option that changes the problems."""
        options = {key: value for key, value in vars(self._options).items() if (key, value) != ("turns", "last")}
        what = [self.source.fingerprint, self._schema, self._bad_rows, self._limit, options]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def _problem(self, index: int, row: Row) -> Problem:
        view = RowView(row, self.source.name(index), self.source.default_id(index), self._options)
        layout = self._schema_for(index, view)
        overlooked = overlooked_trace(view, layout) if self._schema == "auto" else None
        if overlooked is not None:
            raise overlooked
        return READERS[layout](view)

    def _schema_for(self, index: int, view: RowView) -> str:
        """The first recognisable row of a file decides for the file: a later row that differs is a bad row."""
        if self._schema != "auto":
            return self._schema_of_part.setdefault(self.source.part(index), self._schema)
        part = self.source.part(index)
        if part not in self._schema_of_part:
            found = detect(view.values)
            if found is None:
                raise unknown_layout(view.where, view.values)
            self._schema_of_part[part] = found
        return self._schema_of_part[part]

    def _check_rows(self) -> None:
        hashes = array("Q")
        unseen = dict(self._options.columns)
        rows = self.source.scan()
        for index, row in enumerate(rows):
            try:
                if isinstance(row, RowError):
                    raise row
                unseen = _absent(unseen, row)
                problem = self._problem(index, row)
            except RowError as error:
                self._reject(error)
                continue
            self._good.append(index)
            if self._schema_of_part[self.source.part(index)] in CHATS and _has_earlier_turns(problem):
                self._several_turns.append(index)
            hashes.append(text_hash(problem.id))
            if len(self._good) == self._limit:
                break
        self._check_map_was_used(unseen, rows)
        self._reject_duplicates(hashes)
        self._check_not_empty()

    def _reject(self, error: RowError) -> None:
        if self._bad_rows == "error":
            raise error
        self.skipped[error.kind] += 1
        if len(self.messages) < SHOWN_MESSAGES:
            self.messages.append(str(error))

    def _check_map_was_used(self, unseen: Mapping[str, str], beyond: Iterator[Row | RowError]) -> None:
        """A mistyped optional column would otherwise read as 'no row has traces'. Rows beyond the limit may have it."""
        while unseen and (row := next(beyond, None)) is not None:
            unseen = unseen if isinstance(row, RowError) else _absent(unseen, row)
        for key, column in unseen.items():
            raise DataError(f"{self.source.path}: no row has the column {column!r}; correct data.columns.{key}")

    def _check_not_empty(self) -> None:
        if not self._good:
            first = self.messages[0] if self.messages else "none"
            raise DataError(f"{self.source.path}: no usable row, {self.skipped.total()} skipped; the first: {first}")

    def _reject_duplicates(self, hashes: array[int]) -> None:
        """Equal hashes point at rows to read again, so that ids themselves need not be kept."""
        first: dict[str, int] = {}
        dropped: set[int] = set()
        for place in sorted({place for pair in repeated(hashes) for place in pair}):
            row = self._good[place]
            problem_id = self._problem(row, self.source[row]).id
            if problem_id in first:
                names = f"{self.source.name(row)} and {self.source.name(first[problem_id])}"
                self._reject(RowError(names, f"both have the id {problem_id!r}", "duplicate id"))
                dropped.add(row)
            first.setdefault(problem_id, row)
        if dropped:
            self._good = array("q", (row for row in self._good if row not in dropped))
            self._several_turns = array("q", (row for row in self._several_turns if row not in dropped))


def load_problems(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], split: str = "train", **options: Any
) -> ProblemDataset:
    """Open a file, folder or hub dataset and read its problems; ``options`` are those of ``ProblemDataset``."""
    return ProblemDataset(open_source(path, split), **options)


def _has_earlier_turns(problem: Problem) -> bool:
    chat = problem.prompt if isinstance(problem.prompt, tuple) else ()
    return any(trace.messages is None for trace in problem.traces) and any(turn.role == "assistant" for turn in chat)


def _absent(columns: Mapping[str, str], row: Row) -> dict[str, str]:
    return {key: column for key, column in columns.items() if lookup(row, column) is ABSENT}


def _checked_schema(schema: str, columns: Mapping[str, str] | None) -> str:
    one_of("data.format", schema, ("auto", *READERS))
    if columns and schema not in ("auto", "columns"):
        raise ConfigError(f"data.columns and data.format={schema!r} contradict each other; drop one of them")
    if schema == "columns" or columns:
        check_columns(columns or {})
        return "columns"
    return schema


def text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def prompt_hash(prompt: str | tuple[Message, ...]) -> int:
    """The same for prompts that differ in whitespace alone; a question is the same as a chat of it alone."""
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return text_hash("\n".join(f"{turn.role}: {' '.join(turn.content.split())}{_calls(turn)}" for turn in chat))


def _calls(turn: Message) -> str:
    return "".join(f" {call.name}({call.arguments})" for call in turn.tool_calls)


def repeated(hashes: array[int]) -> list[tuple[int, int]]:
    """Places of the problems that repeat an earlier one, each with the place of the first of its kind."""
    keys = np.asarray(hashes, dtype=np.uint64)
    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    earlier = first[kind]
    places = np.flatnonzero(earlier < np.arange(len(keys)))
    return list(zip(places.tolist(), earlier[places].tolist(), strict=True))


def shared(hashes: array[int], others: array[int]) -> list[tuple[int, int]]:
    """Places of ``hashes`` that are among ``others`` too, each with its first place there."""
    wanted = np.asarray(hashes, dtype=np.uint64)
    known, first = np.unique(np.asarray(others, dtype=np.uint64), return_index=True)
    found = np.flatnonzero(np.isin(wanted, known))
    return list(zip(found.tolist(), first[np.searchsorted(known, wanted[found])].tolist(), strict=True))


class ProblemSampler:
    """Indices ``0..size-1`` in a new order every epoch, without end.

    Every epoch uses every index once; a batch that reaches the end of an epoch goes on in the next. ``epoch``
    counts finished epochs.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ConfigError(f"a sampler over {size} problems has nothing to draw; check the dataset and its filters")
        self.size = size
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._order = epoch_order(size, seed, 0)

    def next(self, k: int) -> list[int]:
        """The next ``k`` indices."""
        if k < 0:
            raise ValueError(f"cannot draw {k} problems")
        drawn: list[int] = []
        while len(drawn) < k:
            stop = min(self.size, self._position + k - len(drawn))
            drawn.extend(self._order[self._position : stop].tolist())
            self._move(self.epoch, stop)
        return drawn

    def _move(self, epoch: int, position: int) -> None:
        if position == self.size:
            epoch, position = epoch + 1, 0
        if epoch != self.epoch:
            self._order = epoch_order(self.size, self.seed, epoch)
        self.epoch, self._position = epoch, position

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"size", "seed", "epoch", "position"} - state.keys()
        if missing:
            raise UserError(
                f"sampler state lacks {', '.join(sorted(missing))}; the checkpoint is damaged, take another"
            )
        self._check_same(state, "size", "the dataset changed; resume with the data the run began with")
        self._check_same(state, "seed", "resume with the seed the run began with")
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < self.size:
            raise UserError(
                f"sampler state has epoch {epoch} and position {position} of {self.size} problems; "
                "the checkpoint is damaged, take another"
            )
        self._move(epoch, position)

    def _check_same(self, state: Mapping[str, Any], key: str, advice: str) -> None:
        if state[key] != getattr(self, key):
            raise UserError(f"sampler state has {key} {state[key]}, this run has {getattr(self, key)}; {advice}")


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)``, a pure function of its arguments.

    Sorts indices by a 64-bit mix (the splitmix64 finaliser, one to one, so no ties). Library shuffles may change
    between versions, and a resumed run would then repeat some problems and miss others.
    """
    start = int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little")
    keys = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return np.argsort(keys).astype(np.int64, copy=False)
