"""A small mutating fuzzer with a corpus that is kept.

Inputs of the corpus folder are tried as they are, then changed at random. An input that ends in a way not seen before
(another message, another kind of result) joins the pool it mutates from; with LUFFY_FUZZ_KEEP=1 it is written to the
corpus. An input that breaks the target is always written there, as ``crash-*``, and so is tried by every later run.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SLOWEST_S = 2.0  # of CPU: nothing here may be slow
LONGEST = 20_000


class Broken(AssertionError):
    """The target raised what it may not raise, or took too long; the message names the kept input."""


def fuzz(
    name: str, target: Callable[[bytes], str], dictionary: Sequence[bytes], rounds: int, seed: int = 0
) -> tuple[int, int]:
    """(inputs tried, ways they ended). ``target`` returns in words how an input ended."""
    dice = random.Random(seed)
    pool = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    tried = len(pool) + rounds
    seen = {_signature(_tried(name, target, data)) for data in pool}
    for _ in range(rounds):
        data = _mutated(dice, pool, dictionary)
        signature = _signature(_tried(name, target, data))
        if signature not in seen:
            seen.add(signature)
            pool.append(data)
            if os.environ.get("LUFFY_FUZZ_KEEP") == "1":
                _keep(name, "way", data)
    return tried, len(seen)


def _tried(name: str, target: Callable[[bytes], str], data: bytes) -> str:
    started = time.process_time()
    try:
        ended = target(data)
    except Exception as error:
        raise Broken(f"{_keep(name, 'crash', data)}: {type(error).__name__}: {error}") from error
    took = time.process_time() - started
    if took > SLOWEST_S:
        raise Broken(f"{_keep(name, 'crash', data)}: took {took:.1f} s")
    return ended


def _signature(ended: str) -> str:
    """Messages differ by what they quote; the way is the same. Greedy: what is quoted may hold quotes itself."""
    return re.sub(r"'.*'|\".*\"|/\S+|\d+", "#", ended)[:160]


def _keep(name: str, kind: str, data: bytes) -> Path:
    path = CORPUS / name / f"{kind}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


def _mutated(dice: random.Random, pool: Sequence[bytes], dictionary: Sequence[bytes]) -> bytes:
    data = bytearray(dice.choice(pool))
    for _ in range(dice.randint(1, 6)):
        place = dice.randint(0, len(data))
        match dice.randint(0, 6):
            case 0:
                data[place : place + 1] = bytes([dice.randint(0, 255)])
            case 1:
                del data[place : place + dice.randint(1, 12)]
            case 2:
                data[place:place] = dice.choice(dictionary)
            case 3:
                data[place : place + dice.randint(1, 8)] = dice.choice(dictionary)
            case 4:  # a piece of another input
                other = dice.choice(pool)
                start = dice.randint(0, len(other))
                data[place:place] = other[start : start + dice.randint(1, 60)]
            case 5:  # a piece again and again
                piece = bytes(data[place : place + dice.randint(1, 8)])
                data[place:place] = piece * dice.choice((2, 10, 300))
            case 6:  # swap two lines
                lines = bytes(data).split(b"\n")
                i, j = dice.randrange(len(lines)), dice.randrange(len(lines))
                lines[i], lines[j] = lines[j], lines[i]
                data = bytearray(b"\n".join(lines))
    return bytes(data[:LONGEST])
