"""Write a ``Problem`` as the exact prompt the model sees, by a prompt style or the chat template; the turns of a chat,
and special tokens that texts spell out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import date as Date
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from luffy.data.rows import ROW_KEY, one_of
from luffy.errors import ConfigError, DataError
from luffy.types import END_THINK, THINK, Message, Problem, ToolCall, opens_thought

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # code points that no text has: around the id of a token that is to be read as text
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class SpecialTokens:
    """The special tokens of a tokenizer: ``texts`` by id and ``ids`` by text.

    Those that mark a thought are left out: traces spell them out. ``knows_thoughts``: the tokenizer has tokens for
    them; ``hides_thoughts``: they are special, so that a decoded response does not show them.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        found = {token: text for token, text in (known | dict(named)).items() if token is not None and text}
        self.knows_thoughts = THINK in map(str, tokenizer.added_tokens_decoder.values())
        self.hides_thoughts = END_THINK in found.values()
        self.texts = {token: text for token, text in found.items() if text not in (THINK, END_THINK)}
        self.ids = {text: token for token, text in self.texts.items()}
        self._first_letters = {text[0] for text in self.ids}

    @cached_property
    def spelled(self) -> re.Pattern[str]:
        """Matches any special token that is spelled out."""
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def mark(self, text: str) -> str:
        """``text`` with a mark in place of every special token that is spelled out in it."""
        text = without_marks(text)
        if not any(first in text for first in self._first_letters):
            return text
        return self.spelled.sub(lambda found: f"{OPEN}{self.ids[found[0]]}{CLOSE}", text)

    def without_end(self, text: str, eos_ids: Sequence[int]) -> str:
        """``text`` without the end tokens that are spelled out at its end."""
        ends = [re.escape(self.texts[token]) for token in eos_ids if token in self.texts]
        return re.sub(rf"(?:(?:{'|'.join(ends)})\s*)+\Z", "", text) if ends else text


def without_marks(text: str) -> str:
    """A user's text cannot carry marks of ours."""
    return text.replace(OPEN, "\ufffd") if OPEN in text else text


QUESTION = Message("user", "A question.")
ANSWER = f"{OPEN}answer{CLOSE}"
"""Stands for the text of an assistant turn: no other text has it, and it is cut away before texts are tokenised."""
OTHER_TEMPLATE = "give another chat template (data.chat_template)"
OPENED = re.compile(rf"{THINK}\s*\Z")
Row = dict[str, Any]


def template_rows(chat: Sequence[Message], mark: Callable[[str], str]) -> list[Row]:
    """The messages as chat templates take them, their texts through ``mark``. Calls get ids of nine characters, which
    Mistral's templates demand, the same in every turn; results take those of the calls before them, in order."""
    rows, waiting = [], [_call_id(0)]
    for message in chat:
        row: Row = {"role": message.role, "content": mark(message.content)}
        if message.tool_calls:
            waiting = [_call_id(place) for place in range(len(message.tool_calls))]
            named = zip(message.tool_calls, waiting, strict=True)
            row["tool_calls"] = [_call_row(call, name, mark) for call, name in named]
        if message.name:
            row["name"] = mark(message.name)
        if message.role == "tool":
            row["tool_call_id"] = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        rows.append(row)
    return rows


def _call_id(place: int) -> str:
    return f"call{place:05}"


