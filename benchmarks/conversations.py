#!/usr/bin/env python3
"""Episodes of several turns whose tools take time: how long the GPU waits, beside vLLM on the same work.

    python benchmarks/conversations.py --tokenizer FOLDER        # Qwen2-1.5B's shape, random weights
    python benchmarks/conversations.py --tokenizer FOLDER --shape qwen2-0.5b --episodes 4 --turn-tokens 4    # a CPU

256 episodes of 4 turns. A tool takes between 0 and 2 s, by the seed, and answers with some thirty tokens. Turns have a
fixed number of tokens, so both systems draw as many. luffy plays real episodes: environments in threads, calls read
from text, replies tokenised. vLLM (its asynchronous engine, prefix caching on) gets as many tokens of prompts and
replies and the same delays from one coroutine an episode, and neither reads nor writes text. "no delay" is the same
work with tools that take no time. Each system runs in a process of its own; the median of the repeats counts, after a
warm-up. "no kernel" is the share of the time in which none ran, by the driver's counter (ten readings a second).
"engine idle" is the share in which luffy's engine had nothing to do, because all episodes waited for their tools.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

OFFLINE = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
ANSWER = "The result of this call is {}, rounded to the next whole number."


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer that has a chat template")
    p.add_argument("--systems", default="luffy,luffy-no-delay,vllm")
    p.add_argument("--shape", default="qwen2-1.5b", help="of the random model")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    p.add_argument("--episodes", type=int, default=256)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--turn-tokens", type=int, default=256)
    p.add_argument("--prompt-tokens", type=int, default=128)
    p.add_argument("--highest-id", type=int, default=30_000, help="of the prompts' tokens")
    p.add_argument("--slowest", type=float, default=2.0, help="seconds of the slowest tool")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--memory-fraction", type=float, default=0.4, help="vLLM's share of the GPU")
    p.add_argument("--only", help=argparse.SUPPRESS)
    return p.parse_args(arguments)


def main() -> int:
    o = options()
    if o.only:
        measure = play_vllm if o.only == "vllm" else play_luffy
        print("ROW " + json.dumps(measure(o)), flush=True)
        os._exit(0)  # the figures are out; an engine that does not shut down cleanly must not hold them up
    rows = [row for row in (row_of(system) for system in o.systems.split(",")) if row]
    print(f"\n{o.episodes} episodes of {o.turns} turns of {o.turn_tokens} tokens, {o.prompt_tokens} tokens of prompt,"
          f" tools of 0 to {o.slowest:g} s, {o.shape}, {o.dtype}, median of {o.repeats}")  # fmt: skip
    print("| system | rollout s | tok/s | no kernel | engine idle | tokens prefilled | tokens given |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [row["system"], f"{row['seconds']:.2f}", f"{row['tokens'] / row['seconds']:,.0f}"]
        cells += ["-" if row[name] is None else f"{row[name]:.1%}" for name in ("no_kernel", "idle")]
        cells += ["-" if row[name] is None else f"{row[name]:,}" for name in ("prefilled", "given")]
        print("| " + " | ".join(cells) + " |")
    return 0 if len(rows) == len(o.systems.split(",")) else 1


class Busy:
    """The GPU's own counter while the block ran: the share of time in which a kernel ran; None without a GPU."""

    share: float | None = None
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Busy:
        command = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits --loop-ms=100"
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            readings = [float(line) for line in self._process.communicate()[0].split()]
            self.share = statistics.mean(readings) / 100 if readings else None


def row_of(system: str) -> dict[str, Any] | None:
    """The row of one system, from a process of its own; None, with its output shown, if it failed."""
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--only", system]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**OFFLINE, **os.environ}, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode == 0 and lines:
        return dict(json.loads(lines[-1].removeprefix("ROW ")))
    print(f"{system} failed with code {done.returncode}:\n{done.stdout[-4000:]}", file=sys.stderr)
    return None


def delays(o: argparse.Namespace, repeat: int) -> list[list[float]]:
    """Seconds of each episode's tools."""
    draw = random.Random(f"delays:{repeat}")
    return [[draw.uniform(0, o.slowest) for _ in range(o.turns - 1)] for _ in range(o.episodes)]


def prompts(o: argparse.Namespace, repeat: int) -> list[tuple[int, ...]]:
    draw = random.Random(f"prompts:{repeat}")
    return [tuple(draw.randrange(3, o.highest_id) for _ in range(o.prompt_tokens)) for _ in range(o.episodes)]


def summary(o: argparse.Namespace, seconds: Sequence[float], busy: Busy, **more: Any) -> dict[str, Any]:
    made = o.episodes * o.turns * o.turn_tokens
    no_kernel = None if busy.share is None else 1 - busy.share
    return {"system": o.only, "seconds": statistics.median(seconds), "no_kernel": no_kernel, "tokens": made, **more}


# ---- luffy


