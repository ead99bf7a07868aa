"""The quickstart notebook: short, without outputs in git, and its cells do what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def code_cells():
    """(tags, source) of each."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [(c["metadata"].get("tags", []), "".join(c["source"])) for c in cells if c["cell_type"] == "code"]


def rows_of_file(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_what_it_left(out: Path, methods, steps, held_out):
    for method in methods:
        log = rows_of_file(out / method / "metrics.jsonl")
        assert [row["step"] for row in log] == list(range(steps + 1))
        assert log[0]["val-core/accuracy"] == 0.0 and "val-core/accuracy" in log[-1]
        result = json.loads((out / "evals" / method / "result.json").read_text())
        (figures,) = result["benchmarks"].values()
        assert (figures["items"], figures["k"]) == (held_out, 4)
    recorded = rows_of_file(out / "luffy" / "samples.jsonl")
    group = [row for row in recorded if (row["step"], row["problem"]) == (1, recorded[0]["problem"])]
    assert [row["reward"] for row in group] == [1.0] + [0.0] * 7  # the trace, and own samples that are never right
    assert [row["off_policy_tokens"] > 0 for row in group] == [True] + [False] * 7
    assert (out / "my-model" / "model.safetensors").is_file()


def test_it_has_ten_cells_and_no_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(code_cells()) == 10
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells if c["cell_type"] == "code")
    assert [tags for tags, _ in code_cells()][:2] == [["setup"], ["parameters"]]


def test_its_links_lead_somewhere():
    targets = re.findall(r"\]\((.*?)(?:#.*?)?\)", NOTEBOOK.read_text())
    assert len(targets) >= 4 and [t for t in targets if not (NOTEBOOK.parent / t).is_file()] == []


@pytest.mark.slow
def test_its_code_runs(tmp_path, monkeypatch, capsys):
    """As plain Python, without the cell that installs; two methods, one step, four problems."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    monkeypatch.chdir(tmp_path)
    fewer = {"methods": ["on_policy", "luffy"], "steps": 1, "held_out": 4}
    space: dict[str, object] = {}
    for tags, source in code_cells():
        if "setup" not in tags:
            exec(compile(source, "<cell>", "exec"), space)
        if "parameters" in tags:
            assert {name: type(space[name]) for name in fewer} == {name: type(value) for name, value in fewer.items()}
            space |= fewer
    check_what_it_left(tmp_path / "runs" / "notebook", **fewer)
    (figure,) = shown
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 2]
    said = capsys.readouterr().out
    assert said.count("WRONG") == 8 and "luffy: avg@4" in said and "parameters in runs/notebook/my-model" in said
    pyplot.close(figure)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kernel_runs_it(tmp_path):
    """All of it in Jupyter's own kernel, with as many steps as it takes to see a difference: make test-notebook."""
    nbclient = pytest.importorskip("nbclient", reason="needs Jupyter: make test-notebook")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    fewer = {"methods": ["on_policy", "sft", "luffy"], "steps": 12, "held_out": 20}
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += "".join(f"\n{name} = {value!r}" for name, value in fewer.items())
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    out = tmp_path / "runs" / "notebook"
    check_what_it_left(out, **fewer)
    reached = {
        method: rows_of_file(out / method / "metrics.jsonl")[-1]["val-core/accuracy"] for method in fewer["methods"]
    }
    assert reached["on_policy"] == 0.0 and reached["luffy"] >= 0.15
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert len(json.dumps(outputs)) < 200_000
