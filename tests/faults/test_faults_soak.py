"""Two thousand steps in three parts: memory, open files, threads and processes at the end are what they were near the
start."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from builders import write_rows
from conversing import save_chat_model

from luffy.run_folder.recorder import Recorder, read_json_lines
from luffy.train.loop import Trainer

STEPS = int(os.environ.get("LUFFY_FAULT_SOAK_STEPS", "2000"))
WARM_UP = 0.2  # of a part's steps: allocators and caches fill
MOST_GROWTH_MB = 16
# A window of memory, not one reading: what a step needs for a moment comes and goes.
WINDOW = 0.1
LETTERS_OF = {"name": f"{__name__}:Letters", "max_turns": 3, "at_once": 8}


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    megabytes: float
    files: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Held:
        status = Path("/proc/self/status").read_text()
        children = [Path(f"/proc/self/task/{task}/children").read_text() for task in os.listdir("/proc/self/task")]
        return cls(
            int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024,
            len(os.listdir("/proc/self/fd")),
            int(re.search(r"Threads:\s+(\d+)", status)[1]),
            sum(len(line.split()) for line in children),
        )


def most(part: list[Held]) -> Held:
    return Held(*(max(values) for values in zip(*(vars(held).values() for held in part), strict=True)))


class Letters:
    """An environment that counts the letters of a turn."""

    def reset(self, seed: int) -> None:
        self.turns = 0

    async def step(self, text: str):
        self.turns += 1
        return f"{len(text)} letters", float(len(text) % 2), self.turns == 3


@pytest.fixture
def talking(tmp_path):
    trace = [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "2 letters"},
        {"role": "assistant", "content": "a"},
    ]
    rows = [{"id": f"p{i}", "prompt": f"go {i}", "answer": "1", "traces": [trace]} for i in range(8)]
    return {
        "model": {"path": save_chat_model(tmp_path / "chat")},
        "data": {"train": str(write_rows(tmp_path / "chats.jsonl", rows)), "style": "chat", "max_prompt_tokens": 64},
        "rollout": {"n": 2, "max_tokens": 48},
        "environment": LETTERS_OF,
        "batch": {"problems": 2, "tokens": 512},
        "reward": {"success": 2.0, "failure": 0.0},
    }


@pytest.fixture
def kinds(sums, talking):
    single = {
        "data": {"eval": str(sums)},
        "eval": {"every": 100, "limit": 4},
        "rollout": {"n": 2, "max_tokens": 14, "slots": 8},
        "batch": {"problems": 2, "tokens": 128},
    }
    drafts = {"rollout": {**single["rollout"], "drafts": {"when": "always", "memory_mb": 1}}}
    return {
        "single turns": single | {"algorithm": {"reject_extreme": False, "kl_coef": 0.01}},
        "drafts, four bits": single | drafts | {"model": {"lora": {"rank": 2, "quantize": "nf4"}}},
        "conversations": talking,
    }


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads memory and files from /proc")
@pytest.mark.parametrize("kind", ["single turns", "drafts, four bits", "conversations"])
def test_a_long_run_holds_no_more_at_its_end(make_config, kinds, kind, monkeypatch):
    settings = {"algorithm": {"reject_extreme": False}} | kinds[kind]
    cfg = make_config(**settings, train={"save_every": 50}, record={"samples_every": 10, "tensorboard": True})
    seen: list[Held] = []
    log = Recorder.log
    monkeypatch.setattr(Recorder, "log", lambda *args: (log(*args), seen.append(Held.now()))[0])
    for steps in (STEPS // 10, STEPS // 5, STEPS):  # resumed twice
        with Trainer(replace(cfg, train=replace(cfg.train, steps=steps))) as trainer:
            trainer.train()
        left = Held.now()
    rows = [row for row in read_json_lines(cfg.folder / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    part = seen[-(STEPS - STEPS // 5) :]
    first, window = int(len(part) * WARM_UP), int(len(part) * WINDOW)
    early, late = most(part[first : first + window]), most(part[-window:])
    print(f"\n{kind}, {STEPS} steps: after the warm-up {early}, at the end {late}, closed {left}")
    assert late.megabytes - early.megabytes < MOST_GROWTH_MB
    assert (late.files, late.threads, late.children) == (early.files, early.threads, early.children)
    assert len(list((cfg.folder / "checkpoints").glob("step-*"))) <= cfg.train.keep + 1
