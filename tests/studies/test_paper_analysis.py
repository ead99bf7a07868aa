"""Figures of ``luffy analyze``: inside the report, and their colours."""

import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

from luffy.config import load_config
from luffy.errors import UserError
from luffy.evaluation.results import read_evaluation
from luffy.report.html import write_report
from luffy.report.methods import COLOURS, colour_of
from luffy.report.model_card import draw_curves
from luffy.run_folder.runs import load_run
from luffy.schema import to_dict
from luffy.view.live import Board
from studies.common import looks
from studies.paper.analysis import analyse, styles_of
from studies.paper.figures import colours_of


def test_the_figures_are_inside_the_page(make_config, tmp_path):
    from luffy.train.loop import Trainer

    cfg = make_config(train={"steps": 2})
    with Trainer(cfg) as trainer:
        trainer.train()
    figures = analyse([cfg.folder], tmp_path / "figures", gammas=[0.1])
    page = write_report([cfg.folder], tmp_path / "report.html", analysis=tmp_path / "figures").read_text()
    assert page.count("data:image/png;base64,") == len(figures) > 0
    assert all(figure.title in page for figure in figures)
    for content, said in (
        ("{}", "not a list"),
        ("[3]", "not a JSON object"),
        ('[{"png": "a"}]', "needs a text as 'title'"),
    ):
        (tmp_path / "figures" / "analysis.json").write_text(content)
        with pytest.raises(UserError, match=rf"analysis\.json: {said}; make it again"):
            write_report([cfg.folder], tmp_path / "other.html", analysis=tmp_path / "figures")
    with pytest.raises(UserError, match=r"no analysis\.json"):
        write_report([cfg.folder], tmp_path / "other.html", analysis=tmp_path)


METHODS = {"luffy": "#0072b2", "on_policy": "#d55e00", "sft": "#009e73"}


@pytest.fixture
def evaluated(write_run, make_metric_row, tmp_path):
    """A run of each of METHODS and an evaluation of its model; one of the model before training."""

    def evaluation(name, model, accuracy):
        folder = tmp_path / "evals" / name
        folder.mkdir(parents=True)
        row = {"benchmark": "sums", "id": "1", "sample": 0, "response": "r", "finish": "stop", "status": "ok"}
        (folder / "items.jsonl").write_text(json.dumps({**row, "tokens": 3, "score": 1.0}) + "\n")
        used = {"model": model, "model_identity": model, "problems": "p", "k": {"sums": 1}, "temperature": 1.0}
        sums = {"title": "sums", "items": 1, "k": 1, "accuracy": accuracy, "pass_at": {"1": accuracy}}
        (folder / "result.json").write_text(json.dumps({"settings": used, "benchmarks": {"sums": sums}}))

    runs = []
    for place, recipe in enumerate(METHODS):
        config = {**to_dict(load_config(f"methods/{recipe}")), "name": recipe, "seed": 0}
        row = {"step": 1, "actor/sft_loss": 1.0} if recipe == "sft" else make_metric_row(1, 0.5)
        runs.append(write_run(recipe, [{**row, "time": 30.0 - place}], config))
        evaluation(f"a-{2 - place}", str(runs[-1] / "checkpoints" / "latest" / "model"), 0.2 * (place + 1))
    evaluation("base", "some/base", 0.1)
    return runs, tmp_path / "evals"


def colours_in(png):
    """Of the bars and lines: colours that some hundred pixels have."""
    pixels = (255 * plt.imread(png)[..., :3]).round().astype(int).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    return {f"#{r:02x}{g:02x}{b:02x}" for (r, g, b), count in zip(colours, counts, strict=True) if count > 200}


def test_a_method_has_one_colour_in_report_live_page_evaluation_and_study(evaluated, tmp_path):
    runs, evals = evaluated
    names = ["a-0", "a-1", "a-2", "base"]
    styles = styles_of({}, {name: read_evaluation(evals / name) for name in names})
    assert colours_of(names, styles) == dict(zip(names, [*reversed(METHODS.values()), "#000000"], strict=True))
    analyse([evals], tmp_path / "figures", gammas=[0.1])
    assert {*METHODS.values(), "#000000"} <= colours_in(tmp_path / "figures" / "accuracy.png")
    assert {name: looks(name, {})["color"] for name in METHODS} == METHODS
    assert looks("base", {})["color"] == "#000000"
    page = write_report(runs, tmp_path / "report.html").read_text()
    live = {method.label: COLOURS[method.style] for method in Board([tmp_path / "runs"]).snapshot().methods}
    legend = dict(re.findall(r'<li><svg class="swatch"[^>]*><path class="mean (m\d)"[^>]*></svg> (\w+)</li>', page))
    assert live == METHODS
    assert {label: COLOURS[int(style[1:])] for style, label in legend.items()} == METHODS


def test_the_picture_of_a_model_card_has_the_colour_of_its_method(evaluated, tmp_path):
    runs, _ = evaluated
    assert draw_curves(load_run(runs[1]), tmp_path / "curves.png")
    assert colours_in(tmp_path / "curves.png") & set(METHODS.values()) <= {METHODS["on_policy"]}
    assert colour_of(load_run(runs[1])) == METHODS["on_policy"]
