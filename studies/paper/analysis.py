"""``luffy analyze``: the paper's figures for one's own runs and evaluations.

always              shaping function and gradient weight               Figure 2, middle and right
training runs       reward, length, entropy; ratio of clipped tokens   Figures 2 (left), 5, 8 and 11
                    hours and data                                     Table 2
evaluations         lengths of right and wrong answers                 Figure 10
                    mean accuracies                                    Figure 3; Tables 1, 3 and 4
of 2 gammas         accuracy over gamma                                Figure 9
at 2 temperatures   pass@k over temperatures                           Figure 12
a data set          BLEU of responses against its traces               appendix F.1
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from luffy.cli import main
from luffy.core.shaping import Shape, gradient_weight
from luffy.errors import UserError
from luffy.evaluation.accuracy import is_right, mean_pass_at_k
from luffy.evaluation.results import Evaluation, is_evaluation, model_label, read_evaluation
from luffy.files import write_atomically
from luffy.report.methods import METHODS, group_runs, with_styles
from luffy.run_folder.layout import METRICS, SAMPLES
from luffy.run_folder.recorder import read_json_lines
from luffy.run_folder.runs import RunRecord, without_samples
from studies.paper.bleu import bleu_figure, load_traces
from studies.paper.comparisons import (
    GAMMA_CURVE,
    accuracy_figures,
    gamma_figures,
    resource_figures,
    run_of,
    settings_of,
)
from studies.paper.figures import Figure, Panel, Series, Styles, save

DYNAMICS = (
    ("reward", "critic/rewards/mean", "mean reward of the policy's own samples"),
    ("length", "response_length/mean", "mean response length (tokens)"),
    ("entropy", "actor/entropy_loss", "mean entropy (nats)"),
)
CLIPPED = "actor/pg_clipfrac"
BINS = 24
PAPER_POOL = ("aime24", "amc")  # Figure 12 merges these two


def analyse(
    paths: Sequence[Path],
    out: Path,
    *,
    gammas: Sequence[float],
    data: Path | None = None,
    k: int = 8,
    left_out: list[str] | None = None,
) -> list[Figure]:
    """Draw every figure the given folders allow; the overview is ``analysis.md``, the numbers lie in CSV files.
    ``left_out`` gets a line on what could not be drawn."""
    runs, evaluations = _sorted_out(paths)
    remarks: list[str] = [] if left_out is None else left_out
    figures = list(_figures(runs, evaluations, data, gammas, k, remarks))
    styles = styles_of(runs, evaluations)
    for figure in figures:
        save(figure, out, styles)
    _write_overview(figures, remarks, out)
    return figures


def styles_of(runs: Mapping[str, Path], evaluations: Mapping[str, Evaluation]) -> Styles:
    """The style of each run and evaluated model by its names here: that of its method in a report of all these runs.
    A model that lies in no run is the base."""
    folders: dict[str, Path | None] = {name: path.resolve() for name, path in runs.items()}
    for name, evaluation in evaluations.items():
        model = str(evaluation.settings["model"])
        folders |= dict.fromkeys((name, model_label(model)), run_of(model))
    found = dict.fromkeys(folder for folder in folders.values() if folder is not None)
    records = [without_samples(folder, settings_of(folder)) for folder in found]
    styled = with_styles(group_runs([record for record in records if record.rows]))
    styles: dict[Path | None, int] = {run.folder: method.style for method in styled for run in method.runs}
    known = {name: styles.get(folder) for name, folder in folders.items() if folder is None or folder in styles}
    return {GAMMA_CURVE: METHODS.index("luffy"), **known}


def _below(path: Path) -> list[Path]:
    """The folder itself when it is a run or an evaluation, else the runs and evaluations inside it."""
    if is_evaluation(path) or (path / METRICS).is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_dir() and (is_evaluation(p) or (p / METRICS).is_file())) or [path]


def _sorted_out(paths: Sequence[Path]) -> tuple[dict[str, Path], dict[str, Evaluation]]:
    """Runs and evaluations, each by its path from the folder that its kind shares."""
    runs: list[Path] = []
    evaluations: list[Path] = []
    for path in [found for named in paths for found in _below(named)]:
        if is_evaluation(path):
            evaluations.append(path)
        elif (path / METRICS).is_file():
            runs.append(path)
        else:
            raise UserError(
                f"{path} is neither a run (no {METRICS}) nor an evaluation (no items.jsonl); check the path"
            )
    return _labelled(runs), {label: read_evaluation(path) for label, path in _labelled(evaluations).items()}


def _labelled(folders: Sequence[Path]) -> dict[str, Path]:
    if not folders:
        return {}
    root = os.path.commonpath([folder.resolve().parent for folder in folders])
    return {str(folder.resolve().relative_to(root)): folder for folder in folders}


def _figures(
    runs: Mapping[str, Path],
    evaluations: Mapping[str, Evaluation],
    data: Path | None,
    gammas: Sequence[float],
    k: int,
    left_out: list[str],
) -> Iterator[Figure]:
    yield shaping_figure(gammas)
    if runs:
        records = {name: without_samples(path, settings_of(path)) for name, path in runs.items()}
        yield from dynamics_figures(records)
        yield from resource_figures(records)
    if evaluations:
        yield from accuracy_figures(evaluations)
        yield from gamma_figures(evaluations)
        yield length_figure(evaluations)
        yield from temperature_figures(evaluations, k, left_out)
    if data is not None:
        if not runs and not evaluations:
            raise UserError("--data gives traces to compare responses with: name a run or an evaluation too")
        kinds = {"step": int, "problem": str, "response": str, "off_policy": list}
        samples = {name: read_json_lines(path / SAMPLES, **kinds) for name, path in runs.items()}
        yield bleu_figure(load_traces(data), samples, evaluations)


# ---- Figure 2, middle and right


def shaping_figure(gammas: Sequence[float]) -> Figure:
    if any(gamma <= 0 for gamma in gammas):
        raise UserError(f"--gamma must be above 0, found {min(gammas)}")
    prob = torch.linspace(0.001, 1.0, 400, dtype=torch.float64)
    shapes = {"f(p) = p (no shaping)": Shape()} | {f"p / (p + {g:g})": Shape(f"p_div_p_{g:g}") for g in gammas}
    values, weights = [], []
    for name, shape in shapes.items():
        values.append(_series(name, prob, shape.off_policy(prob.log())))
        weights.append(_series(name, prob, gradient_weight(prob, shape)))
    label = "probability of the teacher's token under the policy"
    return Figure(
        "shaping",
        "Policy shaping",
        "Without shaping the gradient vanishes for teacher tokens the policy finds unlikely; "
        "f(p) = p/(p + gamma) moves its weight to tokens of probability about gamma.",
        "Figure 2, middle and right",
        (
            Panel("shaping function f(p)", label, "f(p)", tuple(values), y_from_zero=True),
            Panel("gradient weight f'(p) p (1 - p)", label, "weight", tuple(weights), y_from_zero=True),
        ),
    )


def _series(name: str, x: torch.Tensor, y: torch.Tensor) -> Series:
    return Series(name, tuple(x.tolist()), tuple(y.tolist()))


# ---- Figures 2 (left), 5 and 8


def dynamics_figures(runs: Mapping[str, RunRecord]) -> Iterator[Figure]:
    panels = tuple(_over_steps(title, key, label, runs) for title, key, label in DYNAMICS)
    drawn = tuple(panel for panel in panels if panel.series)
    if not drawn:
        raise UserError(f"no run has any of {', '.join(key for _, key, _ in DYNAMICS)}: {', '.join(runs)}")
    yield Figure(
        "dynamics",
        "Training dynamics",
        "Reward and length of the policy's own samples, and the entropy of its tokens, over steps.",
        "Figures 2 (left), 5 and 11",
        drawn,
    )
    clipped = _over_steps("ratio of clipped tokens", CLIPPED, "share of tokens", runs)
    if clipped.series:
        yield Figure(
            "clipping",
            "Clipped signals",
            "Share of policy-gradient tokens whose ratio was clipped. All zero: no clipping, or one update a batch.",
            "Figure 8",
            (clipped,),
        )


def _over_steps(title: str, key: str, label: str, runs: Mapping[str, RunRecord]) -> Panel:
    series = []
    for name, run in runs.items():
        if points := run.series(key):
            x, y = zip(*points, strict=True)
            series.append(Series(name, tuple(x), tuple(y)))
    return Panel(title, "step", label, tuple(series), y_from_zero=all(min(s.y) >= 0 for s in series))


# ---- Figure 10


def length_figure(evaluations: Mapping[str, Evaluation]) -> Figure:
    """Shares within right and within wrong answers: each set of bars sums to 1, so that few right ones show too."""
    longest = max(row["tokens"] for e in evaluations.values() for row in e.rows)
    edges = np.linspace(0, longest + 1, min(BINS, longest + 1) + 1)
    panels = []
    for name, evaluation in evaluations.items():
        right = [row["tokens"] for row in evaluation.rows if is_right(row)]
        wrong = [row["tokens"] for row in evaluation.rows if not is_right(row)]
        series = tuple(
            Series(label, tuple(edges[:-1].tolist()), tuple((np.histogram(lengths, edges)[0] / len(lengths)).tolist()))
            for label, lengths in (("right", right), ("wrong", wrong))
            if lengths
        )
        means = [f"{label} {np.mean(v):.0f} ({len(v)})" for label, v in (("right", right), ("wrong", wrong)) if v]
        panels.append(Panel(f"{name}: {', '.join(means)}", "response length (tokens)", "share", series, kind="bar"))
    return Figure(
        "lengths",
        "Length of right and wrong answers",
        "Each set of bars sums to 1; the titles give mean lengths and numbers of answers.",
        "Figure 10",
        tuple(panels),
    )


# ---- Figure 12


def temperature_figures(evaluations: Mapping[str, Evaluation], k: int, left_out: list[str]) -> Iterator[Figure]:
    """One figure with a panel for each suite that was evaluated at two temperatures or more."""
    suites: dict[tuple[str, ...], dict[str, Evaluation]] = {}
    for name, evaluation in evaluations.items():
        suites.setdefault(_pool(evaluation), {})[name] = evaluation
    panels = []
    for pool, members in suites.items():
        if len({e.settings["temperature"] for e in members.values()}) > 1:
            try:
                panels.append(_temperature_panel(pool, members, k))
            except UserError as error:
                left_out.append(f"pass@{k} over temperatures: {error}")
    if panels:
        where = "; ".join(panel.title for panel in panels)
        yield Figure(
            "temperatures",
            f"pass@{k} over temperatures",
            f"Unbiased pass@{k} on {where}: does the model find more when it explores more?",
            "Figure 12",
            tuple(panels),
        )


def _temperature_panel(pool: tuple[str, ...], evaluations: Mapping[str, Evaluation], k: int) -> Panel:
    points: dict[str, dict[float, float]] = {}  # by the model's identity
    labels: dict[str, str] = {}
    for name, evaluation in evaluations.items():
        rows = [row for row in evaluation.rows if row["benchmark"] in pool]
        fewest = min(evaluation.settings["k"][benchmark] for benchmark in pool)
        if fewest < k:
            raise UserError(f"{name} has {fewest} samples per problem, pass@{k} needs {k}; lower --k to {fewest}")
        temperature = float(evaluation.settings["temperature"])
        curve = points.setdefault(evaluation.settings["model_identity"], {})
        labels.setdefault(evaluation.settings["model_identity"], model_label(evaluation.settings["model"]))
        if temperature in curve:
            raise UserError(
                f"two evaluations of one model have temperature {temperature}: {name} is the second; give one"
            )
        curve[temperature] = mean_pass_at_k(rows, k)
    series = [
        Series(labels[model], tuple(sorted(curve)), tuple(curve[t] for t in sorted(curve)))
        for model, curve in points.items()
    ]
    where = " + ".join(next(iter(evaluations.values())).titles[benchmark] for benchmark in pool)
    return Panel(where, "temperature", f"pass@{k}", tuple(series), y_from_zero=True)


def _pool(evaluation: Evaluation) -> tuple[str, ...]:
    """The paper's two benchmarks where they are there, else all."""
    names = tuple(evaluation.titles)
    return PAPER_POOL if set(PAPER_POOL) <= set(names) else names


