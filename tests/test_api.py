"""What a script or notebook uses."""

import subprocess
import sys
from pathlib import Path

import pytest

import luffy
from luffy import api
from luffy.config import load_config
from luffy.errors import ConfigError

PUBLISHED = ["compute_grpo_outcome_advantage_split", "compute_sft_pure_loss", "compute_token_on_off_policy_loss"]


def test_dir_shows_what_there_is():
    assert sorted(set(dir(luffy)) - {"__version__"}) == ["api", *PUBLISHED]
    assert all(callable(getattr(luffy, name)) for name in PUBLISHED)
    assert dir(api) == sorted(api.__all__) and all(getattr(api, name) is not None for name in api.__all__)


def test_importing_loads_neither_torch_nor_transformers():
    code = "import sys, luffy; dir(luffy); luffy.api; dir(luffy.api); luffy.api.reward; luffy.api.evaluate"
    check = f"{code}; print(sorted(set(sys.modules) & {{'torch', 'transformers', 'numpy', 'yaml'}}))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout == "[]\n"


def test_a_config_from_dictionaries():
    cfg = api.load_config(
        {"base": ["sizes/tiny", "methods/mixed"], "name": "mine", "optim": {"lr": 0.5}},
        {"batch.problems": 3, "seed": 7},
    )
    assert (cfg.name, cfg.optim.lr, cfg.batch.problems, cfg.seed) == ("mine", 0.5, 3, 7)
    assert cfg.algorithm.off_policy_reshape == "no_reshape" and cfg.data.style == "plain"
    assert api.load_config("tiny/luffy", {"optim.lr": 1e-3}) == load_config("tiny/luffy", ["optim.lr=1e-3"])
    assert api.load_config({"model": {"path": "package:quickstart"}}).model.path == str(
        Path(luffy.__file__).parent / "quickstart"
    )
    with pytest.raises(ConfigError, match=r"unknown key 'optim.lrr' \(did you mean 'optim.lr'"):
        api.load_config({"optim": {"lrr": 1}})
    recipe = {"data": {"columns": {"a": "b"}}}
    api.load_config(recipe, {"data.columns.a": "c"})
    assert recipe == {"data": {"columns": {"a": "b"}}}  # the caller's own is left alone


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file with a shape of its own, named in a recipe."""
    (tmp_path / "own_shape.py").write_text(
        "from luffy.api import shape\n\n@shape('halved')\ndef halved(log_p, settings):\n    return log_p.exp() / 2\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "own_shape.py"
    sys.modules.pop("own_shape", None)


def test_training_step_by_step(plugin, tmp_path):
    @api.reward("a_quarter")
    def a_quarter(response, answer, problem):
        return 0.25

    cfg = api.load_config(
        {"base": "tiny/luffy", "plugins": [str(plugin)], "algorithm": {"off_policy_reshape": "halved"}},
        {"reward.kind": "a_quarter", "train.steps": 2, "batch.problems": 2, "eval.limit": 4, "eval.every": 0,
         "eval.max_tokens": 4, "record.tensorboard": False, "out": str(tmp_path / "runs")},
    )  # fmt: skip
    with api.Trainer(cfg) as trainer:
        steps = list(trainer.steps())
        held_out = trainer.evaluate()
        model = trainer.train()
    assert [step for step, _ in steps] == [1, 2]
    assert [metrics["critic/rewards/mean"] for _, metrics in steps] == [0.25, 0.25]
    ratio = steps[0][1]["actor/off_ratio_mean"]
    assert ratio == pytest.approx(steps[0][1]["actor/off_policy_prob"] / 2)
    assert held_out["val-core/score"].value == 0.25 and (model / "model.safetensors").is_file()
    assert (cfg.folder / "plugins" / "own_shape.py").read_text() == plugin.read_text()


def test_generate_and_evaluate(tmp_path):
    base = api.load_config("tiny/luffy")
    rows = api.generate(base.model.path, ["3+4=", "2+2="], n=2, max_tokens=4, style="plain", device="cpu")
    assert [(row["id"], row["sample"]) for row in rows] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert all(len(row["token_ids"]) == len(row["log_probs"]) <= 4 for row in rows)
    result = api.evaluate(
        base.model.path, base.data.eval, tmp_path, reward="gsm8k", limit=4, max_tokens=8, style="plain", device="cpu"
    )
    (figures,) = result.benchmarks.values()
    assert 0 <= figures.accuracy <= 1 and (tmp_path / "result.json").is_file()


def test_no_prompts_need_no_model():
    assert api.generate("nowhere", []) == []


def test_evaluate_takes_the_options_of_the_command(tmp_path):
    """Under their names, and folders as text."""
    model = api.load_config("tiny/luffy").model.path
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "3+4=?", "answer": "#### 7"}\n')
    short = {"max_tokens": 1, "style": "plain", "device": "cpu"}
    result = api.evaluate(model, "gsm8k", out=str(tmp_path / "out"), data=str(tmp_path), shuffle=False, **short)
    assert result.settings["shuffle_options"] is False and (tmp_path / "out" / "result.json").is_file()


def test_the_page_is_generated_from_the_docstrings():
    from pages import API_GROUPS, api_page

    assert sorted(name for names in API_GROUPS.values() for name in names) == sorted(api.__all__)
    page = Path(__file__).parents[1] / "docs" / "api.md"
    assert page.read_text() == api_page(), "run `make docs`"
