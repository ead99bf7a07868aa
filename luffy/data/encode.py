"""Encode a ``Problem`` as a ``Task``: the exact prompt the model sees, and traces as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from luffy.data.dataset import prompt_hash
from luffy.data.prompts import CLOCK, MARK, OPEN, PromptWriter, tokenizer_name, where, with_text
from luffy.data.rows import one_of
from luffy.data.traces import TraceEncoder, too_long, trace_text
from luffy.errors import ConfigError, DataError
from luffy.types import NO_LIMIT, Message, Problem, Task

READ_AT_ONCE = 256  # problems whose texts the tokenizer gets in one call


class Encoder:
    """Writes and tokenises problems for one tokenizer.

    ``eos_ids`` are the ids that end a response (default: the tokenizer's). If prompts use a chat template, the token
    that ends its assistant turns comes first. Text traces end with the first of ``eos_ids``, recorded ones with the
    first end token they have. ``chat_template`` is Jinja text or a file with it.

    ``special_tokens``: "text" reads special tokens that prompts and traces spell out (``<|im_end|>``) as plain text,
    except ``<think>`` and ``</think>``; "control" reads them as special tokens. End tokens at the end of a text trace
    end it either way.

    Recorded traces (token ids) are used as they are, up to their first end token; a missing log-prob of the EOS is 0
    (probability 1), as for every token without a record.

    ``counts``: ``prompts_dropped``, ``traces_dropped``, ``traces_truncated``, ``traces_cut_at_end``,
    ``special_as_text``, ``special_as_control``, and ``traces_open_thought``: text traces that begin with ``<think>``,
    which neither ends the prompt nor is a token of the tokenizer, and ``texts_left_out``: texts next to tool calls for
    which the chat template has no place.

    ``tools``: JSON schemas of the tools that prompts offer. ``max_conversation_tokens``: of a trace of several turns,
    replies included; ``max_response_tokens`` counts the teacher's alone.

    ``date`` (``2026-01-31``; default: today) is the date for chat templates that call ``strftime_now``.
    ``prompt_date`` is that date, or None if the template does not ask for it.
    """

    def __init__(
        self,
        tokenizer: Any,
        style: str = "chat",
        system_prompt: str | None = None,
        chat_template: str | None = None,
        max_prompt_tokens: int = 1024,
        overlong_prompt: str = "error",
        max_response_tokens: int = 2048,
        overlong_trace: str = "drop",
        eos_ids: Sequence[int] | None = None,
        date: str | None = None,
        special_tokens: str = "text",
        tools: Sequence[Mapping[str, Any]] = (),
        max_conversation_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.overlong_prompt = one_of("overlong_prompt", overlong_prompt, ("error", "drop"))
        overlong_trace = one_of("overlong_trace", overlong_trace, ("drop", "truncate", "error"))
        self.max_prompt_tokens = _at_least_one("data.max_prompt_tokens", max_prompt_tokens)
        self.max_response_tokens = _at_least_one("rollout.max_tokens", max_response_tokens)
        self.prompts = PromptWriter(tokenizer, style, system_prompt, chat_template, date, special_tokens, tools)
        self.style, self._special = self.prompts.style, self.prompts.special
        self.chat_template = self.prompts.given_template
        asks_date = CLOCK in str(self.prompts.template)
        self.prompt_date = self.prompts.date.isoformat() if asks_date else None
        self.eos_ids = _checked_eos(tokenizer, eos_ids, self.prompts.turn_end())
        self.counts: Counter[str] = Counter()
        self._traces = TraceEncoder(
            self.prompts, self._tokenize, self.eos_ids, self.max_response_tokens, overlong_trace, self.counts,
            max_conversation_tokens or NO_LIMIT,
        )  # fmt: skip
        self._read: dict[str, list[int]] = {}  # ids of texts, while ``encode_all`` runs

    def stops(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens an engine must stop at: this encoder's ends, then the model's."""
        return tuple(dict.fromkeys((*self.eos_ids, *eos_ids)))

    def render(self, problem: Problem) -> str:
        """Exact text of the prompt, special tokens included."""
        text, bos = self.prompts.write(problem)
        spelled = MARK.sub(lambda mark: self._special.texts[int(mark[1])], text)
        return (str(self.tokenizer.bos_token) if bos else "") + spelled

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt, of any length."""
        text, bos = self.prompts.write(problem)
        return (*bos, *self._tokenize(problem, text))

    def in_thought(self, problem: Problem) -> bool:
        """Whether the prompt ends with ``<think>``, so that a response begins inside a thought."""
        return self.prompts.opens_thought(self.prompts.write(problem)[0])

    def prompt_hash(self, problem: Problem) -> int:
        """Hash of the prompt as the model sees it; equal for prompts that differ only in whitespace."""
        return prompt_hash(self.prompts.chat(problem.prompt))

    def reply_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that an environment's messages add behind an assistant turn and its end token, the beginning of the next
        assistant turn included. Special tokens that the messages spell out are read as text."""
        return self._traces.reply_ids(messages)

    def text_of_turn(self, token_ids: Sequence[int]) -> str:
        """Text of an assistant turn without its end token; other special tokens, which may mark calls, stay in it."""
        ids = list(token_ids)
        body = ids[:-1] if ids and ids[-1] in self.eos_ids else ids
        return str(self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def with_observation(self, task: Task, text: str) -> Task:
        """The task with ``text`` behind its question, or behind the last user message of a chat, and its hint behind
        that. A prompt that gets too long is an error."""
        problem = with_text(task.problem, text)
        seen = replace(task, problem=problem, prompt_ids=self.prompt_ids(problem))
        if task.hint:
            seen = self.with_hint(seen, task.hint_text, task.hint)
        if len(seen.prompt_ids) > self.max_prompt_tokens:
            raise self._too_long(problem, len(seen.prompt_ids))
        return seen

    def with_hint(self, task: Task, text: str, level: int) -> Task:
        """The task with a hint, ``text``, behind its question; of any length."""
        prompt_ids = self.prompt_ids(with_text(task.problem, text))
        return replace(task, prompt_ids=prompt_ids, hint=level, hint_text=text, plain_ids=task.prompt_ids)

    def encode(self, problem: Problem) -> Task | None:
        """Tokenised problem, or None if its prompt is too long and may be dropped."""
        return self._task(problem, *self.prompts.write(problem))

    def encode_all(self, problems: Iterable[Problem]) -> Iterator[Task | None]:
        """``encode`` of each problem; a fast tokenizer reads many texts at once on all cores."""
        rest = iter(problems)
        while some := list(islice(rest, READ_AT_ONCE)):
            prompts = [self.prompts.write(problem) for problem in some]
            self._read = self._read_at_once(some, [text for text, _ in prompts])
            try:
                tasks = [self._task(problem, *prompt) for problem, prompt in zip(some, prompts, strict=True)]
            finally:
                self._read = {}
            yield from tasks

    def _read_at_once(self, problems: Sequence[Problem], prompts: Sequence[str]) -> dict[str, list[int]]:
        traces = (
            trace_text(trace, prompt)
            for problem, prompt in zip(problems, prompts, strict=True)
            for trace in problem.traces
            if trace.text is not None
        )
        texts = list(dict.fromkeys(text for text in (*prompts, *traces) if OPEN not in text))
        try:
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        except Exception:  # the tokenizers library raises nothing narrower; one by one, the error names the row
            return {}
        return dict(zip(texts, ids, strict=True))

    def _tokenize(self, problem: Problem | None, text: str) -> list[int]:
        """Ids of a text; a marked special token becomes the ids of its letters."""
        if (known := self._read.get(text)) is not None:  # another thread may clear what was read
            return list(known)
        ids: list[int] = []
        for place, part in enumerate(MARK.split(text)):  # every other part is the id of a special token
            spelled = self._special.texts[int(part)] if place % 2 else part
            ids += self._ids(problem, spelled, **({"split_special_tokens": True} if place % 2 else {}))
        return ids

    def _ids(self, problem: Problem | None, text: str, **options: bool) -> list[int]:
        if not text:
            return []
        try:
            # verbose=False: lengths are checked here against the run's own budgets, not the tokenizer's.
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise DataError(
                f"{where(problem)}: the tokenizer {tokenizer_name(self.tokenizer)} cannot read {text[:60]!r} "
                f"({error}); is it the model's own, and the text in its alphabet?"
            ) from error

    def _task(self, problem: Problem, text: str, bos: tuple[int, ...]) -> Task | None:
        prompt_ids = (*bos, *self._tokenize(problem, text))
        if not prompt_ids:
            raise DataError(f"{where(problem)}: the prompt has no tokens; fix the row")
        if len(prompt_ids) > self.max_prompt_tokens:
            if self.overlong_prompt == "error":
                raise self._too_long(problem, len(prompt_ids))
            self.counts["prompts_dropped"] += 1
            return None
        if OPEN in text:
            self.counts["special_as_text"] += 1
        if not self.prompts.marks and self._spells_special(problem):
            self.counts["special_as_control"] += 1
        traces = (self._traces.encode(problem, trace, text) for trace in problem.traces)
        shown = tuple(trace for trace in traces if trace is not None)
        return Task(problem, prompt_ids, shown, in_thought=self.prompts.opens_thought(text))

    def _too_long(self, problem: Problem, length: int) -> DataError:
        knob = f"data.max_prompt_tokens={self.max_prompt_tokens}"
        return too_long(problem, "the prompt", length, knob, "overlong_prompt=drop")

    def _spells_special(self, problem: Problem) -> bool:
        """Whether the user's prompt spells out special tokens."""
        chat = problem.prompt if isinstance(problem.prompt, tuple) else (Message("user", problem.prompt),)
        return any(self._special.spelled.search(message.content) for message in chat)


def _at_least_one(knob: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{knob}={value} leaves no room; give 1 or more")
    return value


def _checked_eos(tokenizer: Any, eos_ids: Sequence[int] | None, turn_end: int | None) -> tuple[int, ...]:
    """End tokens, the turn's end first; without one no response would ever end."""
    own = tokenizer.eos_token_id
    given = tuple(eos_ids) if eos_ids is not None else (() if own is None else (own,))
    ids = tuple(dict.fromkeys(given if turn_end is None else (turn_end, *given)))
    if not ids:
        raise ConfigError(
            f"the tokenizer {tokenizer_name(tokenizer)} has no EOS token; set eos_token in its tokenizer_config.json"
        )
    wrong = [token for token in ids if not 0 <= token < len(tokenizer)]
    if wrong:
        raise ConfigError(f"eos_ids: {wrong[0]} is not one of the tokenizer's {len(tokenizer)} ids; correct it")
    return ids
