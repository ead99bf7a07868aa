"""The quickstart's task: follow a chain of additions and subtractions, one running total at a time.

    prompt   47+5-3+8=?
    trace    +5=52 -3=49 +8=57 #### 57

Every total has two digits, so all problems with the same number of terms have the same length.

The base model knows this arithmetic but has a habit: nineteen steps of twenty come out ONE SHORT (``+5=51``). The
slips all point the same way, so they cannot cancel: the answer is right only when every single step is. That makes
long chains hopeless for sampling alone (no reward, so no gradient), while every token of a teacher's trace keeps a
probability of a few percent, where the shaped off-policy gradient is largest (p near gamma).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from luffy.errors import ConfigError

LOWEST, HIGHEST = 21, 99  # right totals; eleven slips below the lowest still leave two digits
LONGEST = 12  # terms; the base has seen no longer chain
ALPHABET = "0123456789+-=? #"
EOS, PAD = "<eos>", "<pad>"

Row = Mapping[str, object]


def draw_chain(rng: random.Random, terms: int) -> tuple[int, ...]:
    """A start and ``terms - 1`` signed digits whose running totals all stay within the two-digit range."""
    if not 2 <= terms <= LONGEST:
        raise ConfigError(f"a chain has 2 to {LONGEST} terms, got {terms}")
    total = rng.randint(LOWEST, HIGHEST)
    chain = [total]
    while len(chain) < terms:
        step = rng.randint(1, 9) * rng.choice((-1, 1))
        if LOWEST <= total + step <= HIGHEST:
            total += step
            chain.append(step)
    return tuple(chain)


def prompt_of(chain: tuple[int, ...]) -> str:
    return f"{chain[0]}{''.join(f'{step:+d}' for step in chain[1:])}=?"


def solution_of(chain: tuple[int, ...], slips: Iterable[bool] | None = None) -> str:
    """The steps and the answer they lead to; a step marked in ``slips`` comes out one short.

    >>> solution_of((47, 5, -3))
    '+5=52 -3=49 #### 49'
    >>> solution_of((47, 5, -3), slips=(True, False))
    '+5=51 -3=48 #### 48'
    """
    steps = chain[1:]
    total, lines = chain[0], []
    for step, slip in zip(steps, slips if slips is not None else (False,) * len(steps), strict=True):
        total += step - int(slip)
        lines.append(f"{step:+d}={total}")
    return " ".join([*lines, f"#### {total}"])


def prompt_tokens(terms: int) -> int:
    """Length of a prompt under the character tokenizer: two per term and ``=?``."""
    return 2 * terms + 2


def response_tokens(terms: int) -> int:
    """Length of a solution under the character tokenizer, EOS included: six per step, seven for the answer, one."""
    return 6 * (terms - 1) + 8


def row_of(chain: tuple[int, ...]) -> Row:
    prompt = prompt_of(chain)
    return {"id": prompt, "prompt": prompt, "answer": str(sum(chain)), "traces": [solution_of(chain)]}


def draw_rows(rng: random.Random, count: int, terms: int, taken: set[str]) -> list[Row]:
    """``count`` new problems; ``taken`` holds the prompts used so far and grows, so that splits never share one."""
    rows: list[Row] = []
    while len(rows) < count:
        row = row_of(draw_chain(rng, terms))
        if str(row["id"]) not in taken:
            taken.add(str(row["id"]))
            rows.append(row)
    return rows


def write_dataset(
    folder: Path | str,
    seed: int,
    train: int = 1024,
    heldout: int = 200,
    ood: int = 200,
    terms: int = 8,
    ood_terms: int = 11,
) -> dict[str, Path]:
    """Write ``train.jsonl``, ``heldout.jsonl`` (both of ``terms`` terms) and ``ood.jsonl`` (longer chains).

    Held-out and OOD problems are the same for every seed, so that runs with different seeds are comparable.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    fixed = random.Random("quickstart-evaluation")
    splits = {
        "heldout": draw_rows(fixed, heldout, terms, taken),
        "ood": draw_rows(fixed, ood, ood_terms, taken),
        "train": draw_rows(random.Random(f"quickstart-train-{seed}"), train, terms, taken),
    }
    return {name: _write_rows(folder / f"{name}.jsonl", rows) for name, rows in splits.items()}


def _write_rows(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
