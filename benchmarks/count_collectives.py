"""Number and bytes of the collectives of one training step, counted, next to what the cost model says.

    python benchmarks/count_collectives.py --ranks 4 parallel.gather=mini_batch
    python benchmarks/count_collectives.py --ranks 4 --device cuda --dtype bfloat16 parallel.gather=mini_batch

A random model of the given shape takes two steps by the trainer, over gloo on a CPU or NCCL on GPUs; the second is
counted. Several ranks may share a GPU; NCCL then talks over sockets, so no time is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench.step import step_config, write_inputs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from luffy.config.recipes import parse_override, set_at
from luffy.distributed.shard import local_world_size, units
from luffy.distributed.world import join_world, leave_world
from luffy.dry_run.cost import Model, Traffic, fsdp_traffic
from luffy.learn.policy import Policy, Totals
from luffy.models.load import DTYPES
from luffy.run_folder.timing import Stopwatch
from luffy.train.loop import Trainer

KINDS = {
    "_allgather_base_": "all-gather", "allgather_": "all-gather", "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather", "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather", "all_gather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter", "reduce_scatter_tensor_out": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter", "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce", "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce", "all_reduce_coalesced": "all-reduce", "all_reduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast", "broadcast": "broadcast",
}  # fmt: skip
SENT = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors")  # arguments, by their names
SILENT = {"barrier", "monitored_barrier_"}  # they move no data


class Collective(NamedTuple):
    phase: str
    kind: str  # all-gather, reduce-scatter, all-reduce, broadcast; "objects" for pickled values
    ranks: int


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that this thread and its backward passes issue, through whichever interface, by the phase
    of the step. ``received``: bytes that this rank receives at least: (n - 1) / n of what n ranks gather or scatter,
    twice that of an all-reduce, all of a broadcast unless this rank sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[Collective] = Counter()
        self.received: Counter[Collective] = Counter()
        self.phases = ["between phases"]
        self._in_objects = False

    @contextmanager
    def watching(self) -> Iterator[CollectiveCounter]:
        """Count what is inside. Phases are those of the trainer's stopwatch; packing belongs to the one around it."""
        clock = Stopwatch.__call__

        @contextmanager
        def in_phase(watch: Stopwatch, name: str, on_host: bool = False) -> Iterator[None]:
            self.phases.append(self.phases[-1] if name == "pack" else name)
            try:
                with clock(watch, name, on_host):
                    yield
            finally:
                self.phases.pop()

        with ExitStack() as stack:
            stack.enter_context(patch.object(Stopwatch, "__call__", in_phase))
            for name in ("all_gather_object", "broadcast_object_list"):
                stack.enter_context(patch.object(dist, name, self._of_objects(getattr(dist, name))))
            stack.enter_context(self)
            yield self

    def _of_objects(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """An exchange of pickled values counts once, with the bytes of its messages."""

        def counted(*args: Any, **options: Any) -> Any:
            self.number[self._key("objects", dist.get_world_size(options.get("group")))] += 1
            self._in_objects = True
            try:
                return exchange(*args, **options)
            finally:
                self._in_objects = False

        return counted

    def _key(self, kind: str, ranks: int) -> Collective:
        return Collective(self.phases[-1], kind, ranks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the collectives that it turns into come back here
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in SILENT:
            names = (argument.name for argument in func._schema.arguments)
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            if {"process_group", "group_name"} & arguments.keys():
                self._count(KINDS.get(name, name), arguments)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, arguments: dict[str, Any]) -> None:
        group = _group_of(arguments)
        ranks = group.size()
        tensors = [t for name in SENT for t in tree_leaves(arguments.get(name)) if isinstance(t, Tensor)]
        sent = sum(t.numel() * t.itemsize for t in tensors)
        source = arguments.get("root_rank", arguments.get("src"))
        others = (ranks - 1) / ranks
        factor = {"all-gather": ranks - 1, "reduce-scatter": others, "all-reduce": 2 * others}
        received = round(sent * factor.get(kind, float(source != group.rank())))
        if self._in_objects:
            self.received[self._key("objects", ranks)] += received
        else:
            self.number[self._key(kind, ranks)] += 1
            self.received[self._key(kind, ranks)] += received


def _group_of(arguments: dict[str, Any]) -> dist.ProcessGroup:
    """Functional collectives have the group's name, the others the group."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)  # type: ignore[attr-defined]


class CountedStep(NamedTuple):
    """A step of one rank, and the passes of each of its updates."""

    counter: CollectiveCounter
    passes: list[int]


def counted_step(trainer: Trainer) -> CountedStep:
    counter, passes = CollectiveCounter(), []
    totals = Policy._totals

    def noting(self: Policy, *args: Any) -> Totals:
        found = totals(self, *args)
        passes.append(found.passes)
        return found

    with patch.object(Policy, "_totals", noting), counter.watching():
        trainer.step()
    return CountedStep(counter, passes)


def model_of(policy: Policy) -> Model:
    """A sharded policy as the cost model sees it."""
    _, *layers = units(policy.scorer)
    total = sum(p.numel() for p in policy.model.parameters())
    inside = sum(p.numel() for layer in layers for p in cast(nn.Module, layer).parameters())
    return Model("", total, len(layers), 0, 0, total - inside, DTYPES[policy.cfg.model.dtype].itemsize)


def predicted(policy: Policy, passes: Sequence[int], once: bool) -> dict[tuple[str, str], tuple[float, float]]:
    """Number and bytes by phase and kind, by the cost model. A sync moves every trained weight once, a message for each
    tensor. Updates with unequal numbers of passes are added up."""
    cfg, world, model = policy.cfg, policy.world, model_of(policy)
    shards = world.size if cfg.parallel.shard == "full" else cfg.parallel.shard_size or local_world_size()
    copies, adapters = world.size // shards, cfg.model.lora is not None
    parts = [fsdp_traffic(model, shards, copies, passes=count, once=once, adapters=adapters) for count in passes]
    moved = Traffic(*map(sum, zip(*parts, strict=True)))
    trained = [p.numel() for p in policy.optimizer.parameters.values()]
    said = {
        ("update", "all-gather"): (moved.gathers, moved.gathered),
        ("update", "reduce-scatter"): (moved.reductions, moved.reduced),
        ("sync", "all-gather"): (len(trained), model.itemsize * sum(trained) * (shards - 1) / shards),
    }
    return said | ({("update", "all-reduce"): (moved.reductions, moved.summed)} if copies > 1 else {})


def table(counter: CollectiveCounter, said: dict[tuple[str, str], tuple[float, float]]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted(counter.number | counter.received):
        number, size = said.get((key.phase, key.kind), (None, None))
        rows.append({
            "phase": key.phase, "kind": key.kind, "ranks": key.ranks, "number": counter.number[key],
            "bytes": counter.received[key], "model: number": number, "model: bytes": size,
        })  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        cells = ["-" if v is None else v if isinstance(v, str) else f"{v:,.0f}" for v in row.values()]
        print("| " + " | ".join(cells) + " |")


def as_rank(args: argparse.Namespace) -> None:
    overrides: dict[str, Any] = {"launch": "torchrun", "batch": {"tokens": args.tokens}}
    overrides |= {"data": {"max_prompt_tokens": args.prompt_tokens}, "reward": {"workers": 1}}
    for text in args.settings:
        set_at(overrides, *parse_override(text))
    set_at(overrides, ["parallel", "workers"], args.ranks)
    sizes = (args.problems, args.samples, args.response_tokens)
    cfg = step_config(args.folder, *sizes, args.dtype, args.device, overrides)
    world = join_world(args.device, cfg.parallel.timeout_s)
    with Trainer(cfg, world=world) as trainer:
        trainer.step()
        step = counted_step(trainer)
        every = world.gather(step.counter.number)
    if world.is_main:
        rows = table(step.counter, predicted(trainer.run.policy, step.passes, cfg.parallel.gather == "mini_batch"))
        print(f"{args.ranks} ranks, {args.shape}, {args.dtype}, {dist.get_backend()}, torch {torch.__version__}, "
              f"parallel.gather={cfg.parallel.gather}; passes {step.passes}; bytes that rank 0 receives")  # fmt: skip
        show(rows)
        print(f"all ranks issue the same collectives: {all(one == every[0] for one in every)}")
        if args.json:
            args.json.write_text(
                json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
            )
    leave_world()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="batch.tokens: of a micro-batch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help="such as parallel.shard=hybrid parallel.shard_size=2")
    args = parser.parse_args()
    if args.folder is not None:
        return as_rank(args)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), args.shape, args.dtype, "cpu", 4 * args.problems, args.prompt_tokens)
        # The children are what torchrun makes of this command line with the folder.
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", f"--nproc-per-node={args.ranks}", __file__, f"--folder={folder}", *sys.argv[1:]])


if __name__ == "__main__":
    main()
