from __future__ import annotations

from dataclasses import replace

import pytest

from luffy.data import Encoder
from luffy.data.prompts import PAPER_SYSTEM_PROMPT, PromptStyle, with_text
from luffy.data.traces import without_open_think
from luffy.errors import ConfigError, DataError
from luffy.step.tasks import left_out
from luffy.types import Message, Problem, Trace

PROBLEM = Problem(id="p1", prompt="1+1?", answer="2", meta={"__row__": "d.jsonl:4"})


def with_traces(*traces: Trace) -> Problem:
    return replace(PROBLEM, traces=traces)


def decode(encoder: Encoder, ids) -> str:
    return encoder.tokenizer.decode(list(ids))


# ---- prompts


def test_chat_style(tokenizer):
    encoder = Encoder(tokenizer)
    assert encoder.render(PROBLEM) == "<bos>[user]1+1?[/][assistant]"
    brief = Encoder(tokenizer, system_prompt="Be brief.")
    assert brief.render(PROBLEM) == "<bos>[system]Be brief.[/][user]1+1?[/][assistant]"


def test_bos_appears_exactly_once_and_no_eos_is_added(tokenizer):
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id  # this tokenizer adds BOS and EOS by itself
    for style in PromptStyle:
        task = Encoder(tokenizer, style=style).encode(PROBLEM)
        assert task.prompt_ids.count(tokenizer.bos_token_id) == 1 and task.prompt_ids[0] == tokenizer.bos_token_id
        assert tokenizer.eos_token_id not in task.prompt_ids


def test_no_bos_where_the_tokenizer_adds_none(make_tokenizer):
    encoder = Encoder(make_tokenizer(adds_bos=False), style="plain")
    assert encoder.render(PROBLEM) == "1+1?"
    assert encoder.encode(PROBLEM).prompt_ids == tuple(encoder.tokenizer.convert_tokens_to_ids(list("1+1?")))


def test_what_is_rendered_is_what_is_tokenised(tokenizer):
    chat = replace(PROBLEM, prompt=(Message("user", "é ∑"), Message("assistant", "?"), Message("user", "x")))
    for style in PromptStyle:
        encoder = Encoder(tokenizer, style=style)
        for problem in (PROBLEM, chat):
            assert decode(encoder, encoder.encode(problem).prompt_ids) == encoder.render(problem)


def test_paper_style(tokenizer):
    encoder = Encoder(tokenizer, style="paper")
    assert encoder.render(PROBLEM) == (
        f"<bos>[system]{PAPER_SYSTEM_PROMPT}[/][user]This is the problem: 1+1?[/][assistant]<think>\n"
    )
    assert PAPER_SYSTEM_PROMPT.startswith("Your task is to follow a systematic, thorough reasoning process before")
    assert 'the format: "<think>\n thoughts </think>\n". Each thought' in PAPER_SYSTEM_PROMPT
    assert PAPER_SYSTEM_PROMPT.endswith(
        "include the answer in \\boxed{} for closed-form results like multiple choices or mathematical solutions."
    )
    assert Encoder(tokenizer, style="paper", system_prompt="Hm.").render(PROBLEM).startswith("<bos>[system]Hm.[/]")


@pytest.mark.parametrize("opening", ["", "<think>", "<think>\n"])
def test_paper_style_opens_the_thought_once_whatever_the_template_does(make_tokenizer, opening):
    template = "{{ messages[-1].content }}|" + opening
    encoder = Encoder(make_tokenizer(chat_template=template), style="paper")
    assert encoder.render(PROBLEM) == "This is the problem: 1+1?|<think>\n"


def test_plain_text_styles(tokenizer):
    simple = Encoder(tokenizer, style="paper_simple")
    assert simple.render(PROBLEM) == "<bos>User: 1+1?\n\nAnswer: Let's think step by step."
    assert Encoder(tokenizer, style="plain").render(PROBLEM) == "<bos>1+1?"


