"""LUFFY in one file: the whole method on `luffy.core` and `luffy.rewards` alone.

    python examples/one_file_luffy.py --steps 40

A tiny model learns chains of sums ("47+5-3+8=?" -> "+5=52 -3=49 +8=57 #### 57") that its own samples never get
right, from 7 own attempts and 1 teacher's trace per problem. Everything a real trainer adds (continuous batching,
packing, checkpoints, schedules, recording) is left out; what is left is the method, in the order of the paper.

Shapes: P problems, N samples each, B = P * N sequences, S tokens of prompt + response, T = S - 1 predictions.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import luffy
from luffy import compute_grpo_outcome_advantage_split, compute_token_on_off_policy_loss
from luffy.core.advantages import group_advantages
from luffy.rewards import Verifier, build_verifier
from luffy.types import Problem

ASSETS = Path(luffy.__file__).parent / "quickstart" / "assets"


@dataclass
class Settings:
    steps: int = 40
    problems: int = 16  # P: problems a step
    samples: int = 8  # N: samples of each problem, the trace included
    traces: int = 1  # of which whole traces; 0 is plain on-policy RL
    max_tokens: int = 56
    lr: float = 3e-4
    shape: str = "p_div_p_0.1"  # policy shaping f(p) = p / (p + 0.1); no_reshape is Mixed-Policy GRPO
    advantage: str = "grpo"  # baseline of all samples (Eq. 4), or grpo_split: of the policy's own
    entropy: float = 0.01
    clip: bool = False  # the paper's best row removes the on-policy clip
    seed: int = 0


@dataclass
class Row:
    problem: Problem
    prompt: list[int]
    trace: list[int]


@dataclass
class Batch:
    """B sequences, right-padded. ``response`` marks predicted tokens that count, ``teacher`` those a teacher wrote."""

    ids: Tensor  # [B, S]
    response: Tensor  # [B, T] bool
    teacher: Tensor  # [B, T] bool
    groups: list[int]  # which problem each sequence belongs to


# --- data -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path, tokenizer) -> list[Row]:
    """Problems with their trace as token ids, EOS included."""
    rows = []
    for line in path.read_text().splitlines():
        raw = json.loads(line)
        problem = Problem(id=raw["id"], prompt=raw["prompt"], answer=raw["answer"])
        trace = tokenizer(raw["traces"][0])["input_ids"] + [tokenizer.eos_token_id]
        rows.append(Row(problem, tokenizer(raw["prompt"])["input_ids"], trace))
    return rows


# --- 1. roll out ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model, prompts: list[list[int]], max_tokens: int, eos: int) -> list[list[int]]:
    """One response for each prompt, at temperature 1. All prompts of this task have the same length: nothing to pad."""
    ids = torch.tensor(prompts)
    cache, done, made = None, torch.zeros(len(ids), dtype=torch.bool), []
    step = ids
    for _ in range(max_tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        step = torch.multinomial(torch.softmax(logits, -1), 1)
        made.append(torch.where(done, eos, step[:, 0]))
        done |= step[:, 0] == eos
        if done.all():
            break
    return [upto_eos(row, eos) for row in torch.stack(made, dim=1).tolist()]


def upto_eos(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def make_group(model, rows: list[Row], s: Settings, eos: int) -> list[list[tuple[list[int], bool]]]:
    """For each problem N responses with the mark "a teacher wrote it": traces first, then the policy's own."""
    own = s.samples - s.traces
    responses = iter(sample(model, [r.prompt for r in rows for _ in range(own)], s.max_tokens, eos))
    return [[(r.trace, True)] * s.traces + [(next(responses), False) for _ in range(own)] for r in rows]


# --- 2. verify, 3. reject, 4. advantages ----------------------------------------------------------------------------


def verify(rows: list[Row], groups, verifier: Verifier, tokenizer) -> list[list[float]]:
    """0 or 1 for every response; the trace goes through the same verifier."""
    items = [
        (row.problem, tokenizer.decode(ids, skip_special_tokens=True))
        for row, group in zip(rows, groups, strict=True)
        for ids, _ in group
    ]
    scores = iter(verifier.score(items))
    return [[next(scores).value for _ in group] for group in groups]


def has_signal(rewards: list[float]) -> bool:
    """A group whose rewards are all equal prefers nothing."""
    return len(set(rewards)) > 1


def advantages_of(batch: Batch, rewards: Tensor, how: str) -> Tensor:
    """[B, T]: reward minus the baseline of its group, on every token (Dr. GRPO: no division by the std)."""
    own = ~batch.teacher.any(dim=1)
    if how == "grpo_split":
        token_rewards = torch.zeros(batch.response.shape)
        token_rewards[:, 0] = rewards
        return compute_grpo_outcome_advantage_split(token_rewards, batch.response, batch.groups, own, use_std=False)[0]
    everyone = torch.ones_like(own)
    return group_advantages(rewards, batch.groups, everyone, use_std=False)[:, None] * batch.response


