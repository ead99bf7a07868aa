"""A tiny model, a tiny task and a config for them: a run takes seconds."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

# Without a GPU Triton's kernels are interpreted, for the tests that ask for them. Triton looks when it is first
# imported, by whomever: before anything below.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from luffy.config import Config

# torch, transformers and luffy are imported by the fixtures: the process that only hands out the tests reads this
# file too, and no other begins before it has.

# A busy machine is not a failure; and CI draws the same examples every time.
settings.register_profile("luffy", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("luffy")

# A shell has what it starts in the background ignore Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


STUDIES = tuple(Path(__file__).parent / folder for folder in ("studies", "benchmarks"))


@pytest.hookimpl(tryfirst=True)  # before the items are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of studies and benchmarks, which are outside the package. Files that take children come first: so
    they are one worker's, and a child that has imported torch serves many."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in STUDIES):
            item.add_marker("studies")
    taking = {"run_ranks", "in_child", "in_children", "exit_code_in_child"}
    items.sort(key=lambda item: not taking & vars(getattr(item, "module", None) or item).keys())


@pytest.fixture(autouse=True, scope="session")
def no_full_collection_in_a_training():
    """A training looks once through all objects of the process: in this one, a third of its time."""
    import luffy.train.recording

    without = SimpleNamespace(collect=lambda: 0, freeze=gc.freeze, unfreeze=gc.unfreeze)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(luffy.train.recording, "gc", without)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from builders import LETTERS, make_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One-digit sums; every third problem has no trace."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for i in range(24):
        a, b = i % 5, i // 5
        traces = [] if i % 3 == 2 else [f"{a}+{b}={a + b}\n#### {a + b}"]
        rows.append({"id": f"p{i}", "prompt": f"{a}+{b}", "answer": str(a + b), "traces": traces})
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder / "train.jsonl"


@pytest.fixture
def make_config(make_config_in, tmp_path: Path):
    """``make_config(optim={"lr": 0.1}, name="b")``: a small LUFFY run, sections merged."""
    return make_config_in(tmp_path)


@pytest.fixture(scope="session")
def make_config_in(tiny_model: Path, sums: Path):
    """``make_config`` for runs in a folder, for fixtures that several tests share."""
    from luffy.config import Config
    from luffy.schema import build

    def make(folder: Path, **changes) -> Config:
        values: dict = {
            "out": str(folder / "runs"),
            "model": {"path": str(tiny_model), "device": "cpu"},
            "data": {"train": str(sums), "style": "plain", "max_prompt_tokens": 16},
            "reward": {"kind": "numeric", "workers": 1},
            "rollout": {"n": 4, "max_tokens": 16, "slots": 24},  # one wave of a step
            "optim": {"lr": 1e-3},
            "batch": {"problems": 6, "tokens": 128},
            "train": {"steps": 4, "save_every": 2, "threads": 1},
            "record": {"tensorboard": False, "samples_every": 1},
        }
        for section, entries in changes.items():
            values[section] = {**values.get(section, {}), **entries} if isinstance(entries, dict) else entries
        return build(Config, values)

    return lambda folder: functools.partial(make, folder)


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub where nobody listens, in the place of the one that this process knows."""
    from huggingface_hub import constants

    from luffy.hub import hub_fault

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    hub_fault.cache_clear()
    yield constants.ENDPOINT
    hub_fault.cache_clear()


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, let the code under test use its Triton kernels all the same."""
    pytest.importorskip("triton")
    monkeypatch.setattr("luffy.kernels.interpreted", True)


@pytest.fixture
def fast_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the kernels in plain torch, which on a CPU is faster than Triton's interpreter."""
    pytest.importorskip("triton")
    import plain_kernels

    plain_kernels.install(monkeypatch)
