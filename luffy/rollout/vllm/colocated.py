"""vLLM in the trainer's own process, on the trainer's own device.

In process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) because a push is then a copy from the policy's tensors into vLLM's:
nothing is serialised, no second CUDA context holds memory, and there is no process to lose. Only when a model is
spread over several GPUs do workers of their own exist; the weights then go through a folder (``/dev/shm`` will do).

Sleep is vLLM's level 2: weights and KV cache are dropped. Level 1 would first copy the weights to the host's memory,
to bring back what the very next ``sync`` overwrites; where adapters are pushed alone it overwrites no weights, and
level 1 it is. Waking goes in two steps, weights, push, KV cache, so that the cache is not there yet while layers are
loaded.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from luffy.errors import UserError, how_to_install
from luffy.models.forward import causal_lm, text_config
from luffy.rollout.engine import Engine, EngineStats, OnProgress, RequestSource, check_request
from luffy.rollout.policy_weights import PushCheck, check_adapters_alone, tensors_of
from luffy.rollout.vllm.requests import completion, sampling_arguments
from luffy.rollout.vllm.transfer import write_adapters, write_weights
from luffy.types import Completion, Request

WORKER = "luffy.rollout.vllm.worker_extension.LuffyWorker"
SLEEP_LEVEL = 2
KEEPING_WEIGHTS = 1  # the same, with the weights in the host's memory
# Defaults for what the user's environment leaves open: quiet, nothing sent home, nothing listening beyond this host.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}

# What torchrun and Ray tell a process of its place among the others.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmEngine(Engine):
    """vLLM in this process with the weights of ``policy``; None: those that vLLM loaded itself, unchanged.

    ``arguments`` are vLLM's own engine arguments. Without ``seeded`` a batch has one seed, that of its first request:
    a request of its own seed costs vLLM a kernel of its own in every step. With ``adapters_alone`` a push after the
    first has adapters alone.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        vocabulary: int,
        policy: nn.Module | None = None,
        push_folder: Path | None = None,
        seeded: bool = True,
        adapters_alone: bool = False,
    ) -> None:
        self.model, self.vocabulary, self.seeded = policy, vocabulary, seeded
        self.version = 0
        self.stats = EngineStats()
        self.seconds: dict[str, float] = {}  # of the last sleep, wake and push
        self._asleep = False
        self._check = None if policy is None else PushCheck(policy)
        self._push_folder = push_folder
        self._adapters_alone, self._has_base = adapters_alone, False
        self._adapter: Any = None  # vLLM's request for the policy's adapters
        self._pushes = 0
        if adapters_alone and policy is not None:
            check_adapters_alone(policy)
        with keeping_random_state():
            self._llm = start(arguments)
        self.max_context = int(self._llm.llm_engine.model_config.max_model_len)

    @classmethod
    def of_policy(cls, policy: nn.Module, arguments: Mapping[str, Any], **settings: Any) -> VllmEngine:
        """An engine with the policy's shape, and nothing in it before the first ``sync``: the weights always come from
        the policy, whether they were read from a folder, a GGUF file or a checkpoint, with adapters or without."""
        config = causal_lm(policy).config
        with tempfile.TemporaryDirectory(prefix="luffy-vllm-") as folder:
            plain = type(config).from_dict({**config.to_dict(), "architectures": [type(causal_lm(policy)).__name__]})
            plain.save_pretrained(folder)
            blank = {"model": folder, "load_format": "dummy", **arguments}
            engine = cls(blank, vocabulary=text_config(config).vocab_size, policy=policy, **settings)
        engine._asleep = True  # a dummy must never answer
        return engine

    def sync(self, version: int) -> None:
        """Checks the policy's weights, wakes, copies them in, and forgets what was cached under the old ones."""
        if self.model is None or self._check is None:
            raise RuntimeError("this engine loaded its weights itself: there is no policy to take others from")
        self._check(self.model, version)
        self.seconds.update(wake=0.0, push=0.0)
        with self._timed("wake"):
            self._wake("weights")
        with self._timed("push"):
            self._push(version)
        with self._timed("wake"):
            self._wake("kv_cache")
        self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM would not reset its prefix cache: requests are still running")
        self.version = version

    def sleep(self) -> None:
        if self.model is None or self._asleep:
            return
        self.seconds["sleep"] = 0.0
        with self._timed("sleep"):
            if can_sleep():
                self._llm.sleep(level=KEEPING_WEIGHTS if self._adapters_alone else SLEEP_LEVEL)
        self._asleep = True

    def generate(self, requests: Sequence[Request], progress: OnProgress | None = None) -> list[Completion]:
        if not requests:
            return []
        if self._asleep:
            raise RuntimeError("the engine sleeps and has no weights: call sync first")
        for request in requests:
            check_request(request, self.max_context, self.vocabulary)
        started = time.perf_counter()
        with keeping_random_state():
            torch.manual_seed(requests[0].seed)  # for what has no seed of its own
            outputs = self._run(requests, progress)
        completions = [
            completion(request, output.outputs[0].token_ids, output.outputs[0].logprobs.logprobs)
            for request, output in zip(requests, outputs, strict=True)
        ]
        made = sum(c.token_ids.numel() for c in completions)
        self._count(outputs, made, time.perf_counter() - started)
        return completions

    def serve(self, source: RequestSource) -> None:
        """A request begins while others are under way; its conversation's KV blocks are in the prefix cache."""
        if self._asleep:
            raise RuntimeError("the engine sleeps and has no weights: call sync first")
        engine, asked, outputs, started = self._llm.llm_engine, dict[str, Request](), list[Any](), time.perf_counter()
        count = made = 0
        with keeping_random_state():
            while (ready := source.take(wait=not asked)) is not None:
                for request in ready:
                    check_request(request, self.max_context, self.vocabulary)
                    asked[str(count)] = request
                    given = self._prompt(request), self._params(request)
                    engine.add_request(str(count), *given, lora_request=self._adapter)
                    count += 1
                for output in engine.step() if asked else ():
                    drawn, request = output.outputs[0], asked.pop(output.request_id)
                    outputs.append(output)
                    made += len(drawn.token_ids)
                    source.finish(int(output.request_id), completion(request, drawn.token_ids, drawn.logprobs.logprobs))
        self._count(outputs, made, time.perf_counter() - started)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _run(self, requests: Sequence[Request], progress: OnProgress | None) -> list[Any]:
        """Samples of one prompt are requests of their own, for their own seeds; the prompt's KV blocks are shared by
        the prefix cache."""
        prompts, params = list(map(self._prompt, requests)), list(map(self._params, requests))
        bar: Any = False if progress is None else bar_for(progress)
        return cast(list[Any], self._llm.generate(prompts, params, use_tqdm=bar, lora_request=self._adapter))

    def _prompt(self, request: Request) -> Any:
        return {"prompt_token_ids": list(request.given_ids)}

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        whole = RequestOutputKind.FINAL_ONLY
        try:
            asked = sampling_arguments(request, self.seeded)
            return SamplingParams(**asked, detokenize=False, flat_logprobs=True, output_kind=whole)
        except (ValueError, VLLMValidationError) as error:  # newer ones take no temperature above 2
            raise UserError(f"vLLM refuses the sampling parameters: {' '.join(str(error).split())}") from error

    def _count(self, outputs: Sequence[Any], made: int, seconds: float) -> None:
        given = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        self.stats = EngineStats(generated_tokens=made, prefill_tokens=given - cached, seconds=seconds)

    def _wake(self, tag: str) -> None:
        if self._asleep and can_sleep() and self._llm.llm_engine.is_sleeping():
            gc.collect()
            torch.cuda.empty_cache()  # what the update left cached is memory that vLLM could not map
            self._llm.wake_up(tags=[tag])

    def _push(self, version: int) -> None:
        if not (self._adapters_alone and self._has_base):
            self._push_weights(version)
        if self._adapters_alone:
            self._push_adapters(version)

    def _push_adapters(self, version: int) -> None:
        from vllm.lora.request import LoRARequest

        assert self.model is not None
        self._pushes += 1
        with (
            tempfile.TemporaryDirectory(prefix="luffy-vllm-") as own,
            write_adapters(self.model, self._push_folder or Path(own), version) as folder,
        ):
            adapter = LoRARequest(folder.name, self._pushes, str(folder))
            self._llm.llm_engine.add_lora(adapter)
        self._adapter = adapter  # vLLM keeps the one before until the next comes

    def _push_weights(self, version: int) -> None:
        assert self.model is not None
        merged = not self._adapters_alone
        if self._push_folder is None:
            weights = tensors_of(self.model, merged)
            answers = self._llm.collective_rpc("luffy_load", kwargs={"version": version, "weights": weights})
        else:
            with write_weights(self.model, self._push_folder, version, merged) as folder:
                answers = self._llm.collective_rpc("luffy_load", kwargs={"version": version, "folder": str(folder)})
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(f"vLLM took the push of version {version} only in part: {answer['error']}")
        self._has_base = True

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[what] += time.perf_counter() - started


