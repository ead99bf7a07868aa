import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conversing import make_chat_tokenizer
from processes import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from luffy.errors import ConfigError
from luffy.run_folder.recorder import Recorder, evaluation_rows, read_json_lines, sample_rows, trace_rows
from luffy.run_folder.trackers import check_trackers
from luffy.step.draws import trace_sample
from luffy.train.loop import Trainer
from luffy.types import Author, Demonstration, Episode, EpisodeOutcome, Group, Problem, Sample, Score, Task


class WandbRun:
    """Takes figures as a run of W&B does: a row of a step that is not after those of the process before is ignored."""

    def __init__(self, before):
        self.rows, self.first = before, len(before)
        self.axes = {}

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        step = len(self.rows) if step is None else step
        if step >= self.first:
            self.rows.append({**values, "_step": step})

    def finish(self):
        pass


@pytest.fixture
def wandb_runs(monkeypatch):
    """What the ``wandb`` package was asked to begin; the package itself speaks to a server."""
    begun, rows = [], []

    def init(**asked):
        begun.append({**asked, "run": WandbRun(rows)})
        return begun[-1]["run"]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return begun


def record(cfg, start_step=-1):
    cfg.folder.mkdir(parents=True, exist_ok=True)
    Recorder(cfg, start_step, pytest.fail).close()


def test_two_users_of_one_name_write_into_two_runs_of_wandb(make_config, wandb_runs, monkeypatch, tmp_path):
    for user in ("ann", "bob"):
        (tmp_path / user).mkdir()
        monkeypatch.chdir(tmp_path / user)
        record(make_config(out="runs", name="mine", record={"wandb": True}))
    ids = [asked["id"] for asked in wandb_runs]
    assert ids[0] != ids[1]
    assert all(asked["name"] == "mine" and asked["resume"] == "allow" for asked in wandb_runs)


def test_a_resumed_run_goes_on_in_its_run_of_wandb_wherever_it_lies(make_config, wandb_runs, tmp_path):
    cfg = make_config(name="mine", record={"wandb": True})
    record(cfg)
    record(cfg, start_step=3)
    (tmp_path / "runs").rename(tmp_path / "moved")
    record(make_config(out=str(tmp_path / "moved"), name="mine", record={"wandb": True}), start_step=3)
    assert len({asked["id"] for asked in wandb_runs}) == 1


def record_a_resumed_run(cfg):
    """An evaluation before the first step, three steps, and after a stop an evaluation made up for and a fourth."""
    cfg.folder.mkdir(parents=True)
    figures = {"critic/rewards/mean": 0.25, "timing_s/step": 1.5}
    recorder = Recorder(cfg, -1, pytest.fail)
    for step, values in enumerate(
        [{"val-core/accuracy": 0.5}, figures, {**figures, "val-core/accuracy": 0.75}, figures]
    ):
        recorder.log(step, values)
    recorder.close()
    recorder = Recorder(cfg, 3, pytest.fail)
    recorder.log(3, {"val-core/accuracy": 1.0})
    recorder.log(4, figures)
    recorder.close()


def recorded_rows(cfg):
    """(name, step, value) in metrics.jsonl."""
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    return {(name, row["step"], row[name]) for row in rows for name in row if name not in ("step", "time")}


