"""Accuracy of a model by family of reasoning-gym, built on `luffy eval`: where is a larger model clearly better?

    python -m studies.gym.accuracy --model MODEL --out FOLDER --size 32 --k 8
    python -m studies.gym.accuracy --compare SMALL_FOLDER LARGE_FOLDER

The first evaluates held-out problems of the families (--families, else all that make problems quickly) and lists pass@1
and pass@k; after a stop the same command goes on. The second lists two such folders side by side, widest gap first.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from luffy import api
from luffy.data import load_problems
from luffy.files import write_atomically

SYSTEM_PROMPT = "Think step by step. Then write the final answer as <answer>answer</answer>."
PROBLEMS, TABLE, EVALUATION = "problems.jsonl", "families.json", "eval"
SLOW = {  # seconds per problem, or packages of their own
    "composite", "sokoban", "knight_swap", "futoshiki", "zebra_puzzles", "intermediate_integration", "sudoku",
    "mini_sudoku", "puzzle24", "quantum_lock", "polynomial_equations", "rubiks_cube", "countdown",
}  # fmt: skip


def quick_families() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - SLOW)


def write_problems(families: Iterable[str], size: int, out: Path) -> None:
    """One file with the held-out problems of all families, told apart by their ids: the model is loaded once. A family
    may have settings: ``products:min_digits=4``."""
    rows = []
    for family in families:
        name, _, settings = family.partition(":")
        path = f"reasoning_gym:{name}:size={size}{':' if settings else ''}{settings}"
        for number, problem in enumerate(load_problems(path, "test")):
            rows.append(
                {"id": f"{family}#{number}", "prompt": problem.prompt, "answer": problem.answer,
                 "source": problem.source, "entry": problem.meta["entry"]}
            )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / PROBLEMS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def by_family(items: Iterable[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Of each family pass@1 (the mean over all samples), pass@k, and the number of problems."""
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        right[str(item["id"]).partition("#")[0]][str(item["id"])].append(bool(item["right"]))
    return {
        family: {
            "pass@1": sum(map(sum, found.values())) / sum(map(len, found.values())),
            "pass@k": sum(map(any, found.values())) / len(found),
            "problems": len(found),
        }
        for family, found in sorted(right.items())
    }


def evaluate(model: str, families: Sequence[str], out: Path, size: int, k: int, max_tokens: int, engine: str) -> None:
    if not (out / PROBLEMS).exists():
        write_problems(families, size, out)
    api.evaluate(
        model, str(out / PROBLEMS), out / EVALUATION, k=k, reward="reasoning_gym", system_prompt=SYSTEM_PROMPT,
        max_tokens=max_tokens, engine=engine,
    )  # fmt: skip
    lines = (out / EVALUATION / "items.jsonl").read_text(encoding="utf-8").splitlines()
    table = by_family(map(json.loads, lines))
    write_atomically(out / TABLE, json.dumps(table, indent=1) + "\n")
    for family, row in sorted(table.items(), key=lambda pair: -pair[1]["pass@1"]):
        print(f"{family:40} pass@1 {row['pass@1']:6.1%}  pass@{k} {row['pass@k']:6.1%}  {row['problems']:.0f} problems")


def compared(small: Path, large: Path) -> list[str]:
    """A line for each family that both folders have, the widest gap of pass@1 first."""
    tables = [json.loads((folder / TABLE).read_text(encoding="utf-8")) for folder in (small, large)]
    both = tables[0].keys() & tables[1].keys()
    gap = {family: tables[1][family]["pass@1"] - tables[0][family]["pass@1"] for family in both}
    return [
        f"{family:40} {tables[0][family]['pass@1']:6.1%} {tables[1][family]['pass@1']:6.1%}  gap {gap[family]:+.1%}"
        for family in sorted(both, key=lambda family: (-gap[family], family))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or hub id")
    parser.add_argument("--families", nargs="+", help="such as countdown, or products:min_digits=4:max_digits=5")
    parser.add_argument("--size", type=int, default=32, help="problems of each family")
    parser.add_argument("--k", type=int, default=8, help="samples of each problem")
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--engine", default="native")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("SMALL", "LARGE"))
    args = parser.parse_args()
    if args.compare:
        print("\n".join(compared(*args.compare)))
    elif args.model and args.out:
        families = args.families or quick_families()
        evaluate(args.model, families, args.out, args.size, args.k, args.max_tokens, args.engine)
    else:
        parser.error("give --model and --out, or --compare")


if __name__ == "__main__":
    main()
