"""Figures of ``luffy analyze`` inside the report."""

import pytest

from luffy.errors import UserError
from luffy.report.html import write_report
from studies.paper.analysis import analyse


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
