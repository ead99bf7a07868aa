"""The Hugging Face hub: whether it answers, asked once and briefly; and what a path says of it."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

PATIENCE_S = 5.0

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_PATH = re.compile(rf"({HUB_ID.pattern})(/[\w./-]+)?")  # and perhaps a folder in it
_CACHED = re.compile(r"(?:models|datasets)--([\w.-]+?)--([\w.-]+)")  # a folder of the hub's cache
_FILES = (".json", ".jsonl", ".parquet", ".arrow", ".gguf")


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


def hub_id(path: str, inside: bool = False) -> str | None:
    """``org/name`` where a path is a hub id, or lies in the hub's cache; None where it is a file or folder of this
    machine. ``inside``: it may go on with a folder of the repository, as paths of datasets do."""
    cached = next(filter(None, map(_CACHED.fullmatch, Path(path).parts)), None)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    found = HUB_PATH.fullmatch(path)
    if found is None or (found[2] and not inside) or path.endswith(_FILES) or Path(path).exists():
        return None
    return found[1]