def test_a_chat_prompt_is_taken_as_it_is(tokenizer):
    own = replace(PROBLEM, prompt=(Message("system", "mine"), Message("user", "q")))
    bare = replace(PROBLEM, prompt=(Message("user", "q"),))
    for style in ("chat", "paper"):
        encoder = Encoder(tokenizer, style=style, system_prompt="yours")
        end = "<think>\n" if style == "paper" else ""
        assert encoder.render(own) == f"<bos>[system]mine[/][user]q[/][assistant]{end}"
        assert encoder.render(bare) == f"<bos>[system]yours[/][user]q[/][assistant]{end}"
    assert Encoder(tokenizer, style="plain").render(own) == "<bos>[system]mine[/][user]q[/][assistant]"


def test_prompts_are_equal_if_the_model_sees_the_same_words(tokenizer):
    question, chat = Message("user", " 1+1?\n"), replace(PROBLEM, prompt=(Message("user", "1+1?"),))
    brief = replace(PROBLEM, prompt=(Message("system", "Be brief."), question))
    paper = replace(PROBLEM, prompt=(Message("user", "This is the problem:\n1+1?"),))

    def equal(other, **options):
        encoder = Encoder(tokenizer, **options)
        return encoder.prompt_hash(PROBLEM) == encoder.prompt_hash(other)

    assert equal(replace(PROBLEM, prompt="\t1+1? ")) and not equal(replace(PROBLEM, prompt="1 + 1?"))
    assert equal(chat) and not equal(chat, style="paper") and equal(paper, style="paper")
    assert equal(brief, system_prompt="Be brief.") and not equal(brief)


def test_own_chat_template_as_text_or_file(make_tokenizer, tmp_path):
    bare = make_tokenizer(chat_template=None)
    template = "<<{{ messages[0].content }}>>"
    assert Encoder(bare, chat_template=template).render(PROBLEM) == "<<1+1?>>"
    (tmp_path / "chat.jinja").write_text(template)
    assert Encoder(bare, chat_template=str(tmp_path / "chat.jinja")).render(PROBLEM) == "<<1+1?>>"
    with pytest.raises(ConfigError, match=r"'nowhere.jinja' is neither Jinja text nor a file"):
        Encoder(bare, chat_template="nowhere.jinja")


def test_no_chat_template(make_tokenizer):
    bare = make_tokenizer(chat_template=None)
    for style in ("chat", "paper"):
        with pytest.raises(
            ConfigError,
            match=f"no chat template, which style {style} needs; choose style plain or give a chat template",
        ):
            Encoder(bare, style=style)
    chat = replace(PROBLEM, prompt=(Message("user", "q"),))
    with pytest.raises(DataError, match=r"^d.jsonl:4: the prompt is a chat, but .* has no chat template; give it one"):
        Encoder(bare, style="plain").encode(chat)


def test_a_template_that_refuses_the_chat_is_one_clear_line(make_tokenizer):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    encoder = Encoder(make_tokenizer(chat_template=template), system_prompt="s")
    told = r"^d.jsonl:4: the chat template refuses a chat of system, user \(System role.*template or fix the row$"
    with pytest.raises(DataError, match=told):
        encoder.encode(PROBLEM)


def test_overlong_prompts(tokenizer):
    exact = Encoder(tokenizer, style="plain", max_prompt_tokens=5)
    assert len(exact.encode(PROBLEM).prompt_ids) == 5
    with pytest.raises(DataError) as caught:
        Encoder(tokenizer, style="plain", max_prompt_tokens=4).encode(PROBLEM)
    assert str(caught.value) == (
        "d.jsonl:4: the prompt has 5 tokens, more than data.max_prompt_tokens=4; "
        "raise it or set data.overlong_prompt=drop"
    )
    dropping = Encoder(tokenizer, style="plain", max_prompt_tokens=4, overlong_prompt="drop")
    assert dropping.encode(PROBLEM) is None and dropping.encode(PROBLEM) is None
    assert dropping.counts == {"prompts_dropped": 2}


def test_a_problem_without_its_row_is_named_by_id(tokenizer):
    with pytest.raises(DataError, match=r"^problem 'p1': the prompt has"):
        Encoder(tokenizer, max_prompt_tokens=1).encode(replace(PROBLEM, meta={}))


def test_an_empty_prompt_has_no_token_to_predict_from(make_tokenizer):
    with pytest.raises(DataError, match="the prompt has no tokens"):
        Encoder(make_tokenizer(adds_bos=False), style="plain").encode(replace(PROBLEM, prompt=""))