class Slow:
    """An environment whose replies take the time that a list says."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = list(seconds)

    def start(self, problem: Any, seed: int) -> str:
        return ""

    def reply(self, turn: Any) -> Any:
        from luffy.environments.protocol import Reply
        from luffy.types import Message

        if not self.seconds:
            return Reply(done=True)
        time.sleep(self.seconds.pop(0))
        return Reply((Message("tool", ANSWER.format(len(turn.text))),))

    def reward(self) -> float | None:
        return None

    def close(self) -> None:
        pass


class SlowMaker:
    """Makes the environments of a batch, one after the other."""

    tools, gives_reward = (), False

    def __init__(self, seconds: Sequence[Sequence[float]]) -> None:
        self.left = list(seconds)

    def make(self) -> Slow:
        return Slow(self.left.pop())


def play_luffy(o: argparse.Namespace) -> dict[str, Any]:
    import torch
    from bench.models import random_model

    from luffy.config import EnvironmentConfig
    from luffy.conversations import Conversations, Table
    from luffy.data import Encoder
    from luffy.environments.call_formats import format_of
    from luffy.guidance.plan import unwritten
    from luffy.models.load import load_tokenizer
    from luffy.models.machine import pick_device, synchronize
    from luffy.rollout import NativeEngine
    from luffy.types import Completion, Problem, Request, Sampling, Task

    class Timed(Table):
        """Turns of a fixed length, and how long the engine waited with nothing to do."""

        waited = 0.0
        given = 0

        def take(self, wait: bool) -> list[Request] | None:
            started = time.perf_counter()
            ready = super().take(wait)
            self.waited += (time.perf_counter() - started) if wait else 0.0
            return ready

        def _request(self, seat: Any) -> Request:
            asked = super()._request(seat)
            self.given += len(asked.given_ids)
            return replace(asked, sampling=replace(asked.sampling, max_tokens=o.turn_tokens))

        def finish(self, number: int, completion: Completion) -> None:
            super().finish(number, replace(completion, finish="stop"))

    device = pick_device("auto")
    engine = NativeEngine(random_model(o.shape, o.dtype, device), max_slots=o.episodes)
    encoder = Encoder(load_tokenizer(o.tokenizer), max_prompt_tokens=o.prompt_tokens)
    cfg = EnvironmentConfig(name="slow", max_turns=o.turns + 1, at_once=o.episodes)
    most = o.turns * (o.turn_tokens + 256)
    call_format = format_of(str(encoder.prompts.template or ""))
    slowest = 0.0 if o.only == "luffy-no-delay" else o.slowest
    scale = slowest / o.slowest if o.slowest else 0.0

    def rollout(repeat: int) -> tuple[float, float, int]:
        late = [[scale * s for s in each] for each in delays(o, repeat)]
        rules = Conversations(cfg, SlowMaker(late[::-1]), 0.0, encoder, call_format, most)
        sampling = Sampling(most)
        tasks = [Task(Problem(str(i), "", "", ()), ids) for i, ids in enumerate(prompts(o, repeat))]
        episodes = [unwritten(task, repeat * o.episodes + i, sampling) for i, task in enumerate(tasks)]
        started = time.perf_counter()
        with Timed(rules, episodes, 0, lambda done, total: None) as table:
            engine.serve(table)
            synchronize(torch.device(device))
            seconds = time.perf_counter() - started
            drawn = sum(seat.episode.drawn for seat in table.seats)
            assert drawn == o.episodes * o.turns * o.turn_tokens, drawn
            return seconds, table.waited, table.given

    rollout(-1)
    with Busy() as busy:
        seconds, waits, given = zip(*(rollout(repeat) for repeat in range(o.repeats)), strict=True)
    idle = sum(waits) / sum(seconds)
    return summary(o, seconds, busy, idle=idle, prefilled=engine.stats.prefill_tokens, given=given[-1])


# ---- vLLM


def play_vllm(o: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    folder = Path(o.tokenizer).parent / f"random-{o.shape}"
    if not folder.exists():
        program = (f"import sys; sys.path[:0] = {sys.path[:2]!r}\nfrom bench.models import random_model\n"
                   f"import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
                   f"random_model({o.shape!r}, {o.dtype!r}, device).save_pretrained({str(folder)!r})")  # fmt: skip
        subprocess.run([sys.executable, "-c", program], check=True)  # the engine's parent must not have used CUDA
    return asyncio.run(_vllm_rows(o, folder))


async def _vllm_rows(o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    sizes = sorted({s for s in (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224) if s < o.episodes} | {o.episodes})
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder), dtype=o.dtype, skip_tokenizer_init=True, gpu_memory_utilization=o.memory_fraction,
            max_model_len=o.prompt_tokens + o.turns * (o.turn_tokens + 256), max_num_seqs=o.episodes, seed=0,
            enable_prefix_caching=True, compilation_config={"cudagraph_capture_sizes": sizes},
        )
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(o.tokenizer)
    message = [{"role": "user", "content": ANSWER.format(o.turn_tokens)}]
    reply = list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    params = SamplingParams(
        temperature=1.0, max_tokens=o.turn_tokens, ignore_eos=True, logprobs=0, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    given = 0

    async def draw(ids: list[int], name: str) -> list[int]:
        outputs = engine.generate({"prompt_token_ids": ids}, params, request_id=name)
        (made,) = [output async for output in outputs]
        return list(made.outputs[0].token_ids)

    async def episode(prompt: Sequence[int], seconds: Sequence[float], name: str) -> None:
        nonlocal given
        ids = list(prompt)
        for turn in range(o.turns):
            if turn:
                await asyncio.sleep(seconds[turn - 1])
                ids += reply
            given += len(ids)
            ids += await draw(ids, f"{name}-{turn}")

    async def rollout(repeat: int) -> float:
        started = time.perf_counter()
        pairs = enumerate(zip(prompts(o, repeat), delays(o, repeat), strict=True))
        await asyncio.gather(*(episode(prompt, late, f"{repeat}-{i}") for i, (prompt, late) in pairs))
        return time.perf_counter() - started

    await rollout(-1)
    seconds = []
    with Busy() as busy:
        for repeat in range(o.repeats):
            given = 0
            seconds.append(await rollout(repeat))
    return summary(o, seconds, busy, idle=None, prefilled=None, given=given)


if __name__ == "__main__":
    sys.exit(main())