def _call_row(call: ToolCall, name: str, mark: Callable[[str], str]) -> Row:
    arguments = {key: _marked(value, mark) for key, value in call.arguments.items()}
    return {"id": name, "type": "function", "function": {"name": mark(call.name), "arguments": arguments}}


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): _marked(inner, mark) for key, inner in value.items()}
    return [_marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


class Turn(NamedTuple):
    """An assistant turn: its text without the end token, and that token. ``left_out``: the template has no place for a
    text next to the calls."""

    text: str
    end: str
    left_out: bool


class TurnWriter:
    """Writes single turns, without the chat around them. ``render(rows, opens)`` applies the chat template and, if
    ``opens``, begins the next assistant turn. ``ends``: texts of the tokens that end a turn."""

    def __init__(self, render: Callable[[list[Row], bool], str], special: SpecialTokens, ends: Sequence[str]) -> None:
        self._render, self._special = render, special
        longest_first = sorted(ends, key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._shown: set[str] = set()  # roles whose messages the template is known to write

    def reply(self, messages: Sequence[Message]) -> str:
        """What the messages add behind an assistant turn: from its end token to the beginning of the next one. Special
        tokens that the messages spell out are marked."""
        for role in {message.role for message in messages} - self._shown:
            if ANSWER not in self._behind_answer([Message(role, ANSWER, name="tool" if role == "tool" else "")]):
                raise ConfigError(f"the chat template leaves out messages of the role {role!r}; {OTHER_TEMPLATE}")
            self._shown.add(role)
        return self._behind_answer(messages)

    def _behind_answer(self, messages: Sequence[Message]) -> str:
        text = self._with_answer(messages)
        place = text.find(ANSWER)
        end = self._ends.search(text, place)
        if place < 0 or end is None:
            what = "rewrites the turns before" if place < 0 else "ends an assistant turn with no special token before"
            raise ConfigError(f"the chat template {what} an environment's answer; {OTHER_TEMPLATE}")
        return text[end.start() :]

    def _with_answer(self, messages: Sequence[Message]) -> str:
        """A chat with an answer and the messages behind it. Results need calls: as many, or one if the template takes
        no more."""
        results = [message.name or "tool" for message in messages if message.role == "tool"]
        refused: TemplateError | None = None
        for count in sorted({len(results), min(len(results), 1)}, reverse=True):
            calls = tuple(ToolCall(name, {"text": ANSWER}) for name in results[:count])
            chat = (QUESTION, Message("assistant", ANSWER, calls), *messages)
            try:
                return self._render(template_rows(chat, self._marked), True)
            except TemplateError as error:
                refused = error
        roles = ", ".join(dict.fromkeys(message.role for message in messages))
        remedy = f"let the environment answer as the user, or {OTHER_TEMPLATE}" if results else OTHER_TEMPLATE
        raise ConfigError(
            f"the chat template refuses an answer of {roles} behind an assistant turn ({refused}); {remedy}"
        )

    def calls(self, content: str, calls: Sequence[ToolCall], mark: Callable[[str], str]) -> Turn:
        """An assistant turn with calls in the model's own format. May raise the template's error."""
        turn = Message("assistant", ANSWER if content else "", tuple(calls))
        results = [Message("tool", "A result.", name=call.name) for call in calls]
        rows = template_rows((QUESTION, turn, *results), lambda text: text if text == ANSWER else mark(text))
        text, header = self._render(rows, False), OPENED.sub("", self._header())
        end = self._ends.search(text, len(header))
        if not text.startswith(header) or end is None:
            raise ConfigError(f"the chat template begins or ends a turn with tool calls otherwise; {OTHER_TEMPLATE}")
        body = text[len(header) : end.start()]
        _, shown, behind = body.partition(ANSWER)
        return Turn(content + behind if shown else body, end[0], bool(content) and not shown)

    def _header(self) -> str:
        return self._render(template_rows([QUESTION], self._marked), True)

    def _marked(self, text: str) -> str:
        return text if text == ANSWER else self._special.mark(text)


CLOCK = "strftime_now"  # chat templates call it to get the date

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
        self.style = PromptStyle(one_of("style", style, tuple(PromptStyle)))
        self.special = SpecialTokens(tokenizer)
        self.marks = one_of("special_tokens", special_tokens, ("text", "control")) == "text"
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
    row = deepcopy(row)
    for call in row.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return row


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


def where(problem: Problem | None) -> str:
    """File and row of a problem, for messages; None: an environment wrote the text."""
    if problem is None:
        return "an answer of the environment"
    return str(problem.meta.get(ROW_KEY, f"problem {problem.id!r}"))


def tokenizer_name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