# ---- the tokenizer's ends


def test_a_tokenizer_without_eos(make_tokenizer):
    blind = make_tokenizer(eos=None)
    with pytest.raises(ConfigError, match=r"has no EOS token; set eos_token in "):
        Encoder(blind)
    assert Encoder(blind, eos_ids=[3]).eos_ids == (3,)
    with pytest.raises(ConfigError, match="has no EOS token"):
        Encoder(blind, eos_ids=[])
    with pytest.raises(ConfigError, match=r"eos_ids: 9999 is not one of the tokenizer's 259 ids"):
        Encoder(blind, eos_ids=[9999])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "alpaca"}, "^style='alpaca' is unknown; known: chat, paper, paper_simple, plain"),
        ({"overlong_prompt": "cut"}, "overlong_prompt='cut' is unknown; known: error, drop"),
        ({"overlong_trace": "cut"}, "overlong_trace='cut' is unknown; known: drop, truncate, error"),
        ({"special_tokens": "drop"}, "special_tokens='drop' is unknown; known: text, control"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens=0 leaves no room"),
        ({"max_response_tokens": 0}, "rollout.max_tokens=0 leaves no room"),
        (
            {"style": "plain", "system_prompt": "x"},
            "^style plain has no place for a system prompt; leave it out or choose style chat$",
        ),
    ],
)
def test_options_that_cannot_be_honoured(tokenizer, options, message):
    with pytest.raises(ConfigError, match=message):
        Encoder(tokenizer, **options)


def test_a_task_knows_whether_its_prompt_opens_a_thought(tokenizer, make_tokenizer):
    opened = {style: Encoder(tokenizer, style=style).encode(PROBLEM).in_thought for style in PromptStyle}
    assert opened == {"chat": False, "paper": True, "paper_simple": False, "plain": False}
    plain = Encoder(tokenizer, style="plain")
    prompts = {"1+1?<think>": True, "1+1? <think> \n": True, "Use <think> tags: 1+1?": False, "<think></think>": False}
    for prompt, expected in prompts.items():
        problem = replace(PROBLEM, prompt=prompt)
        assert plain.encode(problem).in_thought is plain.in_thought(problem) is expected
    hiding = make_tokenizer()
    hiding.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    assert not Encoder(hiding, style="paper").in_thought(PROBLEM)  # a decoded response would not show its end


# ---- traces


def test_traces_with_a_think_tag_that_no_prompt_opens_are_counted(make_tokenizer):
    problem = with_traces(Trace(text="<think>\na\n</think>\nb"), Trace(text="b"))
    found = {}
    for style in PromptStyle:
        encoder = Encoder(make_tokenizer(), style=style)
        encoder.encode(problem)
        found[style] = dict(encoder.counts)
    said = {"traces_open_thought": 1}
    assert found == {"chat": said, "paper": {}, "paper_simple": said, "plain": said}
    knowing = make_tokenizer()
    knowing.add_tokens(["<think>", "</think>"])  # as Qwen3's: such a model writes them by itself
    encoder = Encoder(knowing)
    encoder.encode(problem)
    assert encoder.counts == {}
    assert left_out(said, {}) == [
        "training data: 1 trace(s) with a <think> that the prompt does not open: the policy learns to write it"
    ]


@pytest.mark.parametrize("text", ["two", "two<eos>", "two<eos><eos>"])
def test_eos_exactly_once(tokenizer, text):
    encoder = Encoder(tokenizer)
    (demonstration,) = encoder.encode(with_traces(Trace(text=text))).demonstrations
    assert decode(encoder, demonstration.token_ids) == "two<eos>"
    assert demonstration.token_ids.count(tokenizer.eos_token_id) == 1 and demonstration.token_ids[0] != 256
    assert demonstration.log_probs is None


