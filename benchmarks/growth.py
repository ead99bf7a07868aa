"""Does a step stay proportional to its tokens? Longer responses and more problems, whole steps by the trainer.

python benchmarks/growth.py [--shape qwen2-0.5b] [--points 32x512,128x512,512x512,32x2048,32x8192] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.step import bench_step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--points", default="32x512,128x512,512x512,32x2048,32x8192", help="PROBLEMSxRESPONSE_TOKENS")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=121)
    parser.add_argument("--tokens", type=int, default=32768, help="batch.tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    rows = []
    for point in args.points.split(","):
        problems, response = map(int, point.split("x"))
        overrides = {"batch": {"tokens": args.tokens}}
        _, (warm, row) = bench_step(
            args.shape, args.dtype, args.device, problems, args.samples, args.prompt_tokens, response, 2, overrides,
            warm_up=False,
        )  # fmt: skip
        rows.append({"problems": problems, "response_tokens": response, "first_seconds": warm["seconds"], **row})
        print(f"{point}: {row}", flush=True)
    show(rows)
    if args.json:
        args.json.write_text(
            json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
        )


def show(rows: list[dict[str, Any]]) -> None:
    names = ["problems", "response", "rollout s", "update s", "step s", "rollout/s", "update/s", "step/s", "outside"]
    print("\ntokens per second of the rollout (new ones), of the update and of the whole step (trained on)")
    print(" ".join(f"{name:>9}" for name in [*names, "peak GiB"]))
    for row in rows:
        phases = row["phases"]
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        cells = [row["problems"], row["response_tokens"], f"{phases['rollout']:.2f}", f"{phases['update']:.2f}"]
        speeds = [row[f"{part}tokens_per_second"] for part in ("rollout_", "update_", "")]
        cells += [f"{row['seconds']:.2f}", *(f"{speed:,.0f}" for speed in speeds), f"{row['outside']:.1%}", peak]
        print(" ".join(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
