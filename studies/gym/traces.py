"""Long step-by-step traces for problems of reasoning-gym, written by programs that solve them.

    python -m studies.gym.traces --family products --size 2000 --out products.jsonl

The rows are for `luffy train`: prompt, answer, entry (for the reward `reasoning_gym`) and one trace each. A program
reads the question's numbers, never the answer; a trace that the family's own scorer does not give 1 stops the command.
Held-out problems of the same kind: the path that the command prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.data import load_problems
from luffy.errors import UserError
from luffy.files import write_atomically
from luffy.rewards import build_verifier

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
Solved = tuple[list[str], str]  # steps, answer


def products(known: Mapping[str, Any]) -> Solved:
    """Long multiplication: a partial product for each digit, digit by digit with carries, then their sum."""
    left, right = (int(part) for part in known["expression"].split(" * "))
    steps, partial = [f"{left} * {right}: multiply {left} by each digit of {right}, from the right."], []
    for place, digit in enumerate(map(int, reversed(str(right)))):
        carry, written = 0, ""
        for other in map(int, reversed(str(left))):
            value = other * digit + carry
            said = f" + {carry}" if carry else ""
            steps.append(f"{other} * {digit}{said} = {value}: write {value % 10}, carry {value // 10}")
            carry, written = value // 10, f"{value % 10}{written}"
        product = int(f"{carry}{written}")
        partial.append(product * 10**place)
        steps.append(f"{left} * {digit} = {product}, with {place} zeros behind it {partial[-1]}")
    total = partial[0]
    for number in partial[1:]:
        steps.append(f"Add {number} to {total}.")
        more, total = added(total, number)
        steps += more
    return steps, str(total)


def added(left: int, right: int) -> tuple[list[str], int]:
    """Column addition of two numbers that are not negative."""
    width = max(len(str(left)), len(str(right)))
    steps, carry, written = [], 0, ""
    for one, other in zip(reversed(str(left).zfill(width)), reversed(str(right).zfill(width)), strict=True):
        value = int(one) + int(other) + carry
        steps.append(f"{one} + {other} + {carry} = {value}: write {value % 10}, carry {value // 10}")
        carry, written = value // 10, f"{value % 10}{written}"
    total = int(f"{carry}{written}")
    return [*steps, f"{left} + {right} = {total}"], total


def subtracted(left: int, right: int) -> tuple[list[str], int]:
    """Column subtraction of a number from one that is not smaller, none of them negative."""
    width = len(str(left))
    steps, borrowed, written = [], 0, ""
    for one, other in zip(reversed(str(left)), reversed(str(right).zfill(width)), strict=True):
        value = int(one) - int(other) - borrowed
        borrows = value < 0
        said = f", borrow 10: write {value + 10}" if borrows else f": write {value}"
        steps.append(f"{one} - {other} - {borrowed} = {value}{said}")
        borrowed, written = int(borrows), f"{value % 10}{written}"
    return [*steps, f"{left} - {right} = {int(written)}"], int(written)


def chain_sum(known: Mapping[str, Any]) -> Solved:
    """Add up what is added, add up what is taken away, and subtract."""
    first, *rest = known["expression"].split(" ")
    terms = [int(first), *(int(sign + number) for sign, number in zip(rest[::2], rest[1::2], strict=True))]
    steps, totals = [], {}
    for sign, what in ((1, "added"), (-1, "taken away")):
        numbers = [abs(term) for term in terms if sign * term > 0]
        steps.append(f"What is {what}: {', '.join(map(str, numbers)) or 'nothing'}.")
        total = numbers[0] if numbers else 0
        for number in numbers[1:]:
            more, total = added(total, number)
            steps += more
        totals[sign] = total
    up, down = totals[1], totals[-1]
    steps.append(f"{up} - {down}: {'the result is negative' if up < down else 'the result is not negative'}.")
    more, left = subtracted(max(up, down), min(up, down))
    return steps + more, f"-{left}" if up < down else str(left)


def base_conversion(known: Mapping[str, Any]) -> Solved:
    """To decimal, digit by digit from the left, then repeated division."""
    source, target, text = known["source_base"], known["target_base"], known["source_repr"]
    steps, value = [f"First {text} in base {source} as a decimal number, from the left."], 0
    for digit in text:
        steps.append(f"{value} * {source} + {DIGITS.index(digit)} = {value * source + DIGITS.index(digit)}")
        value = value * source + DIGITS.index(digit)
    steps.append(f"The number is {value}. Now divide by {target} again and again; the remainders are the digits.")
    written = "" if value else "0"
    while value:
        digit = DIGITS[value % target]
        steps.append(f"{value} / {target} = {value // target}, remainder {value % target}, digit {digit}")
        value, written = value // target, digit + written
    return [*steps, f"Read from the last to the first: {written}"], written


def count_bits(known: Mapping[str, Any]) -> Solved:
    """Halve, and count the odd numbers."""
    value, ones = known["number"], 0
    steps = [f"Halve {value} until nothing is left; each odd number is a 1."]
    while value:
        ones += value % 2
        steps.append(f"{value} is {'odd' if value % 2 else 'even'}: {ones} so far, half is {value // 2}")
        value //= 2
    return steps, str(ones)


@dataclass(frozen=True)
class Family:
    """What solves it, and settings with which a small model fails."""

    solve: Callable[[Mapping[str, Any]], Solved]
    settings: str


FAMILIES = {
    "products": Family(products, "min_digits=4:max_digits=5"),
    "chain_sum": Family(chain_sum, "min_terms=5:max_terms=8:min_digits=5:max_digits=7"),
    "base_conversion": Family(base_conversion, "min_value=10000:max_value=1000000"),
    "count_bits": Family(count_bits, "min_n=1000000:max_n=2147483647"),
}


def trace_of(family: str, entry: str) -> str:
    """The steps and the marked answer."""
    steps, answer = FAMILIES[family].solve(json.loads(entry)["metadata"])
    return "\n".join([*steps, f"<answer>{answer}</answer>"])


def write_traces(family: str, out: Path, size: int, seed: int = 0, settings: str | None = None) -> str:
    """Write the rows; returns the data path of problems of the same kind."""
    settings = FAMILIES[family].settings if settings is None else settings
    path = f"reasoning_gym:{family}:size={size}:seed={seed}{':' if settings else ''}{settings}"
    problems = list(load_problems(path))
    traces = [trace_of(family, problem.meta["entry"]) for problem in problems]
    with build_verifier("reasoning_gym") as verifier:
        scores = verifier.score(list(zip(problems, traces, strict=True)))
    for problem, trace, score in zip(problems, traces, scores, strict=True):
        if score.value != 1:
            raise UserError(f"the program is wrong about {problem.prompt!r} ({score}): {trace}")
    rows = [
        {
            "id": f"{family}:{seed}:{number}", "prompt": problem.prompt, "answer": problem.answer,
            "source": problem.source, "entry": problem.meta["entry"], "traces": [{"text": trace, "teacher": "program"}],
        }
        for number, (problem, trace) in enumerate(zip(problems, traces, strict=True))
    ]  # fmt: skip
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--settings", help="of the family, such as min_digits=4:max_digits=5; default: hard ones")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    path = write_traces(args.family, args.out, args.size, args.seed, args.settings)
    print(f"wrote {args.out}; held-out problems of this kind: data.eval={path.replace(f'={args.size}', '=200', 1)}")


if __name__ == "__main__":
    main()
