"""A checkpoint from anybody, whose hashes fit because its maker wrote the manifest: what is odd in it is an error of one
line, and nothing of the run folder changes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from luffy.errors import UserError
from luffy.run_folder.checkpoint import Checkpoint, file_entries, files_below, is_card, manifest_text
from luffy.step.memory import Remembered, Replay
from luffy.step.snapshot import restore
from luffy.train.loop import Trainer

MEMORY = {
    "reward": {"kind": "loop_rewards:length_parity"},
    "guidance": {"n_prefix": 0},
    "algorithm": {"credit": "lone_trace_sft", "off_policy_reshape": "exgrpo"},
    "rollout": {"n": 3},
    "batch": {"problems": 8, "expert_share": 0.25, "mini_batch": 4},
    "replay": {"share": 0.4, "start": 0.3, "problems": 5},
    "sft_steps": {"buffer": 50},
}
IN_PARTS = {"rollout": {"n": 3, "max_tokens_per_step": 4}}


@pytest.fixture(scope="module")
def runs(make_config_in, tmp_path_factory):
    """Two runs of three steps by name, to be resumed for a fourth: with a replay and lessons; with unfinished responses."""
    made = {}
    for name, settings in (("memory", MEMORY), ("parts", IN_PARTS)):
        make = make_config_in(tmp_path_factory.mktemp(name))
        cfg = make(name="run", **settings, train={"steps": 3, "save_every": 3, "threads": 1})
        with Trainer(cfg) as trainer:
            trainer.train()
        made[name] = replace(cfg, train=replace(cfg.train, steps=4))
    return made


def sign(checkpoint):
    """Write the manifest of the files as they are."""
    files = [p for p in files_below(checkpoint) if p.name != "manifest.json"]
    entries = file_entries(checkpoint, [p for p in files if not is_card(p.relative_to(checkpoint).as_posix())])
    (checkpoint / "manifest.json").write_text(manifest_text(entries))


@pytest.fixture
def altered(runs):
    """``altered("memory", state=change)`` lets a function change the content of state.json, ``tensors=`` that of the
    optimizer's file, ``raw=`` the text of state.json. All is as it was after the test."""
    kept = {}

    def alter(name, state=None, tensors=None, raw=None):
        checkpoint = runs[name].folder / "checkpoints" / "step-000003"
        for file in ("state.json", "optimizer.safetensors", "manifest.json"):
            kept.setdefault(checkpoint / file, (checkpoint / file).read_bytes())
        if state is not None:
            content = json.loads((checkpoint / "state.json").read_text())
            raw = json.dumps(state(content) or content).encode()
        if raw is not None:
            (checkpoint / "state.json").write_bytes(raw)
        if tensors is not None:
            content = load_file(checkpoint / "optimizer.safetensors")
            tensors(content)
            save_file(content, checkpoint / "optimizer.safetensors")
        sign(checkpoint)

    yield alter
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.fixture(scope="module")
def restored(runs):
    """Both runs as they were resumed from their checkpoints before anything was changed."""
    with Trainer(runs["memory"]) as memory, Trainer(runs["parts"]) as parts:
        yield {"memory": memory.run, "parts": parts.run}


def said_of(error):
    said = str(error.value)
    assert "\n" not in said and len(said) < 500 and "start a new run" in said
    return said


def assert_refused(run, says):
    checkpoint = Checkpoint(run.cfg.folder / "checkpoints" / "step-000003")
    assert checkpoint.verify() == []
    with pytest.raises(UserError, match=says) as caught:
        restore(run, checkpoint, allow_changed_data=False)
    said_of(caught)


def put(*keys, value):
    """A change of what stands under the keys of state.json."""

    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


def drop(key):
    return lambda state: state.pop(key) and None