def test_any_of_several_ends_counts_and_texts_get_the_first(tokenizer):
    end, eos = tokenizer.convert_tokens_to_ids(["<end>", "<eos>"])
    encoder = Encoder(tokenizer, eos_ids=[end, eos])
    texts = ["a", "a<eos>", "a<end>", "a<end><eos>", "a<end>\n"]
    demonstrations = encoder.encode(with_traces(*(Trace(text=text) for text in texts))).demonstrations
    assert [d.token_ids[1:] for d in demonstrations] == [(end,)] * 5
    recorded = [(7,), (7, eos), (7, end), (7, end, eos)]
    demonstrations = encoder.encode(with_traces(*(Trace(token_ids=ids) for ids in recorded))).demonstrations
    assert [d.token_ids[1:] for d in demonstrations] == [(end,), (eos,), (end,), (end,)]
    assert encoder.counts == {}


CHATML = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def test_a_trace_ends_as_the_chat_template_ends_a_turn(make_tokenizer):
    """As for Qwen2.5-Instruct and Gemma: the tokenizer's own EOS is one that the chat never uses."""
    tokenizer = make_tokenizer(chat_template=CHATML)
    end, eos = tokenizer.convert_tokens_to_ids(["<end>", "<eos>"])
    chat = Encoder(tokenizer)
    assert chat.eos_ids == (end, eos) and chat.stops([eos, 5]) == (end, eos, 5)
    (trace,) = chat.encode(with_traces(Trace(text="two"))).demonstrations
    assert decode(chat, trace.token_ids) == "two<end>"
    (trace,) = chat.encode(with_traces(Trace(token_ids=(7, end), log_probs=(-1.0, -2.0)))).demonstrations
    assert (trace.token_ids, trace.log_probs) == ((7, end), (-1.0, -2.0))
    plain = Encoder(tokenizer, style="plain", eos_ids=[eos, end])
    (trace,) = plain.encode(with_traces(Trace(text="two"))).demonstrations
    assert decode(plain, trace.token_ids) == "two<eos>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",  # the answer is not shown
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # nothing after it
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }} END<end>{% endfor %}",  # a word of its own first
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}",
    ],
)
def test_a_template_that_ends_no_turn_leaves_the_tokenizers_eos(make_tokenizer, template):
    tokenizer = make_tokenizer(chat_template=template)
    assert Encoder(tokenizer).eos_ids == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("tail", ["<end>", " <end>\n", "\n<end><eos>"])
def test_the_end_of_a_turn_may_follow_space(make_tokenizer, tail):
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}" + tail + "{% endfor %}")
    assert Encoder(tokenizer).eos_ids == tuple(tokenizer.convert_tokens_to_ids(["<end>", "<eos>"]))


# ---- special tokens in the user's texts


def test_a_text_trace_does_not_end_in_the_middle(tokenizer):
    text = "#### 1<eos> or rather\n#### 7<bos>"
    encoder = Encoder(tokenizer)
    (trace,) = encoder.encode(with_traces(Trace(text=text))).demonstrations
    assert decode(encoder, trace.token_ids) == text + "<eos>"
    assert [i for i in trace.token_ids if i >= 256] == [tokenizer.eos_token_id]
    assert encoder.counts == {"special_as_text": 1}
    control = Encoder(tokenizer, special_tokens="control")
    (trace,) = control.encode(with_traces(Trace(text=text))).demonstrations
    assert decode(control, trace.token_ids) == "#### 1<eos>"
    assert control.counts == {"special_as_control": 1, "traces_cut_at_end": 1}


def test_a_recorded_trace_ends_at_its_first_end_token(tokenizer):
    eos = tokenizer.eos_token_id
    encoder = Encoder(tokenizer)
    cut = Trace(token_ids=(7, eos, 8, 9, eos), log_probs=(-1.0, -2.0, -3.0, -4.0, -5.0))
    (trace,) = encoder.encode(with_traces(cut)).demonstrations
    assert (trace.token_ids, trace.log_probs) == ((7, eos), (-1.0, -2.0))
    without_last = replace(cut, log_probs=cut.log_probs[:-1])
    (trace,) = encoder.encode(with_traces(without_last)).demonstrations
    assert (trace.token_ids, trace.log_probs) == ((7, eos), (-1.0, -2.0))
    assert encoder.counts == {"traces_cut_at_end": 2}
    with pytest.raises(DataError, match="found 2 log-probs for 5 token ids"):
        encoder.encode(with_traces(replace(cut, log_probs=cut.log_probs[:2])))


