"""The pictures of docs/healthy.md: runs of the tiny recipes on a CPU, one that is well and some that are not.

python -m studies.healthy --out runs/healthy      trains what is missing (half an hour on two cores), then draws
                                                  docs/images/healthy-*.png
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from luffy.report.methods import METHODS, free_style, line_of
from luffy.run_folder.layout import METRICS
from luffy.run_folder.runs import RunRecord, load_run
from studies.common import legend_below, panels, smooth

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STEPS = 30
SHOWN = 3  # steps that a point of the noisy curves is a mean of


@dataclass(frozen=True)
class Case:
    """A run, what it shows, whether it is well, and the method whose recipe it is, unchanged."""

    label: str
    command: tuple[str, ...]
    well: bool = False
    method: str | None = None


HELD_OUT = "eval.hold_out=64"  # traces
CASES = {
    "luffy": Case("good", ("train", "tiny/luffy"), well=True, method="luffy"),
    "hot": Case("optim.lr 30 times as high", ("train", "tiny/luffy", "optim.lr=1e-2")),
    "entropy": Case("algorithm.entropy_coef 0.3", ("train", "tiny/luffy", "algorithm.entropy_coef=0.3")),
    "no-signal": Case("on-policy, never right", ("train", "tiny/on_policy"), method="on_policy"),
    "cut-off": Case(
        "responses and traces cut off", ("train", "tiny/luffy", "rollout.max_tokens=40", "data.overlong_trace=truncate")
    ),
    "relift": Case("good", ("train", "tiny/relift"), well=True, method="relift"),
    "relift-hot": Case("optim.lr 30 times as high", ("train", "tiny/relift", "optim.lr=1e-2")),
    "sft": Case("good", ("sft", "tiny/sft", HELD_OUT), well=True, method="sft"),
    "sft-hot": Case("optim.lr 300 times as high", ("sft", "tiny/sft", HELD_OUT, "optim.lr=1e-1")),
    "sft-few": Case(
        "16 problems, optim.lr 10 times as high", ("sft", "tiny/sft", HELD_OUT, "data.limit=80", "optim.lr=3e-3")
    ),
}
FIGURES = {
    "reward": (("luffy", "hot", "entropy", "no-signal", "cut-off"), (
        ("critic/rewards/mean", "reward"), ("batch/off_solved", "trace"), ("val-core/accuracy", "held-out"))),
    "policy": (("luffy", "hot", "entropy"), (
        ("actor/entropy_loss", "entropy"), ("response_length/mean", "length"),
        ("actor/off_policy_prob", "probability of trace tokens"))),
    "sft": (("sft", "sft-hot", "sft-few"), (
        ("actor/sft_loss", "sft loss"), ("val-traces/loss", "held-out loss"), ("val-core/accuracy", "held-out"))),
    "buffer": (("relift", "relift-hot"), (("method/sft_buffer", "sft buffer"), ("critic/rewards/mean", "reward"))),
    "steps": (("luffy", "no-signal"), (
        ("perf/throughput", "trained tok/s"), ("batch/rejected", "groups without a signal"))),
}  # fmt: skip


def train(name: str, out: Path) -> None:
    """A run that is finished is left as it is."""
    case = CASES[name]
    command = [sys.executable, "-m", "luffy", *case.command, f"name={name}", f"out={out}", f"train.steps={STEPS}"]
    subprocess.run([*command, "eval.every=10", "data.eval_also={}", "record.tensorboard=false"], check=True)


def styles() -> dict[str, int]:
    """The same in every picture: that of the method, else one that no case has."""
    given = {name: METHODS.index(case.method) for name, case in CASES.items() if case.method}
    for name in CASES:
        given.setdefault(name, free_style(list(given.values())))
    return given


def draw(
    figure_name: str, names: tuple[str, ...], metrics: tuple[tuple[str, str], ...], runs: dict[str, RunRecord]
) -> None:
    figure, axes = panels(len(metrics))
    for ax, (metric, title) in zip(axes, metrics, strict=True):
        for name in names:
            points = runs[name].series(metric)
            rare = len(points) <= STEPS // 4
            values = smooth([y for _, y in points], 1 if rare or metric == "method/sft_buffer" else SHOWN)
            well = CASES[name].well
            line = "-" if well else (4 * names.index(name), (6, 6))  # lines that coincide show in turn
            ax.plot([x for x, _ in points], values, color=line_of(styles()[name])["color"], lw=2.2 if well else 1.4,
                    ls=line, marker="o" if rare else None, ms=3, label=CASES[name].label)  # fmt: skip
        ax.set(title=title, xlabel="step", xlim=(0, STEPS))
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        if metric.endswith("loss"):
            ax.set_yscale("log")  # losses that are too high would hide the others
        else:
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    legend_below(figure, axes[0])
    figure.savefig(IMAGES / f"healthy-{figure_name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="where the runs are, or will be")
    parser.add_argument("--only-draw", action="store_true", help="train nothing")
    given = parser.parse_args()
    for name in () if given.only_draw else CASES:
        train(name, given.out)
    runs = {name: load_run(given.out / name) for name in CASES if (given.out / name / METRICS).is_file()}
    for figure, (names, metrics) in FIGURES.items():
        draw(figure, names, metrics, runs)


if __name__ == "__main__":
    main()