STATES = {
    "a list": lambda state: [1], "a text": lambda state: "x", "no progress": drop("progress"),
    "no sampler": drop("sampler"), "no method": drop("method"), "no model": drop("model"),
    "no fingerprint": drop("data_fingerprint"), "no usable": drop("usable"),
    "progress of text": put("progress", value="x"), "step of text": put("progress", "step", value="3"),
    "no step": put("progress", value={}), "negative step": put("progress", "step", value=-3),
    "another step": put("progress", "step", value=2), "half a step": put("progress", "step", value=3.5),
    "a true step": put("progress", "step", value=True), "huge problems": put("progress", "problems", value=10**30),
    "an unknown counter": put("progress", "bonus", value=1), "odd best": put("progress", "best_step", value="x"),
    "odd accuracy": put("progress", "best_accuracy", value=None),
    "infinite accuracy": put("progress", "best_accuracy", value=float("inf")),
    "another method": put("method", value="dpo"), "method of numbers": put("method", value=3),
    "sampler of a list": put("sampler", value=[1]), "position of text": put("sampler", "position", value="x"),
    "epoch of null": put("sampler", "epoch", value=None), "model of a list": put("model", value=[]),
    "odd date": put("date", value=7), "odd traces": put("traces", value=[]), "no left out": put("traces", value={}),
}  # fmt: skip
RAW = {
    "not JSON": b"{",
    "no text": b"\xff\xfe",
    "empty": b"",
    "deep": b"[" * 100_000,
    "digits": b'{"a": ' + b"9" * 6000,
}


@pytest.mark.parametrize("kind", STATES)
def test_an_odd_state(altered, restored, kind):
    altered("memory", state=STATES[kind])
    assert_refused(restored["memory"], r"state\.json")


@pytest.mark.parametrize("kind", RAW)
def test_a_state_that_cannot_be_read(altered, restored, kind):
    altered("memory", raw=RAW[kind])
    assert_refused(restored["memory"], r"state\.json: not JSON")


def whole(*rows):
    return torch.tensor(rows, dtype=torch.long)


REPLAY = {
    "row beyond the data": ("problems", lambda t: t.index_fill(1, torch.tensor([0]), 24)),
    "negative row": ("problems", lambda t: t.index_fill(1, torch.tensor([0]), -1)),
    "never solved": ("problems", lambda t: t.index_fill(1, torch.tensor([1]), 0)),
    "one column": ("problems", lambda t: t[:, :1].contiguous()),
    "numbers with a point": ("problems", lambda t: t.double()),
    "no table": ("problems", lambda t: t.flatten()),
    "responses of no problem": ("responses", lambda t: t + whole([1000, 0, 0])),
    "lengths beyond the tokens": ("responses", lambda t: t + whole([0, 0, 1])),
    "negative lengths": ("responses", lambda t: -t),
    "no response": ("responses", lambda t: t[:0]),
    "a token beyond the vocabulary": ("token_ids", lambda t: t + 18),
    "a negative token": ("token_ids", lambda t: t - 18),
    "tokens with a point": ("token_ids", lambda t: t.float()),
    "too few tokens": ("token_ids", lambda t: t[1:].contiguous()),
    "too few log-probs": ("log_probs", lambda t: t[1:].contiguous()),
    "log-probs of whole numbers": ("log_probs", lambda t: t.int()),
    "a log-prob of +5": ("log_probs", lambda t: t + 5),
    "a log-prob of -inf": ("log_probs", lambda t: t - torch.inf),
    "replies beyond the tokens": ("replies", lambda t: torch.tensor([True])),
    "prompts of no response": ("prompts", lambda t: whole(1)),
    "prompts without a token": ("prompt_ids", lambda t: whole(3)),
    "rewards of no response": ("rewards", lambda t: torch.tensor([0.5])),
    "two beginnings": ("begun", lambda t: whole(1, 1)),
    "retired beyond the data": ("retired", lambda t: whole(24)),
    "retired with a point": ("retired", lambda t: torch.tensor([0.5])),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPLAY)
