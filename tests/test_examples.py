"""The one-file example runs, learns where on-policy RL does not, and stays within its promise of size."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import one_file_luffy  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_luffy_learns_and_on_policy_does_not():
    lines = []
    before, after = one_file_luffy.train(one_file_luffy.Settings(steps=10), log=lines.append)
    assert before == 0.0 and after > 0.2 and "held-out" in lines[0]
    assert one_file_luffy.train(one_file_luffy.Settings(steps=3, traces=0), log=lines.append)[-1] == 0.0


def test_its_switches_change_the_loss(tmp_path, monkeypatch):
    """With sixteen rows of each file. The first batch is the same for all."""
    (tmp_path / "data").mkdir()
    for file in (one_file_luffy.ASSETS / "data").glob("*.jsonl"):
        (tmp_path / "data" / file.name).write_text("".join(file.read_text().splitlines(keepends=True)[:16]))
    (tmp_path / "base").symlink_to(one_file_luffy.ASSETS / "base")
    monkeypatch.setattr(one_file_luffy, "ASSETS", tmp_path)
    losses, luffy_loss = [], one_file_luffy.luffy_loss

    def recorded(*args):
        loss, metrics = luffy_loss(*args)
        losses.append(round(loss.item(), 6))
        return loss, metrics

    monkeypatch.setattr(one_file_luffy, "luffy_loss", recorded)
    first = []
    for changes in ({}, {}, {"advantage": "grpo_split"}, {"shape": "no_reshape", "clip": True}):
        losses.clear()
        assert len(one_file_luffy.train(one_file_luffy.Settings(steps=1, problems=4, **changes), log=print)) == 2
        first.append(losses[0])
    assert first[0] == first[1] and len(set(first)) == 3


def test_it_stands_on_core_and_rewards_alone_and_is_short():
    text = (EXAMPLES / "one_file_luffy.py").read_text()
    used = {line.split()[1] for line in text.splitlines() if line.startswith(("from luffy", "import luffy"))}
    assert used == {"luffy", "luffy.core.advantages", "luffy.rewards", "luffy.types"}
    assert len(text.splitlines()) <= 260
