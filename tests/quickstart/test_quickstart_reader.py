"""The start of tiny/opsd: it reads a solution behind the question, and is lost without one."""

import pytest
import torch

from luffy.config import load_config
from luffy.data.hints import SOLUTION
from luffy.models.load import load_model, load_tokenizer
from luffy.quickstart import task
from luffy.quickstart.make_base import Base
from luffy.quickstart.make_reader import ASSETS, shown_rows
from luffy.report.recorder import read_json_lines


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


def test_it_was_made_of_problems_that_no_set_has() -> None:
    used = {
        row["id"] for name in ("train", "heldout", "ood") for row in read_json_lines(ASSETS / "data" / f"{name}.jsonl")
    }
    rows = shown_rows(20)
    assert not used & {row["id"] for row in rows}
    chain = rows[0]["id"]
    assert rows[0]["prompt"] == f"{chain} {rows[0]['traces'][0]} " and rows[0]["traces"][0].endswith(rows[0]["answer"])
    assert len(rows[0]["prompt"]) == task.prompt_tokens(8) + task.response_tokens(8) + 1
