"""Does a step stay proportional to its tokens? Longer responses and more problems, whole steps by the trainer.

python benchmarks/growth.py [--shape qwen2-0.5b] [--points 32x512,128x512,512x512,32x2048,32x8192] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from luffy.bench.step import bench_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--points", default="32x512,128x512,512x512,32x2048,32x8192", help="PROBLEMSxRESPONSE_TOKENS")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=121)
    parser.add_argument("--tokens", type=int, default=32768, help="batch.tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
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
    print(
        f"\n{'problems':>8} {'response':>8} {'rollout s':>9} {'update s':>8} {'step s':>7} {'tokens/s':>9} {'peak GiB':>8}"
    )
    for row in rows:
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        print(
            f"{row['problems']:8} {row['response_tokens']:8} {row['phases']['rollout']:9.2f} {row['phases']['update']:8.2f} "
            f"{row['seconds']:7.2f} {row['tokens_per_second']:9,.0f} {peak:>8}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
