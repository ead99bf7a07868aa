"""Traces as token ids: a text, recorded ids, or the turns of a chat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from jinja2 import TemplateError

from luffy.data.prompts import OPEN, PromptWriter, tokenizer_name, where, without_marks
from luffy.data.rows import log_prob_fault
from luffy.errors import ConfigError, DataError
from luffy.types import NO_LIMIT, THINK, Demonstration, Message, Problem, Trace

SHORT_REPLY = 200  # characters of a message whose ids are remembered
KEPT_REPLIES = 4096


class Part(NamedTuple):
    """Tokens of a trace that one author wrote: a teacher, with so many tool calls, or else an environment."""

    ids: tuple[int, ...]
    by_teacher: bool
    calls: int = 0


class TraceEncoder:
    """Encodes traces for one tokenizer. ``tokenize(problem, text)`` gives the ids of a marked text, ``eos_ids`` end a
    response, ``limit`` is the most tokens a teacher may have written, ``most`` that of a trace with its replies,
    ``counts`` are those of the ``Encoder``."""

    def __init__(
        self,
        prompts: PromptWriter,
        tokenize: Callable[[Problem | None, str], list[int]],
        eos_ids: Sequence[int],
        limit: int,
        overlong: str,
        counts: Counter[str],
        most: int = NO_LIMIT,
    ) -> None:
        self.most = most
        self.prompts, self.tokenize, self.eos_ids, self.counts = prompts, tokenize, tuple(eos_ids), counts
        self.limit, self.overlong = limit, overlong
        self.special = prompts.special
        self.turns = prompts.turn_writer(self.eos_ids)
        self._replies: dict[tuple[tuple[str, str, str], ...], tuple[int, ...]] = {}

    def encode(self, problem: Problem, trace: Trace, prompt: str) -> Demonstration | None:
        """The trace behind ``prompt``, or None if it is too long and may be dropped."""
        if trace.messages is not None:
            return self._encode_turns(problem, trace, prompt)
        ids = self._trace_ids(problem, trace, prompt)
        log_probs = self._log_probs(problem, trace, ids)
        if len(ids) <= self.limit:
            return Demonstration(ids, log_probs)
        if self._is_dropped(problem, len(ids)):
            return None
        self.counts["traces_truncated"] += 1
        return Demonstration(ids[: self.limit], log_probs and log_probs[: self.limit])

    def reply_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that an environment's messages add behind an assistant turn and its end token. Short replies are
        remembered: tools often answer alike, and a chat template takes a millisecond."""
        if any(message.tool_calls or len(message.content) > SHORT_REPLY for message in messages):
            return self._reply(messages)[1]
        key = tuple((message.role, message.content, message.name) for message in messages)
        if key not in self._replies:
            if len(self._replies) >= KEPT_REPLIES:
                self._replies.clear()
            self._replies[key] = self._reply(messages)[1]
        return self._replies[key]

    def _is_dropped(self, problem: Problem, length: int) -> bool:
        """Whether a trace that is too long is left out; False: it is truncated."""
        if self.overlong == "error":
            knob, way_out = f"rollout.max_tokens={self.limit}", "overlong_trace=drop or truncate"
            raise too_long(problem, "a trace with its EOS", length, knob, way_out)
        if self.overlong == "drop":
            self.counts["traces_dropped"] += 1
        return self.overlong == "drop"

    # ---- several turns

    def _encode_turns(self, problem: Problem, trace: Trace, prompt: str) -> Demonstration | None:
        if trace.log_probs is not None:
            raise DataError(f"{where(problem)}: a trace of messages has log-probs; drop them")
        parts = self._parts(problem, trace.messages or (), prompt)
        length, whole = sum(len(part.ids) for part in parts if part.by_teacher), sum(len(part.ids) for part in parts)
        if length <= self.limit and whole <= self.most:
            return _joined(parts)
        if length <= self.limit and self.overlong == "error":
            limit, way_out = f"{self.most} with replies (environment.max_tokens)", "overlong_trace=drop or truncate"
            raise too_long(problem, "a trace of several turns", whole, limit, way_out)
        if self._is_dropped(problem, length):
            return None
        kept = self._whole_turns(parts)
        self.counts["traces_truncated" if kept else "traces_dropped"] += 1
        return _joined(kept) if kept else None

    def _parts(self, problem: Problem, messages: Sequence[Message], prompt: str) -> list[Part]:
        """Teacher's and environment's tokens in turn. Requires that an assistant turn is at each end and no two follow
        each other."""
        roles = [message.role == "assistant" for message in messages]
        if not roles or not roles[0] or not roles[-1] or (True, True) in pairwise(roles):
            what = "a trace of messages must begin and end with an assistant turn, with an answer between any two"
            raise DataError(f"{where(problem)}: {what}; fix the row")
        parts = []
        for by_teacher, some in groupby(messages, key=lambda message: message.role == "assistant"):
            if by_teacher:
                turn = next(some)
                parts.append(Part(self._turn_ids(problem, turn, prompt), True, len(turn.tool_calls)))
            else:
                prompt, ids = self._reply(list(some))
                parts.append(Part(ids, False))
        return parts

    def _whole_turns(self, parts: list[Part]) -> list[Part]:
        """The first parts, up to the last assistant turn that fits."""
        left, room = self.limit, self.most
        for place, part in enumerate(parts):
            room -= len(part.ids)
            left -= len(part.ids) if part.by_teacher else 0
            if part.by_teacher and (left < 0 or room < 0):
                return parts[: max(place - 1, 0)]
        return parts

    def _reply(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Text and ids of an environment's messages, up to where the next turn begins. The end token before them is
        tokenised with them: some tokenizers begin a text otherwise than they go on behind a token."""
        if self.turns is None:
            raise ConfigError(f"style {self.prompts.style} has no turns; choose style chat (data.style)")
        text = self.prompts.opened(self.turns.reply(messages))
        return text, tuple(self.tokenize(None, text)[1:])

    def _turn_ids(self, problem: Problem, message: Message, prompt: str) -> tuple[int, ...]:
        """Ids of an assistant turn with its end token."""
        if not message.tool_calls:
            return self._trace_ids(problem, Trace(text=message.content), prompt)
        if self.turns is None:
            raise ConfigError(f"style {self.prompts.style} has no place for tool calls; choose style chat (data.style)")
        content = self.special.without_end(opened_text(message.content, prompt), self.eos_ids)
        try:
            turn = self.turns.calls(self.prompts.marked(content), message.tool_calls, self.prompts.marked)
        except TemplateError as error:
            names = ", ".join(call.name for call in message.tool_calls)
            raise DataError(
                f"{where(problem)}: the chat template refuses a turn that calls {names} ({error}); "
                "give another template (data.chat_template) or fix the row"
            ) from error
        found = {"special_as_text": OPEN in turn.text, "texts_left_out": turn.left_out}
        self.counts.update(key for key, is_so in found.items() if is_so)
        text = without_open_think(turn.text, prompt)  # of a turn without text the template may write the thought
        return self._ended(self.tokenize(problem, text), self.special.ids[turn.end])

    def _ended(self, ids: Sequence[int], end: int) -> tuple[int, ...]:
        """Ids before the first end token, and ``end``."""
        body = next((place for place, token in enumerate(ids) if token in self.eos_ids), len(ids))
        if body < self._body_length(ids):
            self.counts["traces_cut_at_end"] += 1
        return (*ids[:body], end)

    # ---- one turn

    def _trace_ids(self, problem: Problem, trace: Trace, prompt: str) -> tuple[int, ...]:
        """Token ids up to the first end token, which is their last."""
        if trace.token_ids is None:
            text = trace_text(trace, prompt)
            if text.startswith(THINK) and not self.special.knows_thoughts:
                self.counts["traces_open_thought"] += 1
            return self._ended(self._text_ids(problem, text), self.eos_ids[0])
        _check_recorded(problem, trace.token_ids, self.prompts.tokenizer)
        recorded = (token for token in trace.token_ids if token in self.eos_ids)
        return self._ended(trace.token_ids, next(recorded, self.eos_ids[0]))

    def _text_ids(self, problem: Problem, text: str) -> list[int]:
        """Ids of a trace's text; an end token spelled out at its end stays an end token or is left off."""
        ids = self.tokenize(problem, text)
        if self.special.texts.keys().isdisjoint(ids):
            return ids
        body = self.special.without_end(text, self.eos_ids)
        if self.special.spelled.search(body):
            self.counts["special_as_text" if self.prompts.marks else "special_as_control"] += 1
        return self.tokenize(problem, self.prompts.marked(body)) if self.prompts.marks else ids

    def _body_length(self, ids: Sequence[int]) -> int:
        """Number of tokens before the end tokens at the end."""
        length = len(ids)
        while length and ids[length - 1] in self.eos_ids:
            length -= 1
        return length

    def _log_probs(self, problem: Problem, trace: Trace, ids: tuple[int, ...]) -> tuple[float, ...] | None:
        """One log-prob per id of the finished trace; a missing one of the EOS is 0."""
        if trace.log_probs is None:
            return None
        if trace.token_ids is None:
            raise DataError(f"{where(problem)}: a text trace has log-probs; record its token ids or drop them")
        wrong, whole = log_prob_fault(trace.log_probs), self._body_length(trace.token_ids)
        if wrong is None and len(trace.log_probs) not in {whole, whole + 1, len(trace.token_ids)}:
            wrong = f"found {len(trace.log_probs)} log-probs for {len(trace.token_ids)} token ids"
        if wrong is not None:
            raise DataError(f"{where(problem)}: column 'log_probs': {wrong}; fix the row")
        known = trace.log_probs[: len(ids)]
        return known if len(known) == len(ids) else (*known, 0.0)


def _joined(parts: Sequence[Part]) -> Demonstration:
    ids: list[int] = []
    replies = []
    for part in parts:
        if not part.by_teacher:
            replies.append((len(ids), len(ids) + len(part.ids)))
        ids += part.ids
    return Demonstration(tuple(ids), replies=tuple(replies), calls=sum(part.calls for part in parts))


def _check_recorded(problem: Problem, ids: Sequence[int], tokenizer: Any) -> None:
    wrong = next((token for token in ids if not 0 <= token < len(tokenizer)), None)
    if wrong is not None:
        raise DataError(
            f"{where(problem)}: a recorded trace has token id {wrong}, but the tokenizer "
            f"{tokenizer_name(tokenizer)} has {len(tokenizer)} ids; record the trace with this tokenizer"
        )


def too_long(problem: Problem, what: str, length: int, limit: str, way_out: str) -> DataError:
    return DataError(f"{where(problem)}: {what} has {length} tokens, more than {limit}; raise it or set data.{way_out}")


def without_open_think(trace: str, prompt: str) -> str:
    """The trace without the ``<think>`` (and its newline) that the prompt already wrote."""
    if not trace.startswith(THINK):
        return trace
    if prompt.endswith(f"{THINK}\n"):
        return trace.removeprefix(THINK).removeprefix("\n")
    return trace.removeprefix(THINK) if prompt.endswith(THINK) else trace


def opened_text(text: str, prompt: str) -> str:
    """The text as it goes on behind the prompt."""
    return without_marks(without_open_think(text, prompt))


def trace_text(trace: Trace, prompt: str) -> str:
    return opened_text(trace.text or "", prompt)
