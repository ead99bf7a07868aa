"""The command line as a user meets it: exit codes, one-line errors, nothing half-written."""

import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders import write_rows
from commands import luffy
from trainings import stop_before_update

import luffy as luffy_package
from luffy.config import load_config
from luffy.errors import ConfigError
from luffy.generate import read_prompts
from luffy.report.methods import group_runs
from luffy.run_folder.runs import load_run
from luffy.train.loop import Trainer


@pytest.fixture
def recipe(tmp_path, tiny_model, sums):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
out: {tmp_path / "runs"}
model: {{path: {tiny_model}, device: cpu}}
data: {{train: {sums}, style: plain, max_prompt_tokens: 16}}
reward: {{kind: numeric, workers: 1}}
rollout: {{n: 4, max_tokens: 16}}
optim: {{lr: 1e-3}}
batch: {{problems: 4, tokens: 128}}
train: {{steps: 2, threads: 1}}
"""
    )
    return path


def test_train_runs_and_its_piped_output_is_readable(recipe, tmp_path):
    result = luffy("train", recipe, "name=first")
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert [line.split("  ")[1] for line in lines if "step" in line] == ["step 1/2", "step 2/2"]
    assert "\x1b" not in result.stderr + result.stdout and "reward" in lines[0] and "eta" in lines[0]
    model = tmp_path / "runs" / "first" / "checkpoints" / "step-000002" / "model"
    assert f"model      {model}" in result.stdout and (model / "config.json").is_file()


def test_seeds_trains_several_times_and_they_are_one_method(recipe, tmp_path):
    result = luffy("train", recipe, "name=several", "train.steps=1", "seed=3", "--seeds", "2")
    assert result.returncode == 0, result.stderr
    folders = [tmp_path / "runs" / "several" / f"seed-{seed}" for seed in (3, 4)]
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [(c["seed"], c["name"]) for c in configs] == [(3, "several/seed-3"), (4, "several/seed-4")]
    (method,) = group_runs([load_run(folder) for folder in folders])
    assert method.label == "several" and [run.seed for run in method.runs] == [3, 4]
    again = luffy("train", recipe, "name=several", "train.steps=1", "seed=3", "--seeds=2")
    assert again.stdout.count("already finished at step 1") == 2
    result = luffy("train", recipe, "--seeds", "2", "--resume", tmp_path)
    assert result.returncode == 2 and "--seeds asks for 2 trainings" in result.stderr
    assert ", the first of 2 seeds)" in luffy("train", recipe, "--seeds", "2", "--dry-run").stdout


def test_ctrl_c_saves_the_step_under_way(recipe, tmp_path):
    """Of the installed command. The terminal sends it to the whole group: the verifier's workers get it too."""
    changes = ["name=cut", "train.steps=100000", "record.tensorboard=false"]  # TensorBoard takes a second to import
    command = [Path(sys.executable).parent / "luffy", "train", recipe, *changes]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert any("step 2/100000" in line for line in running.stderr)
        os.killpg(running.pid, signal.SIGINT)
        said = running.stderr.read()
    assert running.returncode == 130
    assert re.search(r"^luffy: stopped at step (\d+) by Ctrl-C; the same command goes on there", said, re.MULTILINE), (
        said
    )
    assert "error" not in said
    (saved,) = (tmp_path / "runs" / "cut" / "checkpoints").glob("step-*")
    rows = (tmp_path / "runs" / "cut" / "metrics.jsonl").read_text().splitlines()
    assert saved.name == f"step-{len(rows):06d}"


def test_a_stopped_run_says_that_it_goes_on_without_its_resume(recipe, monkeypatch):
    stop_before_update(monkeypatch, 2, "stopped: run the same command again")
    first = luffy("train", recipe, "--resume", "never")
    assert first.returncode == 1
    assert first.stderr.splitlines()[-1].endswith("the same command again (with --resume auto instead of never)")
    assert luffy("train", recipe).stderr.splitlines()[-1].endswith("run the same command again")


def test_help_shows_every_knob_and_only_working_commands():
    text = luffy("train", "--help").stdout
    assert "guidance.n_prefix = 1" in text and "samples of each group that start from a trace" in text
    listed = luffy("--help").stdout.split("Commands:")[1]
    for command in [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]:
        assert luffy(command, "--help").returncode == 0


def test_print_config_is_a_recipe_itself(recipe, tmp_path):
    shown = luffy("train", recipe, "rollout.n=6", "--print-config").stdout
    (tmp_path / "again.yaml").write_text(shown)
    assert luffy("train", tmp_path / "again.yaml", "--print-config").stdout == shown and "n: 6" in shown


