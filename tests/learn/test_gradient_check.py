"""A sharded run whose gradients are not those of one process does not start."""

import pytest
import torch
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule
from trainings import train, untimed_metrics

from luffy.errors import TrainingStopped
from luffy.learn import policy
from luffy.train.loop import Trainer


def shard_and_halve(root, *args):
    """A fault for the test: every gradient comes out of the reduction divided by two."""
    SHARD(root, *args)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


SHARD = policy.shard


def start_with_a_fault(cfg, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "shard", shard_and_halve)
        with pytest.raises(TrainingStopped) as stopped:
            Trainer(cfg, world=world)
    return str(stopped.value)


def train_with_a_fault(cfg, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "shard", shard_and_halve)
        train(cfg, world)


def test_wrong_gradients_end_the_run_before_its_first_step_on_every_rank(make_config):
    cfg = make_config(train={"steps": 1})
    said = run_ranks(2, start_with_a_fault, cfg)
    assert said[0] == said[1]
    assert (
        "on 2 processes the gradient of " in said[0]
        and " differs from that of one process by 0.5 of its norm" in said[0]
    )
    assert not (cfg.folder / "metrics.jsonl").exists()


def test_the_check_can_be_turned_off(make_config):
    cfg = make_config(train={"steps": 1}, parallel={"check_gradients": False})
    run_ranks(2, train_with_a_fault, cfg)
    assert len(untimed_metrics(cfg)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize(
    "model", [{}, {"dtype": "bfloat16"}, {"lora": {"rank": 4}}], ids=["float32", "bfloat16", "lora"]
)
def test_right_gradients_pass_on_any_number_of_ranks(make_config, count, model):
    """With five ranks two of them have the same batches."""
    torch.set_num_threads(1)
    cfg = make_config(train={"steps": 1}, model=model)
    run_ranks(count, train, cfg)
    assert len(untimed_metrics(cfg)) == 1
