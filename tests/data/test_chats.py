"""Chats with several turns and tools: read from rows, and as token ids behind one another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from data.templates import make_model_tokenizer

from luffy.data import Encoder, load_problems
from luffy.data.prompts import PAPER_SYSTEM_PROMPT
from luffy.data.rows import ReadOptions, RowView
from luffy.data.schemas import READERS
from luffy.data.sources import RowError
from luffy.errors import ConfigError, DataError
from luffy.types import Demonstration, Message, Problem, ToolCall, Trace

ADD = ToolCall("add", {"a": 2, "b": 3})
SUB = ToolCall("sub", {"a": "<|im_end|>é", "b": [1, {"c": None}]})
ASK = Message("user", "What is 2+3?")
RESULT = Message("tool", "5", name="add")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


def call_row(name="add", arguments='{"a": 2, "b": 3}', **more):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def read(row, layout="messages", **options):
    return READERS[layout](RowView(row, "d.jsonl:7", "d:7", ReadOptions(require_answer=False, **options)))


def fault_of(row, layout="messages", **options) -> str:
    with pytest.raises(RowError) as caught:
        read(row, layout, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- rows


def test_calls_and_results_of_openai_rows():
    calls = [call_row(), call_row("sub", {"a": 1}, id="c2")]
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "2+3?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "1"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    problem = read({"messages": chat, "answer": "5", "tools": "[]"})
    assert problem.prompt == (Message("system", "Be brief."), Message("user", "2+3?"))
    (trace,) = problem.traces
    assert trace == Trace(
        messages=(
            Message("assistant", "", (ADD, ToolCall("sub", {"a": 1}))),
            Message("tool", "5", name="add"),
            Message("tool", "1", name="sub"),
            Message("assistant", "It is 5."),
        )
    )
    assert problem.meta["tools"] == "[]" and trace.answer_text == "It is 5."
    plain = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "now", "arguments": None}]
    one = read({"messages": [*chat[1:2], {"role": "assistant", "content": "Hm.", "tool_calls": plain}]}).traces[0]
    assert one.messages == (Message("assistant", "Hm.", (ADD, ToolCall("now", {}))),)


def test_results_without_ids_get_the_names_of_the_calls_in_order():
    calls = [{"name": name, "arguments": {}} for name in ("add", "sub")]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat += [{"role": "tool", "content": "5"}, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "5"}]
    assert [message.name for message in read({"messages": chat}).traces[0].messages] == ["", "add", "sub", ""]


def test_named_results_are_put_in_the_order_of_their_calls():
    calls = [{"name": name, "arguments": {}} for name in ("add", "sub", "add")]
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat += [
        {"role": "tool", "content": text, "name": name} for text, name in (("1", "sub"), ("5", "add"), ("6", "add"))
    ]
    messages = read({"messages": [*chat, {"role": "assistant", "content": "5"}]}).traces[0].messages
    assert [(message.name, message.content) for message in messages[1:]] == [
        ("add", "5"), ("sub", "1"), ("add", "6"), ("", "5"),
    ]  # fmt: skip


def test_a_result_is_of_its_id_wherever_that_was_asked():
    """Not of a call that waits in the last turn; a name that the result has counts before the call's."""
    two, one = [call_row("add"), call_row("sub", id="c2")], [call_row("now", id="c3")]
    asked = [{"role": "assistant", "content": None, "tool_calls": calls} for calls in (two, one)]
    first = {"role": "tool", "tool_call_id": "c1", "content": "5", "name": "plus"}
    late, next_one = {"role": "tool", "tool_call_id": "c2", "content": "1"}, {"role": "tool", "content": "noon"}
    chat = [{"role": "user", "content": "q"}, asked[0], first, asked[1], late, next_one]
    messages = read({"messages": [*chat, {"role": "assistant", "content": "5"}]}).traces[0].messages
    assert [(message.name, message.content) for message in messages] == [
        ("", ""), ("plus", "5"), ("", ""), ("sub", "1"), ("now", "noon"), ("", "5"),
    ]  # fmt: skip


def test_which_turns_are_the_trace():
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("abcd")]
    assert read({"messages": chat}).traces == (Trace(text="d"),) and len(read({"messages": chat}).prompt) == 3
    every = read({"messages": chat}, turns="all")
    assert every.prompt == (Message("user", "a"),)
    assert [message.content for message in every.traces[0].messages] == ["b", "c", "d"]
    assert read({"messages": chat[:2]}, turns="all") == read({"messages": chat[:2]})
    assert read({"messages": chat[:3]}, turns="all").traces == ()  # the policy is to go on
    greeted = [{"role": "assistant", "content": "Hello."}, *chat]
    assert len(read({"messages": greeted}, turns="all").prompt) == 2


