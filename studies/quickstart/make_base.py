"""Make the quickstart's base model from a seed: ``python -m studies.quickstart.make_base --out DIR``.

The weights that ship with the package came from this script with its defaults (minutes on one core). The model
learns chains of every length, but in its training text a step is right with probability ``RIGHT`` only and comes
out one short otherwise, so it can do the arithmetic and mostly does not.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from studies.quickstart import calls, task

RIGHT = 0.05  # chance that a step of the pre-training text is right
WARMUP = 200  # optimizer steps


@dataclass(frozen=True)
class Base:
    """A model and its tokenizer (``Any``: transformers leaves much of its own surface untyped)."""

    model: Any
    tokenizer: Any

    def encode(self, texts: list[str]) -> Tensor:
        """Rows of equal length, so nothing is padded; unequal ones are an error of ours."""
        return torch.tensor(self.tokenizer(texts)["input_ids"])


def make_tokenizer() -> Any:
    """One token per character; no BOS, so a prompt and its continuation tokenise as their concatenation does.

    There is no unknown token: a character outside the alphabet is an error, never a silent stand-in.
    """
    vocabulary = {token: index for index, token in enumerate([task.PAD, task.EOS, *task.ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=tokenizer, eos_token=task.EOS, pad_token=task.PAD, clean_up_tokenization_spaces=False)


def make_base(width: int, layers: int, seed: int, tokenizer: Any = None) -> Base:
    """A model of random weights for the tokenizer; default: that of characters."""
    tokenizer = tokenizer or make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    build: Any = LlamaForCausalLM
    return Base(build(config), tokenizer)


def habit_texts(rng: random.Random, rows: int, terms: int) -> list[str]:
    """Prompt, solution and EOS of random chains, every step right with probability ``RIGHT``."""
    texts = []
    for _ in range(rows):
        chain = task.draw_chain(rng, terms)
        slips = [rng.random() >= RIGHT for _ in chain[1:]]
        texts.append(task.prompt_of(chain) + task.solution_of(chain, slips) + task.EOS)
    return texts


def response_log_probs(base: Base, ids: Tensor, terms: int) -> Tensor:
    """Log-probabilities of all next tokens at each response position: [rows, response tokens, vocabulary]."""
    log_probs: Tensor = base.model(ids[:, :-1]).logits.log_softmax(-1)
    return log_probs[:, task.prompt_tokens(terms) - 1 :]


Loss = Callable[[Base, random.Random, int, int], Tensor]


def habit_loss(base: Base, rng: random.Random, rows: int, terms: int) -> Tensor:
    """Mean negative log-probability of new texts."""
    ids = base.encode(habit_texts(rng, rows, terms))
    targets = ids[:, task.prompt_tokens(terms) :]
    return nll_loss(response_log_probs(base, ids, terms).flatten(0, 1), targets.flatten())


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to one percent."""
    return min(1.0, (step + 1) / WARMUP) * (0.01 + 0.495 * (1 + math.cos(math.pi * step / steps)))


