"""The generated task: arithmetic that is right, splits that share nothing, slips that cannot cancel."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from luffy.errors import ConfigError
from studies.quickstart import task

CHAIN = (47, 5, -3, 8)


def test_texts_of_a_known_chain() -> None:
    assert task.prompt_of(CHAIN) == "47+5-3+8=?"
    assert task.solution_of(CHAIN) == "+5=52 -3=49 +8=57 #### 57"
    assert task.solution_of(CHAIN, slips=(True, False, True)) == "+5=51 -3=48 +8=55 #### 55"


def test_an_answer_is_right_only_when_every_step_is() -> None:
    for slips in itertools.product((False, True), repeat=3):
        answer = int(task.solution_of(CHAIN, slips).rpartition("#### ")[2])
        assert answer == 57 - sum(slips)


@pytest.mark.parametrize("terms", [2, 8, 12])
def test_every_text_of_a_length_has_that_length_even_when_all_steps_slip(terms: int) -> None:
    rng = random.Random(3)
    for _ in range(300):
        chain = task.draw_chain(rng, terms)
        assert len(chain) == terms
        assert all(task.LOWEST <= total <= task.HIGHEST for total in itertools.accumulate(chain))
        assert len(task.prompt_of(chain)) == 2 * terms + 2
        for slips in ([False] * (terms - 1), [True] * (terms - 1)):
            text = task.solution_of(chain, slips)
            assert len(text) + 1 == task.response_tokens(terms)
            assert set(text) <= set(task.ALPHABET)


def test_too_long_a_chain_names_the_limit() -> None:
    with pytest.raises(ConfigError, match="2 to 12 terms, got 13"):
        task.draw_chain(random.Random(0), 13)


def read_text(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_dataset_is_exact_disjoint_and_a_function_of_the_seed(tmp_path: Path) -> None:
    first = {
        k: read_text(p) for k, p in task.write_dataset(tmp_path / "a", seed=1, train=300, heldout=50, ood=40).items()
    }
    again = {
        k: read_text(p) for k, p in task.write_dataset(tmp_path / "b", seed=1, train=300, heldout=50, ood=40).items()
    }
    other = {
        k: read_text(p) for k, p in task.write_dataset(tmp_path / "c", seed=2, train=300, heldout=50, ood=40).items()
    }
    assert first == again
    assert first["train"] != other["train"]
    assert (first["heldout"], first["ood"]) == (other["heldout"], other["ood"])
    assert {k: len(v) for k, v in first.items()} == {"train": 300, "heldout": 50, "ood": 40}
    ids = [row["id"] for rows in first.values() for row in rows]
    assert len(set(ids)) == 390
    for row in itertools.chain(*first.values()):
        total = sum(int(term) for term in re.findall(r"[+-]?\d+", str(row["prompt"])))
        assert row["answer"] == str(total)
        assert row["traces"][0].endswith(f"#### {total}")  # type: ignore[index]
