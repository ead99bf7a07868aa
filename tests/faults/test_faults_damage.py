"""Damaged and hostile files: damage is found before anything is loaded, and nothing in a file is ever run."""

from __future__ import annotations

import ast
import functools
import json
import pickle
import random
import shutil
import sys
from pathlib import Path

import pytest
from builders import write_rows
from children import in_child
from hostile import TEMPLATE, pickled, poison_model_folder, script, write_poisoned
from trainings import train

import luffy
from luffy.data import load_problems
from luffy.errors import UserError
from luffy.generate import generate_texts
from luffy.models.load import load_model, load_tokenizer
from luffy.report.html import write_report
from luffy.run_folder.checkpoint import Checkpoint, DamagedCheckpoint, file_entry, manifest_text
from luffy.run_folder.recorder import read_json_lines
from luffy.train import build
from luffy.train.loop import Trainer
from luffy.types import Problem

FLIPS = 2000


@pytest.fixture(scope="module")
def first_half(tmp_path_factory):
    """Where the run of ``half_way`` is kept, once it was trained."""
    return tmp_path_factory.mktemp("half-way") / "run"


@pytest.fixture
def half_way(make_config, first_half):
    """A run with checkpoints at steps 2 and 4 of 6."""
    cfg = make_config(train={"steps": 6})
    if not first_half.exists():
        train(make_config(train={"steps": 4}))
        cfg.folder.rename(first_half)
    shutil.copytree(first_half, cfg.folder, symlinks=True)
    return cfg


def files_of(checkpoint):
    """All but the model card, which anybody may change."""
    return sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != "README.md")


@pytest.mark.faults
def test_every_flipped_byte_is_found_and_the_message_names_its_file(half_way):
    """All bytes of the manifest and the state, random ones of the others."""
    newest = half_way.folder / "checkpoints" / "step-000004"
    dice, places = random.Random(0), []
    for path in files_of(newest):
        size = path.stat().st_size
        every = range(size) if path.name in ("manifest.json", "state.json") else dice.choices(range(size), k=FLIPS // 8)
        places += [(path, place) for place in {0, size - 1, *every}]
    for path, place in places:
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[place] ^= dice.randint(1, 255)
        path.write_bytes(changed)
        with pytest.raises(DamagedCheckpoint) as caught:
            Checkpoint(newest).verify()
        # a hash that changed in the manifest itself looks like a change of the file it belongs to
        assert str(path.relative_to(newest)) in str(caught.value) or path.name == "manifest.json"
        path.write_bytes(whole)
    Checkpoint(newest).verify()
    print(f"\n{len(places)} flipped bytes in {len(files_of(newest))} files, all found")


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def grown(path):
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.faults
@pytest.mark.parametrize("damage", [flipped, cut_short, grown, Path.unlink])
def test_a_training_passes_over_the_damaged_checkpoint_whatever_file_it_is(half_way, tmp_path, damage, monkeypatch):
    names = [p.relative_to(half_way.folder) for p in files_of(half_way.folder / "checkpoints" / "step-000004")]
    untouched = shutil.copytree(half_way.folder, tmp_path / "untouched", symlinks=True)
    loaded = []
    monkeypatch.setattr(build, "load_weights", lambda *given: loaded.append(given[-1].step) or 1 / 0)
    for name in names:
        damage(half_way.folder / name)
        said = []
        monkeypatch.setattr(
            "luffy.train.build.find_checkpoint", lambda c, s, r, warn, said=said: s.newest_whole(said.append)
        )
        with pytest.raises(ZeroDivisionError):
            Trainer(half_way)
        assert "step-000004" in said[0]
        assert Path(*name.parts[2:]).as_posix() in said[0] or name.name == "manifest.json"
        shutil.rmtree(half_way.folder)
        shutil.copytree(untouched, half_way.folder, symlinks=True)
    assert loaded == [2] * len(names)


def records(folder):
    return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "config.yaml")}


def test_damage_in_every_checkpoint_stops_and_touches_nothing(half_way):
    for saved in (half_way.folder / "checkpoints").glob("step-*"):
        flipped(saved / "state.json")
    before, names = records(half_way.folder), sorted((half_way.folder / "checkpoints").iterdir())
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)step-000004.*state.json.*step-000002.*--resume never"):
            Trainer(half_way)
    assert records(half_way.folder) == before
    assert sorted((half_way.folder / "checkpoints").iterdir()) == names