@pytest.mark.parametrize("style", PromptStyle)
def test_special_tokens_in_a_prompt_are_text(make_tokenizer, style):
    tokenizer = make_tokenizer(chat_template=CHATML)
    bos, end = tokenizer.convert_tokens_to_ids(["<bos>", "<end>"])
    question, marked = "say <end>\n<bos>assistant\nno", replace(PROBLEM, prompt="say <end>\n<bos>assistant\nno")
    honest = replace(PROBLEM, prompt="say (end)\n(bos)assistant\nno")
    encoder = Encoder(tokenizer, style=style, max_prompt_tokens=2000)
    task, sound = encoder.encode(marked), encoder.encode(honest)
    for token in (bos, end):
        assert task.prompt_ids.count(token) == sound.prompt_ids.count(token)
    assert question in encoder.render(marked) and decode(encoder, task.prompt_ids) == encoder.render(marked)
    assert encoder.counts == {"special_as_text": 1}
    control = Encoder(tokenizer, style=style, max_prompt_tokens=2000, special_tokens="control")
    task, sound = control.encode(marked), control.encode(honest)
    assert task.prompt_ids.count(end) == sound.prompt_ids.count(end) + 1
    assert control.counts == {"special_as_control": 1}


def test_special_tokens_of_every_turn_of_a_chat_are_text(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=CHATML)
    end = tokenizer.convert_tokens_to_ids("<end>")
    chat = (Message("system", "a<end>"), Message("user", "<end><end>"), Message("assistant", "b"), Message("user", "c"))
    encoder = Encoder(tokenizer)
    ids = encoder.encode(replace(PROBLEM, prompt=chat)).prompt_ids
    assert ids.count(end) == 4 and decode(encoder, ids) == encoder.render(replace(PROBLEM, prompt=chat))


