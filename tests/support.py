"""Things several test files need."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from luffy.errors import TrainingStopped
from luffy.report.recorder import read_json_lines
from luffy.train import training_step
from luffy.types import Sample

# Some tests run wherever they are: on a CPU as part of the default suite. On a GPU they are gpu tests, which the
# default suite leaves out and `pytest -m gpu` runs.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU_IF_THERE = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

LETTERS = "0123456789+=# \n"


def stop_before_update(monkeypatch, step, message):
    """As when the servers of a teacher are gone: a TrainingStopped between rollout and update of that step."""
    score = training_step.score_tokens

    def stopping(run, batch):
        if run.progress.step == step - 1:
            raise TrainingStopped(message)
        return score(run, batch)

    monkeypatch.setattr(training_step, "score_tokens", stopping)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(LETTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_samples(count=7, seed=0, off_policy=True, more=(0,)):
    """Responses of 4 to 10 tokens, and in turn ``more``."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        prompt = torch.randint(3, 18, (3 + i % 3,), generator=g)
        response = torch.randint(3, 18, (4 + (5 * i) % 7 + more[i % len(more)],), generator=g)
        n = len(response)
        off = torch.arange(n) < (n if off_policy and i == 0 else n // 2 if off_policy and i == 1 else 0)
        samples.append(
            Sample(
                tuple(prompt.tolist()),
                response,
                off,
                torch.ones(n),
                torch.zeros(n),
                torch.full((n,), float(torch.randn((), generator=g))),
                torch.zeros(n),
                torch.zeros(n),
                old_log_probs=-2 - 0.3 * torch.rand(n, generator=g),
            )  # fmt: skip
        )
    return samples


def untimed_metrics(folder):
    """The rows of a run's metrics without those that differ from machine to machine."""
    return [
        {name: v for name, v in row.items() if name != "time" and not name.startswith(("timing_s/", "perf/"))}
        for row in read_json_lines(folder / "metrics.jsonl")
    ]
