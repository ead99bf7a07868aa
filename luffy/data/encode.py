"""Encode a ``Problem`` as a ``Task``: the exact prompt the model sees, and traces as token ids."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date as Date
from enum import StrEnum
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from luffy.data.repeats import prompt_hash
from luffy.data.special_tokens import MARK, OPEN, SpecialTokens, without_marks
from luffy.data.traces import TraceEncoder, tokenizer_name, too_long, trace_text, where, without_open_think
from luffy.data.turns import Row, TurnWriter, template_rows
from luffy.errors import ConfigError, DataError
from luffy.types import THINK, Message, Problem, Task, opens_thought

__all__ = ["Encoder", "PromptStyle", "PromptWriter", "where", "with_hint", "without_open_think"]

CLOCK = "strftime_now"  # chat templates call it to get the date
READ_AT_ONCE = 256  # problems whose texts the tokenizer gets in one call

PAPER_SYSTEM_PROMPT = (
    "Your task is to follow a systematic, thorough reasoning process before providing the final solution. "
    "This involves analyzing, summarizing, exploring, reassessing, and refining your thought process through "
    "multiple iterations. Structure your response into two sections: Thought and Solution. In the Thought section, "
    'present your reasoning using the format: "<think>\n thoughts </think>\n". Each thought should include detailed '
    'analysis, brainstorming, verification, and refinement of ideas. After "</think>\n" in the Solution section, '
    "provide the final, logical, and accurate answer, clearly derived from the exploration in the Thought section. "
    "If applicable, include the answer in \\boxed{} for closed-form results like multiple choices or mathematical "
    "solutions."
)
"""LUFFY paper, appendix C.2. Rows that carry their own system message keep theirs."""
QUESTION_LINE = "This is the problem: "
"""Text before the question in the paper's prompt."""

SOLUTION = "{solution}"
"""Placeholder of the solution in a hint's template."""


class PromptStyle(StrEnum):
    """How a question becomes a prompt. A prompt that is already a chat always takes the chat template."""

    CHAT = "chat"
    """The chat template over the system prompt, if any, and the question."""
    PAPER = "paper"
    """The paper's system prompt and question line, the answer opened with ``<think>`` and a newline."""
    PAPER_SIMPLE = "paper_simple"
    """The paper's plain prompt for models that follow no system prompt; no template."""
    PLAIN = "plain"
    """The question as it is; no template."""


TEMPLATE_STYLES = (PromptStyle.CHAT, PromptStyle.PAPER)


