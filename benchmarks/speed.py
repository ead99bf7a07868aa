"""`luffy bench`, or `python -m benchmarks.speed`: a table to read and JSON to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from luffy.cli import main
from luffy.cli_help import FullHelp

if TYPE_CHECKING:
    from luffy.models.load import DtypeName
    from luffy.models.machine import Machine
    from luffy.rollout.native.native_engine import Precision

app = typer.Typer(
    cls=FullHelp,
    help="Measure speed and memory: rollout, update, step.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Shape = Annotated[str, typer.Option(help="random model: tiny, 30m, qwen2-0.5b, qwen2-1.5b, qwen2-7b")]
ModelPath = Annotated[Path | None, typer.Option("--model", help="a model folder instead of random weights")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16; default: bfloat16 on a GPU")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Json = Annotated[Path | None, typer.Option("--json", help="also write the figures here")]
Repeats = Annotated[int, typer.Option(help="timed runs; the best counts", min=1)]
MicroBatch = Annotated[int, typer.Option("--tokens", help="batch.tokens: tokens of a micro-batch", min=1)]
Checkpointing = Annotated[str, typer.Option(help="model.gradient_checkpointing: auto, true or false")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch; default: as train.threads", min=1)]
Offload = Annotated[bool, typer.Option(help="optim.offload: optimizer state in the host's memory")]
Lora = Annotated[int, typer.Option(help="rank of LoRA adapters; 0: all weights", min=0)]
Quantize = Annotated[str, typer.Option(help="model.lora.quantize: nf4, beside --lora")]
Memory = Annotated[float | None, typer.Option(help="GiB of the GPU that may be used; default: all", min=1)]
Kernels = Annotated[bool, typer.Option("--kernels", help="one more run under the profiler: what takes the time?")]

WIDE = 160  # characters of a line
LENGTH_COLUMNS = {
    "max_tokens_per_step": "{max_tokens_per_step}", "step": "{seconds:.2f}", "rollout": "{rollout:.2f}",
    "update": "{update:.2f}", "waiting": "{waiting_share:.0%}", "GPU busy": "{gpu_busy_share:.0%}",
    "tokens/s": "{tokens_per_second:,.0f}", "groups": "{groups:.1f}", "oldest": "{oldest:.0f}", "GiB": "{peak_gib}",
}  # fmt: skip
NAME_CUT = 100  # of a kernel's name, whose template arguments have no end


def _place(device: str, dtype: str, threads: int | None) -> tuple[str, DtypeName]:
    from luffy.errors import UserError
    from luffy.models.load import DTYPES
    from luffy.models.machine import pick_device, use_threads

    use_threads(threads)
    device = pick_device(device)
    if dtype == "":
        return device, "bfloat16" if device == "cuda" else "float32"
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown: use {' or '.join(DTYPES)}")
    return device, cast("DtypeName", dtype)


@app.command()
def rollout(
    shape: Shape = "tiny",
    model: ModelPath = None,
    runs: Annotated[str, typer.Option(help="PROMPTSxPROMPT_TOKENSxNEW_TOKENS, several with commas")] = "16x32x64",
    samples: Annotated[int, typer.Option(help="samples of each prompt", min=1)] = 1,
    slots: Annotated[int | None, typer.Option(help="sequences decoded at once", min=1)] = None,
    merged: Annotated[bool, typer.Option(help="on a GPU: q, k and v as one product, gate and up as one")] = True,
    precision: Annotated[str, typer.Option(help="rollout.precision: model or fp8")] = "model",
    kernels: Kernels = False,
    dtype: Dtype = "", device: Device = "auto", repeats: Repeats = 2, threads: Threads = None, json_path: Json = None,
) -> None:  # fmt: skip
    """New tokens per second of the native engine, with log-probs, and the share of the memory's limit."""
    from bench.models import model_of
    from bench.rollout import RolloutRun, bench_rollout

    from luffy.errors import UserError

    device, kind = _place(device, dtype, threads)
    wanted = [RolloutRun.parse(text, samples) for text in runs.split(",")]
    if precision not in ("model", "fp8"):
        raise UserError(f"precision '{precision}' is unknown: use model or fp8")
    machine, rows = bench_rollout(
        model_of(shape, model, kind, device), wanted, repeats, slots, kernels, merged, cast("Precision", precision)
    )
    _show("rollout", machine, rows, json_path, {
        "prompts": "{prompts}", "samples": "{samples}", "prompt": "{prompt_tokens}", "new": "{new_tokens}",
        "seconds": "{seconds:.2f}", "tokens/s": "{tokens_per_second:,.0f}", "of roofline": "{roofline_share:.0%}",
        "peak GiB": "{peak_gib}", **({"fp8 copy s": "{quantize_s:.3f}"} if precision == "fp8" else {}),
    })  # fmt: skip


