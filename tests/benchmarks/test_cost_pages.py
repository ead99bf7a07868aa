"""The pages about costs against the cost model."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cost_tables import comparison, table  # noqa: E402

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    "figure",
    ["34,366", "80,297", "99,696", "18,919", "23,079", "2.51 s", "1.53 s", "114 s", "4.05 s", "211 s", "4.20 TB/s",
     "2.18 s", "| 2.23 |"],
)  # fmt: skip
def test_the_measurements_are_those_of_the_performance_page(figure):
    assert figure in (DOCS / "results" / "performance.md").read_text()


def test_the_page_shows_what_the_model_says():
    page = (DOCS / "results" / "cost.md").read_text()
    assert table() in page and comparison() in page