def in_tensorboard(cfg):
    events = EventAccumulator(str(cfg.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {(name, e.step, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)}


def of_rows(rows):
    """(name, step, value) in rows of W&B, less what it adds."""
    return {(name, row["step"], row[name]) for row in rows for name in row if name != "step" and name[0] != "_"}


def test_both_trackers_have_the_names_steps_and_values_of_the_metrics(make_config, wandb_runs):
    cfg = make_config(record={"tensorboard": True, "wandb": True})
    record_a_resumed_run(cfg)
    run = wandb_runs[-1]["run"]
    assert len(recorded_rows(cfg)) == 11
    assert in_tensorboard(cfg) == of_rows(run.rows) == recorded_rows(cfg)
    assert run.axes == {"step": None, "*": "step"}


def test_wandb_itself_keeps_names_steps_and_values(make_config, monkeypatch, tmp_path):
    """Offline, in the file that ``wandb sync`` would upload."""
    wandb_proto = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    cfg = make_config(record={"tensorboard": True, "wandb": True})
    record_a_resumed_run(cfg)

    def records():
        """Of each run's file; W&B's own process ends them a moment after the runs have finished."""
        files = [list(log_records(path.read_bytes())) for path in sorted(tmp_path.rglob("*.wandb"))]
        return [list(map(wandb_proto.Record.FromString, file)) for file in files]

    def ended(file):
        return any(record.WhichOneof("record_type") == "exit" for record in file)

    wait_until(lambda: len(found := records()) == 2 and all(map(ended, found)))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for file in records()
        for record in file
    ]
    assert of_rows(rows) == recorded_rows(cfg) == in_tensorboard(cfg)


def log_records(data):
    """The records of a LevelDB log, which W&B's files are after 7 bytes: in blocks of 32 KiB, each with a header of 4
    bytes of checksum, 2 of length and 1 of kind (1: whole, 4: the last part). The last may be half written."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_trackers_are_settled_before_the_first_step(make_config, monkeypatch):
    both = make_config(record={"tensorboard": True, "wandb": True})
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"record\.wandb=true, but the package wandb is missing: pip install"):
        check_trackers(both)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key=None)))
    with pytest.raises(ConfigError, match="nobody is logged in: run `wandb login`"):
        check_trackers(both)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_trackers(both) == []
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key="x")))
    assert check_trackers(both) == []
    monkeypatch.setattr("luffy.run_folder.trackers.find_spec", lambda name: None if name == "tensorboard" else name)
    (said,) = check_trackers(both)
    assert said.startswith("TensorBoard is off: the package tensorboard is missing")
    both.folder.mkdir(parents=True)
    assert Recorder(make_config(record={"tensorboard": True}), -1, pytest.fail).trackers == {}


def test_a_missing_tracker_ends_a_run_before_it_writes(make_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = make_config(record={"wandb": True})
    with pytest.raises(ConfigError, match="wandb is missing"):
        Trainer(cfg)
    assert not cfg.folder.exists()


def episode(authors, outcome=None):
    zeros = torch.zeros(len(authors))
    ids = torch.arange(len(authors)) + 65
    task = Task(Problem("p", "q", "1"), (66, 67))
    return Episode(task, ids, torch.tensor(authors, dtype=torch.int8), zeros, zeros, "stop", outcome=outcome)


def rows_of_episode(rollout):
    group = Group(rollout.task, (rollout,), (Score(1.0),))
    (kept,) = sample_rows(3, group, None, make_chat_tokenizer(), ())
    (held_out,) = evaluation_rows(3, "core", group, make_chat_tokenizer())
    return kept, held_out


def test_rows_of_episodes_tell_turns_calls_replies_and_faults():
    own, asked = int(Author.POLICY), int(Author.ENVIRONMENT)
    outcome = EpisodeOutcome("turns", 3, 2, ("unknown_tool",), 0.0, (0.0, 0.5), "why", trace_left_out=True)
    for row in rows_of_episode(episode([own, asked, asked, own, asked, own], outcome)):
        assert (row["turns"], row["calls"], row["end"], row["length"]) == (3, 2, "turns", 3)
        assert row["replies"] == [(1, 3), (4, 5)] and row["faults"] == ["unknown_tool"]
        assert (row["environment_reward"], row["turn_rewards"], row["message"]) == (0.0, [0.0, 0.5], "why")
        assert row["trace_left_out"] is True
    plain, _ = rows_of_episode(episode([own, own], EpisodeOutcome("answer", 1)))
    assert (plain["turns"], plain["calls"], plain["end"]) == (1, 0, "answer")
    assert not plain.keys() & {"replies", "faults", "environment_reward", "turn_rewards", "message", "trace_left_out"}


def test_a_whole_trace_tells_its_calls_a_replayed_response_does_not():
    teacher, reply = int(Author.TEACHER), int(Author.ENVIRONMENT)
    for calls, finish, told in ((3, "trace", 3), (0, "trace", 0), (None, "trace", None), (3, "stop", None)):
        trace = Demonstration((65, 66, 67), replies=((1, 2),), calls=calls)
        given = replace(episode([teacher, reply, teacher], None), finish=finish, trace=trace)
        kept, _ = rows_of_episode(given)
        assert (kept["turns"], kept.get("calls")) == (2, told)
        (row,) = trace_rows(1, [trace_sample(given.task, trace)], make_chat_tokenizer(), (), 0)
        assert row.get("calls") == calls


def test_rows_without_an_environment_are_what_they_were():
    kept, held_out = rows_of_episode(episode([0, 3]))
    assert list(kept) == [
        "step", "problem", "sample", "reward", "status", "finish", "length", "off_policy_tokens", "override_tokens",
        "prefix_ratio", "prompt", "answer", "response", "token_ids", "tokens", "off_policy", "overrides", "log_probs",
        "advantages", "policy_version", "versions",
    ]  # fmt: skip
    assert list(held_out) == list(kept)[:-3]


def test_rows_of_sft_leave_replies_out_of_the_teachers_tokens():
    authors = torch.tensor([Author.TEACHER, Author.ENVIRONMENT, Author.TEACHER], dtype=torch.int8)
    zeros = torch.zeros(3)
    sample = Sample((65,), torch.tensor([66, 67, 68]), authors, zeros, zeros, zeros, zeros, zeros)
    (row,) = trace_rows(1, [sample], make_chat_tokenizer(), (), 0)
    assert (row["off_policy"], row["replies"], row["turns"]) == ([1, 0, 1], [(1, 2)], 2)
    assert (row["length"], row["off_policy_tokens"]) == (2, 2)
