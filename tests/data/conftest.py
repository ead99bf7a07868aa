"""Tiny files and tokenizers, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A byte-level tokenizer (one token per byte) that puts a BOS before plain text, as Llama's do."""

    def make(chat_template: str | None = CHAT_TEMPLATE, eos: str | None = "<eos>", adds_bos: bool = True):
        letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        core = Tokenizer(models.BPE(vocab=letters, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(["<bos>", "<eos>", "<end>"])
        if adds_bos:
            core.post_processor = processors.TemplateProcessing(
                single="<bos> $A <eos>",
                special_tokens=[("<bos>", core.token_to_id("<bos>")), ("<eos>", core.token_to_id("<eos>"))],
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=eos)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer()
