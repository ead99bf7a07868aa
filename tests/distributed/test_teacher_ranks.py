"""A teacher's scores are the same on any number of processes: of a sharded model, and of averaged sharded weights."""

import pytest
import torch
from ranks import run_ranks
from trainings import assert_same_metrics, assert_same_weights, final_weights, train, untimed_metrics

from luffy.run_folder.checkpoint import Checkpoint

SETTINGS = {
    "algorithm": {"credit": "distill", "distill_reward": 1.0, "reject_extreme": False},
    "optim": {"lr": 1e-2, "eps": 1e-3},
    "train": {"steps": 3, "save_every": 3},
}
TEACHERS = {
    "frozen, shown the solution": {"path": "self", "shown": "solution", "hint_text": "={solution}="},
    "averaged, shown a sibling": {"path": "self", "average": 0.3, "shown": "sibling", "hint_text": "={solution}="},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEACHERS)
def test_ranks_agree_on_the_teacher(make_config, kind):
    torch.set_num_threads(1)
    runs = {count: make_config(name=f"ranks-{count}", teacher=TEACHERS[kind], **SETTINGS) for count in (0, 1, 2)}
    train(runs[0])
    for count in (1, 2):
        run_ranks(count, train, runs[count])
        assert_same_metrics(untimed_metrics(runs[count]), untimed_metrics(runs[0]))
        assert_same_weights(final_weights(runs[count]), final_weights(runs[0]))
    gaps = [row["method/teacher_gap"] for row in untimed_metrics(runs[0])]
    assert len(set(gaps)) == 3 and 0 < untimed_metrics(runs[0])[0]["method/teacher_share"] < 1
    if "average" in TEACHERS[kind]:
        alone, many = (averages(runs[count]) for count in (0, 2))
        assert len(alone) > 0
        assert_same_weights(many, alone)


def averages(cfg):
    tensors = Checkpoint(max((cfg.folder / "checkpoints").glob("step-*"))).tensors()
    return {name: value for name, value in tensors.items() if name.endswith("/teacher")}
