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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from studies.quickstart import task

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


def make_base(width: int, layers: int, seed: int) -> Base:
    tokenizer = make_tokenizer()
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


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to one percent."""
    return min(1.0, (step + 1) / WARMUP) * (0.01 + 0.495 * (1 + math.cos(math.pi * step / steps)))


def pretrain(base: Base, steps: int, rows: int, lr: float, seed: int) -> None:
    """One length of chain per batch. Short chains come first: without that curriculum the model spends thousands of
    steps before it finds out which term is next."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(base.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    started = time.perf_counter()
    for step in range(steps):
        terms = rng.randint(2, min(task.LONGEST, 3 + 3 * task.LONGEST * step // steps))
        ids = base.encode(habit_texts(rng, rows, terms))
        targets = ids[:, task.prompt_tokens(terms) :]
        loss: Any = nll_loss(response_log_probs(base, ids, terms).flatten(0, 1), targets.flatten())
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


def report(base: Base) -> None:
    for terms in (2, 8, 11):
        right = right_step_probabilities(base, terms)
        greedy, sampled = accuracy(base, terms, greedy=True), accuracy(base, terms, greedy=False)
        print(
            f"{terms:2d} terms: right step p {right.mean():.3f} (least {right.min():.3f}, most {right.max():.3f}),",
            end=" ",
        )
        print(f"greedy {greedy:.4f}, sampled {sampled:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train the quickstart's base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights, the config and the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=64, help="chains per step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in a fixed order: the same seed gives the same weights
    base = make_base(options.width, options.layers, options.seed)
    print(f"{sum(p.numel() for p in base.model.parameters())} parameters", flush=True)
    pretrain(base, options.steps, options.rows, options.lr, options.seed)
    base.model.eval()
    report(base)
    base.model.save_pretrained(options.out)
    base.tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