def bar_for(progress: OnProgress) -> Callable[..., Any]:
    """Stand-in for ``tqdm`` that reports to ``progress``; vLLM also wraps the list of prompts in it, which is
    ignored."""

    def bar(items: Any = None, total: int = 0, **_: Any) -> Any:
        return Bar(progress, total) if items is None else items

    return bar


class Bar:
    """Stands in for vLLM's progress bar and passes the count on."""

    def __init__(self, progress: OnProgress, total: int) -> None:
        self._progress, self._total, self._started = progress, total, time.perf_counter()
        self.n = 0
        self.postfix = ""

    @property
    def format_dict(self) -> dict[str, float]:
        return {"elapsed": max(time.perf_counter() - self._started, 1e-9)}

    def update(self, count: int) -> None:
        self.n += count
        self._progress(self.n, self._total)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def can_sleep() -> bool:
    """Whether vLLM can sleep: not on a CPU, where the update would gain nothing."""
    return torch.cuda.is_available()


def engine_arguments(
    *, dtype: str, slots: int, max_context: int | None, width: int, memory_fraction: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """vLLM's arguments: ours, then the user's. No ``max_context``: the model's own."""
    return {
        "dtype": dtype,
        "max_num_seqs": slots,
        "max_model_len": max_context,
        "tensor_parallel_size": width,
        "gpu_memory_utilization": memory_fraction,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; the default ignores it
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        **args,
    }


def start(arguments: Mapping[str, Any]) -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"rollout.engine=vllm needs vLLM; install it with: {how_to_install('vllm')}")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.exceptions import VLLMValidationError

    ours: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_sleep_mode": can_sleep(),
        "worker_extension_cls": WORKER,
    }
    try:
        with environment(**worker_environment(arguments.get("distributed_executor_backend"))):
            return LLM(**ours, **arguments)
    except (ValueError, TypeError, VLLMValidationError) as error:
        raise UserError(f"vLLM refused its arguments: {' '.join(str(error).split())[:500]}") from error


