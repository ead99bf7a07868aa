"""A byte tokenizer and small OpenR1-like files, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(chat_template: str | None = CHATML, special: list[str] = SPECIAL) -> PreTrainedTokenizerFast:
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder


def trace(answer: str, pad: int = 0) -> str:
    return f"<think>\nlet me see{'.' * pad}\n</think>\n\nSo \\boxed{{{answer}}}"


def openr1_row(problem: str, answer: str | None, generations: list[str] | None, **more: Any) -> dict[str, Any]:
    labels = None if generations is None else [True] * len(generations)
    row = {"problem": problem, "answer": answer, "generations": generations, "source": "olympiads"}
    return row | {"correctness_math_verify": labels, "question_type": "math-word-problem", "uuid": "u"} | more


def write_openr1(path: Path, rows: list[dict[str, Any]], row_group_size: int = 4) -> str:
    schema = pa.schema([
        ("problem", pa.string()), ("answer", pa.string()), ("generations", pa.list_(pa.string())),
        ("source", pa.string()), ("correctness_math_verify", pa.list_(pa.bool_())),
        ("question_type", pa.string()), ("uuid", pa.string()),
    ])  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=row_group_size)
    return str(path)
