"""An engine that serves conversations draws what `generate` draws, prefills nothing twice and keeps nobody waiting."""

import plain_kernels
import pytest
import torch
from builders import DEVICE, GPU_IF_THERE, make_model, make_request
from talks import REPLY, Talks, assert_drawn_alone

from luffy.errors import UserError
from luffy.rollout import NativeEngine

SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WAYS = ["slots", "pages"]

pytestmark = GPU_IF_THERE


@pytest.fixture
def make_engine(monkeypatch):
    def make(decoding, **knobs):
        if decoding == "pages":
            pytest.importorskip("triton")
            if DEVICE.type == "cpu":
                plain_kernels.install(monkeypatch)
        return NativeEngine(make_model("qwen2", **SMALL).to(DEVICE), decoding=decoding, **knobs)

    return make


@pytest.mark.parametrize("decoding", WAYS)
def test_turns_are_those_of_generate_and_nothing_is_prefilled_twice(make_engine, decoding):
    engine = make_engine(decoding)
    talks = Talks([(3, 4, 5), (3, 4, 5), (6, 3)])
    engine.serve(talks)
    # Two prompts once, then behind each turn its last token, which was not fed back, and the reply.
    assert engine.stats.prefill_tokens == 3 + 2 + 3 * 2 * (1 + len(REPLY))
    assert engine.stats.generated_tokens == 3 * 3 * 4
    assert_drawn_alone(engine, talks)


@pytest.mark.parametrize("decoding", WAYS)
def test_a_slow_reply_keeps_no_other_conversation_waiting(make_engine, decoding):
    talks = Talks([(3, 4), (5, 6), (7, 8)], slow=[0])
    make_engine(decoding).serve(talks)
    assert [i for i in talks.log if i != 0] == [1, 2] * 3
    assert talks.log[-2:] == [0, 0], "the slow one goes on when the others have ended"


@pytest.mark.parametrize("decoding", WAYS)
def test_more_conversations_than_rows(make_engine, decoding):
    engine = make_engine(decoding, max_slots=2)
    talks = Talks([(3 + i, 4) for i in range(7)])
    engine.serve(talks)
    assert len(talks.over) == 7
    assert_drawn_alone(engine, talks)


def test_pages_that_run_out_cost_a_conversation_its_cache_alone(make_engine, monkeypatch):
    engine = make_engine("pages")
    from luffy.rollout.native import paged_generation

    monkeypatch.setattr(paged_generation, "pages_available", lambda wanted, *_: 8)
    prompts = [tuple(3 + (i + j) % 30 for j in range(100)) for i in range(4)]  # two pages each, of 64 tokens
    talks = Talks(prompts, tokens=30, longest=240)
    engine.serve(talks)
    assert engine.stats.prefill_tokens > 400 + 4 * 2 * 4, "some were prefilled again"
    assert_drawn_alone(engine, talks)


def test_a_prompt_takes_the_pages_of_a_conversation_that_waits(make_engine, monkeypatch):
    """Else turns of others would have to give way, and be prefilled again and again."""
    engine = make_engine("pages", max_slots=2)
    from luffy.rollout.native import paged_generation

    monkeypatch.setattr(paged_generation, "pages_available", lambda wanted, *_: 8)
    talks = Talks([tuple(3 + (i + j) % 30 for j in range(100)) for i in range(4)], tokens=6, slow=[0], longest=240)
    engine.serve(talks)
    first, later, again = 4 * 100, 4 * 2 * (1 + len(REPLY)), 100 + 6 - 1
    assert engine.stats.prefill_tokens < first + later + 3 * again, "on a CPU one of them is prefilled again"


@pytest.mark.parametrize("decoding", WAYS)
def test_an_ended_conversation_leaves_the_cache(make_engine, decoding):
    engine = make_engine(decoding)
    talks = Talks([(3, 4), (5, 6)], turns=2, slow=[1])
    conversations = engine._conversations(talks)
    with torch.no_grad():
        conversations.serve(talks, lambda requests: None)
    assert list(conversations._kept) == [1], "the one that ended first"


def test_a_model_of_another_family_is_asked_in_rounds():
    class Plain(NativeEngine):
        def serve(self, source):
            super(NativeEngine, self).serve(source)

    engine = Plain(make_model("qwen2", **SMALL).to(DEVICE))
    talks = Talks([(3, 4, 5), (6, 3)])
    engine.serve(talks)
    assert_drawn_alone(engine, talks)


@pytest.mark.parametrize("decoding", WAYS)
def test_a_request_beyond_the_context_is_refused(make_engine, decoding):
    engine = make_engine(decoding, max_context=16)
    with pytest.raises(UserError, match="exceed the context of 16"):
        engine.serve(Talks([(3, 4, 5)], tokens=8, turns=4))


def test_requests_without_a_conversation_are_served_too(make_engine):
    engine = make_engine("slots")

    class Once:
        most, longest = 2, 32

        def __init__(self):
            self.requests, self.completions = [make_request((3, 4), 5, seed=1), make_request((5,), 3, seed=2)], {}

        def take(self, wait):
            requests, self.requests = self.requests, []
            return None if len(self.completions) == 2 else requests

        def finish(self, number, completion):
            self.completions[number] = completion

        def ended(self):
            return []

    once = Once()
    engine.serve(once)
    for request, number in zip([make_request((3, 4), 5, seed=1), make_request((5,), 3, seed=2)], (0, 1), strict=True):
        (alone,) = engine.generate([request])
        assert alone.token_ids.tolist() == once.completions[number].token_ids.tolist()
