"""What FSDP2 returns is handed on as copies, so that nobody can start a backward pass by differentiating for a metric."""

from unittest.mock import patch

import torch
from gathers import before_each_gather
from ranks import run_ranks

from luffy.learn.policy import Policy
from luffy.learn.scorer import TokenScorer
from luffy.train.loop import Trainer


def test_an_update_is_one_backward_pass_for_each_forward_pass(make_config):
    """Two micro-batches of a model with two layers: the root and both layers are gathered in each forward pass, and
    both layers again in each backward pass (the root stays gathered until then)."""
    cfg = make_config(
        batch={"problems": 2, "tokens": 64},
        train={"steps": 1},
        algorithm={"reject_extreme": False},
        parallel={"check_gradients": False},  # its passes are not those of the update
        record={"samples_every": 0},  # recorded samples are scored before the update, which leaves the root gathered
    )
    passes, hooks, gathers = zip(*run_ranks(2, count_in_update, cfg), strict=True)
    assert passes[0] == passes[1] >= 2
    assert hooks == passes
    assert gathers == tuple(5 * p for p in passes)


def count_in_update(cfg, world):
    """Forward passes with gradients, backward passes that reached the log-probs as FSDP2 sees them, and gathers."""
    counts = {"passes": 0, "hooks": 0, "gathers": 0}
    forward, update = TokenScorer.forward, Policy.update

    def count(name):
        counts[name] += 1

    def hooked(self, *args):
        out = forward(self, *args)
        if torch.is_grad_enabled():
            count("passes")
            out[0].register_hook(lambda grad: count("hooks"))
        return out

    def counting(self, *args):
        with before_each_gather(lambda: count("gathers")):
            return update(self, *args)

    with (
        patch.object(TokenScorer, "forward", hooked),
        patch.object(Policy, "update", counting),
        Trainer(cfg, world=world) as trainer,
    ):
        trainer.train()
    return counts["passes"], counts["hooks"], counts["gathers"]
