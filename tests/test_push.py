"""``luffy push`` against a hub on loopback. The client has read its settings when it was imported: they are set there."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from commands import luffy
from hub_server import TOKEN, HubServer
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM

from luffy.errors import UserError
from luffy.evaluation.engines import model_identity
from luffy.hub import hub_fault
from luffy.push import files_to_push, find_model, write_card
from luffy.report.model_card import MARK
from luffy.run_folder.checkpoint import Checkpoint
from luffy.train.loop import Trainer


@pytest.fixture(scope="module")
def trained(make_config_in, sums, tmp_path_factory):
    """A run of two steps with checkpoints of both; its folder."""
    make_config = make_config_in(tmp_path_factory.mktemp("trained"))
    cfg = make_config(
        data={"eval": str(sums)}, eval={"every": 1, "limit": 4}, train={"steps": 2, "save_every": 1}, name="mine"
    )
    with Trainer(cfg) as trainer:
        trainer.train()
    return cfg.folder


def evaluation(folder, model, accuracy=0.75):
    """What ``luffy eval`` leaves of a model."""
    folder.mkdir(parents=True)
    settings = {"model_identity": model_identity(str(model)), "temperature": 0.6, "max_tokens": 8, "style": "plain"}
    settings |= {"reward": "math"}
    figures = {"title": "GSM8K", "items": 8, "k": 1, "accuracy": accuracy, "pass_at": {"1": accuracy}}
    (folder / "result.json").write_text(json.dumps({"settings": settings, "benchmarks": {"gsm8k": figures}}))
    return folder


@contextlib.contextmanager
def client_of(hub, folder):
    """Inside, this process knows that hub alone, and no token but the one in the environment."""
    settings = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_TOKEN_PATH": str(folder / "token")}
    settings |= {"HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(constants, name, value)
        for name in ("HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        patch.chdir(folder)
        hub_fault.cache_clear()
        yield
        hub_fault.cache_clear()


@pytest.fixture(scope="module")
def pushed(trained, tmp_path_factory):
    """The hub after a series of pushes, and what each command said."""
    folder = tmp_path_factory.mktemp("pushed")
    evaluation(folder / "evals" / "mine", trained / "checkpoints" / "step-000002" / "model")
    other = evaluation(folder / "evals" / "other", trained / "checkpoints" / "step-000001" / "model", 0.125)
    run, first = str(trained), str(trained / "checkpoints" / "step-000001")
    push = ["push", run]
    calls = {
        "not mine": [*push, "bob/mine"],
        "no name": [*push, "a/b/c"],
        "no folder": ["push", str(folder / "nowhere"), "ann/mine"],
        "no step": [*push, "ann/mine", "--checkpoint", "7"],
        "another model": [*push, "ann/mine", "--eval", str(other)],
        "refused": [*push, "ann/mine"],
        "no token": [*push, "ann/mine"],
        "dry": [*push, "ann/mine", "--dry-run"],
        "plain": [*push, "ann/mine", "--private", "--license", "mit"],
        "branch": ["push", first, "ann/mine", "--revision", "first", "--message", "Of step 1", "--training-state"],
        "again": [*push, "ann/old", "--samples"],
    }
    tokens = {"refused": "hf_wrong", "no token": None}
    hub = HubServer()
    hub.repos["ann/old"] = {}
    hub.files["ann/old"] = {
        "main": {"model-00001-of-00002.safetensors": b"x", "model.safetensors.index.json": b"{}", "notes.md": b"kept"}
    }
    with client_of(hub, folder):
        said = {name: luffy(*args, HF_TOKEN=tokens.get(name, TOKEN)) for name, args in calls.items()}
    hub.close()
    return hub, said


def test_the_hub_has_the_bytes_of_the_folder(pushed, trained, tmp_path):
    hub, said = pushed
    assert said["plain"][0] == 0, said["plain"]
    assert hub.commits[0] == ("ann/mine", "main", "Push with luffy, step 2")
    assert hub.repos["ann/mine"]["name"] == "mine" and "private" in json.dumps(hub.repos["ann/mine"])
    there = dict(hub.files["ann/mine"]["main"])
    assert there.pop(".gitattributes") == b""
    model = trained / "checkpoints" / "step-000002" / "model"
    local = {path.name: path.read_bytes() for path in model.iterdir()}
    assert there.keys() == local.keys()
    assert {name for name in there if there[name] != local[name]} == {"README.md"}  # a later push has made it anew
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "curves.png"} <= there.keys()
    assert there["curves.png"].startswith(b"\x89PNG")
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "pushed     " in said["plain"][1] and "/ann/mine/commit/" in said["plain"][1]


def test_weights_of_another_model_go_and_other_files_stay(pushed, trained):
    hub, said = pushed
    there = dict(hub.files["ann/old"]["main"])
    assert said["again"][0] == 0 and there.pop("notes.md") == b"kept"
    assert {n: b for n, b in there.items() if not n.startswith("training/")} == {
        path.name: path.read_bytes() for path in (trained / "checkpoints" / "step-000002" / "model").iterdir()
    }


def test_the_card_has_what_was_evaluated_since(pushed):
    hub, _ = pushed
    text = hub.files["ann/old"]["main"]["README.md"].decode()
    card = ModelCard(text).data
    assert [(r.dataset_name, r.metric_value) for r in card.eval_results] == [("GSM8K", 75.0)]  # not of the other step
    assert card.model_name == "old" and card.license == "mit"  # a later push keeps the license
    assert "| GSM8K (avg@1) | 8 | 75.0 | 40.9 to 92.9 |  |" in text and "](curves.png)" in text


def test_a_branch_and_what_is_uploaded_only_on_request(pushed, trained):
    hub, said = pushed
    assert said["branch"][0] == said["again"][0] == 0, (said["branch"], said["again"])
    first, main = hub.files["ann/mine"]["first"], hub.files["ann/old"]["main"]
    step = trained / "checkpoints" / "step-000001"
    assert first["model.safetensors"] == (step / "model" / "model.safetensors").read_bytes()
    assert first["training/optimizer.safetensors"] == (step / "optimizer.safetensors").read_bytes()
    assert {n for n in first if n.startswith("training/")} == {
        f"training/{n}" for n in ("optimizer.safetensors", "state.json", "manifest.json")
    }
    assert {n for n in main if n.startswith("training/")} == {"training/samples.jsonl", "training/eval_samples.jsonl"}
    assert main["training/samples.jsonl"] == (trained / "samples.jsonl").read_bytes()
    assert hub.commits[1] == ("ann/mine", "first", "Of step 1") and len(hub.commits) == 3


def test_no_training_state_of_a_checkpoint_that_lost_its_own(trained, tmp_path):
    step = shutil.copytree(trained / "checkpoints" / "step-000001", tmp_path / "step-000001")
    Checkpoint(step).remove_optimizer()
    model = find_model(step)
    assert "model.safetensors" in files_to_push(model)
    with pytest.raises(UserError, match=r"has no optimizer state .*; start a new run with model\.path="):
        files_to_push(model, training_state=True)


def test_a_dry_run_lists_files_and_sizes_and_uploads_nothing(pushed, trained):
    _, said = pushed
    code, out, _ = said["dry"]
    assert code == 0 and "nothing was uploaded" in out
    weights = trained / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    assert f"{weights.stat().st_size:,}  model.safetensors" in out and "optimizer" not in out


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("not mine", "the push to bob/mine failed: the token may not write to bob/mine"),
        ("no name", "'a/b/c' is no name of a repository; give OWNER/NAME"),
        ("no folder", "nowhere: no such folder; give a run, a checkpoint or a model folder"),
        ("no step", "has checkpoints of the steps 1, 2; or give latest or best"),
        ("another model", "is the evaluation of another model"),
        ("refused", "the hub does not accept the token: log in again with `hf auth login`"),
        ("no token", "no token for the hub: run `hf auth login` or set HF_TOKEN"),
    ],
)
def test_mistakes_are_told_in_one_line(pushed, call, why):
    code, _, err = pushed[1][call]
    assert code == 2 and err.startswith("luffy: error: ") and why in err
    assert len(err.splitlines()) == 1


def test_no_network_is_told_in_one_line(trained, unreachable_hub):
    code, out, err = luffy("push", str(trained), "ann/mine", "--checkpoint", "best", HF_TOKEN=TOKEN)
    assert (code, out) == (2, "")
    assert err.startswith("luffy: error: nothing was pushed: http://127.0.0.1:9 cannot be reached")


def test_a_card_of_ones_own_is_pushed_as_it_is(trained, tmp_path):
    model = find_model(trained / "checkpoints" / "latest" / "model")
    before = (model.folder / "README.md").read_text()
    try:
        (model.folder / "README.md").write_text("# Mine")
        assert write_card(model, "mine", {}, []) is False and (model.folder / "README.md").read_text() == "# Mine"
        with pytest.raises(UserError, match=r"--base-model is for the card that luffy makes, but .* is your own"):
            write_card(model, "mine", {"base_model": "a/b"}, [])
        (model.folder / "notes.txt").write_text("not saved with it")
        assert "notes.txt" not in files_to_push(find_model(trained))
    finally:
        (model.folder / "README.md").write_text(before)
        (model.folder / "notes.txt").unlink()
    Checkpoint(model.folder.parent).verify()


def test_folders_that_are_no_checkpoint(trained, tiny_model, tmp_path):
    plain = find_model(tiny_model)
    assert plain.checkpoint is None and "model.safetensors" in files_to_push(plain)
    assert write_card(plain, "mine", {}, []) is False and not (tiny_model / "README.md").exists()
    with pytest.raises(UserError, match="is a model alone"):
        files_to_push(plain, samples=True)
    with pytest.raises(UserError, match="holds no model"):
        find_model(tmp_path)
    with pytest.raises(UserError, match="is no run folder"):
        find_model(tiny_model, "best")
    assert find_model(trained, "best").checkpoint.step == json.loads((trained / "best.json").read_text())["step"]
    assert find_model(Path(trained), "1").checkpoint.step == 1


def test_a_card_has_the_settings_of_its_checkpoint_and_the_reward_of_its_evaluation(trained, tmp_path, monkeypatch):
    """The run was resumed after its first step with another learning rate."""
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    before = (run / "config.yaml").read_text()
    (run / "config-step-000001.yaml").write_text(before.replace("\n  lr: 0.001", "\n  lr: 0.25"))
    monkeypatch.chdir(tmp_path)
    for step, rate, changed in (("1", "0.25", False), ("2", "0.001", True)):
        model = find_model(run, step)
        assert write_card(model, "mine", {}, [evaluation(tmp_path / "evals" / step, model.folder)])
        text = (model.folder / "README.md").read_text()
        assert f"| `optim.lr` | `{rate}` |" in text and "style plain, reward math." in text
        assert ("| 1 | `optim.lr` | `0.25` | `0.001` |" in text) == changed


def test_damaged_files_are_named(trained, tmp_path, monkeypatch, caplog):
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    model = find_model(run)
    monkeypatch.chdir(tmp_path)
    cut = evaluation(tmp_path / "evals" / "cut", model.folder)
    (cut / "result.json").write_text('{"settings": ')
    with pytest.raises(UserError, match="cut/result.json: not JSON"):
        write_card(model, "mine", {}, [cut])
    strange = evaluation(tmp_path / "evals" / "strange", model.folder)
    (strange / "result.json").write_text('{"accuracy": 1}')  # of another program
    evaluation(tmp_path / "evals" / "mine", model.folder)
    assert write_card(model, "mine", {}, [])  # nobody named them
    assert "evals/cut/result.json: not JSON" in caplog.text
    assert ModelCard.load(model.folder / "README.md").data.eval_results[0].metric_value == 75
    (run / "data.json").write_text("[]")
    with pytest.raises(UserError, match="data.json: not a JSON object; remove it"):
        write_card(model, "mine", {}, [])
    (run / "data.json").write_text('{"train": {"usable": "all"}}')
    with pytest.raises(UserError, match="data.json: train: needs a whole number as 'usable'; remove it"):
        write_card(model, "mine", {}, [])
    (run / "best.json").write_text("")
    with pytest.raises(UserError, match="best.json: not JSON .* give --checkpoint latest or one of 1, 2"):
        find_model(run, "best")
    (run / "best.json").write_text('{"accuracy": 1.0}')
    with pytest.raises(UserError, match="best.json: needs a whole number as 'step'; give --checkpoint latest"):
        find_model(run, "best")


def test_a_card_that_people_edited(trained, tmp_path, monkeypatch):
    model = find_model(shutil.copytree(trained, tmp_path / "run", symlinks=True))
    monkeypatch.chdir(tmp_path)
    path = model.folder / "README.md"
    for matter in ("license: [", "- mit"):
        path.write_text(f"---\n{matter}\n---\n{MARK}\n")
        with pytest.raises(UserError, match="README.md: its front matter .*; fix it"):
            write_card(model, "mine", {}, [])
    for matter, license in (("", None), ("license: mit\n", "mit")):
        path.write_text(f"---\n{matter}---\n{MARK}\n")
        assert write_card(model, "mine", {}, [])
        assert ModelCard.load(path).data.license == license


def test_a_push_from_elsewhere_invents_no_base(trained, tmp_path, monkeypatch):
    """``models/base`` and ``data/sums`` looked like folders where the run trained, and like hub ids from here."""
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["path"], config["data"]["train"] = "models/base", "data/sums"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    model, path = find_model(run), find_model(run).folder / "README.md"

    def named(**given):
        write_card(model, "mine", given, [])
        data = ModelCard.load(path).data
        return data.base_model, data.datasets

    assert named() == (None, None) and "Base model: a local model" in path.read_text()
    assert named(base_model="org/base", datasets=["org/sums"]) == ("org/base", ["org/sums"])
    assert named() == ("org/base", ["org/sums"])  # the card knows it now
    path.write_text(f"---\nbase_model: org/base\ndatasets: org/sums\n---\n{MARK}\n")
    assert named() == ("org/base", ["org/sums"])
    path.unlink()
    assert named() == ("models/base", ["data/sums"])  # nothing but the paths is left to tell
