#!/usr/bin/env python3
"""The engines side by side: the same weights, the same requests, one table.

    python benchmarks/engines.py                                      # Qwen2-1.5B's shape, random weights
    python benchmarks/engines.py --model FOLDER --prompts 64 --samples 8 --new-tokens 512
    python benchmarks/engines.py --shape '{"hidden_size": 128, ...}' --dtype float32      # small enough for a CPU
    python benchmarks/engines.py --lora 16 --engines vllm,vllm-adapters     # adapters merged, and pushed alone

Every engine runs in a process of its own, so that one's memory is not the other's. A row is: warm-up, REPEATS timed
batches (the median counts), log-probs against the trainer's forward pass, then what a training step does to an engine:
sleep, changed weights, sync; and log-probs again, which show whether the push arrived whole. Random weights are fine
for speed and never for claims about learning. Responses never stop early, so all engines make as many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

QWEN2_1_5B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
ALONE = "vllm-adapters"  # with --lora: adapters pushed alone
COLUMNS = {
    "engine": "engine",
    "tokens_per_second": "new tok/s",
    "seconds": "batch s",
    "diff_mean": "logp diff mean",
    "diff_max": "logp diff max",
    "start_s": "start s",
    "sleep_s": "sleep s",
    "wake_s": "wake s",
    "push_s": "push s",
    "push_mib": "push MiB",
    "diff_mean_after": "diff mean after push",
    "peak_gib": "peak GiB",
    "asleep_gib": "asleep GiB",
}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engines", default="native,vllm", help="which, in this order")
    p.add_argument("--model", help="a Hugging Face folder instead of random weights")
    p.add_argument("--shape", default="{}", help="JSON over the random model's config")
    p.add_argument("--lora", type=int, help="rank of adapters of all linear layers; without: all weights change")
    p.add_argument("--push-folder", type=Path, help="vLLM's weights go through this folder, as to servers")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    p.add_argument("--prompts", type=int, default=64, help="different prompts")
    p.add_argument("--samples", type=int, default=1, help="samples of each")
    p.add_argument("--prompt-tokens", type=int, default=128)
    p.add_argument("--new-tokens", type=int, default=256)
    p.add_argument("--slots", type=int, help="sequences at once; default: all")
    p.add_argument("--repeats", type=int, default=3, help="timed batches; the median counts")
    p.add_argument("--check", type=int, default=8, help="responses whose log-probs are compared")
    p.add_argument("--memory-fraction", type=float, default=0.4, help="vLLM's share of the GPU")
    p.add_argument("--no-request-seeds", action="store_true", help="vLLM without a seed for every request: faster")
    p.add_argument("--vllm-args", default="{}", help="JSON of further engine arguments of vLLM")
    p.add_argument("--json", help="also write the rows to this file")
    p.add_argument("--only", help=argparse.SUPPRESS)
    return p.parse_args(arguments)


def main() -> int:
    o = options()
    if o.only:
        print("ROW " + json.dumps(measure(o)), flush=True)
        os._exit(0)  # the figures are out; an engine that does not shut down cleanly must not hold them up
    rows = [row for row in (row_of(engine) for engine in o.engines.split(",")) if row is not None]
    if rows:
        print(f"\n{rows[-1]['machine']}\n{o.prompts} prompts x {o.samples} samples, {o.prompt_tokens} + {o.new_tokens} "
              f"tokens, {o.dtype}, median of {o.repeats}\n")  # fmt: skip
        print(table(rows))
    if o.json:
        Path(o.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if len(rows) == len(o.engines.split(",")) else 1


def row_of(engine: str) -> dict[str, Any] | None:
    """One engine's row, from a process of its own; None, with its output shown, when it failed."""
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--only", engine]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(), check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1].removeprefix("ROW ")))
    print(f"{engine} failed with code {done.returncode}:\n{done.stdout[-4000:]}", file=sys.stderr)
    return None


def environment() -> dict[str, str]:
    """A machine without a network: everything stays on this host."""
    here = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        here["GLOO_SOCKET_IFNAME"] = "lo"
    return {**here, **os.environ}


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [list(COLUMNS.values())] + [[_shown(row.get(key)) for key in COLUMNS] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "---|" * len(COLUMNS), *lines[1:]])


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.2e}" if 0 < value < 0.01 else f"{value:.3g}"
    return str(value)


# ---- one engine


def measure(o: argparse.Namespace) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(o, device)
    with PeakMemory(device) as memory:
        started = time.perf_counter()
        engine = make_engine(o, model)
        engine.sync(0)
        start_s = time.perf_counter() - started
        engine.generate(requests_of(o, model, repeat=-1, new_tokens=min(8, o.new_tokens)))
        seconds, last = [], None
        for repeat in range(o.repeats):
            requests = requests_of(o, model, repeat)
            started = time.perf_counter()
            last = (requests, engine.generate(requests))
            seconds.append(time.perf_counter() - started)
        assert last is not None
        row = {"start_s": start_s, "seconds": statistics.median(seconds), **differences(o, model, *last)}
        row |= step(o, engine, model, memory)
    made = o.prompts * o.samples * o.new_tokens
    row |= {"engine": o.only, "machine": machine(device), "peak_gib": memory.peak}
    return row | {"tokens_per_second": made / row["seconds"]}