def test_dry_run_prints_the_plan_and_writes_nothing(recipe, tmp_path):
    for method in ("train", "sft"):
        result = luffy(method, recipe, "--dry-run")
        assert result.returncode == 0, result.stderr
        assert "with_traces 16" in result.stdout and "GiB at the peak" in result.stdout
    assert "4 problems x 4 samples" in luffy("train", recipe, "--dry-run").stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "did you mean 'optim.lr'"),
        (["data.train=missing.jsonl"], "missing.jsonl"),
        (["model.path=no/such/folder/here"], "no/such/folder/here"),
        (["model.path="], "'model.path' must be text"),
        (["guidance.n_prefix=5"], "exceeds 'rollout.n' (4)"),
        (["data.columns={prompt: prompt, answer: answer, traces: nothing}"], "nothing"),
        (["data.max_prompt_tokens=2"], "data.max_prompt_tokens"),
        (["rollout.max_tokens=4", "batch.tokens=64"], "longer than rollout.max_tokens=4"),
        (["rollout.max_tokens=120", "batch.tokens=999"], "exceeds the model's context of 128"),
        (["reward.kind=mathh"], "math"),
        (["reward.kind=no_such_module:f"], "no_such_module"),
        (["data.style=chat"], "chat template"),
        (["train.steps=null"], "train.steps or train.epochs"),
        (["model.device=cuda"], "sees no GPU"),
        (["algorithm.teacher_probs=recorded"], "no recorded log-probs"),
        (["algorithm.kl_coef=0.1", "model.reference=no/such/reference"], "no/such/reference"),
        (["model.lora={target_modules: [nothing]}"], "nothing"),
        (["rollout.offpolicy_guidance.model_path=no/such/guide"], "no/such/guide"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_bad_input_is_one_clear_line_and_exit_code_2(recipe, tmp_path, overrides, message, mode):
    result = luffy("train", recipe, *overrides, *mode)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs").exists()


def test_empty_data_and_a_bad_row_name_the_file(recipe, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    result = luffy("train", recipe, f"data.train={empty}")
    assert result.returncode == 2 and "empty.jsonl" in result.stderr
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1", "answer": "2", "traces": ["2"]}\n{"prompt": "1+2", "answer": null}\n')
    result = luffy("train", recipe, f"data.train={bad}")
    assert result.returncode == 2 and "bad.jsonl:2" in result.stderr and "'answer'" in result.stderr


def test_a_tokenizer_without_eos(recipe, tmp_path, tiny_model):
    folder = tmp_path / "no_eos"
    folder.mkdir()
    for file in tiny_model.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer_config.json":
            settings = json.loads(text)
            settings.pop("eos_token")
            text = json.dumps(settings).encode()
        (folder / file.name).write_bytes(text)
    result = luffy("train", recipe, f"model.tokenizer={folder}")
    assert result.returncode == 2 and "EOS" in result.stderr.upper(), result.stderr


def test_generate_from_argument_file_and_stdin(tiny_model, tmp_path):
    options = ["--style", "plain", "--max-tokens", "5", "--seed", "3", "--json"]
    rows = [json.loads(line) for line in luffy("generate", tiny_model, "1+2", "--n", "2", *options).stdout.splitlines()]
    assert [r["sample"] for r in rows] == [0, 1] and all(len(r["token_ids"]) == len(r["log_probs"]) <= 5 for r in rows)
    piped = luffy("generate", tiny_model, *options, stdin="1+2\n").stdout
    assert json.loads(piped)["token_ids"] == rows[0]["token_ids"]
    (tmp_path / "prompts.txt").write_text("1+2\n3+4\n")
    listed = luffy("generate", tiny_model, "--file", tmp_path / "prompts.txt", *options).stdout.splitlines()
    assert len(listed) == 2 and json.loads(listed[0])["token_ids"] == rows[0]["token_ids"]
    for name in ("prompts.ndjson", "prompts.JSONL", "prompts.json"):
        (tmp_path / name).write_text('{"prompt": "1+2", "id": "a"}\n')
        [problem] = read_prompts(None, tmp_path / name, io.StringIO())
        assert (problem.id, problem.prompt) == ("a", "1+2")
    (tmp_path / "odd.txt").write_bytes("a\fb\u2028c\x85d\r\n \r\n e\rf".encode())
    assert [problem.prompt for problem in read_prompts(None, tmp_path / "odd.txt", io.StringIO())] == [
        "a\fb\u2028c\x85d", " e\rf",
    ]  # fmt: skip
    result = luffy("generate", tiny_model, stdin="")
    assert result.returncode == 2 and "no prompt" in result.stderr


def test_verify_scores_rows_in_order(tmp_path):
    rows = [("72", "so \\boxed{72}"), ("1/2", "thus \\boxed{0.5}"), ("3", "I do not know"), ("4", "\\boxed{5}")]
    path, out = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    write_rows(path, ({"answer": a, "response": r} for a, r in rows))
    result = luffy("verify", path, "--workers", 1, "--out", out)
    assert result.returncode == 0, result.stderr
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert [s["score"] for s in scores] == [1.0, 1.0, 0.0, 0.0] and scores[2]["status"] == "no_answer"
    assert "4 rows, mean score 0.5000, no_answer 1, ok 3;" in result.stderr
    printed = luffy("verify", path, "--reward", "numeric").stdout.splitlines()
    assert [json.loads(line)["score"] for line in printed] == [1.0, 1.0, 0.0, 0.0]
    path.write_text('{"answer": "1"}\n')
    result = luffy("verify", path, "--reward", "numeric", "--out", tmp_path / "none.jsonl")
    assert result.returncode == 2 and "rows.jsonl:1" in result.stderr and not (tmp_path / "none.jsonl").exists()


def test_the_version_and_a_recipe_that_is_not_there(monkeypatch, capsys):
    assert luffy("--version").stdout.startswith("luffy 0.")
    monkeypatch.setattr(sys, "argv", ["luffy", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("luffy", run_name="__main__")
    assert capsys.readouterr().out == luffy("--version").stdout
    mistake = luffy("train", "nowhere")
    assert mistake.returncode == 2 and mistake.stderr.startswith("luffy: error: no recipe 'nowhere'")


def test_help_shows_whole_descriptions():
    for group in ([], ["prepare"], ["bench"], ["eval"]):
        listed = luffy(*group, "--help").stdout.split("Commands:")[1]
        assert not any(line.endswith("...") for line in listed.splitlines()) and len(listed.split()) > 20
    assert "traces, or both." in " ".join(luffy("--help").stdout.split())


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--steps", "3"], "--steps: unknown option; write algorithm.mix.steps=3 or train.steps=3"),
        (["--steps=3"], "or train.steps=3"),
        (["--optim.lr", "1e-6"], "write optim.lr=1e-6"),
        (["--max-prompt-tokens=9"], "write data.max_prompt_tokens=9"),
        (["--max-tokens", "9"], "write rollout.max_tokens=9 or environment.max_tokens=9 or eval.max_tokens=9"),
        (["--normalize_std", "--dry-run"], "write algorithm.normalize_std=..."),
        (["--no-such-thing"], "section.key=value (luffy train --help lists them)"),
    ],
)
def test_a_knob_written_as_an_option_is_told_as_it_should_be(recipe, options, advice):
    result = luffy("train", recipe, *options)
    assert result.returncode == 2 and advice in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("out", ["/proc/nowhere", "{file}/below"])
def test_a_run_folder_that_cannot_be_made_names_its_knob(recipe, tmp_path, out):
    (tmp_path / "file").write_text("")
    out = out.format(file=tmp_path / "file")
    result = luffy("train", recipe, f"out={out}")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert f"cannot write the run folder {out}" in result.stderr and "choose another out=" in result.stderr


def test_data_without_answers_points_to_sft_and_the_column_map(recipe, tmp_path):
    path = tmp_path / "no_answers.jsonl"
    path.write_text('{"prompt": "1+1", "traces": ["1+1=2"], "solution": "2"}\n')
    result = luffy("train", recipe, f"data.train={path}")
    assert result.returncode == 2 and "no_answers.jsonl:1" in result.stderr
    assert "data.columns={prompt: prompt, answer: ..., traces: traces}" in result.stderr
    assert "luffy sft" in result.stderr


@pytest.fixture
def own_code(tiny_model, tmp_path, monkeypatch):
    """A model of a class that only its own folder has."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = shutil.copytree(tiny_model, tmp_path / "own-code")
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own-code'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own-code", "architectures": ["OwnForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_trained_with_code_of_its_own_is_used_if_that_is_trusted(recipe, own_code, sums, tmp_path):
    trained = luffy("train", recipe, "name=own", f"model.path={own_code}", "train.steps=1", "rollout.n=2")
    told = "read it, then set model.trust_remote_code=true, or give --trust-remote-code"
    assert trained.returncode == 2 and told in trained.stderr and not (tmp_path / "modules").exists()
    trust = "model.trust_remote_code=true"
    trained = luffy("train", recipe, "name=own", f"model.path={own_code}", "train.steps=1", "rollout.n=2", trust)
    assert trained.returncode == 0, trained.stderr
    model = tmp_path / "runs" / "own" / "checkpoints" / "latest" / "model"
    made = {"evaluated": tmp_path / "eval" / "result.json", "traces": tmp_path / "traces.parquet",
            "longer": tmp_path / "longer" / "chat_template.jinja"}  # fmt: skip
    short = ["--style", "plain", "--max-tokens", "5", "--device", "cpu"]
    commands = [
        ["generate", model, "1+2", *short],
        ["eval", model, "--suite", sums, "--limit", "2", "--out", made["evaluated"].parent, *short],
        [
            "prepare",
            "traces",
            sums,
            "--local",
            model,
            "--tokenizer",
            model,
            "--limit",
            "2",
            "--out",
            made["traces"],
            *short,
        ],
        ["prepare", "model", model, "--out", made["longer"].parent, "--rope-theta", "0"],
    ]
    for command in commands:
        refused = luffy(*command)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr
        result = luffy(*command, "--trust-remote-code")
        assert result.returncode == 0, result.stderr
    assert all(path.exists() for path in made.values())


def test_generate_takes_what_the_context_leaves(tiny_model, tmp_path):
    options = ["--style", "plain", "--json"]
    row = json.loads(luffy("generate", tiny_model, "1+2", *options).stdout)
    assert len(row["token_ids"]) <= 128 - 3 and (row["finish"] == "length") == (len(row["token_ids"]) == 125)
    result = luffy("generate", tiny_model, "1+2", "--max-tokens", "126", *options)
    assert result.returncode == 2 and "at most 125" in result.stderr
    (tmp_path / "prompts.txt").write_text("1+2\n" + "1+" * 60 + "2\n")
    both = luffy("generate", tiny_model, "--file", tmp_path / "prompts.txt", *options).stdout.splitlines()
    assert json.loads(both[0])["token_ids"] == row["token_ids"]  # a long prompt takes nothing from the others
    assert len(json.loads(both[1])["token_ids"]) <= 128 - 121
    full = luffy("generate", tiny_model, "1+" * 64, *options)
    assert (
        full.returncode == 2 and "problem '0': the prompt leaves no room in the model's context of 128" in full.stderr
    )


def test_verify_reads_standard_input():
    rows = [("72", "\\boxed{72}"), ("3", "\\boxed{4}")]
    text = "".join(json.dumps({"answer": a, "response": r}) + "\n" for a, r in rows)
    result = luffy("verify", "-", "--reward", "numeric", stdin=text)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["score"] for line in result.stdout.splitlines()] == [1.0, 0.0]
    result = luffy("verify", "-", "--reward", "numeric", stdin='{"answer": "1"}\n')
    assert result.returncode == 2 and "standard input:1" in result.stderr


def said_of_no_hub(result, name):
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert name in result.stderr and "http://127.0.0.1:9 cannot be reached" in result.stderr


def test_a_hub_that_does_not_answer_is_one_line(recipe, unreachable_hub):
    said_of_no_hub(luffy("train", recipe, "data.train=org/data", "--dry-run"), "org/data")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model.path=org/model", "data.train=org/data"])
def test_a_hub_that_does_not_answer_is_one_line_of_the_command(recipe, what):
    command = [str(Path(sys.executable).parent / "luffy"), "train", str(recipe), what, "--dry-run"]
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    said_of_no_hub(
        subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False), what.split("=")[1]
    )


def test_sft_does_not_take_the_learning_rate_of_rl_in_silence(recipe, tmp_path):
    own = tmp_path / "own.yaml"
    text = recipe.read_text().replace("optim: {lr: 1e-3}\n", "")

    def said(*overrides, base="", command="sft"):
        own.write_text(base + text)
        result = luffy(command, own, *overrides, "--print-config")
        assert result.returncode == 0, result.stderr
        return result.stderr

    assert said() == (
        "warning: optim.lr=1e-06 comes from the default, which is meant for RL; SFT usually takes 10 to 50 times as "
        "much: set optim.lr\n"
    )
    assert "comes from base tiny/luffy" in said(base="base: tiny/luffy\n")
    assert said("optim.lr=1e-5") == said(base="base: small/sft\n") == said(command="train") == ""
    text += "optim: {lr: 1e-4}\n"
    assert said() == ""


def test_a_recipe_of_sft_is_not_trained_by_rl_in_silence(tmp_path):
    message = "recipe 'tiny-sft' is made for SFT: run it with luffy sft"
    result = luffy("train", "tiny/sft", f"out={tmp_path}", "--dry-run")
    assert result.returncode == 2 and message in result.stderr
    with pytest.raises(ConfigError, match=message):
        Trainer(load_config("tiny/sft", {"out": str(tmp_path)}))
    assert luffy("sft", "tiny/sft", f"out={tmp_path}", "--dry-run").returncode == 0


def test_a_current_folder_that_was_deleted_is_one_line(tmp_path):
    """Importing torch there would end the process with an error of MKL."""
    gone = tmp_path / "gone"
    gone.mkdir()
    into = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", into, sys.executable, "-m", "luffy", "recipes"]
    environment = os.environ | {"PYTHONPATH": str(Path(luffy_package.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "luffy: error: the current folder does not exist any more; change to another one and run it again\n"
    )
