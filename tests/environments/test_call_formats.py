"""Calls are read from the texts of the common templates, and what cannot be read says why."""

import json

import pytest

from luffy.environments.call_formats import FORMATS, format_of, read_turn
from luffy.environments.protocol import Turn
from luffy.errors import UserError
from luffy.types import ToolCall

ADD = ToolCall("add", {"a": 2, "b": 3})
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"

READABLE = [
    ("hermes", TAGGED, "", (ADD,)),
    ("hermes", f"I add.\n{TAGGED}\n{TAGGED}", "I add.", (ADD, ADD)),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}</tool_call>', "", (ADD,)),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", (ToolCall("now", {}),)),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", (ToolCall("now", {}),)),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", (ToolCall("now", {}),)),
    ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 2, "b": 3}}</tool_call>', "", (ADD,)),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>',
        "",
        (ToolCall("f", {"s": "</tool_call>"}),),
    ),
    ("hermes", f"<think>{TAGGED}</think>\nNo.", "<think>" + TAGGED + "</think>\nNo.", ()),
    ("hermes", f"<think>a</think>{TAGGED}<think>{TAGGED}", f"<think>a</think><think>{TAGGED}", (ADD,)),
    ("hermes", f"<think>for ever {TAGGED}", f"<think>for ever {TAGGED}", ()),
    ("hermes", "It is 5.", "It is 5.", ()),
    ("llama3", '{"name": "add", "parameters": {"a": 2, "b": 3}}', "", (ADD,)),
    ("llama3", f'<|python_tag|>{CALL}; {{"name": "now", "parameters": {{}}}}', "", (ADD, ToolCall("now", {}))),
    ("llama3", f"{CALL}\n{CALL}", "", (ADD, ADD)),
    ("llama3", "It is {5}.", "It is {5}.", ()),
    ("llama3", '{"answer": 5}', '{"answer": 5}', ()),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", (ADD, ADD)),
    (
        "mistral",
        'Well.[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]now[ARGS]{}',
        "Well.",
        (ADD, ToolCall("now", {})),
    ),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 2, "b": 3}', "", (ADD,)),
    ("mistral", "It is 5.", "It is 5.", ()),
    ("json", CALL, "", (ADD,)),
    ("json", f"I add.\n```json\n{CALL}\n```", "I add.", (ADD,)),
    ("json", f"{TAGGED} then {{{CALL}}}", " then {}", (ADD, ADD)),
    ("json", f'{{"name": "f", "arguments": {{"s": {json.dumps(CALL)}}}}}', "", (ToolCall("f", {"s": CALL}),)),
    ("json", f'{{"name": "f", "arguments": {{"c": {CALL}}}}}', "", (ToolCall("f", {"c": json.loads(CALL)}),)),
    ("json", '```\n{"name": "Ann", "age": 5}\n``` {5}', '```\n{"name": "Ann", "age": 5}\n``` {5}', ()),
    ("mistral", f"\n<think>[TOOL_CALLS] [{CALL}]</think>No.", f"\n<think>[TOOL_CALLS] [{CALL}]</think>No.", ()),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), READABLE)
def test_calls_are_read(format, text, content, calls):
    assert read_turn(text, format) == Turn(content, calls, "", text)


UNREADABLE = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {</tool_call>', "no valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "without a name"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "without a name"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "2, 3"}</tool_call>', "must be a JSON object"),
    ("hermes", "<tool_call>[]</tool_call>", "must be a JSON object"),
    ("hermes", f"<tool_call>{CALL}", "never closed"),
    ("hermes", "<tool_call>", "never closed"),
    ("hermes", f"<tool_call>{CALL} and so on</tool_call>", "text after"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "no valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "no valid JSON"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"[" * 100_000}</tool_call>', "no valid JSON"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "no valid JSON"),
    ("llama3", '<|python_tag|>print("x")', "no valid JSON"),
    ("llama3", "<|python_tag|>", "no call"),
    ("llama3", '{"name": "add", "parameters": {', "no valid JSON"),
    ("llama3", f"{CALL} or not", "text after"),
    ("mistral", f"[TOOL_CALLS] [{CALL}", "no valid JSON"),
    ("mistral", "[TOOL_CALLS]", "no name"),
    ("mistral", "[TOOL_CALLS]add", "no valid JSON"),
    ("mistral", f"[TOOL_CALLS] [{CALL}] done", "text after"),
    ("json", '{"name": "add", "arguments": {', "no valid JSON"),
    ("json", '{"name": 3, "arguments": {}}', "without a name"),
]


@pytest.mark.parametrize(("format", "text", "why"), UNREADABLE)
def test_what_cannot_be_read_says_why(format, text, why):
    turn = read_turn(text, format)
    assert why in turn.fault and len(turn.fault) < 120 and turn.text == text


def test_the_readable_calls_of_a_faulty_turn_are_kept():
    turn = read_turn(f"{TAGGED}<tool_call>{{</tool_call>{TAGGED}")
    assert turn.calls == (ADD, ADD) and "no valid JSON" in turn.fault
    several = read_turn("Hm.<tool_call>{</tool_call><tool_call>[]</tool_call><tool_call>{")
    assert several.fault == "no valid JSON: '{</tool_call><tool_call>[]</tool_call><tool_call>{'", "the first alone"
    assert several.content == "Hm."


@pytest.mark.parametrize("format", FORMATS)
def test_a_thought_that_the_prompt_opened_is_not_searched(format):
    inside, behind = (
        f"{TAGGED}[TOOL_CALLS] [{CALL}]",
        {"hermes": TAGGED, "llama3": CALL, "mistral": f"[TOOL_CALLS][{CALL}]", "json": CALL},
    )
    assert read_turn(inside, format, in_thought=True).calls == ()
    assert read_turn(f"{inside}</think>{behind[format]}", format, in_thought=True).calls == (ADD,)


def test_any_text_is_read_without_an_error():
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "{",
        "}",
        '"name"',
        "[TOOL_CALLS]",
        "[ARGS]",
        ";",
        CALL,
    ]
    for first in pieces:
        for second in pieces:
            for format in FORMATS:
                for third in ("", first, CALL):
                    assert isinstance(read_turn(first + second + third, format), Turn)


def test_the_format_is_chosen_by_the_template():
    assert format_of("{{ '<tool_call>' }}{{ json.dumps(tool) }}") == "hermes"
    assert format_of("{{ '<|python_tag|>' }}") == format_of("'\"parameters\": '") == "llama3"
    assert format_of("{{ '<tool_call>' }}{{ '\"parameters\": ' }}") == "hermes", "a tool's schema has the word too"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of("") == "hermes"
    with pytest.raises(UserError, match="unknown format of tool calls 'xml'; known: hermes, llama3, mistral"):
        read_turn("", "xml")


def test_arguments_keep_their_json_types():
    values = {"i": 3, "f": 3.5, "t": "x", "b": True, "n": None, "l": [1, {"x": 2}]}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': values})}</tool_call>"
    assert read_turn(text).calls == (ToolCall("f", values),)
