"""``luffy quickstart --task tools``: a few steps, what it leaves, and (slow) its result."""

import contextlib
import io
import json
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from luffy.cli import app
from luffy.config import load_config
from luffy.errors import UserError
from luffy.quickstart import run
from luffy.quickstart.run import TASKS, choose_methods, configure, find_task, quickstart
from luffy.run_folder.recorder import read_json_lines


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a quickstart of one step with few problems, and what it printed."""

    def small(*args):
        cfg = configure(*args)
        return replace(
            cfg,
            eval=replace(cfg.eval, limit=4),
            batch=replace(cfg.batch, problems=4),
            rollout=replace(cfg.rollout, n=4),
        )

    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(run, "configure", small)
        quickstart(folder, seeds=1, steps=1, task="tools")
    return folder, printed.getvalue()


def test_a_short_quickstart_leaves_summary_report_and_episodes(short):
    folder, printed = short
    assert set(json.loads((folder / "summary.json").read_text())["methods"]) == {"on-policy", "luffy"}
    assert "Correct answers after training in percent, 1 seed" in printed
    report = (folder / "report.html").read_text()
    assert (
        "luffy quickstart --task tools" in report
        and "chip reply" in report
        and "environment&#39;s reply" in report.replace("'", "&#39;")
    )
    rows = read_json_lines(folder / "luffy" / "seed-0" / "samples.jsonl")
    traces = [row for row in rows if row["finish"] == "trace"]
    assert traces and all(row["turns"] == 8 and len(row["replies"]) == 7 and row["reward"] == 1.0 for row in traces)
    assert all("end" in row and row["turns"] >= 1 for row in rows if row["finish"] != "trace")


def test_the_task_chooses_recipes_methods_and_folder(tmp_path):
    tools = find_task("tools")
    assert tools.methods == ["luffy", "mixed", "on_policy", "sft"]
    assert choose_methods("all", tools) == tools.methods
    cfg = configure(tmp_path, "on_policy", 3, 5, tools)
    assert (cfg.environment.name, cfg.guidance.n_prefix, cfg.train.steps) == ("chain", 0, 5)
    assert cfg.folder == tmp_path / "on-policy" / "seed-3"
    assert len({task.out for task in TASKS.values()}) == len(TASKS)
    with pytest.raises(UserError, match=r"no method 'hpt'; there are luffy, mixed, on_policy, sft, and all"):
        choose_methods("hpt", tools)
    with pytest.raises(UserError, match=r"--task: no task 'tool' \(did you mean 'tools'\?\)"):
        find_task("tool")


def test_the_command_names_the_task(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "quickstart", lambda *given: asked.append(given))
    for line in (["quickstart"], ["quickstart", "--task", "tools", "--steps", "2"]):
        assert CliRunner().invoke(app, line).exit_code == 0
    assert [(str(given[0]), given[1:]) for given in asked] == [
        ("runs/quickstart", (1, None, None, False, "chains")),
        ("runs/quickstart-tools", (1, 2, None, False, "tools")),
    ]


def test_all_methods_of_the_task_differ_from_their_twins_in_the_task_alone():
    for name in find_task("tools").methods:
        tools, tiny = load_config(f"tools/{name}"), load_config(f"tiny/{name}")
        assert (tools.algorithm, tools.guidance, tools.optim) == (tiny.algorithm, tiny.guidance, tiny.optim)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_luffy_learns_to_call_the_tool_and_on_policy_rl_does_not(tmp_path):
    began = time.monotonic()
    outcomes = quickstart(tmp_path, seeds=1, task="tools")
    assert outcomes["on-policy"][0].heldout < 0.05
    assert outcomes["luffy"][0].heldout > 0.60
    assert time.monotonic() - began < 1200  # three minutes on two cores of its own
    last = read_json_lines(tmp_path / "luffy" / "seed-0" / "metrics.jsonl")[-1]
    assert last["environment/calls"] > 5