def test_odd_rows_of_the_replay(altered, restored, kind):
    name, change = REPLAY[kind]

    def tensors(content):
        key = f"memory/replay/{name}"
        content[key] = change(content.get(key, whole(0)))

    altered("memory", tensors=tensors)
    assert_refused(restored["memory"], "memory/replay/[a-z_]+ does not fit this run")


OTHERS = {
    "memory": {
        "experts": [whole(1), torch.tensor([0.5, 1.0]), whole([0, 1])],
        "lessons": [whole([24, 0]), whole([0, 1]), whole([0, -1]), whole(0, 0), whole([2, 0])],
        "replay/begun": [None],
    },
    "parts": {
        "under_way/problems": [whole([24, 0, 0, 3]), whole([0, 0, 0, 1]), whole([0, -1, 0, 3]), whole([0, 0]), None],
        "under_way/responses": [whole([0, 0, 0, 0, 0]), whole([1, 0, 0, 4, 0]), whole(0, 0), None],
        "under_way/versions": [whole(0), torch.tensor([0.5])],
        "under_way/token_ids": [whole(0), None],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("run", "name", "value"), [(r, n, v) for r, all_ in OTHERS.items() for n, vs in all_.items() for v in vs]
)
def test_an_odd_memory(altered, restored, run, name, value):
    def tensors(content):
        assert content.pop(f"memory/{name}") is not None
        content.update({} if value is None else {f"memory/{name}": value})

    altered(run, tensors=tensors)
    assert_refused(restored[run], "memory/[a-z_/]+ does not fit this run")


@pytest.mark.parametrize("suffix", ["exp_avg", "exp_avg_sq", "step"])
def test_optimizer_state_of_another_shape(altered, restored, suffix):
    def tensors(content):
        key = next(key for key in content if key.endswith(f"/{suffix}"))
        content[key] = torch.zeros(3)

    altered("memory", tensors=tensors)
    assert_refused(restored["memory"], rf"optimizer state \({suffix}\) has the shape \(3,\)")


def test_a_file_that_is_no_safetensors(altered, restored):
    altered("memory", state=lambda state: None)
    checkpoint = Checkpoint(restored["memory"].cfg.folder / "checkpoints" / "step-000003")
    (checkpoint.path / "optimizer.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(UserError, match=r"optimizer\.safetensors: not a safetensors file"):
        checkpoint.tensors()


def test_a_training_is_refused_and_its_folder_stays_as_it_is(runs, tmp_path):
    cfg = replace(runs["memory"], out=str(tmp_path))
    shutil.copytree(runs["memory"].folder, cfg.folder, symlinks=True)
    state = cfg.folder / "checkpoints" / "step-000003" / "state.json"
    state.write_text("[]")
    sign(state.parent)
    before = contents(cfg.folder)
    with pytest.raises(UserError, match=r"state\.json: not a JSON object") as caught:
        Trainer(cfg)
    said_of(caught)
    assert contents(cfg.folder) == before


def contents(folder):
    return {p: p.read_bytes() for p in files_below(folder) if "lock" not in p.name}


@pytest.mark.parametrize("name", ["memory", "parts"])
def test_the_checkpoint_as_it_was_saved_goes_on(runs, tmp_path, name):
    cfg = replace(runs[name], out=str(tmp_path))
    shutil.copytree(runs[name].folder, cfg.folder, symlinks=True)
    with Trainer(cfg) as trainer:
        trainer.train()
        assert trainer.progress.step == 4


def test_a_problem_without_responses_is_not_replayed(runs):
    replay = Replay(runs["memory"].replay, n=3)
    replay.load_state_dict({"begun": whole(1), "problems": whole([0, 1], [1, 2])})
    assert len(replay) == 0


def test_problems_far_from_half_solved_are_drawn_all_the_same(runs):
    """After a resume with a smaller rollout.n every weight may round to 0."""
    replay = Replay(runs["memory"].replay, n=3)
    replay.problems = {0: Remembered(400), 5: Remembered(500)}
    assert sorted(replay.draw(2, "key")) == [0, 5]