# --- 5. mixed loss --------------------------------------------------------------------------------------------------


def collate(rows: list[Row], groups, pad: int) -> Batch:
    """Prompt + response of every sample in one padded tensor; masks are shifted like the predictions."""
    sequences = [(row.prompt, ids, off) for row, group in zip(rows, groups, strict=True) for ids, off in group]
    width = max(len(prompt) + len(ids) for prompt, ids, _ in sequences)
    ids = torch.full((len(sequences), width), pad)
    response = torch.zeros(len(sequences), width - 1, dtype=torch.bool)
    teacher = torch.zeros_like(response)
    for b, (prompt, answer, off) in enumerate(sequences):
        end = len(prompt) + len(answer)
        ids[b, :end] = torch.tensor(prompt + answer)
        response[b, len(prompt) - 1 : end - 1] = True
        teacher[b, len(prompt) - 1 : end - 1] = off
    return Batch(ids, response, teacher, [g for g, group in enumerate(groups) for _ in group])


def log_probs_and_entropy(model, ids: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(model(ids[:, :-1]).logits.float(), dim=-1)  # [B, T, V]
    return log_p.gather(2, ids[:, 1:, None]).squeeze(2), -(log_p.exp() * log_p).sum(-1)


def luffy_loss(model, batch: Batch, advantages: Tensor, s: Settings) -> tuple[Tensor, dict[str, float]]:
    """Eq. 6 of the paper. One optimizer step per batch of rollouts, so the old policy is the current one."""
    log_prob, entropy = log_probs_and_entropy(model, batch.ids)
    out = compute_token_on_off_policy_loss(
        old_log_prob=log_prob.detach(),
        log_prob=log_prob,
        advantages=advantages,
        eos_mask=batch.response,
        cliprange=0.2,
        clip_upper_bound=1.2,
        prefix_mask=batch.teacher,
        off_cliprange=None,
        off_policy_reshape=s.shape,
        loss_remove_token_mean=True,  # a constant denominator instead of the number of tokens (Dr. GRPO) ...
        loss_remove_clip=not s.clip,
    )
    padded, sequences = batch.response.shape[1], batch.response.shape[0]
    loss = out["pg_loss"] * padded / (s.max_tokens * sequences)  # ... which is the response budget, per sequence
    bonus = (entropy * batch.response).sum() / (s.max_tokens * sequences)
    return loss - s.entropy * bonus, {name: value.item() for name, value in out.items()}


# --- the loop -------------------------------------------------------------------------------------------------------


def accuracy(model, rows: list[Row], verifier: Verifier, tokenizer, s: Settings) -> float:
    """Share of right answers, one sample each at temperature 1."""
    made = sample(model, [r.prompt for r in rows], s.max_tokens, tokenizer.eos_token_id)
    rewards = verify(rows, [[(ids, False)] for ids in made], verifier, tokenizer)
    return sum(r[0] for r in rewards) / len(rows)


def train(s: Settings, log=print) -> list[float]:
    """Returns the held-out accuracy before, and after every ten steps."""
    torch.manual_seed(s.seed)
    rng = random.Random(s.seed)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "base")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=0.0)
    problems = read_rows(ASSETS / "data" / "train.jsonl", tokenizer)
    held_out = read_rows(ASSETS / "data" / "heldout.jsonl", tokenizer)
    with build_verifier("gsm8k") as verifier:
        reached = [accuracy(model, held_out, verifier, tokenizer, s)]
        for step in range(1, s.steps + 1):
            rows = rng.sample(problems, s.problems)
            groups = make_group(model, rows, s, tokenizer.eos_token_id)
            rewards = verify(rows, groups, verifier, tokenizer)
            own = [r for group in rewards for r in group[s.traces :]]
            kept = [i for i, group in enumerate(rewards) if has_signal(group)]
            if kept:
                batch = collate([rows[i] for i in kept], [groups[i] for i in kept], tokenizer.pad_token_id)
                reward_B = torch.tensor([r for i in kept for r in rewards[i]])
                loss, metrics = luffy_loss(model, batch, advantages_of(batch, reward_B, s.advantage), s)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if step % 10 == 0 or step == s.steps:
                reached.append(accuracy(model, held_out, verifier, tokenizer, s))
                teacher = f"{metrics['off_policy_prob']:.3f}" if kept else "-"
                log(f"step {step:3d}  own reward {sum(own) / len(own):.3f}  groups with a signal {len(kept):2d}  "
                    f"p(teacher token) {teacher}  held-out {reached[-1]:.3f}")  # fmt: skip
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in vars(Settings()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    torch.set_num_threads(1)  # so small a model only loses time to more
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
