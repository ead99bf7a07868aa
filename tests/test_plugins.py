"""A recipe makes a user's own module known: on the trainer's side and in verifier processes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import luffy
from luffy.config import load_config, to_yaml
from luffy.errors import ConfigError, UserError
from luffy.plugins import NAMED, leave_current_folder, load_plugins, python_flags
from luffy.registry import resolve
from luffy.rewards import build_verifier
from luffy.rewards.kinds import REWARDS, built_in, reward
from luffy.run_folder.runs import read_config
from luffy.types import Problem, Score

PLUGIN = """
    import os

    from luffy.guidance.ratios import prefix_schedule
    from luffy.rewards.kinds import reward

    @reward("plugin_length")
    def length(response, answer, problem):
        if response == "die":
            os._exit(3)
        return len(response) / 10

    @prefix_schedule("plugin_half")
    def half(done, low, high):
        return (low + high) / 2
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file my_plugin.py in another folder than the working one."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_plugin.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.chdir(tmp_path)
    yield "own/my_plugin.py"
    sys.modules.pop("my_plugin", None)


def test_what_a_plugin_registers_can_be_named(plugin, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"base: tiny/luffy\nplugins: [{plugin}]\nreward: {{kind: plugin_length}}\nguidance: {{strategy: plugin_half}}\n"
    )
    cfg = load_config(recipe, ["guidance.min_ratio=0.5"])
    assert cfg.schedule(10).ratios(2, 0, "x") == [0.75, 0.75]
    assert "plugins:\n- own/my_plugin.py" in to_yaml(cfg)
    with build_verifier(cfg.reward.kind, workers=1) as verifier:
        scores = verifier.score([(Problem("1", "", ""), text) for text in ("four", "abcdefgh", "die")])
    assert scores == [Score(0.4), Score(0.8), Score(0.0, "crashed")]  # so it ran in a process of its own


# Commands that load no plugin, then a reward by its path, in this process and in a verifier's.
COMMANDS = """
import json, sys
from luffy.cli import main
for arguments in (["recipes"], ["report", "nowhere"]):
    sys.argv = ["luffy", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code)
from luffy.registry import resolve
from luffy.rewards import build_verifier
from luffy.types import Problem
resolve("named.inner:length")
with build_verifier("named.inner:length", workers=1) as verifier:
    print(json.dumps([score.value for score in verifier.score([(Problem("1", "", ""), "four")])]))
"""


def test_a_file_of_the_current_folder_stands_in_for_no_other_module(tmp_path):
    """Neither for one of the standard library nor for one that is not installed; only what is named is found there."""
    reward = "def length(response, answer, problem):\n    return len(response)\n"
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "inner.py").write_text(f"from named.beside import length\n{reward}")
    (tmp_path / "named" / "beside.py").write_text(reward)
    for name in sys.stdlib_module_names | {"typer", "yaml", "numpy", "wandb", "orjson", "gmpy2"}:
        (tmp_path / f"{name}.py").write_text(f"open('taken', 'a').write('{name} ')")
    environment = os.environ | {"PYTHONPATH": str(Path(luffy.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-P", "-c", COMMANDS], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    taken = (tmp_path / "taken").read_text() if (tmp_path / "taken").exists() else ""
    assert (taken, done.stdout.splitlines()[-2:]) == ("", ["2", "[4.0]"])
    assert json.loads(done.stdout.splitlines()[-1]) == [4.0] and "no folder nowhere" in done.stderr


def test_plugins_import_each_other_but_no_file_that_was_not_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(NAMED, "folders", {})
    path = list(sys.path)
    (tmp_path / "uses_helper.py").write_text(
        "from own_helper import twice\ndef reward(r, a, p):\n    return twice(len(r))\n"
    )
    (tmp_path / "own_helper.py").write_text("def twice(value):\n    return 2 * value\n")
    message = "No module named 'own_helper'; add own_helper.py to 'plugins'"
    for load in (lambda: load_plugins(["uses_helper.py"]), lambda: resolve("uses_helper:reward")):
        with pytest.raises(UserError, match=message):
            load()
    try:
        using, helper = load_plugins(["uses_helper.py", "own_helper.py"])
        assert using.twice is helper.twice and sys.path == path
        with build_verifier("uses_helper:reward", workers=1) as verifier:
            assert verifier.score([(Problem("1", "", ""), "four")]) == [Score(8.0)]
    finally:
        for name in ("uses_helper", "own_helper"):
            sys.modules.pop(name, None)


def test_the_current_folder_leaves_the_path_of_started_processes(tmp_path, monkeypatch):
    """Unless luffy itself lies there, or PYTHONPATH names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{tmp_path}")
    leave_current_folder()
    assert sys.path == [str(tmp_path), "", "/elsewhere"] and python_flags() == ["-P"]
    for value in ("/elsewhere", ""):
        monkeypatch.setenv("PYTHONPATH", value)
        monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/elsewhere"])
        leave_current_folder()
        assert sys.path == ["/elsewhere"]
    home = Path(luffy.__file__).parents[1]
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home)])
    leave_current_folder()
    assert sys.path == [str(home)] and python_flags() == []


def test_a_module_by_name_and_a_second_import(plugin, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "own")
    (module,) = load_plugins(["my_plugin"])
    assert load_plugins(["my_plugin", plugin]) == [module, module]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, "'plugins': no file 'gone.py'"),
        ("no_such_plugin", None, "cannot import 'no_such_plugin': ModuleNotFoundError"),
        ("json.py", "", "has the name of another module"),
        ("broken_plugin.py", "1 / 0", "cannot import 'broken_plugin.py': ZeroDivisionError"),
        ("ending_plugin.py", "raise SystemExit(0)", "cannot import 'ending_plugin.py': SystemExit: 0"),
    ],
)
def test_a_plugin_that_cannot_be_loaded(name, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_config("tiny/luffy", [f"plugins=[{name}]"])


def test_a_module_that_ends_the_process_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ending_module.py").write_text("raise SystemExit(0)")
    with pytest.raises(UserError, match="cannot import 'ending_module' for 'ending_module:score': SystemExit: 0"):
        resolve("ending_module:score")


def test_plugins_are_a_list_of_names():
    with pytest.raises(ConfigError, match="'plugins' must be a list"):
        load_config("tiny/luffy", ["plugins=my_plugin"])


def test_a_reward_that_verifier_processes_cannot_import_runs_here():
    @reward("local_reward")
    def local(response, answer, problem):
        if response == "raise":
            raise KeyError("no")
        return response == answer

    with build_verifier("local_reward") as verifier:
        scores = verifier.score([(Problem("1", "", "a"), text) for text in ("a", "b", "raise")])
    assert scores == [Score(1.0), Score(0.0), Score(0.0, "error")]
    with pytest.raises(UserError, match="there is a reward 'gsm8k' already"):
        reward("gsm8k")(local)
    assert built_in() == ("choice", "format", "gsm8k", "math", "numeric", "reasoning_gym") and "local_reward" in REWARDS


def test_reading_a_config_imports_nothing(tmp_path, monkeypatch):
    """A report or the live page reads configs of runs that others made."""
    (tmp_path / "planted.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "plugins: [planted.py, planted]\nreward: {kind: 'planted:f'}\nrollout: {engine: 'planted:f'}\n"
        "guidance: {strategy: 'planted:f', gate: 'planted:f'}\nalgorithm: {credit: 'planted:f', off_policy_reshape: 'planted:f'}\n"
    )
    assert read_config(tmp_path / "config.yaml")["algorithm.off_policy_reshape"] == "planted:f"
    assert "planted" not in sys.modules
