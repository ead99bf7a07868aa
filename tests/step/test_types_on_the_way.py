"""The types and files between a row and backward(), as docs/architecture.md lists them."""

import re
import sys
import threading
from pathlib import Path

import torch

import luffy
from luffy.train.loop import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEHIND_AN_INTERFACE = ("luffy.metrics", "luffy.rollout", "luffy.models")


def section(title):
    return re.search(rf"^## {title}\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]


def traced_step(trainer, monkeypatch):
    """The types of luffy of which a step makes objects before its first backward pass, and the files that it runs."""
    types, files, is_over = set(), set(), []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **kw: (is_over.append(True), backward(*args, **kw))[1])

    def note(frame, event, argument):
        if event != "call" or is_over:
            return
        files.add(frame.f_code.co_filename)
        if frame.f_code.co_name in ("__init__", "__post_init__") and "self" in frame.f_locals:
            types.add(type(frame.f_locals["self"]))
        elif isinstance(frame.f_locals.get("_cls"), type):  # of a NamedTuple
            types.add(frame.f_locals["_cls"])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        trainer.step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {t for t in types if t.__module__.startswith("luffy.")}, files


def test_a_plain_step_makes_the_listed_types_and_runs_the_listed_files(make_config, monkeypatch):
    with Trainer(make_config()) as trainer:
        types, files = traced_step(trainer, monkeypatch)
    made = {t.__name__ for t in types if not t.__module__.startswith(BEHIND_AN_INTERFACE)}
    listed = re.findall(r"^\|`(\w+)`\|", section("Types"), re.MULTILINE)
    assert made == set(listed) and len(listed) <= 30
    way = re.findall(r"^\d+\. `([\w/]+\.py)`", section("The way of a trace"), re.MULTILINE)
    root = Path(luffy.__file__).parent
    assert 0 < len(way) <= 12 and {str(root / name) for name in way} <= files