def test_faults_of_chats_with_tools():
    ask, say = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    calls = {"role": "assistant", "content": None, "tool_calls": [call_row()]}
    result = {"role": "tool", "content": "5"}
    assert "column 'messages[2]': expected an assistant turn behind" in fault_of({"messages": [ask, calls, result]})
    twice = fault_of({"messages": [ask, calls, say]})
    assert "column 'messages[1]': expected an answer between two assistant turns" in twice
    empty = {"role": "assistant", "content": " "}
    assert "column 'messages[3]'" in fault_of({"messages": [ask, calls, result, empty]})
    assert "column 'messages[1]'" in fault_of({"messages": [ask, {**calls, "tool_calls": []}]})
    unreadable = [[call_row(arguments=some)] for some in ("{", [1], "[" * 100_000)]
    for wrong in ([{"function": {"arguments": "{}"}}], ["add"], *unreadable):
        assert "messages[1].tool_calls[0]" in fault_of({"messages": [ask, {**calls, "tool_calls": wrong}, result, say]})
    assert "messages[1].tool_calls'" in fault_of({"messages": [ask, {**calls, "tool_calls": {"a": 1}}, result, say]})
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    assert "column 'messages[0]': expected a chat message with text" in fault_of({"messages": [picture, say]})


def test_sharegpt_with_tools():
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    turns = [
        {"from": "human", "value": "2+3?"},
        {"from": "gpt", "value": "I add."},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "5"},
        {"from": "function_call", "value": json.dumps([call, call])},
        {"from": "tool", "value": "5"},
        {"from": "gpt", "value": "5."},
    ]
    problem = read({"conversations": turns, "tools": "[...]"}, "sharegpt")
    roles = [(m.role, m.content, len(m.tool_calls), m.name) for m in problem.traces[0].messages]
    assert roles == [
        ("assistant", "I add.", 1, ""), ("tool", "5", 0, "add"), ("assistant", "", 2, ""), ("tool", "5", 0, "add"),
        ("assistant", "5.", 0, ""),
    ]  # fmt: skip
    bad = [turns[0], {"from": "function_call", "value": "add(2)"}]
    told = fault_of({"conversations": bad}, "sharegpt")
    assert "column 'conversations[1].value': expected a call as JSON, found 'add(2)'" in told


def test_chats_in_a_column_of_traces():
    ask, say = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    calls, result = {"role": "assistant", "content": None, "tool_calls": [call_row()]}, {"role": "tool", "content": "5"}
    row = {"prompt": "q", "answer": "5", "traces": [[calls, result, say], [say], calls, {"messages": [say, ask, say]}]}
    several, text, single, named = read(row, "luffy").traces
    assert several.messages == (Message("assistant", "", (ADD,)), RESULT, Message("assistant", "a"))
    assert text == Trace(text="a") and single.messages == (Message("assistant", "", (ADD,)),)
    assert len(named.messages) == 3
    assert "to begin with an assistant turn" in fault_of({**row, "traces": [[ask, calls, result, say]]}, "luffy")
    assert "to end with an assistant turn" in fault_of({**row, "traces": [[calls, result]]}, "luffy")
    given = {"messages": [say, ask, say], "log_probs": [-1.0], "teacher": "big"}
    assert "recorded log-probs need the token ids" in fault_of({**row, "traces": [given]}, "luffy")


def test_thoughts_that_are_apart_join_the_text():
    ask, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "5"}
    thinks = {"role": "assistant", "reasoning_content": " two and three\n"}
    call, say = {**thinks, "content": None, "tool_calls": [call_row()]}, {**thinks, "content": "\n5"}
    before = "<think>\ntwo and three\n</think>\n\n"
    (single,), (several,) = (read({"messages": [ask, *more]}).traces for more in ([say], [call, result, say]))
    assert single == Trace(text=before + "5")
    assert [turn.content for turn in several.messages] == [before, "5", before + "5"]
    parts = {**say, "content": [{"type": "text", "text": "5"}]}
    for turn in (parts, {"role": "assistant", "reasoning": "two and three", "content": "5"}):
        assert read({"messages": [ask, turn]}).traces == (Trace(text=before + "5"),)
    for turn in ({**say, "content": "a </think> 5"}, {**say, "reasoning_content": None, "content": "a </think> 5"}):
        assert read({"messages": [ask, turn]}).traces == (Trace(text="a </think> 5"),)
    assert "expected an assistant message with text" in fault_of({"messages": [ask, {**say, "content": {}}]})
    greeting = {**say, "content": "hello"}  # in a prompt thoughts stay out, as templates leave out those of past turns
    assert read({"messages": [greeting, ask, say]}).prompt[0].content == "hello"


