"""The table, the curves and the picture of a comparison; an SVG file that needs nothing but itself."""

import json
from xml.etree import ElementTree

import yaml

from luffy.compare.arms import Arm
from luffy.compare.outcome import outcome_of
from luffy.compare.pages import write_pages
from luffy.compare.state import ArmState
from luffy.config import load_config
from luffy.schema import to_dict

SVG = "{http://www.w3.org/2000/svg}"


def compared(folder, lead):
    """An outcome of two methods in two seeds, and the run folders of their arms."""
    arms, states = [], {}
    for method, right in (("luffy", 20 + lead), ("on_policy", 20)):
        for seed in (0, 1):
            values = {"out": str(folder / "arms"), "seed": seed, "model.device": "cpu"}
            arm = Arm(method, 1e-3, seed, load_config(f"tiny/{method}", values))
            run = folder / "arms" / arm.name
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(yaml.safe_dump({**to_dict(arm.cfg), "name": arm.name}))
            rows = [
                {"step": step, "time": 1000.0 + step, "timing_s/step": 2.0, "val-core/accuracy": right * step / 400}
                for step in range(11)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (run / "data.json").write_text(json.dumps({"run": {"processes": 1, "gpus": 0}}))
            items = {str(i): float(i < right) for i in range(40)}
            states[arm.name] = ArmState(seconds=22.0, rungs=[right / 40], at=[22.5], items=items)
            arms.append(arm)
    return outcome_of(arms, states), states


def test_the_pages_of_a_comparison_with_a_winner(tmp_path):
    cfg = load_config("tiny/luffy")
    pages = write_pages(cfg, *compared(tmp_path, 20), "6m", tmp_path)
    assert {name: path.name for name, path in pages.items()} == {
        "table": "compare.md", "curves": "compare.html", "picture": "compare.svg", "winner": "winner.yaml",
    }  # fmt: skip
    table = pages["table"].read_text()
    assert "Winner: luffy-lr0.001." in table and table.rstrip().endswith("(compare.svg)")
    assert "Winner: luffy-lr0.001." in pages["curves"].read_text()
    root = ElementTree.fromstring(pages["picture"].read_text())
    (chart,) = [part for part in root.iter(f"{SVG}svg") if part.get("class") == "chart"]
    assert root.tag == f"{SVG}svg" and chart.get("data-axis") == "seconds"
    labels = {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    assert any("luffy-lr0.001" in label for label in labels) and any("on-polic" in label for label in labels)
    assert "Validation accuracy by seconds of training" in labels
    assert len([path for path in chart.iter(f"{SVG}path") if "mean" in str(path.get("class"))]) >= 2
    assert "luffy-lr0.001 goes from 0.000 at 2.000 seconds to 1.000 at 22.500 seconds" in chart.get(
        "aria-label"
    )  # after the rung
    style = root.find(f"{SVG}style").text
    assert "--m0: #0072b2" in style and "url(" not in style and "http" not in style


def test_no_winner_no_recipe_and_no_step_no_curves(tmp_path):
    cfg = load_config("tiny/luffy")
    pages = write_pages(cfg, *compared(tmp_path, 0), "6m", tmp_path)
    assert "winner" not in pages and not (tmp_path / "winner.yaml").exists()
    empty = tmp_path / "empty"
    (empty / "arms" / "luffy-lr0.001-s0").mkdir(parents=True)
    (empty / "arms" / "luffy-lr0.001-s0" / "metrics.jsonl").touch()  # an arm that failed before its first step
    assert write_pages(cfg, *compared(tmp_path / "other", 0), "6m", empty).keys() == {"table"}
    assert "compare.svg" not in (empty / "compare.md").read_text()