@app.command()
def update(
    shape: Shape = "tiny",
    model: ModelPath = None,
    samples: Annotated[int, typer.Option(help="responses in the step", min=1)] = 16,
    group: Annotated[int, typer.Option(help="responses to each prompt, which is computed once for them", min=1)] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    response_tokens: Annotated[int, typer.Option(min=1)] = 64,
    tokens: MicroBatch = 16384,
    checkpointing: Checkpointing = "auto",
    offload: Offload = False,
    lora: Lora = 0,
    quantize: Quantize = "",
    memory: Memory = None,
    kernels: Kernels = False,
    dtype: Dtype = "", device: Device = "auto", repeats: Repeats = 2, threads: Threads = None, json_path: Json = None,
) -> None:  # fmt: skip
    """Tokens trained on per second of one optimizer step, and its share of the matrix rate (6 operations a weight and
    computed token)."""
    from bench.limits import limit_memory
    from bench.update import bench_update, trained_model, update_config

    device, kind = _place(device, dtype, threads)
    limit_memory(device, memory)
    cfg = update_config(tokens, response_tokens, checkpointing, offload, lora, quantize, kind, device)
    trained = trained_model(shape, model, cfg, device)
    machine, row = bench_update(trained, cfg, samples, group, prompt_tokens, response_tokens, repeats, kernels)
    _show("update", machine, [row], json_path, {
        "samples": "{samples}", "lengths": "{prompt_tokens}+{response_tokens}", "tokens": "{tokens:,}",
        "computed": "{computed_tokens:,}", "seconds": "{seconds:.2f}", "tokens/s": "{tokens_per_second:,.0f}",
        "MFU": "{mfu:.0%}", "ckpt": "{checkpointing}", "GiB": "{peak_gib}",
    })  # fmt: skip


