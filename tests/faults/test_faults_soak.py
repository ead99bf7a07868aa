"""Two thousand steps: memory and open files at the end are what they were near the start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from luffy.run_folder.recorder import Recorder, read_json_lines
from luffy.train.loop import Trainer

STEPS = int(os.environ.get("LUFFY_FAULT_SOAK_STEPS", "2000"))
WARM_UP = 0.2  # of the steps: allocators and caches fill
MOST_GROWTH_MB = 16
# A window of memory, not one reading: what a step needs for a moment comes and goes.
WINDOW = 0.1


def anonymous_megabytes() -> float:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads memory and files from /proc")
def test_two_thousand_steps_with_flat_memory_and_files(make_config, sums, monkeypatch):
    cfg = make_config(
        data={"eval": str(sums)},
        eval={"every": 100, "limit": 4},
        rollout={"n": 2, "max_tokens": 14, "slots": 8},
        batch={"problems": 2, "tokens": 128},
        train={"steps": STEPS, "save_every": 50},
        record={"samples_every": 10, "tensorboard": True},
        algorithm={"reject_extreme": False, "kl_coef": 0.01},
    )
    seen: list[tuple[float, int]] = []
    log = Recorder.log
    monkeypatch.setattr(
        Recorder, "log", lambda *args: (log(*args), seen.append((anonymous_megabytes(), open_files())))[0]
    )
    with Trainer(cfg) as trainer:
        trainer.train()
    assert len(read_json_lines(cfg.folder / "metrics.jsonl")) == STEPS + 1
    first, window = int(STEPS * WARM_UP), int(STEPS * WINDOW)
    early, late = (max(mb for mb, _ in part) for part in (seen[first : first + window], seen[-window:]))
    files = [max(n for _, n in part) for part in (seen[first : first + window], seen[-window:])]
    print(
        f"\n{STEPS} steps: {early:.1f} MB after {first} steps, {late:.1f} MB at the end; {files[0]} open files, then {files[1]}"
    )
    assert late - early < MOST_GROWTH_MB
    assert files[1] == files[0]
    assert len(list((cfg.folder / "checkpoints").glob("step-*"))) <= cfg.train.keep + 1