# ---- overview


def _write_overview(figures: Sequence[Figure], left_out: Sequence[str], out: Path) -> None:
    lines = ["# Analysis", ""]
    for figure in figures:
        lines += [f"## {figure.title}", "", f"![{figure.title}]({figure.name}.png)", "", figure.caption, ""]
        lines += [f"The paper: {figure.paper}. Numbers: [{figure.name}.csv]({figure.name}.csv).", ""]
    if left_out:
        lines += ["## Left out", "", *(f"- {remark}" for remark in left_out), ""]
    write_atomically(out / "analysis.md", "\n".join(lines))
    content = [_as_json(figure) for figure in figures]
    write_atomically(out / "analysis.json", json.dumps(content, ensure_ascii=False) + "\n")


def _as_json(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "png": f"{figure.name}.png", "csv": f"{figure.name}.csv"}


# ---- the command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    paths: Annotated[list[Path] | None, typer.Argument(help="folders of luffy train and luffy eval")] = None,
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("analysis"),
    data: Annotated[Path | None, typer.Option(help="dataset with traces: BLEU of responses against them")] = None,
    gamma: Annotated[list[float] | None, typer.Option(help="shaping curves; default: 0.01 0.1 0.5")] = None,
    k: Annotated[int, typer.Option(min=1, help="pass@k over temperatures")] = 8,
) -> None:
    """Figures 2, 3, 5 and 8 to 12 and Table 2 of the paper for your own runs and evaluations, as PNG and CSV."""
    left_out: list[str] = []
    for figure in analyse(paths or [], out, data=data, gammas=gamma or [0.01, 0.1, 0.5], k=k, left_out=left_out):
        typer.echo(f"{out / (figure.name + '.png')}  {figure.title}")
    for remark in left_out:
        typer.echo(f"left out   {remark}", err=True)
    typer.echo(f"overview   {out / 'analysis.md'}")


if __name__ == "__main__":
    main(app)