def executor_argument(group_size: int) -> dict[str, str]:
    """vLLM's executor in a trainer of several processes, ``group_size`` of which share an engine.

    By default vLLM computes on the first GPU, whichever is this process's. As a worker of an external launcher it takes
    the one that it is told, and makes its groups with all other processes; an engine that only the leaders of rollout
    groups have must not wait for those, so it computes in processes of its own.
    """
    if not dist.is_initialized():
        return {}
    return {"distributed_executor_backend": "external_launcher" if group_size == 1 else "mp"}


def worker_environment(executor: str | None) -> dict[str, str | None]:
    """The variables with which vLLM's workers start; None: without. They do not look for modules in the current folder
    first. As workers of an external launcher they are told their place as torchrun would tell it; in processes of
    vLLM's own nothing is left of our launcher."""
    names: dict[str, str | None] = {"PYTHONSAFEPATH": "1"}
    if executor == "external_launcher":
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        names |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(device)}
    elif executor == "mp":
        names |= dict.fromkeys(LAUNCHER_VARIABLES) | dict.fromkeys(
            n for n in os.environ if n.startswith("TORCHELASTIC_")
        )
    return names


@contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Environment variables that are set, or with None removed, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts, and draws from torch's for greedy rows."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    state = random.getstate()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