def test_thoughts_stay_what_the_tokenizer_makes_of_them(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    opened, closed = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    (trace,) = Encoder(tokenizer).encode(with_traces(Trace(text="<think>a<eos></think>b"))).demonstrations
    assert [i for i in trace.token_ids if i >= 256] == [opened, closed, tokenizer.eos_token_id]


def test_a_text_cannot_carry_marks_of_its_own(tokenizer):
    text = "\ufdd0257\ufdd1 and \ufdd0999999\ufdd1"
    for style in ("plain", "chat"):
        problem = replace(with_traces(Trace(text=text)), prompt=text)
        task = Encoder(tokenizer, style=style).encode(problem)
        assert tokenizer.eos_token_id not in task.prompt_ids
        assert task.demonstrations[0].token_ids.count(tokenizer.eos_token_id) == 1


def test_marked_texts_come_out_alike_at_once_and_one_by_one(tokenizer):
    rows = [replace(with_traces(Trace(text=f"{i}<eos>x")), prompt="a<bos>b" if i % 2 else "ab") for i in range(6)]
    at_once, one_by_one = Encoder(tokenizer), Encoder(tokenizer)
    assert list(at_once.encode_all(rows)) == [one_by_one.encode(row) for row in rows]
    assert at_once.counts == one_by_one.counts == {"special_as_text": 9}


@pytest.mark.parametrize(
    ("prompt", "trace", "left"),
    [
        ("..<think>\n", "<think>\nHm", "Hm"),
        ("..<think>\n", "<think>Hm", "Hm"),
        ("..<think>\n", "<think>\n\nHm", "\nHm"),
        ("..<think>", "<think>\nHm", "\nHm"),
        ("..", "<think>\nHm", "<think>\nHm"),
        ("..<think>\n", "Hm <think>\n", "Hm <think>\n"),
    ],
)
def test_the_opened_thought_is_not_opened_again(prompt, trace, left):
    assert without_open_think(trace, prompt) == left


def test_think_is_removed_through_the_encoder_only_where_the_prompt_has_it(tokenizer):
    problem = with_traces(Trace(text="<think>\nHm</think>\n2"))
    for style, text in (("paper", "Hm</think>\n2<eos>"), ("chat", "<think>\nHm</think>\n2<eos>")):
        encoder = Encoder(tokenizer, style=style, max_prompt_tokens=2000)
        assert decode(encoder, encoder.encode(problem).demonstrations[0].token_ids) == text


def test_overlong_traces(tokenizer):
    fits, long = Trace(text="abc"), Trace(text="abcd")  # 4 and 5 tokens with EOS
    problem = with_traces(long, fits)
    dropping = Encoder(tokenizer, max_response_tokens=4)
    assert [decode(dropping, d.token_ids) for d in dropping.encode(problem).demonstrations] == ["abc<eos>"]
    assert dropping.counts == {"traces_dropped": 1}
    cutting = Encoder(tokenizer, max_response_tokens=4, overlong_trace="truncate")
    assert [decode(cutting, d.token_ids) for d in cutting.encode(problem).demonstrations] == ["abcd", "abc<eos>"]
    assert cutting.counts == {"traces_truncated": 1}
    with pytest.raises(
        DataError, match=r"^d.jsonl:4: a trace with its EOS has 5 tokens, more than rollout.max_tokens=4"
    ):
        Encoder(tokenizer, max_response_tokens=4, overlong_trace="error").encode(problem)


def test_recorded_traces(tokenizer):
    eos = tokenizer.eos_token_id
    encoder = Encoder(tokenizer)

    def encoded(ids, log_probs=None):
        trace = Trace(token_ids=tuple(ids), log_probs=None if log_probs is None else tuple(log_probs))
        (demonstration,) = encoder.encode(with_traces(trace)).demonstrations
        return demonstration.token_ids, demonstration.log_probs

    assert encoded([7, 8]) == ((7, 8, eos), None)
    assert encoded([7, 8, eos]) == ((7, 8, eos), None)
    assert encoded([7, 8], [-1, -2]) == ((7, 8, eos), (-1, -2, 0.0))
    assert encoded([7, 8], [-1, -2, -3]) == ((7, 8, eos), (-1, -2, -3))
    assert encoded([7, 8, eos], [-1, -2, -3]) == ((7, 8, eos), (-1, -2, -3))
    assert encoded([7, 8, eos], [-1, -2]) == ((7, 8, eos), (-1, -2, 0.0))
    assert encoded([7, eos, eos], [-1, -2, -3]) == ((7, eos), (-1, -2))


def test_a_truncated_recorded_trace_keeps_its_log_probs_aligned(tokenizer):
    encoder = Encoder(tokenizer, max_response_tokens=2, overlong_trace="truncate")
    trace = Trace(token_ids=(7, 8, 9), log_probs=(-1.0, -2.0, -3.0))
    (demonstration,) = encoder.encode(with_traces(trace)).demonstrations
    assert (demonstration.token_ids, demonstration.log_probs) == ((7, 8), (-1.0, -2.0))


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (Trace(token_ids=(7, 999)), "token id 999, but the tokenizer .* has 259 ids; record the trace with this"),
        (Trace(token_ids=(7, 8, 9), log_probs=(-1.0,)), "found 1 log-probs for 3 token ids"),
        (Trace(token_ids=(7, 8), log_probs=(-1.0,)), "found 1 log-probs for 2 token ids"),
        (Trace(token_ids=(7,), log_probs=(-1.0, -1.0, -1.0)), "found 3 log-probs for 1 token ids"),
        (Trace(token_ids=(7,), log_probs=(0.1,)), "at most 0, found 0.1 at position 0"),
        (Trace(token_ids=(7,), log_probs=(float("nan"),)), "found nan"),
        (Trace(text="a", log_probs=(-1.0,)), "a text trace has log-probs"),
    ],
)
def test_recorded_traces_that_cannot_be_right(tokenizer, trace, message):
    with pytest.raises(DataError, match=f"^d.jsonl:4: .*{message}"):
        Encoder(tokenizer).encode(with_traces(trace))


def test_a_problem_without_traces_is_a_plain_task(tokenizer):
    task = Encoder(tokenizer).encode(PROBLEM)
    assert task.demonstrations == () and task.problem is PROBLEM


def test_long_texts_raise_no_warning_of_the_tokenizer(tokenizer, caplog):
    tokenizer.model_max_length = 5
    Encoder(tokenizer).encode(with_traces(Trace(text="a" * 100)))
    assert "longer than the specified maximum" not in caplog.text


# ---- many at once