def test_what_is_no_text_of_an_assistants_thoughts_stays_out():
    call = {"role": "assistant", "content": None, "tool_calls": [call_row()], "reasoning": {"effort": "low"}}
    result = {"role": "tool", "content": "5", "reasoning": "a tool's"}
    say = {"role": "assistant", "content": "It is 5.", "reasoning": ["a", "list"]}
    (trace,) = read({"messages": [{"role": "user", "content": "q"}, call, result, say]}).traces
    assert [turn.content for turn in trace.messages] == ["", "5", "It is 5."]


def test_the_option_of_a_dataset(write_jsonl):
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("abcd")]
    path = write_jsonl([{"messages": chat}])
    last, every = (load_problems(path, require_answer=False, turns=turns) for turns in ("last", "all"))
    assert last[0].traces == (Trace(text="d"),) and len(every[0].traces[0].messages) == 3
    assert "data.turns=all" in last.turns_notices[0] and every.turns_notices == []
    assert last.fingerprint == load_problems(path, require_answer=False).fingerprint != every.fingerprint
    with pytest.raises(ConfigError, match=r"data\.turns='first' is unknown; known: last, all"):
        load_problems(path, turns="first")


# ---- token ids

STABLE = ["qwen2.5", "qwen3", "llama3.1", "mistral", "hermes", "deepseek"]  # write every turn always the same
CHATS = {
    "text": [Message("assistant", "A guess."), Message("user", "No."), Message("assistant", "5")],
    "call": [Message("assistant", "", (ADD,)), RESULT, Message("assistant", "5")],
    "text and call": [Message("assistant", "I add.", (ADD,)), RESULT, Message("assistant", "", (ADD,))],
    "parallel": [
        Message("assistant", "", (ADD, SUB)), RESULT, Message("tool", 'a "b"\n<|im_end|>', name="sub"),
        Message("assistant", "5"),
    ],
}  # fmt: skip
MORE = Message("user", "and 3+4?<|eot_id|>")


def make_encoder(name, **options):
    return Encoder(make_model_tokenizer(name), date="2026-01-31", max_prompt_tokens=4096, **options)


def traced(*messages, **more):
    return Problem("p", (ASK,), "5", traces=(Trace(messages=tuple(messages), **more),), meta={"__row__": "d.jsonl:4"})


def text_of(encoder, ids):
    return encoder.tokenizer.decode(list(ids))


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize("kind", CHATS)
def test_turns_put_behind_one_another_are_the_chat_rendered_whole(name, kind):
    chat, encoder = CHATS[kind], make_encoder(name)
    if (name, kind) == ("llama3.1", "parallel"):
        with pytest.raises(DataError, match=r"^d.jsonl:4: the chat template refuses a turn that calls add, sub"):
            encoder.encode(traced(*chat))
        return
    reply = [RESULT, MORE] if chat[-1].tool_calls else [MORE]
    task = encoder.encode(traced(*chat))
    ids = task.prompt_ids + task.demonstrations[0].token_ids + encoder.reply_ids(reply)
    assert text_of(encoder, ids) == encoder.render(Problem("p", (ASK, *chat, *reply), ""))
    assert ids == encoder.prompt_ids(Problem("p", (ASK, *chat, *reply), ""))
    assert encoder.counts["texts_left_out"] == (kind == "text and call" and name in ("llama3.1", "mistral", "hermes"))


@pytest.mark.parametrize("name", STABLE)
def test_an_environments_tokens_are_known(name):
    encoder = make_encoder(name)
    (trace,) = encoder.encode(traced(*CHATS["call"])).demonstrations
    ((start, end),) = trace.replies
    assert trace.token_ids[start:end] == encoder.reply_ids([RESULT])
    assert trace.token_ids[start - 1] == trace.token_ids[-1] == encoder.eos_ids[0]
    assert encoder.text_of_turn(trace.token_ids[end:]) == "5" and trace.log_probs is None and trace.calls == 1
    call = encoder.text_of_turn(trace.token_ids[:start])
    assert '"a": 2' in call and call.startswith(
        {"llama3.1": '{"name"', "mistral": "[TOOL_CALLS][{", "deepseek": "<|call|>add"}.get(name, "<tool_call>\n{")
    )
    assert encoder.text_of_turn(trace.token_ids[:start][:-1]) == call


