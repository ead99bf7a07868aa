"""An evaluation takes reward, style and system prompt from the run or the card of its model, and says so."""

import json
import shutil
from importlib import resources
from types import SimpleNamespace

import pytest
from builders import make_rollout, make_task, make_tokenizer
from commands import luffy

from luffy.errors import UserError
from luffy.evaluation.plan import Options, PlannedResponse
from luffy.evaluation.scoring import scored
from luffy.evaluation.trained_with import as_trained, training_of
from luffy.generate import as_trained as prompt_of
from luffy.report.model_card import CardFacts, model_card
from luffy.rewards import build_verifier
from luffy.run_folder.checkpoint import model_of
from luffy.run_folder.runs import read_config, without_samples
from studies.quickstart.task import write_dataset

BASE = resources.files("luffy.quickstart") / "assets" / "base"
CONFIG = """
data: {style: plain, system_prompt: null}
reward: {kind: gsm8k, success: 0.5, answer_in_thought: true}
train: {steps: 4}
"""


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, the first of which is the best."""
    folder = tmp_path / "runs" / "mine"
    for step in (2, 4):
        shutil.copytree(BASE, folder / "checkpoints" / f"step-{step:06d}" / "model")
        (folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "latest").symlink_to("step-000004")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "best.json").write_text('{"step": 2, "accuracy": 0.5}')
    return folder


@pytest.fixture
def suite(tmp_path):
    return write_dataset(tmp_path / "sums", 0, train=8, heldout=2, ood=4, terms=2)["heldout"]


def newest_model_path(run):
    return str(run / "checkpoints" / "latest" / "model")


def options_of(model, **more):
    return Options(**{"model": str(model), "suite": "own.jsonl", **more})


def test_reward_style_and_system_prompt_are_those_of_the_run(run):
    (run / "config.yaml").write_text(
        "data: {style: chat, system_prompt: Think.}\nreward: {weights: {math: 1, format: 0.5}, timeout_s: 3}\n"
    )
    options, said = as_trained(options_of(newest_model_path(run)), given=())
    assert (options.style, options.system_prompt) == ("chat", "Think.")
    assert options.reward_settings.weights == {"math": 1.0, "format": 0.5} and options.reward_settings.timeout_s == 3
    assert said == (
        f"as trained reward 1 math + 0.5 format, style 'chat', system prompt 'Think.'; from the run {run} (choose others "
        "with --reward, --style, --system-prompt)"
    )


def test_options_of_the_user_stay(run):
    (run / "config.yaml").write_text("data: {style: chat, system_prompt: Think.}\nreward: {kind: numeric}\n")
    options, said = as_trained(
        options_of(newest_model_path(run), style="auto", reward="choice"), given=("style", "reward")
    )
    assert (options.style, options.system_prompt, options.reward_settings, said) == ("auto", None, None, None)
    options, said = as_trained(options_of(newest_model_path(run), system_prompt=""), given=("system_prompt",))
    assert (options.style, options.system_prompt) == ("chat", "") and "system prompt" not in said
    options, _ = as_trained(options_of(newest_model_path(run), answer_in_thought=True), given=())
    assert options.reward_settings.answer_in_thought


def test_a_suite_keeps_its_own_reward(run):
    options, said = as_trained(options_of(newest_model_path(run), suite="ood"), given=())
    assert options.reward_settings is None and options.style == "plain" and "reward" not in said


def test_settings_are_those_of_the_step(run):
    """A resume after step 2 changed the style."""
    (run / "config-step-000002.yaml").write_text("data: {style: chat}\n")
    styles = [as_trained(options_of(run / "checkpoints" / f"step-00000{s}" / "model"), ())[0].style for s in (2, 4)]
    assert styles == ["chat", "plain"]


def test_a_copy_of_the_newest_checkpoint_is_known_by_its_state(run):
    """A copy that followed the links made a folder of ``latest``; it is of step 2, before a change of the style."""
    (run / "config-step-000002.yaml").write_text("data: {style: chat}\n")
    (run / "checkpoints" / "latest").unlink()
    shutil.copytree(run / "checkpoints" / "step-000002", run / "checkpoints" / "latest")
    (run / "checkpoints" / "latest" / "state.json").write_text('{"progress": {"step": 2}}')
    options, said = as_trained(options_of(newest_model_path(run)), given=())
    assert options.style == "chat" and f"from the run {run}" in said


@pytest.mark.parametrize("text", ["[another tool's]\n", "data: {style: fancy}\n", "reward: {model: x}\n", "a: [\n", ""])
def test_a_config_of_another_tool_is_not_taken_and_not_hidden(run, text):
    (run / "config.yaml").write_text(text)
    options, said = as_trained(options_of(newest_model_path(run)), given=())
    assert (options.style, options.reward_settings) == ("auto", None)
    assert (said is None) == (text in ("[another tool's]\n", "")) and "not as trained: " in (said or "not as trained: ")


def test_a_reward_whose_plugin_is_not_there_is_one_line(run):
    (run / "config.yaml").write_text("plugins: [no_such_module]\nreward: {kind: mine}\n")
    with pytest.raises(
        UserError, match=r"^the reward of the run .* cannot be used: .*no_such_module.*; give --reward$"
    ):
        as_trained(options_of(newest_model_path(run)), given=())


def card_of(write_run, make_metric_row, tmp_path, config):
    """A model folder that was downloaded: no run around it, its card says how it was trained."""
    folder = write_run("mine", [make_metric_row(1, 0.5)], config)
    record = without_samples(folder, read_config(folder / "config.yaml"), 1)
    model = tmp_path / "downloaded"
    shutil.copytree(BASE, model)
    (model / "README.md").write_text(model_card(CardFacts(record, 1)))
    return model


def test_a_model_card_says_how_it_was_trained(write_run, make_metric_row, tmp_path):
    config = {
        "data": {"style": "chat", "system_prompt": "a --> b\n<c> `d`"},
        "reward": {"weights": {"numeric": 1.0, "format": 0.25}, "success": 1.25},
    }
    model = card_of(write_run, make_metric_row, tmp_path, config)
    assert "a --> b" not in (model / "README.md").read_text().split("## Settings")[0]
    options, said = as_trained(options_of(model), given=())
    assert (options.style, options.system_prompt) == ("chat", "a --> b\n<c> `d`")
    assert (
        options.reward_settings.weights == {"numeric": 1.0, "format": 0.25} and options.reward_settings.success == 1.25
    )
    assert f"from the model card {model / 'README.md'}" in said
    (model / "README.md").write_text("# My own card\n")
    assert training_of(str(model)) is None


@pytest.mark.parametrize("kind", ["my_rewards:score", "https://judge.example/score"])
def test_a_card_passes_on_no_code_and_no_address(write_run, make_metric_row, tmp_path, kind):
    model = card_of(write_run, make_metric_row, tmp_path, {"reward": {"kind": kind}})
    assert kind not in (model / "README.md").read_text().split("## Settings")[0]
    options, _ = as_trained(options_of(model), given=())
    assert options.reward_settings is None
    line = json.dumps({"data": {}, "reward": {"kind": kind}})  # of a stranger's card
    (model / "README.md").write_text(f"<!-- Trained with: {line} -->\n")
    options, said = as_trained(options_of(model), given=())
    assert options.reward_settings is None and "which is not built in" in said


def test_a_run_folder_stands_for_its_best_else_its_newest_checkpoint(run):
    best, latest = (str(run / "checkpoints" / f"step-{step:06d}" / "model") for step in (2, 4))
    assert model_of(str(run)) == (best, "step 2, best by held-out accuracy")
    assert model_of(str(run / "checkpoints" / "step-000004")) == (latest, None)
    assert model_of(latest) == (latest, None) and model_of("org/model") == ("org/model", None)
    shutil.rmtree(run / "checkpoints" / "step-000002")  # kept no longer
    assert model_of(str(run)) == (latest, "step 4, newest")
    (run / "best.json").unlink()
    assert model_of(str(run)) == (latest, "step 4, newest")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no checkpoint yet; train it first"):
        model_of(str(run))


def test_eval_of_a_run_from_the_shell(run, suite, tmp_path):
    code, out, err = luffy("eval", run, "--suite", suite, "--max-tokens", 24, "--out", tmp_path / "eval", "--json")
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0] == f"model      {run}/checkpoints/step-000002/model (step 2, best by held-out accuracy)"
    assert lines[1].startswith("as trained reward gsm8k, style 'plain'; from the run ")
    settings = json.loads((tmp_path / "eval" / "settings.json").read_text())
    assert (settings["reward"], settings["style"]) == ("gsm8k", "plain")
    assert (settings["success"], settings["answer_in_thought"]) == (0.5, True)
    assert json.loads(out)["model"] == json.loads((tmp_path / "eval" / "result.json").read_text())["model"]


def test_generate_from_a_run_from_the_shell(run):
    code, out, err = luffy("generate", run, "1+2", "--max-tokens", 4, "--temperature", 0)
    assert code == 0 and out.strip()
    assert "(step 2, best by held-out accuracy)" in err and "as trained style 'plain'; from the run" in err
    assert (
        luffy("generate", newest_model_path(run), "1+2", "--max-tokens", 4, "--temperature", 0, "--style", "plain")[1]
        == out
    )


def test_generate_takes_the_prompt_of_the_training(run):
    (run / "config.yaml").write_text("data: {style: chat, system_prompt: Think.}\n")
    assert prompt_of(newest_model_path(run), None, None)[:2] == ("chat", "Think.")
    assert prompt_of(newest_model_path(run), "plain", None) == ("plain", None, None)
    assert prompt_of(newest_model_path(run), None, "Other.")[:2] == ("chat", "Other.")
    assert prompt_of(str(BASE), None, None) == ("auto", None, None)


def test_an_evaluated_response_that_was_cut_off_fails_if_the_training_says_so():
    task, ids = make_task(answer="5"), make_tokenizer()("2+3\n#### 5")["input_ids"]
    ends = [make_rollout(ids, task=task, finish=finish) for finish in ("stop", "length")]
    responses = [(PlannedResponse("sums", task, sample), end) for sample, end in enumerate(ends)]
    for most, right in ((None, [True, True]), (0.0, [True, False])):
        with build_verifier("gsm8k", most_if_cut_off=most) as verifier:
            settings = SimpleNamespace(success=1.0, seed=0)
            rows, _ = scored(responses, make_tokenizer(), verifier, settings, is_first=True)
        assert [row["right"] for row in rows] == right
