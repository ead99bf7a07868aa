"""A recipe makes a user's own module known: on the trainer's side and in verifier processes."""

import sys
import textwrap

import pytest

from luffy.config import load_config, to_yaml
from luffy.errors import ConfigError, UserError
from luffy.plugins import load_plugins
from luffy.report.runs import read_config
from luffy.rewards import build_verifier
from luffy.rewards.kinds import OWN_REWARDS, built_in, reward
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
    monkeypatch.setattr(sys, "path", list(sys.path))
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
    ],
)
def test_a_plugin_that_cannot_be_loaded(name, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_config("tiny/luffy", [f"plugins=[{name}]"])


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
        reward("gsm8k")
    assert built_in() == ("choice", "format", "gsm8k", "math", "numeric") and "local_reward" in OWN_REWARDS


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
