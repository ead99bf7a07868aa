"""luffy: reinforcement learning with verifiable rewards under off-policy guidance."""

from luffy._version import __version__
from luffy.core.advantages import compute_grpo_outcome_advantage_split
from luffy.core.losses import compute_sft_pure_loss, compute_token_on_off_policy_loss

__all__ = [
    "__version__",
    "compute_grpo_outcome_advantage_split",
    "compute_sft_pure_loss",
    "compute_token_on_off_policy_loss",
]