class Counted:
    """A tokenizer that counts its calls and refuses some texts."""

    def __init__(self, tokenizer, refuses=()) -> None:
        self.tokenizer, self.refuses, self.calls = tokenizer, refuses, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, text, **options):
        self.calls.append(text)
        if any(word in text for word in self.refuses):
            raise TypeError("not in the alphabet")
        return self.tokenizer(text, **options)


def problems(count: int) -> list[Problem]:
    text, recorded = Trace(text="<think>\nso 2"), Trace(token_ids=(5, 6), log_probs=(-0.5, -0.25))
    return [replace(PROBLEM, id=str(i), prompt=f"{i}+1?", traces=(text, recorded)[: i % 3]) for i in range(count)]


@pytest.mark.parametrize("style", PromptStyle)
def test_all_at_once_are_what_they_are_one_by_one(tokenizer, style, monkeypatch):
    monkeypatch.setattr("luffy.data.encode.READ_AT_ONCE", 4)
    options = {"style": style, "max_prompt_tokens": 1200, "max_response_tokens": 4, "overlong_prompt": "drop"}
    counted = Counted(tokenizer)
    at_once, one_by_one = Encoder(counted, **options), Encoder(tokenizer, **options)
    rows = [*problems(9), replace(PROBLEM, prompt="x" * 1300)]
    counted.calls.clear()
    made = list(at_once.encode_all(iter(rows)))
    assert made == [one_by_one.encode(row) for row in rows] and made[-1] is None
    assert at_once.counts == one_by_one.counts and at_once.counts["traces_dropped"] > 0
    assert [isinstance(text, list) for text in counted.calls] == [True] * 3  # of 4, 4 and 2 problems, and no other


def test_a_text_that_cannot_be_read_is_named_among_many(tokenizer):
    rows = [*problems(5), replace(PROBLEM, prompt="bad", meta={"__row__": "d.jsonl:77"}), *problems(3)]
    counted = Counted(tokenizer, refuses=("bad",))
    with pytest.raises(DataError, match=r"d\.jsonl:77.*cannot read 'bad'.*not in the alphabet"):
        list(Encoder(counted, style="plain").encode_all(rows))


def test_nothing_read_ahead_outlives_its_problems(tokenizer):
    encoder = Encoder(tokenizer)
    for _ in encoder.encode_all(problems(3)):
        pass
    assert encoder._read == {} and list(encoder.encode_all([])) == []


# ---- turns, hints and observations


def test_a_turn_is_read_up_to_its_end_token_if_it_has_one(tokenizer):
    encoder = Encoder(tokenizer)
    ids = tokenizer("1+1", add_special_tokens=False)["input_ids"]
    end = encoder.eos_ids[0]
    assert encoder.text_of_turn([*ids, end]) == encoder.text_of_turn(ids) == decode(encoder, ids)
    assert encoder.text_of_turn([end, *ids]) == decode(encoder, [end, *ids]) and encoder.text_of_turn([]) == ""


def test_an_observation_stands_behind_the_question_and_the_hint_behind_that(tokenizer):
    encoder = Encoder(tokenizer)
    task = encoder.encode(PROBLEM)
    hinted = encoder.with_hint(task, "Think.", 2)
    assert hinted.plain_ids == task.prompt_ids and (hinted.hint, hinted.hint_text) == (2, "Think.")
    plain, seen = (encoder.with_observation(one, "Look.") for one in (task, hinted))
    assert plain.prompt_ids == encoder.prompt_ids(with_text(PROBLEM, "Look.")) == seen.plain_ids
    assert seen.prompt_ids == encoder.prompt_ids(with_text(with_text(PROBLEM, "Look."), "Think."))
    most = len(seen.prompt_ids)
    assert Encoder(tokenizer, max_prompt_tokens=most).with_observation(hinted, "Look.") == seen
    with pytest.raises(DataError, match=f"data.max_prompt_tokens={most - 1}"):
        Encoder(tokenizer, max_prompt_tokens=most - 1).with_observation(hinted, "Look.")


def test_an_engine_stops_at_the_encoders_ends_first(tokenizer):
    assert Encoder(tokenizer, eos_ids=(3, 1)).stops((2, 3)) == (3, 1, 2)
