from dataclasses import replace

import torch

from luffy.api import credit_function, group_baseline


@credit_function("confident", needs=("entropy",))
def confident(group, cfg):
    return [
        replace(credit, sft_weights=credit.sft_weights * torch.exp(-tokens.entropy))
        for credit, tokens in zip(group_baseline(group, cfg), group.tokens, strict=True)
    ]