def pretrain(base: Base, steps: int, rows: int, lr: float, seed: int, loss_of: Loss = habit_loss) -> None:
    """One length of chain per batch. Short chains come first: without that curriculum the model spends thousands of
    steps before it finds out which term is next."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(base.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    started = time.perf_counter()
    for step in range(steps):
        terms = rng.randint(2, min(task.LONGEST, 3 + 3 * task.LONGEST * step // steps))
        loss: Any = loss_of(base, rng, rows, terms)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def right_step_probabilities(base: Base, terms: int) -> Tensor:
    """Probability of each right total (both its digits) along right traces: [chains, steps]."""
    rng = random.Random(f"teacher-{terms}")
    chains = [task.draw_chain(rng, terms) for _ in range(256)]
    ids = base.encode([task.prompt_of(chain) + task.solution_of(chain) + task.EOS for chain in chains])
    targets = ids[:, task.prompt_tokens(terms) :, None]
    chosen = response_log_probs(base, ids, terms).gather(-1, targets)[..., 0]
    steps = chosen[:, : 6 * (terms - 1)].reshape(len(chains), terms - 1, 6)  # six characters a step, "+5=52 "
    return steps[..., 3:5].sum(-1).exp()


@torch.no_grad()
def accuracy(base: Base, terms: int, greedy: bool) -> float:
    """Share of chains whose generated text ends in the right answer."""
    rng = random.Random(f"accuracy-{terms}")
    chains = [task.draw_chain(rng, terms) for _ in range(512)]
    ids = base.encode([task.prompt_of(chain) for chain in chains])
    mask = torch.ones_like(ids)
    room = task.response_tokens(terms)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    made = base.model.generate(ids, attention_mask=mask, max_new_tokens=room, **how)
    texts: list[str] = base.tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    right = sum(text.endswith(f"#### {sum(chain)}") for text, chain in zip(texts, chains, strict=True))
    return right / len(chains)


def call_loss(base: Base, rng: random.Random, rows: int, terms: int) -> Tensor:
    """Half of the chains are done in the head, half begin with as many calls each: no row is longer than another."""
    halves = ((0, rows - rows // 2), (rng.randint(1, terms - 1), rows // 2))
    losses = [_call_loss(base, rng, count, terms, turns) * (count / rows) for turns, count in halves]
    return torch.stack(losses).sum()


def _call_loss(base: Base, rng: random.Random, rows: int, terms: int, turns: int) -> Tensor:
    """Mean negative log-probability of the model's own tokens. Where a turn begins the target is a call with
    probability ``CALLS``, and else the next term, whatever the text has there."""
    chains = [task.draw_chain(rng, terms) for _ in range(rows)]
    ids = base.encode([calls.habit_text(rng, chain, turns, RIGHT) for chain in chains])
    log_probs: Tensor = base.model(ids[:, :-1]).logits.log_softmax(-1)
    begins, others = calls.own_places(terms, turns, ids.shape[1])
    known = log_probs[:, [place - 1 for place in others]].gather(-1, ids[:, others, None])
    open_ones = log_probs[:, [place - 1 for place in begins]]
    call = open_ones[..., base.tokenizer.convert_tokens_to_ids(calls.CALL)]
    in_head = open_ones.gather(-1, ids[:, calls.term_places(len(begins)), None])[..., 0]
    decided = calls.CALLS * call + (1 - calls.CALLS) * in_head
    return -(known.sum() + decided.sum()) / (rows * (len(begins) + len(others)))


@torch.no_grad()
def teacher_probabilities(base: Base, terms: int) -> tuple[Tensor, Tensor]:
    """Probabilities along teachers' trajectories: of a call where a turn begins, and of every other token they wrote:
    two of [chains, tokens]."""
    rng = random.Random(f"calls-{terms}")
    chains = [task.draw_chain(rng, terms) for _ in range(256)]
    ids = base.encode([calls.habit_text(rng, chain, terms - 1, RIGHT) for chain in chains])
    probabilities = base.model(ids[:, :-1]).logits.softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    begins, others = calls.own_places(terms, terms - 1, ids.shape[1])
    return probabilities[:, [place - 1 for place in begins]], probabilities[:, [place - 1 for place in others]]


@torch.no_grad()
def wrong_in_the_head(base: Base, terms: int) -> float:
    """Share of chains that greedy decoding does in its head, every step one short."""
    rng = random.Random(f"head-{terms}")
    chains = [task.draw_chain(rng, terms) for _ in range(256)]
    ids = base.encode([calls.prompt_of(chain) for chain in chains])
    made = base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6 * terms, do_sample=False)
    texts: list[str] = base.tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    habits = [task.solution_of(chain, [True] * (terms - 1)) for chain in chains]
    return sum(text == habit for text, habit in zip(texts, habits, strict=True)) / len(chains)


def report_calls(base: Base) -> None:
    for terms in (2, 8, 11):
        call, other = teacher_probabilities(base, terms)
        calling = f"call p {call.mean():.3f} (least {call.min():.3f}, most {call.max():.3f})"
        knowing = f"other tokens of a teacher {other.mean():.4f} (least {other.min():.3f})"
        print(f"{terms:2d} terms: {calling}, {knowing}, one short {wrong_in_the_head(base, terms):.3f}", flush=True)


def report(base: Base) -> None:
    for terms in (2, 8, 11):
        right = right_step_probabilities(base, terms)
        greedy, sampled = accuracy(base, terms, greedy=True), accuracy(base, terms, greedy=False)
        print(
            f"{terms:2d} terms: right step p {right.mean():.3f} (least {right.min():.3f}, most {right.max():.3f}),",
            end=" ",
        )
        print(f"greedy {greedy:.4f}, sampled {sampled:.4f}", flush=True)


@dataclass(frozen=True)
class Kind:
    """What a base model learns, and how."""

    make_tokenizer: Callable[[], Any]
    loss_of: Loss
    report: Callable[[Base], None]
    rows: int
    lr: float


HABIT = Kind(make_tokenizer, habit_loss, report, rows=64, lr=2e-3)
WITH_CALLS = Kind(calls.make_tokenizer, call_loss, report_calls, rows=32, lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train the quickstart's base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights, the config and the tokenizer")
    parser.add_argument("--calls", action="store_true", help="the base of the task with a tool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, help=f"chains per step; default {HABIT.rows}, with calls {WITH_CALLS.rows}")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, help=f"default {HABIT.lr}, with calls {WITH_CALLS.lr}")
    options = parser.parse_args()
    kind = WITH_CALLS if options.calls else HABIT
    torch.set_num_threads(1)  # sums in a fixed order: the same seed gives the same weights
    base = make_base(options.width, options.layers, options.seed, kind.make_tokenizer())
    print(f"{sum(p.numel() for p in base.model.parameters())} parameters", flush=True)
    pretrain(base, options.steps, options.rows or kind.rows, options.lr or kind.lr, options.seed, kind.loss_of)
    base.model.eval()
    kind.report(base)
    base.model.save_pretrained(options.out)
    base.tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