class PromptWriter:
    """Writes problems as prompts for one tokenizer. Special tokens that the user's texts spell out are marked, unless
    ``special_tokens`` is "control". ``tools``: JSON schemas for the chat template."""

    def __init__(
        self,
        tokenizer: Any,
        style: str,
        system_prompt: str | None,
        chat_template: str | None,
        date: str | None,
        special_tokens: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = [dict(tool) for tool in tools]
        self.style = PromptStyle(_one_of("style", style, tuple(PromptStyle)))
        self.special = SpecialTokens(tokenizer)
        self.marks = _one_of("special_tokens", special_tokens, ("text", "control")) == "text"
        self.given_template = _template_text(chat_template)
        self.template = self.given_template or getattr(tokenizer, "chat_template", None)
        self.date = today() if date is None else _checked_date(date)
        self.bos = _leading_special(tokenizer)
        if self.tools and self.style not in TEMPLATE_STYLES:
            raise ConfigError(f"style {self.style} has no place for tools; choose style chat (data.style)")
        if system_prompt and self.style not in TEMPLATE_STYLES:
            raise ConfigError(f"style {self.style} has no place for a system prompt; leave it out or choose style chat")
        use_papers = system_prompt is None and self.style == PromptStyle.PAPER
        self.system_prompt = PAPER_SYSTEM_PROMPT if use_papers else system_prompt
        if self.style in TEMPLATE_STYLES and not self.template:
            raise ConfigError(
                f"the tokenizer {tokenizer_name(tokenizer)} has no chat template, which style {self.style} needs; "
                "choose style plain or give a chat template"
            )

    def write(self, problem: Problem) -> tuple[str, tuple[int, ...]]:
        """Marked text to tokenise, and the ids before it. A chat template writes its own BOS, so it has none there."""
        prompt = problem.prompt
        if isinstance(prompt, str):
            if self.style == PromptStyle.PLAIN:
                return self.marked(prompt), self.bos
            if self.style == PromptStyle.PAPER_SIMPLE:
                return f"User: {self.marked(prompt)}\n\nAnswer: Let's think step by step.", self.bos
        return self.opened(self._apply_template(problem, self.chat(prompt))), ()

    def opened(self, text: str) -> str:
        """The text up to an assistant turn, in the paper's style with the beginning of its thought."""
        if self.style != PromptStyle.PAPER or text.endswith(f"{THINK}\n"):
            return text
        return text + ("\n" if text.endswith(THINK) else f"{THINK}\n")

    def chat(self, prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
        """Messages that the chat template gets."""
        if isinstance(prompt, str):
            question = QUESTION_LINE + prompt if self.style == PromptStyle.PAPER else prompt
            prompt = (Message("user", question),)
        return with_system_prompt(prompt, self.system_prompt)

    def marked(self, text: str) -> str:
        return self.special.mark(text) if self.marks else without_marks(text)

    def opens_thought(self, prompt: str) -> bool:
        """Whether a response to the prompt begins inside a thought and shows where it ends."""
        return opens_thought(prompt) and not self.special.hides_thoughts

    def _apply_template(self, problem: Problem, chat: tuple[Message, ...]) -> str:
        if not self.template:
            raise DataError(
                f"{where(problem)}: the prompt is a chat, but the tokenizer {tokenizer_name(self.tokenizer)} has no "
                "chat template; give it one (data.chat_template)"
            )
        try:
            return self._rendered(template_rows(chat, self.marked), opens=True, tools=self.tools)
        except TemplateError as error:
            roles = ", ".join(message.role for message in chat)
            raise DataError(
                f"{where(problem)}: the chat template refuses a chat of {roles} ({error}); "
                "change the system prompt, give another template or fix the row"
            ) from error

    def _rendered(self, rows: list[Row], opens: bool, tools: list[dict[str, Any]] | None = None) -> str:
        """The rows by the chat template; ``opens``: up to where the next assistant turn begins."""
        try:
            return self._apply(rows, opens, tools)
        except TypeError:
            if not any("tool_calls" in row for row in rows):
                raise
            return self._apply([_with_text_arguments(row) for row in rows], opens, tools)  # DeepSeek's templates

    def _apply(self, rows: list[Row], opens: bool, tools: list[dict[str, Any]] | None) -> str:
        # A tokenizer may have a template of its own for tools: it then writes every turn.
        own = self.tokenizer.get_chat_template(self.given_template, tools=self.tools) if self.tools else None
        text: str = self.tokenizer.apply_chat_template(
            rows, tokenize=False, add_generation_prompt=opens, chat_template=own or self.given_template,
            **({"tools": tools} if tools else {}), **{CLOCK: self.date.strftime},
        )  # fmt: skip
        return text

    def turn_writer(self, eos_ids: Sequence[int]) -> TurnWriter | None:
        """What writes single turns that end with one of ``eos_ids``; None if the style has none."""
        if self.style not in TEMPLATE_STYLES:
            return None
        ends = [self.special.texts[token] for token in eos_ids if token in self.special.texts]
        return TurnWriter(self._rendered, self.special, ends)

    def turn_end(self) -> int | None:
        """Special token with which the chat template ends an assistant turn, or None."""
        if self.style not in TEMPLATE_STYLES:
            return None
        answer = "An answer."
        chat = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
        try:
            text = self._rendered(chat, opens=False)
        except TemplateError:
            return None
        _, found, rest = text.rpartition(answer)
        end = self.special.spelled.match(rest.lstrip()) if found else None
        return self.special.ids[end[0]] if end else None


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

    ``tools``: JSON schemas of the tools that prompts offer.

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
    ) -> None:
        self.tokenizer = tokenizer
        self.overlong_prompt = _one_of("overlong_prompt", overlong_prompt, ("error", "drop"))
        overlong_trace = _one_of("overlong_trace", overlong_trace, ("drop", "truncate", "error"))
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
            self.prompts, self._tokenize, self.eos_ids, self.max_response_tokens, overlong_trace, self.counts
        )
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
        """The task with ``text`` behind its question, or behind the last user message of a chat. A prompt that gets
        too long is an error."""
        problem = with_text(task.problem, text)
        prompt_ids = self.prompt_ids(problem)
        if len(prompt_ids) > self.max_prompt_tokens:
            raise self._too_long(problem, len(prompt_ids))
        return replace(task, problem=problem, prompt_ids=prompt_ids)

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


def today() -> Date:
    return Date.today()


def _checked_date(date: str) -> Date:
    try:
        return Date.fromisoformat(date)
    except ValueError:
        raise ConfigError(f"date={date!r} is not a date; write it as 2026-01-31") from None


def resolve_style(style: str, tokenizer: Any, paper: bool = False) -> str:
    """Resolve ``auto``: ``chat`` if the tokenizer has a chat template, else ``plain``; with ``paper`` the paper's
    prompts, which ask for a boxed answer."""
    if style != "auto":
        return style
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if paper:
        return "paper" if has_template else "paper_simple"
    return "chat" if has_template else "plain"


def with_system_prompt(chat: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    """The chat with a system message first, unless it has one."""
    if not system_prompt or any(message.role == "system" for message in chat):
        return chat
    return (Message("system", system_prompt), *chat)


def with_hint(problem: Problem, template: str, solution: str) -> Problem:
    """The problem with a hint after its question, or after the last user message of a chat: ``template`` with
    ``{solution}`` replaced by ``solution``."""
    return with_text(problem, template.replace(SOLUTION, solution))


def with_text(problem: Problem, text: str) -> Problem:
    """The problem with a text after its question, or after the last user message of a chat."""
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=problem.prompt + text)
    chat = list(problem.prompt)
    last = max((i for i, message in enumerate(chat) if message.role == "user"), default=len(chat) - 1)
    chat[last] = replace(chat[last], content=chat[last].content + text)
    return replace(problem, prompt=tuple(chat))


def _with_text_arguments(row: Row) -> Row:
    """The row with the arguments of its calls as JSON text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in row.get("tool_calls", ())
    ]
    return {**row, "tool_calls": calls} if calls else row


def _one_of(knob: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{knob}={value!r} is unknown; known: {', '.join(known)}")
    return value


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


def _template_text(chat_template: str | None) -> str | None:
    """Jinja text; a string without a brace is the path of a file with it."""
    if chat_template is None or "{" in chat_template:
        return chat_template
    if not os.path.isfile(chat_template):
        raise ConfigError(f"chat template {chat_template!r} is neither Jinja text nor a file; check the path")
    with open(chat_template, encoding="utf-8") as file:
        return file.read()


def _leading_special(tokenizer: Any) -> tuple[int, ...]:
    """The BOS if the tokenizer puts one before plain text, without the EOS it may add after."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ()
    ids = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    return (bos,) if ids[:1] == [bos] else ()
