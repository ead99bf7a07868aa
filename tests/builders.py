"""Small tokenizers, models, tasks, responses and samples for tests. Every builder has defaults for what a test does not name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from luffy.learn.packing import pack
from luffy.types import (
    Author,
    Demonstration,
    Episode,
    Group,
    MicroBatch,
    Problem,
    Request,
    Rollout,
    Sample,
    Sampling,
    Score,
    Task,
)

# Some tests run on any device: on a CPU they are part of the default suite, on a GPU they are gpu tests.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU_IF_THERE = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

LETTERS = "0123456789+=# \n"

# What each architecture adds to the common shape; the window is short so that tests run past it.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 8},
}


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    """Write the rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each of ``LETTERS``."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(LETTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model in evaluation mode; ``changes`` go into its config.

    Weights are drawn wider than usual, so that attention and the next-token distribution are far from
    flat and a wrong mask or position shows in the numbers.
    """
    shape = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **{**shape, **ARCHITECTURES[architecture], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config
        model: PreTrainedModel = build(config)
    nn.Module.eval(model)
    return model


def make_small_model(architecture: str = "qwen2", **changes: Any) -> PreTrainedModel:
    """A smaller one, for tests that generate much; its biases, zero in a new model, are drawn too."""
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = make_model(architecture, **{**shape, **changes})
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(generator=generator)
    return model


# For a model of any size: prompts of different lengths, greedy and sampled by turns.
REQUESTS = [Request(tuple(range(3, 5 + i)), i, Sampling(12, 0.0 if i % 2 else 1.0)) for i in range(5)]


def make_request(
    ids: Sequence[int], max_tokens: int = 8, seed: int = 0, prefix: Sequence[int] = (), **sampling: Any
) -> Request:
    """A request of an engine; ``sampling`` are settings of ``Sampling``."""
    return Request(tuple(ids), seed, Sampling(max_tokens, **sampling), tuple(prefix))


PROBLEM = Problem("p", "1+1", "2")
TASK = Task(PROBLEM, (5, 6))


def make_task(prompt_ids: Sequence[int] = (5, 6), traces: Sequence[Demonstration] = (), **problem: Any) -> Task:
    """A task; ``problem`` are fields of its problem that differ from ``PROBLEM``."""
    return Task(replace(PROBLEM, **problem), tuple(prompt_ids), tuple(traces))


def make_rollout(
    ids: int | Sequence[int] = 3,
    prefix: int = 0,
    *,
    task: Task = TASK,
    log_prob: float = 0.0,
    finish: str = "stop",
    **more: Any,
) -> Episode:
    """A response of these tokens, or of this many; a teacher wrote the first ``prefix`` of them."""
    tokens = torch.arange(ids) + 3 if isinstance(ids, int) else torch.tensor(ids)
    n = len(tokens)
    log_probs = torch.full((n,), log_prob)
    nowhere = torch.zeros(n, dtype=torch.bool)
    return Rollout(task, tokens, prefix, log_probs, log_probs, nowhere, finish, prefix / n, **more)


def make_group(rewards: Sequence[float], rollouts: Sequence[Episode] = (), task: Task = TASK) -> Group:
    """A group with these rewards; without ``rollouts``, of responses of three tokens."""
    made = rollouts or [make_rollout(task=task) for _ in rewards]
    return Group(task, tuple(made), tuple(Score(reward) for reward in rewards))


def make_sample(
    prompt: Sequence[int], ids: Sequence[int] | Tensor, *, prefix: int = 0, advantage: float = 0.0,
    log_probs: float | Tensor = 0.0, sft: bool = False, **more: Any,
) -> Sample:  # fmt: skip
    """A sample whose first ``prefix`` tokens a teacher wrote; all its tokens are in the RL term, or all in the SFT term."""
    tokens = torch.as_tensor(ids)
    n = len(tokens)
    behavior = log_probs if isinstance(log_probs, Tensor) else torch.full((n,), log_probs)
    rl, in_sft = torch.full((n,), float(not sft)), torch.full((n,), float(sft))
    authors = (torch.arange(n) < prefix).to(torch.int8) * Author.TEACHER
    return Sample(tuple(prompt), tokens, authors, rl, in_sft, torch.full((n,), advantage), behavior, behavior, **more)


def make_samples(count: int = 7, seed: int = 0, off_policy: bool = True, more: Sequence[int] = (0,)) -> list[Sample]:
    """Samples of 4 to 10 tokens, lengthened in turn by ``more``."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        prompt = torch.randint(3, 18, (3 + i % 3,), generator=g)
        response = torch.randint(3, 18, (4 + (5 * i) % 7 + more[i % len(more)],), generator=g)
        n = len(response)
        prefix = (n, n // 2)[i] if off_policy and i < 2 else 0
        advantage = float(torch.randn((), generator=g))
        old = -2 - 0.3 * torch.rand(n, generator=g)
        samples.append(make_sample(prompt.tolist(), response, prefix=prefix, advantage=advantage, old_log_probs=old))
    return samples


def pack_in_order(samples: Sequence[Sample], reduction: str | None, length: int) -> MicroBatch:
    """One micro-batch with the samples as they are; packing sorts them by length."""
    batches = [pack([sample], 100, reduction, length)[0] for sample in samples]
    tensors = [f.name for f in fields(batches[0]) if isinstance(getattr(batches[0], f.name), Tensor)]
    joined = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in tensors}
    return replace(batches[0], **joined, families=tuple(batch.families[0] for batch in batches))
