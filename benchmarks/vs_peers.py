"""One GRPO step on luffy, on TRL with transformers' generate, and on TRL with vLLM: same model, prompts and work.

    python benchmarks/vs_peers.py [--systems luffy,luffy-auto,trl,trl-vllm] [--steps 2] [--json PATH]

Every system runs in a process of its own, one after the other: random Qwen2 of the 1.5B shape in bfloat16,
64 prompts of 121 tokens x 8 completions of 512 tokens, temperature 1, one optimizer step, activation
checkpointing, no KL. No completion ends early, on any side: the token that ends one is not in the model's vocabulary.
The first step warms up and is not counted, unless a system is named with --cold. A system that fails has its row
all the same, and the exit code says so. The last line is the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "FIGURES "


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="luffy,luffy-auto,trl,trl-vllm")
    parser.add_argument("--shape", default="qwen2-1.5b")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=121)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1, help="timed steps, after one that warms up")
    parser.add_argument("--cold", default="", help="systems whose first step counts, e.g. trl, which compiles nothing")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's per_device_train_batch_size")
    parser.add_argument("--tokens", type=int, default=16384, help="luffy's batch.tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = options(arguments)
    if args.one:
        figures = run_luffy(args) if args.one.startswith("luffy") else run_trl(args)
        print(MARK + json.dumps(figures), flush=True)
        return 0
    from bench.step import write_inputs

    with tempfile.TemporaryDirectory() as name:
        problems = args.problems * (args.steps + 2)
        write_inputs(Path(name), args.shape, args.dtype, args.device, problems, args.prompt_tokens)
        results = {system: in_its_own_process(args, system, name) for system in args.systems.split(",")}
    report(results, args)
    return int(any("failed" in row for row in results.values()))


def in_its_own_process(args: argparse.Namespace, system: str, inputs: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", system, "--inputs", inputs]
    for name in ("shape", "problems", "samples", "prompt_tokens", "new_tokens", "steps", "micro_batch", "tokens",
                 "device", "dtype", "cold"):  # fmt: skip
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    started = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        print("\n".join(done.stdout.splitlines()[-25:]), flush=True)
        return {"failed": f"exit code {done.returncode}"}
    figures: dict[str, Any] = json.loads(line.removeprefix(MARK))
    print(f"{system}: {figures} ({time.time() - started:.0f} s with start-up)", flush=True)
    return figures


def run_luffy(args: argparse.Namespace) -> dict[str, Any]:
    """``luffy`` checkpoints all activations, as TRL does here; ``luffy-auto`` only if memory asks for it."""
    import torch
    from bench.step import step_config, timed_steps

    from luffy.models.load import DTYPES
    from luffy.models.machine import Machine
    from luffy.train.loop import Trainer

    checkpointing = "auto" if args.one == "luffy-auto" else True
    overrides = {"batch": {"tokens": args.tokens}, "model": {"gradient_checkpointing": checkpointing}}
    cfg = step_config(
        args.inputs, args.problems, args.samples, args.new_tokens, args.dtype, args.device,
        {**overrides, "out": str(args.inputs / args.one)},
    )  # fmt: skip
    machine = Machine.measure(torch.device(args.device), DTYPES[args.dtype])
    with Trainer(cfg) as trainer:
        rows = timed_steps(trainer, machine, args.steps, warm_up=args.one not in args.cold.split(","))
    best = min(rows, key=lambda row: row["seconds"])
    generate = best["seconds"] - best["phases"]["update"] - best["phases"]["pack"]
    return {"step": best["seconds"], "generate_and_score": generate, **best}


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from bench.rewards import coin
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (args.inputs / "train.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.inputs / "tokenizer")
    tokenizer.padding_side = "left"
    warm_up = int(args.one not in args.cold.split(","))
    completions = args.problems * args.samples
    accumulation = completions // args.micro_batch
    vllm = {}
    if args.one == "trl-vllm":
        # vLLM loads the tokenizer from the model's folder.
        tokenizer.save_pretrained(args.inputs / "model")
        room = args.prompt_tokens + args.new_tokens + 16
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        vllm |= {"vllm_max_model_length": max(room, 1024)}
    config = GRPOConfig(
        output_dir=str(args.inputs / args.one), per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation, steps_per_generation=accumulation, num_generations=args.samples,
        max_completion_length=args.new_tokens, temperature=1.0, bf16=args.dtype == "bfloat16", beta=0.0,
        gradient_checkpointing=True, max_steps=args.steps + warm_up, learning_rate=1e-6, loss_type="dr_grpo",
        scale_rewards=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
        use_cpu=args.device == "cpu", model_init_kwargs={"dtype": args.dtype}, **vllm,
    )  # fmt: skip

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [coin(text, "", None) for text in completions]

    trainer = GRPOTrainer(
        model=str(args.inputs / "model"), reward_funcs=rewards, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
    )  # fmt: skip
    steps, generations = watch(trainer, torch)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None
    counted, generated = min(steps[warm_up:]), min(generations[warm_up:])
    return {"step": counted, "generate_and_score": generated, "peak_gib": peak, "all_steps": steps}


def watch(trainer: Any, torch: Any) -> tuple[list[float], list[float]]:
    """Seconds of every step and of its generation, each ended by a synchronisation."""
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    steps: list[float] = []
    generations: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(now() - self.started)

    generate = trainer._generate_and_score_completions

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = now()
        result = generate(*args, **kwargs)
        generations.append(now() - started)
        return result

    trainer._generate_and_score_completions = timed
    trainer.add_callback(Clock())
    return steps, generations


def report(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"\n{'system':12} {'generate+score s':>17} {'whole step s':>13} {'peak GiB':>9}")
    for system, row in results.items():
        if "failed" in row:
            print(f"{system:12} failed: {row['failed']}")
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        print(f"{system:12} {row['generate_and_score']:17.2f} {row['step']:13.2f} {peak:>9}")
    if args.json:
        args.json.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, **results}, indent=1))
    ours = results.get("luffy", {}).get("step")
    others = {name: row["step"] for name, row in results.items() if name != "luffy" and "step" in row}
    ratios = [f"{name} / luffy = {step / ours:.2f}" for name, step in others.items() if ours]
    print("whole step: " + (", ".join(ratios) or "no ratio without luffy and another system"))


if __name__ == "__main__":
    sys.exit(main())
