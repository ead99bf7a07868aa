"""The Hugging Face hub: whether it answers, asked once and briefly."""

from __future__ import annotations

import os
from functools import cache

PATIENCE_S = 5.0


@cache
def hub_fault() -> str | None:
    """None where the hub answers, or where the user works offline; else the reason, in words.

    A hub that cannot be reached is not asked again: its clients use their caches from then on. Without this they
    repeat every request for half a minute and print each attempt.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception as error:  # of the HTTP library in use, which is not the same in every version
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for worker processes
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None
