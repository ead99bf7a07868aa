"""What `--dry-run` says of memory and time against what a step takes, for five configurations.

python benchmarks/memory.py [--device cuda] [--only NAME] [--json PATH]

Exit code 1 where a peak is off by more than a quarter.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.limits import reset_peak
from bench.step import step_config, timed_steps, write_inputs

from luffy.dry_run import dry_run
from luffy.models.load import DTYPES
from luffy.models.machine import Machine
from luffy.train.loop import Trainer

PROMPT = 121
# shape, problems, samples, response tokens, overrides
CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "0.5B, 32 x 4 x 512": ("qwen2-0.5b", 32, 4, 512, {"batch": {"tokens": 32768}}),
    "0.5B, 2 x 4 x 96, less than a micro-batch": ("qwen2-0.5b", 2, 4, 96, {"algorithm": {"kl_coef": 0.01}}),
    "1.5B, 16 x 8 x 512, recomputed": ("qwen2-1.5b", 16, 8, 512, {"model": {"gradient_checkpointing": True}}),
    "1.5B, 16 x 8 x 512, LoRA 16": ("qwen2-1.5b", 16, 8, 512, {"model": {"lora": {"rank": 16}}}),
    "1.5B, 16 x 8 x 512, offload": ("qwen2-1.5b", 16, 8, 512, {"optim": {"offload": True}}),
}
SMALL = {name: ("tiny", 2, 2, 8, case[4]) for name, case in CASES.items()}  # to try the script itself
ALLOWED = 0.25


def measure(case: tuple[str, int, int, int, dict[str, Any]], device: str) -> dict[str, Any]:
    shape, problems, samples, response, overrides = case
    dtype: Any = "bfloat16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, shape, dtype, device, problems * 4, PROMPT)
        cfg = step_config(folder, problems, samples, response, dtype, device, overrides)
        torch.cuda.empty_cache()
        lines = dry_run(cfg, "rl")
        memory, time = (next(line for line in lines if line.startswith(start)) for start in ("memory", "time"))
        machine = Machine.measure(torch.device(device), DTYPES[cfg.model.dtype])
        torch.cuda.empty_cache()
        reset_peak(torch.device(device))
        with Trainer(cfg) as trainer:
            rows = timed_steps(trainer, machine, 1)
        said = re.search(r"about ([\d.]+) GiB", memory)
        assert said is not None, memory
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        return {"said": float(said[1]), "peak": peak, "seconds": rows[-1]["seconds"], "memory": memory, "time": time}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help="one of the names")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script itself")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    cases = {n: c for n, c in (SMALL if args.small else CASES).items() if args.only in (None, n)}
    rows: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        row = rows[name] = measure(case, args.device)
        peak = "-" if row["peak"] is None else f"{row['peak']:.2f} GiB ({row['said'] / row['peak'] - 1:+.0%})"
        print(f"{name}: said {row['said']:.2f} GiB, peak {peak}; step {row['seconds']:.2f} s\n  {row['memory']}")
        print(f"  {row['time']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(any(r["peak"] and abs(r["said"] / r["peak"] - 1) > ALLOWED for r in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
