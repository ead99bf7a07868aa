"""A tokenizer with a chat template for tools, a tiny model for it, and an engine that follows a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from luffy.environments.protocol import Reply
from luffy.rollout.engine import Engine
from luffy.types import Completion, Request

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"]


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte and each special token."""
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chat_model(folder) -> str:
    """A model of random weights that ends one turn of two by itself, with its tokenizer."""
    tokenizer = make_chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, pad_token_id=256,
        bos_token_id=None, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # of 261 tokens most are letters that nothing here writes
        model.lm_head.weight[: tokenizer.eos_token_id] *= 0.5
        model.lm_head.weight[tokenizer.eos_token_id] *= 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class ScriptedEngine(Engine):
    """Writes what ``write(text so far, prompt included)`` says, and the end of a turn."""

    def __init__(self, tokenizer, write: Callable[[str], str]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.requests: list[Request] = []
        self.rounds: list[int] = []

    def generate(self, requests: Sequence[Request], progress=None) -> list[Completion]:
        self.rounds.append(len(requests))
        return [self._complete(request) for request in requests]

    def _complete(self, request: Request) -> Completion:
        self.requests.append(request)
        text = self.write(self.tokenizer.decode(request.given_ids, skip_special_tokens=False))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        kept = ids[: request.sampling.max_tokens]
        finish = "stop" if len(kept) == len(ids) else "length"
        return Completion(torch.tensor(kept), torch.full((len(kept),), -0.5), finish)


def call_text(name: str, **arguments) -> str:
    """A tool call as the template writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Own:
    """An environment of luffy's own protocol."""

    first, answer, total = "", Reply(), 1.0

    def start(self, problem, seed):
        return self.first

    def reply(self, turn):
        return self.answer

    def reward(self):
        return self.total

    def close(self):
        pass
