"""Train in this process and read what a run left: metrics, samples, weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from luffy.errors import TrainingStopped
from luffy.run_folder.recorder import read_json_lines
from luffy.step import crediting
from luffy.trainer import Trainer

TIMED = ("timing_s/", "perf/throughput")


def train(cfg, world=None, method="rl", **options):
    """Train to the end; ``world`` comes second because ``run_ranks`` passes it so."""
    with Trainer(cfg, method, world=world, **options) as trainer:
        trainer.train()


def train_rows(cfg, method="rl", **options):
    """Train; return the rows of metrics.jsonl."""
    train(cfg, method=method, **options)
    return read_json_lines(cfg.folder / "metrics.jsonl")


def train_untimed(cfg, **options):
    """Train; return the rows of metrics.jsonl without the metrics of time."""
    train(cfg, **options)
    return untimed_metrics(cfg)


def train_notices(cfg):
    """Train; return the notices of the run."""
    with Trainer(cfg) as trainer:
        trainer.train()
        return trainer.notices


def untimed_metrics(run):
    """The rows of metrics.jsonl, without the metrics of time; ``run`` is a config or a run's folder."""
    rows = read_json_lines(getattr(run, "folder", run) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(TIMED)} for row in rows]


def samples(cfg, file="samples.jsonl"):
    """The rows of the run's samples."""
    return read_json_lines(cfg.folder / file)


def final_weights(cfg):
    """The weights of the newest checkpoint."""
    newest = max((cfg.folder / "checkpoints").glob("step-*"))
    return AutoModelForCausalLM.from_pretrained(newest / "model").state_dict()


def assert_same_metrics(ours, theirs, tolerance=1e-5):
    """Assert that the rows have the same metrics, within the tolerance."""
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        far = {k: (a[k], b[k]) for k in a if abs(a[k] - b[k]) > tolerance * max(1.0, abs(b[k]))}
        assert far == {}, f"step {a['step']}: {far}"


def assert_same_weights(ours, theirs, tolerance=1e-5):
    """Assert that two dicts of tensors agree within the tolerance."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def stop_before_update(monkeypatch, step, message):
    """Raise TrainingStopped between rollout and update of that step, as when a teacher's servers are gone."""
    score = crediting.score_tokens

    def stopping(run, batch):
        if run.progress.step == step - 1:
            raise TrainingStopped(message)
        return score(run, batch)

    monkeypatch.setattr(crediting, "score_tokens", stopping)
