"""The page on all methods of the quickstart says what its runs left (summary.json of the quickstart)."""

import json
import re
import statistics
from pathlib import Path

from luffy.config import built_in_recipes
from luffy.quickstart.run import COLUMNS, MethodOutcome, by_accuracy, percent

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "methods-quickstart.md").read_text(encoding="utf-8")
SUMMARY = json.loads((RESULTS / "methods-quickstart.json").read_text(encoding="utf-8"))
OUTCOMES = {
    name: {int(seed): MethodOutcome(**outcome) for seed, outcome in method["all"].items()}
    for name, method in SUMMARY["methods"].items()
}


def test_the_table_is_that_of_the_summary():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")
    ]
    assert rows == [
        [
            f"`{name}`",
            f"{100 * statistics.fmean(o.start for o in by_seed.values()):.1f}",
            *(percent([getattr(o, attribute) for o in by_seed.values()]) for _, attribute in COLUMNS),
        ]
        for name, by_seed in by_accuracy(OUTCOMES)
    ]


def test_methods_without_a_row_are_named():
    recipes = {
        name.removeprefix("methods/").replace("_", "-") for name in built_in_recipes() if name.startswith("methods/")
    }
    missing = re.search(r"^Not run: (.*)\.$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`([\w-]+)`", missing[1])) if missing else set()
    assert named | set(OUTCOMES) == recipes and not named & set(OUTCOMES)


def test_accuracies_in_the_prose_are_in_the_table():
    prose = PAGE.partition("What it shows:")[2].partition("What it does not show")[0]
    said = re.findall(r"\d+\.\d", prose)
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    known = {number for row in rows for number in re.findall(r"\d+\.\d", row)}
    assert said and set(said) <= known