def step(o: argparse.Namespace, engine: Any, model: Any, memory: PeakMemory) -> dict[str, Any]:
    """What a training step does: sleep, another set of weights, sync; then a batch that must show them."""
    import torch

    from luffy.rollout.policy_weights import adapter_tensors, tensors_of

    engine.sleep()
    asleep = memory.now()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.mul_(0.98)
    engine.sync(1)
    requests = requests_of(o, model, repeat=o.repeats)[: o.check]
    after = differences(o, model, requests, engine.generate(requests))
    spent = getattr(engine, "seconds", {})
    timings = {f"{name}_s": spent.get(name) for name in ("sleep", "wake", "push")}
    if spent:
        pushed = adapter_tensors(model).items() if o.only == ALONE else tensors_of(model)
        timings["push_mib"] = sum(tensor.nbytes for _, tensor in pushed) / 2**20
    return {**timings, "diff_mean_after": after["diff_mean"], "asleep_gib": asleep}


def make_model(o: argparse.Namespace, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from luffy.models.forward import use_luffy_attention
    from luffy.models.load import DTYPES, load_model

    if o.model:
        return with_adapters(o, load_model(o.model, o.dtype, device))
    config = Qwen2Config(**{**QWEN2_1_5B, **json.loads(o.shape)})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[o.dtype])
    use_luffy_attention(model)
    return with_adapters(o, model)


def with_adapters(o: argparse.Namespace, model: Any) -> Any:
    """Adapters that are not zero, in float32 as luffy trains them."""
    if o.lora is None:
        return model
    import peft

    given = {"target_modules": "all-linear", "init_lora_weights": "gaussian", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(r=o.lora, lora_alpha=2 * o.lora, **given))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if not parameter.any():
                parameter.data.normal_(std=0.002)
    return model


def make_engine(o: argparse.Namespace, model: Any) -> Any:
    slots = o.slots or o.prompts * o.samples
    if o.only == "native":
        from luffy.rollout.native import NativeEngine

        return NativeEngine(model, max_slots=slots)
    if o.only not in ("vllm", ALONE):
        raise SystemExit(f"engine {o.only} is unknown: use native, vllm or {ALONE}")
    from luffy.rollout.vllm.colocated import VllmEngine, engine_arguments

    adapters = {"enable_lora": True, "max_lora_rank": o.lora, "max_cpu_loras": 2} if o.only == ALONE else {}
    arguments = engine_arguments(
        dtype=o.dtype,
        slots=slots,
        max_context=max(o.prompt_tokens + o.new_tokens, 64),
        width=1,
        memory_fraction=o.memory_fraction,
        args={**graph_sizes(slots), **adapters, **json.loads(o.vllm_args)},
    )
    given = {"push_folder": o.push_folder, "adapters_alone": bool(adapters)}
    return VllmEngine.of_policy(model, arguments, seeded=not o.no_request_seeds, **given)


def graph_sizes(slots: int) -> dict[str, Any]:
    """vLLM captures graphs up to 512 sequences unless told otherwise; cover the batch, coarsely."""
    import torch

    if not torch.cuda.is_available():
        return {}
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, max(slots, 256) + 1, 64)]
    return {"compilation_config": {"cudagraph_capture_sizes": sorted({s for s in sizes if s < slots} | {slots})}}


def requests_of(o: argparse.Namespace, model: Any, repeat: int, new_tokens: int | None = None) -> list[Any]:
    """Fresh prompts for every batch, the same for every engine: nothing is cached from the one before."""
    from luffy.types import Request, Sampling

    draw = random.Random(f"prompts:{repeat}")
    vocabulary = model.config.vocab_size
    sampling = Sampling(new_tokens or o.new_tokens)
    prompts = [tuple(draw.randrange(vocabulary) for _ in range(o.prompt_tokens)) for _ in range(o.prompts)]
    return [Request(prompt, draw.randrange(1 << 62), sampling) for prompt in prompts for _ in range(o.samples)]


def differences(
    o: argparse.Namespace, model: Any, requests: Sequence[Any], completions: Sequence[Any]
) -> dict[str, Any]:
    """|engine's log-prob - trainer's|, over the first responses."""
    import torch

    gaps = [
        (trainer_log_probs(model, request, completion) - completion.log_probs).abs()
        for request, completion in list(zip(requests, completions, strict=True))[: o.check]
    ]
    every = torch.cat(gaps)
    return {"diff_mean": every.mean().item(), "diff_max": every.max().item()}


def trainer_log_probs(model: Any, request: Any, completion: Any) -> Any:
    """The forward pass of the update: packed attention, log-probs in chunks over the head."""
    import torch

    from luffy.core.logprobs import selected_log_probs
    from luffy.models.attention import PackedLayout
    from luffy.models.forward import forward_hidden, head_weight_bias

    device = next(model.parameters()).device
    ids = torch.cat([torch.tensor(request.prompt_ids), completion.token_ids]).to(device)
    layout = PackedLayout([ids.numel()], device=device)
    before = torch.arange(len(request.prompt_ids) - 1, ids.numel() - 1, device=device)
    with torch.no_grad():
        hidden = forward_hidden(model, ids, layout.position_ids, layout)
        weight, bias = head_weight_bias(model)
        log_probs, _ = selected_log_probs(hidden[before], weight, bias, ids[before + 1], temperature=1.0)
    return log_probs.float().cpu()


# ---- memory


class PeakMemory:
    """The most memory in use while the block ran, looked at a hundred times a second: the device's as the driver sees
    it, whoever took it, or the process's own on a CPU."""

    def __init__(self, device: str) -> None:
        self.now: Callable[[], float] = device_gib if device == "cuda" else process_gib
        self.peak = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self.now())


def device_gib() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**30


def process_gib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def machine(device: str) -> str:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if "vllm" in sys.modules:
        versions.append(f"vllm {sys.modules['vllm'].__version__}")
    return ", ".join([name, *versions])


if __name__ == "__main__":
    sys.exit(main())
