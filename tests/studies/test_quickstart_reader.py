"""The start of tiny/opsd: it reads a solution behind the question, and without one is as wrong as the base."""

import pytest
import torch

from luffy.config import load_config
from luffy.data.prompts import SOLUTION
from luffy.models.load import load_model, load_tokenizer
from luffy.run_folder.recorder import read_json_lines
from studies.quickstart.make_base import Base, right_step_probabilities
from studies.quickstart.make_reader import ASSETS, reader_rows


@pytest.fixture(scope="module")
def reader() -> Base:
    folder = load_config("tiny/opsd").model.path
    model = load_model(folder).eval()
    model.set_attn_implementation("sdpa")
    return Base(model, load_tokenizer(folder))


def test_shown_a_solution_it_writes_it_and_alone_it_does_not(reader: Base) -> None:
    hint = load_config("tiny/opsd").teacher.hint_text
    rows = read_json_lines(ASSETS / "data" / "heldout.jsonl")[:32]
    shown = [row["prompt"] + hint.replace(SOLUTION, row["traces"][0]) for row in rows]
    solutions = [row["traces"][0] for row in rows]
    assert chance(reader, shown, solutions) > 0.8
    assert chance(reader, [row["prompt"] for row in rows], solutions) < 0.05


def chance(reader: Base, prompts: list[str], solutions: list[str]) -> float:
    """Mean probability of the whole solution."""
    given, written = reader.encode(prompts), reader.encode(solutions)
    with torch.no_grad():
        logits = reader.model(torch.cat([given, written], 1)).logits[:, given.shape[1] - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(-1, written[..., None])[..., 0].sum(1).exp().mean())


def test_alone_it_has_the_habit_of_the_base(reader: Base) -> None:
    right = right_step_probabilities(reader, 8)
    assert 0.02 < right.mean() < 0.12


def test_it_was_made_of_problems_that_no_set_has() -> None:
    sets = [read_json_lines(ASSETS / "data" / f"{name}.jsonl") for name in ("train", "heldout", "ood")]
    rows = reader_rows(21)
    assert not {row["id"] for used in sets for row in used} & {row["id"] for row in rows}
    assert rows[0]["prompt"] == f"{rows[0]['id']} {rows[0]['traces'][0]} "
    assert rows[0]["traces"][0].endswith(rows[0]["answer"]) and rows[2]["prompt"] == rows[2]["id"]
    assert not all(row["traces"][0].endswith(row["answer"]) for row in rows[2::3])  # steps of the habit