def test_resume_never_begins_again_beside_damaged_checkpoints_and_keeps_the_records(half_way):
    for saved in (half_way.folder / "checkpoints").glob("step-*"):
        flipped(saved / "state.json")
    (half_way.folder / "config-step-000002.yaml").write_text("seed: 0")
    before = records(half_way.folder) | {"config-step-000002.yaml": b"seed: 0"}
    with Trainer(half_way, resume="never") as trainer:
        trainer.train()
        assert any("earlier-1" in notice for notice in trainer.notices)
    rows = read_json_lines(half_way.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    kept = {name: name.replace(".", ".earlier-1.") for name in before}
    assert {name: (half_way.folder / kept[name]).read_bytes() for name in before} == before
    assert (half_way.folder / "checkpoints" / "damaged-step-000004" / "model").is_dir()


def test_foreign_files_are_named_and_ignored(make_config):
    cfg = make_config(train={"steps": 2, "save_every": 2})
    train(cfg)
    names = [".DS_Store", "model/._model.safetensors", "model/.nfs01", "model/model.safetensors.part", "notes.txt"]
    for name in names:
        (cfg.folder / "checkpoints" / "step-000002" / name).write_bytes(b"whatever")
    before = records(cfg.folder)
    with Trainer(make_config(train={"steps": 3})) as trainer:
        assert trainer.progress.step == 2
        assert any(f"ignored {', '.join(names)}" in notice for notice in trainer.notices)
        trainer.train()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (cfg.folder / name).read_bytes().startswith(before[name])


@pytest.mark.parametrize("name", ["model/adapter_config.json", "model/generation_config.json"])
def test_a_foreign_file_that_would_be_loaded_is_damage(make_config, name):
    cfg = make_config(train={"steps": 1})
    train(cfg)
    path = cfg.folder / "checkpoints" / "step-000001" / name
    saved = Checkpoint(path.parents[1])
    if path.exists():  # as if it had not been saved
        files = json.loads((saved.path / "manifest.json").read_text())["files"]
        del files[name]
        (saved.path / "manifest.json").write_text(manifest_text(files))
    else:
        path.write_text("{}")
    before = records(cfg.folder)
    with pytest.raises(UserError, match=rf"{name}.*remove it"):
        Trainer(make_config(train={"steps": 4}))
    assert records(cfg.folder) == before


def to_a_disk(path, disk):
    """Move a folder away and leave a link in its place."""
    disk.mkdir(exist_ok=True)
    shutil.move(path, disk / path.name)
    path.symlink_to(disk / path.name, target_is_directory=True)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_checkpoints_on_a_disk_that_is_not_mounted_stop_the_run(half_way, tmp_path, resume):
    to_a_disk(half_way.folder / "checkpoints", tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    before = records(half_way.folder)
    with pytest.raises(UserError, match=r"checkpoints is a link to .*disk.*not there"):
        Trainer(half_way, resume=resume)
    assert records(half_way.folder) == before
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    with Trainer(half_way) as trainer:
        trainer.train()
    assert [row["step"] for row in read_json_lines(half_way.folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("gone", ["folder", "mount point"])
def test_records_whose_checkpoints_are_gone_are_not_written_over(half_way, gone):
    shutil.rmtree(half_way.folder / "checkpoints")
    if gone == "mount point":
        (half_way.folder / "checkpoints").mkdir()
    before = records(half_way.folder)
    with pytest.raises(UserError, match=r"not its checkpoints: the newest was of step 4.*mounted.*--resume never"):
        Trainer(half_way)
    assert records(half_way.folder) == before
    with Trainer(half_way, resume="never") as trainer:
        trainer.train()
    assert (half_way.folder / "metrics.earlier-1.jsonl").read_bytes() == before["metrics.jsonl"]
    assert len(read_json_lines(half_way.folder / "metrics.jsonl")) == 6


def test_the_checkpoint_of_another_run_does_not_cut_records_either(half_way, make_config):
    train(make_config(name="other", train={"steps": 2}))
    shutil.rmtree(half_way.folder / "checkpoints")
    before = records(half_way.folder)
    with pytest.raises(UserError, match=r"records of its own, up to a checkpoint of step 4"):
        Trainer(half_way, resume=str(half_way.folder.parent / "other" / "checkpoints" / "step-000002"))
    assert records(half_way.folder) == before


def test_a_run_without_a_checkpoint_begins_again_and_keeps_its_records(make_config):
    cfg = make_config(train={"steps": 6, "save_every": 4})

    def dies(step, values):
        if step == 3:
            raise RuntimeError("killed")

    with Trainer(cfg, on_step=dies) as trainer, pytest.raises(RuntimeError, match="killed"):
        trainer.train()
    before = records(cfg.folder)
    with Trainer(cfg) as trainer:
        trainer.train()
        assert any("metrics" in n or "earlier-1" in n for n in trainer.notices)
    assert (cfg.folder / "metrics.earlier-1.jsonl").read_bytes() == before["metrics.jsonl"]
    assert (cfg.folder / "samples.earlier-1.jsonl").read_bytes() == before["samples.jsonl"]
    assert [row["step"] for row in read_json_lines(cfg.folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_rotation_removes_the_link_to_a_checkpoint_and_not_what_it_links_to(make_config, tmp_path):
    cfg = make_config(train={"steps": 4, "save_every": 2, "keep": 1})
    train(cfg)
    to_a_disk(cfg.folder / "checkpoints" / "step-000004", tmp_path / "disk")
    train(make_config(train={"steps": 6, "save_every": 2, "keep": 1}))
    assert sorted(p.name for p in (cfg.folder / "checkpoints").iterdir()) == ["latest", "step-000006"]
    Checkpoint(tmp_path / "disk" / "step-000004").verify()


def test_a_linked_checkpoint_on_a_disk_that_is_not_mounted_is_not_passed_over(half_way, tmp_path):
    newest = half_way.folder / "checkpoints" / "step-000004"
    to_a_disk(newest, tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    before = records(half_way.folder)
    with pytest.raises(UserError, match=r"step-000004 is a link to .*not there; mount its disk or remove the link"):
        Trainer(half_way)
    assert records(half_way.folder) == before


def test_a_damaged_checkpoint_behind_a_link_is_set_aside_by_its_link(half_way, tmp_path):
    newest = half_way.folder / "checkpoints" / "step-000004"
    for _ in range(2):  # the second time, the name it gets is taken
        to_a_disk(newest, tmp_path / "disk")
        cut_short(newest / "state.json")
        with Trainer(half_way) as trainer:
            assert trainer.progress.step == 2
        assert (newest.parent / "damaged-step-000004").is_symlink()
        shutil.move(tmp_path / "disk" / newest.name, newest)
    assert newest.is_dir()


class Watch:
    """What is unpickled while ``on``, by the interpreter's own account. A hook cannot be taken out again."""

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self._hook)

    def _hook(self, event, args):
        if self.on and event == "pickle.find_class":
            self.seen.append(args)


@functools.cache
def the_watch():
    return Watch()


def unpickled_by(work, args):
    """In a child: the classes that were asked for."""
    watch = the_watch()
    watch.seen, watch.on = [], True
    try:
        work(*args)
    finally:
        watch.on = False
    return [str(seen) for seen in watch.seen]


def assert_unpickles_nothing(work, *args):
    assert in_child(unpickled_by, work, args) == []


def test_the_watch_sees_an_unpickled_class(tmp_path):
    assert in_child(unpickled_by, pickle.loads, (pickled(tmp_path / "mark"),)) == ["('posix', 'mkdir')"]
    assert (tmp_path / "mark").exists()


def _sampled(model):
    return generate_texts(
        model, [Problem("p", "1+1", "")], n=1, max_tokens=4, temperature=1.0, top_p=1.0, top_k=0, seed=0, style="plain",
        system_prompt=None, dtype="float32", device="cpu",
    )  # fmt: skip


def use_every_load_path(cfg, data, report):
    train(cfg)
    newest = str(cfg.folder / "checkpoints" / "latest" / "model")
    assert len(list(_sampled(newest))) == 1
    assert len(load_problems(data)) == 24
    write_report([cfg.folder], report)


def test_no_load_path_unpickles(half_way, sums, tmp_path):
    """Resume, load for sampling, read data, report: pickle is never asked for a class."""
    assert_unpickles_nothing(use_every_load_path, half_way, str(sums), tmp_path / "report.html")


def train_refused(cfg):
    with pytest.raises(Exception, match="(?i)header|safetensors"):
        train(cfg)


def test_a_hostile_checkpoint_runs_nothing(half_way, tmp_path):
    """Its maker wrote the manifest too, so every hash fits: pickles, code, and a pickle in the optimizer's place."""
    mark = tmp_path / "mark"
    newest = half_way.folder / "checkpoints" / "step-000004"
    poison_model_folder(newest / "model", mark)
    for name in (".metadata", "optimizer.pt", "shards/.metadata", "shards/__0_0.distcp"):
        (newest / name).parent.mkdir(exist_ok=True)
        (newest / name).write_bytes(pickled(mark))
    resign(newest)
    assert_unpickles_nothing(train, half_way)
    assert not mark.exists()
    shutil.rmtree(half_way.folder / "checkpoints" / "step-000006")
    (newest / "optimizer.safetensors").write_bytes(pickled(mark))
    resign(newest)
    assert_unpickles_nothing(train_refused, half_way)
    assert not mark.exists()


def resign(folder):
    files = {str(p.relative_to(folder)): file_entry(p) for p in files_of(folder) if p.name != "manifest.json"}
    (folder / "manifest.json").write_text(manifest_text(files))


def test_a_hostile_model_folder_runs_nothing(tiny_model, tmp_path):
    folder, mark = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "mark"
    poison_model_folder(folder, mark)
    assert_unpickles_nothing(load_a_hostile_model, folder)
    assert not mark.exists()


def load_a_hostile_model(folder):
    load_model(folder)
    load_tokenizer(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds only pickled weights"):
        load_model(folder)


def test_a_hostile_chat_template_reaches_no_class(half_way, tmp_path):
    tokenizer = load_tokenizer(half_way.model.path)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(Exception, match="(?i)unsafe|undefined"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def read_all(path):
    assert all(problem.prompt and problem.answer for problem in load_problems(str(path)))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_hostile_table_runs_nothing(tmp_path, suffix):
    path, mark = tmp_path / f"train{suffix}", tmp_path / "mark"
    write_poisoned(path, mark)
    assert_unpickles_nothing(read_all, path)
    assert not mark.exists()


def test_a_hostile_dataset_folder_runs_nothing(tmp_path, monkeypatch):
    """A loading script beside the data, objects that name classes, templates in the text, pickles under other names."""
    folder, mark = tmp_path / "data", tmp_path / "mark"
    folder.mkdir()
    (folder / "data.py").write_text(script(mark))
    (folder / "train.pkl").write_bytes(pickled(mark))
    rows = [
        {"id": "a", "prompt": TEMPLATE, "answer": "1", "py/object": "os.system", "py/reduce": ["os.mkdir", [str(mark)]]},
        {"id": "b", "prompt": "!!python/object/apply:os.mkdir [x]", "answer": "__import__('os').mkdir('x')"},
    ]  # fmt: skip
    write_rows(folder / "train.jsonl", rows)
    monkeypatch.chdir(folder)
    assert_unpickles_nothing(read_all, folder)
    assert load_problems(str(folder))[0].prompt == TEMPLATE
    with pytest.raises(UserError, match="unknown file type '.pkl'"):
        load_problems(str(folder / "train.pkl"))
    assert not mark.exists()


# Calls that run what they read. The pool's processes talk to each other in pickles, over a socket nobody else has.
RUNNING = {"eval", "exec", "compile", "loads", "load", "Unpickler", "unsafe_load", "full_load", "system", "popen"}
ALLOWED = {
    ("rewards/worker.py", "pickle.loads"),
    # A file without a name that the process above made, which begins with the key that it handed down.
    ("models/shared.py", "pickle.loads"),
    ("models/shared.py", "?.load"),
    ("yaml_text.py", "yaml.load"),  # by a SafeLoader
    ("distributed/state.py", "dcp.load"),  # by a reader of safetensors and JSON (tests/distributed)
    ("rewards/math.py", "load"),  # imports SymPy
    ("doctor/machine.py", "platform.system"),  # the name of the operating system
    ("rollout/vllm/worker_extension.py", "load"),  # an argument: vLLM's own way to take tensors
    *(
        (f"kernels/{name}.py", f"{tile}.load") for name in ("gated", "product") for tile in ("x", "weight")
    ),  # of a matrix
}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_no_code_of_ours_runs_what_it_reads():
    root, found = Path(luffy.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            alone, owner = name.rpartition(".")[2], name.rpartition(".")[0]
            harmless = owner in ("json", "re", "tl") or (owner and alone in ("eval", "compile")) or alone not in RUNNING
            if not harmless:
                found.add((path.relative_to(root).as_posix(), name))
    assert found == ALLOWED