def test_what_a_reply_looks_like():
    encoder = make_encoder("qwen2.5")
    assert text_of(encoder, encoder.reply_ids([MORE])) == (
        "\n<|im_start|>user\nand 3+4?<|eot_id|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoder.tokenizer.convert_tokens_to_ids("<|eot_id|>") not in encoder.reply_ids([MORE])
    controlled = make_encoder("qwen2.5", special_tokens="control")  # the environment's texts stay texts
    assert controlled.reply_ids([MORE]) == encoder.reply_ids([MORE])
    llama = make_encoder("llama3.1")  # more results than calls that a turn may have
    assert text_of(llama, llama.reply_ids([RESULT, RESULT])).count("ipython") == 2


def test_replies_of_other_roles_and_tools_are_told_apart():
    named = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = make_encoder("qwen2.5", chat_template=named)
    for role, name in (("tool", "add"), ("tool", "sub"), ("tool", ""), ("user", "")):
        said = text_of(encoder, encoder.reply_ids([Message(role, "5", name=name)]))
        assert f"<|im_start|>{role} {name}" in said


def test_a_template_that_rewrites_history_does_not_change_what_the_model_saw():
    thought = "<think>\nI add.\n</think>\n\n"
    chat = [Message("assistant", thought + "5?"), MORE, Message("assistant", thought + "I call.", (ADD,)), RESULT]
    qwen3 = make_encoder("qwen3")
    task = qwen3.encode(traced(*chat, Message("assistant", "7")))
    text = text_of(qwen3, task.prompt_ids + task.demonstrations[0].token_ids)
    assert text.count(thought) == 2 and text not in qwen3.render(Problem("p", (ASK, *chat), ""))
    qwq = make_encoder("qwq")  # begins every turn with <think>
    task = qwq.encode(traced(*chat, Message("assistant", "", (ADD,))))
    text = text_of(qwq, task.prompt_ids + task.demonstrations[0].token_ids)
    assert text.count(thought) == 2 and text.count("<think>") == 3 and text.endswith("<|im_end|>")


def test_templates_without_a_place_for_answers():
    gemma = make_encoder("gemma")
    assert text_of(gemma, gemma.reply_ids([MORE])).endswith("<end_of_turn>\n<start_of_turn>model\n")
    with pytest.raises(ConfigError, match=r"refuses an answer of tool .*let the environment answer as the user, or gi"):
        gemma.reply_ids([RESULT])
    silent = make_encoder(
        "qwen2.5", chat_template="{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="leaves out messages of the role 'tool'; give another chat template"):
        silent.reply_ids([RESULT])
    endless = make_encoder(
        "qwen2.5", chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(ConfigError, match="ends an assistant turn with no special token"):
        endless.reply_ids([MORE])
    short = make_encoder("qwen2.5", chat_template="{{ messages[-1].content }}<|im_end|>")
    with pytest.raises(ConfigError, match="the chat template rewrites the turns before|leaves out"):
        short.reply_ids([MORE])
    plain = make_encoder("qwen2.5", style="plain")
    with pytest.raises(ConfigError, match="style plain has no turns; choose style chat"):
        plain.reply_ids([MORE])
    with pytest.raises(ConfigError, match="style plain has no place for tools"):
        make_encoder("qwen2.5", style="plain", tools=TOOLS)


def test_tools_are_in_every_prompt_and_in_no_reply():
    for name in ("qwen2.5", "mistral", "hermes"):
        without, encoder = make_encoder(name), make_encoder(name, tools=TOOLS)
        assert json.dumps(TOOLS[0]) in encoder.render(traced(*CHATS["call"]))
        assert encoder.reply_ids([MORE]) == without.reply_ids([MORE])
        assert encoder.render(Problem("p", "2+3?", "")) != without.render(Problem("p", "2+3?", ""))


def test_the_papers_style_opens_the_thought_of_every_turn():
    encoder = make_encoder("qwen2.5", style="paper")
    task = encoder.encode(
        replace(traced(Message("assistant", "<think>\na</think>"), MORE, Message("assistant", "b")), prompt="q")
    )
    assert PAPER_SYSTEM_PROMPT in text_of(encoder, task.prompt_ids)
    text = text_of(encoder, task.prompt_ids + task.demonstrations[0].token_ids)
    assert text.count("assistant\n<think>\n") == 2 and text.count("<think>\n<think>") == 0


def test_a_turn_begins_as_the_text_before_it_says():
    """Here the template opens a thought behind a question, and none behind a result."""
    opens = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if messages[-1].role == 'user' %}<think>\n{% endif %}{% endif %}"
    )
    encoder = make_encoder("qwen2.5", chat_template=opens)
    call = Message("assistant", "<think>\nadd</think>", (ToolCall("add", {"a": 2, "b": 3}),))
    (trace,) = encoder.encode(traced(call, RESULT, Message("assistant", "<think>\nso</think>5"))).demonstrations
    first, last = (encoder.text_of_turn(turn) for turn in trace.turns)
    assert first.startswith("add</think>") and last == "<think>\nso</think>5"


def test_overlong_traces_of_several_turns():
    chat = [Message("assistant", "12345"), MORE, Message("assistant", "678"), MORE, Message("assistant", "9")]
    whole = make_encoder("qwen2.5", max_response_tokens=12).encode(traced(*chat)).demonstrations[0]
    assert len(whole.replies) == 2  # the answers of the environment do not count

    def cut(tokens, how="truncate"):
        encoder = make_encoder("qwen2.5", max_response_tokens=tokens, overlong_trace=how)
        return encoder.encode(traced(*chat)).demonstrations, dict(encoder.counts)

    first, second = whole.replies
    assert cut(11) == (
        (Demonstration(whole.token_ids[: second[0]], replies=(first,), calls=0),),
        {"traces_truncated": 1},
    )
    assert cut(9) == ((Demonstration(whole.token_ids[: first[0]], calls=0),), {"traces_truncated": 1})
    assert cut(5) == ((), {"traces_dropped": 1}) == cut(11, "drop")
    with pytest.raises(DataError, match="a trace with its EOS has 12 tokens, more than rollout.max_tokens=11"):
        cut(11, "error")

    def bounded(most, how="truncate"):
        encoder = make_encoder("qwen2.5", max_conversation_tokens=most, overlong_trace=how)
        return encoder.encode(traced(*chat)).demonstrations

    length = len(whole.token_ids)
    assert bounded(length) == (whole,) == bounded(length, "drop")
    assert bounded(length - 1) == (Demonstration(whole.token_ids[: second[0]], replies=(first,), calls=0),)
    assert bounded(length - 1, "drop") == () == bounded(3)
    with pytest.raises(DataError, match=f"has {length} tokens, more than {length - 1} with replies"):
        bounded(length - 1, "error")


def test_faults_of_traces_of_several_turns():
    encoder = make_encoder("qwen2.5")
    say = Message("assistant", "a")
    for wrong in ((), (MORE, say), (say, MORE), (say, say)):
        with pytest.raises(
            DataError, match=r"^d.jsonl:4: a trace of messages must begin and end with an assistant turn"
        ):
            encoder.encode(traced(*wrong))
    with pytest.raises(DataError, match=r"^d.jsonl:4: a trace of messages has log-probs; drop them"):
        encoder.encode(traced(say, MORE, say, log_probs=(-1.0,)))
    with pytest.raises(ConfigError, match="style plain has no place for tool calls"):
        make_encoder("qwen2.5", style="plain").encode(replace(traced(Message("assistant", "", (ADD,))), prompt="q"))


def test_an_observation_stands_behind_the_question():
    encoder = make_encoder("qwen2.5")
    task = encoder.encode(traced(*CHATS["call"]))
    seen = encoder.with_observation(task, "\nYou see a door.")
    assert "What is 2+3?\nYou see a door.<|im_end|>" in text_of(encoder, seen.prompt_ids)
    assert seen.problem.prompt == (Message("user", "What is 2+3?\nYou see a door."),)
    assert seen.demonstrations == task.demonstrations and encoder.with_observation(task, "") == task
    hinted = encoder.with_observation(encoder.with_hint(task, " Add.", 2), "\nYou see a door.")
    assert "What is 2+3?\nYou see a door. Add.<|im_end|>" in text_of(encoder, hinted.prompt_ids)
    assert hinted.plain_ids == seen.prompt_ids and hinted.problem == seen.problem and hinted.hint == 2
    encoder.max_prompt_tokens = len(task.prompt_ids)
    with pytest.raises(DataError, match=r"^d.jsonl:4: the prompt has .* tokens, more than data.max_prompt_tokens="):
        encoder.with_observation(task, "!")
