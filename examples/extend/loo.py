from dataclasses import dataclass

import torch

from luffy.api import credit_function, in_baseline, knob


@dataclass(frozen=True)
class LeaveOneOut:
    length_penalty: float = knob(0.0, "reward that the longest response of a group loses", ge=0)


@credit_function("loo", settings=LeaveOneOut, sft_term=False)
def loo(group, cfg, settings):
    lengths = torch.tensor([float(rollout.token_ids.numel()) for rollout in group.rollouts])
    rewards = group.rewards - settings.length_penalty * lengths / lengths.max()
    counted = in_baseline(group.rollouts, cfg).float()
    others = (rewards * counted).sum() - rewards * counted
    return rewards - others / (counted.sum() - counted).clamp(min=1)
