"""Conversations on a GPU: pages with real kernels and graphs draw what single requests draw."""

import random

import pytest
import torch
from builders import make_model, write_rows
from conversing import save_chat_model
from talks import REPLY, Talks, assert_drawn_alone
from trainings import train_rows

pytest.importorskip("triton")

from luffy.rollout import NativeEngine
from luffy.rollout.native import paged_conversations

pytestmark = pytest.mark.gpu


def prompts(count):
    draw = random.Random(0)
    return [tuple(draw.randrange(3, 90) for _ in range(5 + i % 40)) for i in range(count)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_turns_are_drawn_as_if_each_were_asked_alone(architecture):
    engine = NativeEngine(make_model(architecture).cuda(), decoding="pages")
    talks = Talks(prompts(24), turns=3, tokens=20, slow=[1, 5, 9], longest=200)
    engine.serve(talks)
    assert all(len(turns) == 3 for turns in talks.drawn.values())
    assert_drawn_alone(engine, talks)


def test_a_later_turn_prefills_its_reply_alone():
    engine = NativeEngine(make_model("qwen2").cuda(), decoding="pages")
    talks = Talks(prompts(16), turns=4, tokens=12, longest=200)
    engine.serve(talks)
    # Behind a turn come its last token, which was not fed back, and the reply.
    later = sum(3 * (len(REPLY) + 1) for _ in talks.prompts)
    assert engine.stats.prefill_tokens == sum(map(len, talks.prompts)) + later


def test_conversations_that_lose_their_pages_go_on(monkeypatch):
    """Memory for a third of them: the others are prefilled again, and draw the same."""
    model = make_model("llama").cuda()
    roomy, tight = NativeEngine(model, decoding="pages"), NativeEngine(model, decoding="pages")
    wide = Talks(prompts(24), turns=3, tokens=20, slow=range(0, 24, 2), longest=200)
    roomy.serve(wide)
    monkeypatch.setattr(paged_conversations.PagedConversations, "_prefill_round", small_pool(24))
    narrow = Talks(prompts(24), turns=3, tokens=20, slow=range(0, 24, 2), longest=200)
    tight.serve(narrow)
    assert tight.stats.prefill_tokens > roomy.stats.prefill_tokens
    different = sum(ids_of_turns(narrow, i) != ids_of_turns(wide, i) for i in range(24))
    assert different <= 1  # float32 sums in another order may turn one draw in thousands


def ids_of_turns(talks, i):
    return [turn.token_ids.tolist() for turn in talks.drawn[i]]


def small_pool(pages):
    """`_prefill_round` that hides all but some pages from the conversations, once."""
    plain = paged_conversations.PagedConversations._prefill_round

    def prefill_round(self):
        if not hasattr(self, "_hidden"):
            self._hidden = self._pool.allocate(max(self._pool.free - pages, 0))
        return plain(self)

    return prefill_round


def test_later_turns_in_bfloat16_are_as_near_to_float32_as_first_ones():
    model = make_model("qwen2").cuda().to(torch.bfloat16)
    talks = Talks(prompts(16), turns=3, tokens=16, longest=200)
    NativeEngine(model, decoding="pages").serve(talks)
    exact = model.float()
    exact.set_attn_implementation("sdpa")
    errors = [[], [], []]
    for i, turns in talks.drawn.items():
        text = [*talks.prompts[i]]
        for number, turn in enumerate(turns):
            before, text = len(text), [*text, *turn.token_ids.tolist()]
            with torch.no_grad():
                logits = exact(input_ids=torch.tensor([text], device="cuda")).logits
            again = logits[0, before - 1 : -1].log_softmax(-1).cpu().gather(1, turn.token_ids[:, None])[:, 0]
            errors[number].append((again - turn.log_probs).abs())
            text += REPLY
    first, *later = (torch.cat(each).mean() for each in errors)
    assert first < 0.05 and max(later) < 1.5 * first


class Words:
    """Answers each turn with its length; the third turn ends the episode."""

    def reset(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return f"{len(text)} letters", float(len(text) % 2), self.turns == 3


def test_episodes_are_trained_on_what_was_drawn(make_config, tmp_path):
    trace = [
        {"role": "assistant", "content": "ab"}, {"role": "user", "content": "2 letters"},
        {"role": "assistant", "content": "abc"},
    ]  # fmt: skip
    rows = [{"id": f"p{i}", "prompt": f"go {i}", "answer": "1", "traces": [trace]} for i in range(8)]
    cfg = make_config(
        model={"path": save_chat_model(tmp_path / "model"), "device": "cuda"},
        data={"train": str(write_rows(tmp_path / "chats.jsonl", rows)), "style": "chat", "max_prompt_tokens": 64},
        rollout={"n": 4, "max_tokens": 48},
        environment={"name": f"{__name__}:Words", "max_turns": 3, "at_once": 8},
        batch={"problems": 4, "tokens": 1024},
        reward={"success": 2.0, "failure": 0.0},
        algorithm={"reject_extreme": False},
        train={"steps": 3},
    )
    rows = train_rows(cfg)
    assert len(rows) == 3 and all(row["rollout/logprob_diff_mean"] < 1e-4 for row in rows)
    assert all(1 < row["environment/turns"] <= 3 for row in rows)
