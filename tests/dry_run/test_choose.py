"""The case of a base, at the borders; and the page has the same table."""

from pathlib import Path

import pytest

from luffy.dry_run import base_model
from luffy.dry_run.choose import CASES, CLOSE, FAR, NO_TRACES, RARE, SOME, STUCK, TRIES, case_of

PAGE = Path(__file__).parents[2] / "docs" / "choose.md"


@pytest.mark.parametrize(
    ("solved", "unlikely", "case"),
    [
        (0.0, 0.0, STUCK), (0.05, 0.9, STUCK), (0.0501, 0.0, SOME), (0.499, 0.9, SOME), (0.5, 0.0499, CLOSE),
        (1.0, 0.0, CLOSE), (0.5, 0.05, FAR), (0.4, None, SOME), (0.6, None, None), (None, 0.1, None),
    ],
)  # fmt: skip
def test_the_case_at_its_borders(solved, unlikely, case):
    assert case_of(solved, unlikely) is case
    assert case_of(solved, unlikely, has_traces=False) is NO_TRACES


def test_the_page_has_the_same_table_and_numbers():
    text = PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[2:] == [[case.when, case.take] for case in CASES]
    said = " ".join(text.split())
    assert f"samples {base_model.PROBLEMS} training problems {TRIES} times" in said
    assert f"if the base gives it less than {RARE:g}" in said and base_model.SECONDS == 60