@app.command()
def step(
    shape: Shape = "tiny",
    problems: Annotated[int, typer.Option(min=1)] = 4,
    samples: Annotated[int, typer.Option(help="responses of each problem", min=1)] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[
        int | None, typer.Option(help="of a response; default: 64, at most 8,192 with --lengths lognormal", min=1)
    ] = None,
    lengths: Annotated[str, typer.Option(help="of responses: equal or lognormal")] = "equal",
    median: Annotated[float, typer.Option(help="of lognormal lengths, in tokens", min=1)] = 800,
    sigma: Annotated[float, typer.Option(help="of their logarithm", min=0)] = 1.0,
    max_tokens_per_step: Annotated[
        int | None,
        typer.Option(help="rollout.max_tokens_per_step of the second row; default: a quarter; 0: no second row", min=0),
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="one more step first, which does not count")] = True,
    tokens: MicroBatch = 16384,
    checkpointing: Checkpointing = "auto",
    offload: Offload = False,
    lora: Lora = 0,
    quantize: Quantize = "",
    memory: Memory = None,
    profile: Annotated[
        bool, typer.Option(help="one more step under the profiler: how long was the GPU idle, at least and at most?")
    ] = False,
    dtype: Dtype = "", device: Device = "auto", repeats: Repeats = 2, threads: Threads = None, json_path: Json = None,
) -> None:  # fmt: skip
    """A whole training step by the trainer itself, phase by phase; MFU is that of the update with its packing, the
    roofline that of the rollout, and outside is what passes in neither, nor in scoring. With --lengths lognormal: a row
    with every response ended in its step and one with rollout.max_tokens_per_step; waiting is the share of the rollout
    with fewer than a quarter of a step's responses under way, and a busy GPU neither waits so nor is outside."""
    from bench.lengths import Lognormal, bench_lengths
    from bench.limits import limit_memory
    from bench.step import bench_step
    from bench.update import model_knobs

    from luffy.errors import UserError

    device, kind = _place(device, dtype, threads)
    limit_memory(device, memory)
    overrides = {
        "batch": {"tokens": tokens},
        "model": model_knobs(checkpointing, lora, quantize),
        "optim": {"offload": offload},
        "data": {"max_prompt_tokens": prompt_tokens},
    }
    if lengths == "lognormal":
        if profile:
            raise UserError(
                "--profile records every kernel, too many in a step of unequal lengths: use --lengths equal"
            )
        drawn = Lognormal(median, sigma, new_tokens or 8192)
        sizes = (shape, kind, device, problems, samples, prompt_tokens)
        most = -(-drawn.most // 4) if max_tokens_per_step is None else max_tokens_per_step
        found = bench_lengths(*sizes, drawn, (None, most) if most else (None,), repeats, overrides, warm_up)
        _show("step", *found, json_path, LENGTH_COLUMNS)
        return
    if lengths != "equal":
        raise UserError(f"lengths '{lengths}' are unknown: use equal or lognormal")
    machine, rows = bench_step(
        shape, kind, device, problems, samples, prompt_tokens, new_tokens or 64, repeats, overrides, profile, warm_up
    )
    phases = [name for name in rows[0]["phases"] if any(_counts(row, name) for row in rows)]
    _show("step", machine, rows, json_path, {
        "step": "{seconds:.2f}", **{phase: f"{{phases[{phase}]:.2f}}" for phase in phases},
        "tokens/s": "{tokens_per_second:,.0f}", "MFU": "{mfu:.0%}", "of roofline": "{roofline_share:.0%}",
        "outside": "{outside:.1%}", "GPU idle": "{gpu_idle_share}",
        "GiB": "{peak_gib}",
    })  # fmt: skip


def _counts(row: dict[str, Any], phase: str) -> bool:
    """Phases below a hundredth of the step are in the JSON; a table has only so many columns."""
    return bool(row["phases"][phase] >= 0.01 * row["seconds"])


def _show(title: str, machine: Machine, rows: list[dict[str, Any]], path: Path | None, columns: dict[str, str]) -> None:
    rates = f"{_rate(machine.flops, 'FLOP/s')}, {_rate(machine.bandwidth, 'B/s')}"
    table = Table(title=f"{title} on {machine.name} (measured: {rates})", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        values = _as_shown(row)
        table.add_row(*(text.format(**values) for text in columns.values()))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE  # in a file a line may be longer than a terminal's usual 80 characters
    console.print(table)
    for row in rows:
        if "kernels" in row:
            console.print(_kernel_table(row["kernels"]))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"bench": title, "machine": vars(machine), "rows": rows}, indent=1) + "\n")


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    table = Table(title="kernels", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("share", "ms", "calls", "kernel"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for row in kernels:
        cells = f"{row['share']:.1%}", f"{1000 * row['seconds']:.1f}", f"{row['calls']:,}"
        table.add_row(*cells, Text(row["kernel"][:NAME_CUT]))
    return table


def _rate(value: float, unit: str) -> str:
    size, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, "")) if value >= s or s == 1.0)
    return f"{value / size:.3g} {prefix}{unit}"


def _as_shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row with texts for values that may be missing."""
    most, peak, idle = (row.get(name) for name in ("max_tokens_per_step", "peak_gib", "gpu_idle_share"))
    return {
        **row,
        "max_tokens_per_step": "null" if most is None else most,
        "peak_gib": "-" if peak is None else f"{peak:.1f}",
        "gpu_idle_share": "-" if idle is None else f"{idle[0]:.1%} to {idle[1]:.1%}",
    }


if __name__ == "__main__":
    main(app)
