"""Figures that set runs or evaluations side by side: mean accuracies, accuracy over gamma, and what runs used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from luffy.errors import UserError
from luffy.evaluation.results import Evaluation
from luffy.report.charts import process_seconds
from luffy.run_folder.layout import CONFIG, METRICS
from luffy.run_folder.runs import RunRecord, first_stage, read_config, whole
from studies.paper.figures import Figure, Panel, Series

GAMMA_CURVE = "LUFFY"


def settings_of(folder: Path) -> dict[str, Any]:
    """The flat config of a run folder; empty where it cannot be read."""
    with suppress(UserError):
        return read_config(folder / CONFIG)
    return {}


def by_suite(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[str, Evaluation]]:
    """Evaluations of the same benchmarks, by what a panel of them is called."""
    suites: dict[str, dict[str, Evaluation]] = {}
    for name, evaluation in evaluations.items():
        suites.setdefault(", ".join(evaluation.titles.values()), {})[name] = evaluation
    return suites


def mean_accuracy(evaluation: Evaluation) -> float:
    """In percent; benchmarks weigh the same, as in the paper."""
    scores = [figures["accuracy"] for figures in evaluation.content["benchmarks"].values()]
    return 100 * sum(scores) / len(scores)


def accuracy_figures(evaluations: Mapping[str, Evaluation]) -> Iterator[Figure]:
    """A panel for each suite that two models or more were evaluated on, each once."""
    panels = [
        Panel(
            title, "evaluation", "accuracy (%)", _bars({n: mean_accuracy(e) for n, e in members.items()}), "bar", True
        )
        for title, members in by_suite(evaluations).items()
        if len({e.settings["model_identity"] for e in members.values()}) == len(members) > 1
    ]
    if panels:
        caption = "Mean accuracy (avg@k); benchmarks weigh the same."
        yield Figure("accuracy", "Mean accuracy", caption, "Figure 3; averages of Tables 1, 3 and 4", tuple(panels))


def gamma_figures(evaluations: Mapping[str, Evaluation]) -> Iterator[Figure]:
    """A panel for each suite that models of runs with two values of gamma or more were evaluated on."""
    panels = []
    for title, members in by_suite(evaluations).items():
        points: dict[float, float] = {}
        for evaluation in members.values():
            gamma = gamma_of(str(evaluation.settings["model"]))
            if gamma is not None:
                points.setdefault(gamma, mean_accuracy(evaluation))
        if len(points) > 1:
            curve = Series(GAMMA_CURVE, tuple(sorted(points)), tuple(points[gamma] for gamma in sorted(points)))
            panels.append(Panel(title, "gamma", "accuracy (%)", (curve,)))
    if panels:
        caption = "Mean accuracy of models trained with f(p) = p/(p + gamma); benchmarks weigh the same."
        yield Figure("gamma", "Accuracy over gamma", caption, "Figure 9", tuple(panels))


def run_of(model: str) -> Path | None:
    """The folder of the run that a model lies in."""
    return next((place for place in Path(model).resolve().parents if (place / METRICS).is_file()), None)


def gamma_of(model: str) -> float | None:
    """Gamma of the run that a model lies in; None if it is in none, or its run used no traces or another shape."""
    folder = run_of(model)
    settings = {} if folder is None else settings_of(folder)
    shaped = settings.get("algorithm.off_policy_reshape") == "p_div_p" and whole(settings.get("guidance.n_prefix")) > 0
    return float(settings["algorithm.off_policy_reshape.gamma"]) if shaped else None


def resource_figures(runs: Mapping[str, RunRecord]) -> Iterator[Figure]:
    """GPU hours, and responses and traces in thousands, earlier stages included."""
    hours = {name: max(spent.values()) / 3600 for name, run in runs.items() if (spent := process_seconds(run))}
    used = {name: data_used(run) for name, run in runs.items() if run.config}
    panels = [
        Panel("time", "run", "process hours (one a GPU)", _bars(hours), "bar", True),
        Panel(
            "on-policy responses",
            "run",
            "thousands",
            _bars({n: own / 1e3 for n, (own, _) in used.items()}),
            "bar",
            True,
        ),
        Panel("traces", "run", "thousands", _bars({n: off / 1e3 for n, (_, off) in used.items()}), "bar", True),
    ]
    if len(hours) > 1:
        caption = (
            "Rollouts and updates; each process is a GPU, or a CPU run. Responses and traces as planned (steps x "
            "problems x samples), without rounds of a gate. A run that started from another run's model includes it."
        )
        drawn = tuple(panel for panel in panels if panel.series)
        yield Figure("resources", "Hours and data", caption, "Table 2", drawn)


def data_used(run: RunRecord, stages: int = 4) -> tuple[int, int]:
    """On-policy responses and traces of a run and of those before it."""
    samples, traces = (whole(run.config.get(key)) for key in ("rollout.n", "guidance.n_prefix"))
    own, off = (samples - traces, traces) if run.kind == "train" else (0, 1)
    problems = run.steps * whole(run.config.get("batch.problems"))
    before = first_stage(run) if stages > 1 else None
    earlier = (0, 0) if before is None else data_used(before, stages - 1)
    return earlier[0] + problems * own, earlier[1] + problems * off


def _bars(values: Mapping[str, float]) -> tuple[Series, ...]:
    return tuple(Series(name, (float(place),), (value,)) for place, (name, value) in enumerate(values.items()))
