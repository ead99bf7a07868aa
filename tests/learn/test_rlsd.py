"""RLSD: the gradient of its formula; a run without a teacher is refused."""

import pytest
import torch
from published import assert_gradient_is

from luffy.config import load_config
from luffy.errors import UserError
from luffy.train.setup import check_names

REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
ADVANTAGES = (REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-6)


@pytest.mark.parametrize(("mix", "clip"), [(0.5, 0.2), (1.0, 0.9), (0.0, 0.2)])
def test_the_gradient_of_the_formula(mix, clip):
    """The second response was not scored: it has the advantage of GRPO."""

    def published(log_p, old, ref, teacher):
        total = 0
        for i, (a, p, o, q) in enumerate(zip(ADVANTAGES, log_p, old, teacher, strict=True)):
            scale = torch.exp(torch.sign(a) * (q - o)).clamp(1 - clip, 1 + clip) if i != 1 else 1.0
            of_tokens, r = a * ((1 - mix) + mix * scale), torch.exp(p - o)
            total = total - torch.minimum(of_tokens * r, of_tokens * r.clamp(0.8, 1.2)).sum() / (4 * len(p))
        return total

    settings = [f"algorithm.credit.mix={mix}", f"algorithm.credit.clip={clip}"]
    assert_gradient_is("rlsd", published, rewards=REWARDS.tolist(), untaught=(1,), overrides=settings)


def test_without_a_teacher_it_is_refused():
    cfg = load_config("tiny/on_policy", ["algorithm.credit=rlsd"])
    with pytest.raises(UserError, match=r"algorithm\.credit=rlsd needs a teacher: set teacher\.path"):
        check_names(cfg, "rl")


def test_the_recipe_asks_the_policy_as_it_is():
    teacher = load_config("small/rlsd").teacher
    assert teacher.is_self and teacher.average == 1.0 and teacher.shown == "solution"
