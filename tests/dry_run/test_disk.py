"""The disk that checkpoints take: counted by hand, and against a run that writes them."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from luffy.config.knobs import VllmConfig
from luffy.dry_run.lines import bytes_of_run, checkpoint_parts, checkpoints_at_once, disk_line
from luffy.dry_run.models import model_shape
from luffy.dry_run.place import Place
from luffy.run_folder.checkpoint import CheckpointStore
from luffy.train.loop import Trainer

SEVEN_B = 7_615_616_512  # Qwen2.5-Math-7B
HERE = Place(False, 1e12, 1e12, "this machine")


def work(parameters=SEVEN_B, trained=None, itemsize=2):
    return SimpleNamespace(parameters=parameters, trained=trained or parameters, itemsize=itemsize)


def paper(make_config, **train):
    train = {"steps": 500, "save_every": 50} | train
    return make_config(
        launch="torchrun", data={"eval": "x"}, eval={"every": 50}, train=train, model={"dtype": "bfloat16"}
    )


def test_a_checkpoint_of_the_papers_model_by_hand(make_config):
    parts = checkpoint_parts(paper(make_config), "rl", work())
    assert parts == {"model": 2 * SEVEN_B, "optimizer state": 12 * SEVEN_B}
    assert sum(parts.values()) == pytest.approx(106.6e9, rel=1e-3)


@pytest.mark.parametrize(
    ("train", "peak", "end"),
    [
        ({}, 4 * 14, 3 * 14),
        ({"keep_optimizer": 1}, 2 * 14 + 2 * 2, 14 + 2 * 2),
        ({"keep_optimizer": 2}, 3 * 14 + 2, 2 * 14 + 2),
        ({"keep_optimizer": 9}, 4 * 14, 3 * 14),
        ({"keep_best": False}, 3 * 14, 2 * 14),
        ({"keep_best": False, "keep": 1}, 2 * 14, 14),
        ({"keep_best": False, "keep": 1, "keep_optimizer": 1}, 2 * 14, 14),
        ({"steps": 1}, 14, 14),
        ({"steps": 40, "keep_best": False}, 14, 14),
        ({"steps": 100, "keep": 9, "keep_best": False}, 2 * 14, 2 * 14),
    ],
)
def test_the_most_that_a_run_takes_by_hand(make_config, train, peak, end):
    cfg = paper(make_config, **train)
    found = bytes_of_run(cfg, cfg.train.steps, {"model": 2.0, "optimizer state": 12.0})
    assert found == (peak, end)


def test_the_best_step_takes_room_only_if_there_is_one_to_keep(make_config):
    for without in ({"data": {"eval": None}}, {"eval": {"every": 0}}):
        cfg = replace(
            paper(make_config), **{k: replace(getattr(paper(make_config), k), **v) for k, v in without.items()}
        )
        assert checkpoints_at_once(cfg, 500) == (3, 2)


@pytest.mark.parametrize("train", [{}, {"keep_optimizer": 1}, {"keep": 1, "keep_best": False}])
def test_a_run_takes_no_more_than_was_said(make_config, sums, monkeypatch, train):
    cfg = make_config(
        data={"eval": str(sums)}, eval={"every": 2, "limit": 4}, train={"steps": 5, "save_every": 1, **train}
    )
    seen, complete = [], CheckpointStore.complete

    def watched(store, aside, state):
        found = list(store.folder.glob("*/model/*.safetensors")) + list(store.folder.glob("*/optimizer.safetensors"))
        seen.append(sum(p.stat().st_size for p in found if p.parts[-2] != "latest" and p.parts[-3] != "latest"))
        return complete(store, aside, state)

    monkeypatch.setattr(CheckpointStore, "complete", watched)
    with Trainer(cfg) as trainer:
        trainer.train()
    shape = model_shape(cfg)
    parts = checkpoint_parts(cfg, "rl", work(shape.parameters, shape.trained, 4))
    peak, _ = bytes_of_run(cfg, 5, parts)
    assert 0.7 * peak < max(seen) < 1.25 * peak  # names and shapes of a tiny model weigh something too


def test_too_little_disk_is_said_with_what_writes_less(make_config, monkeypatch):
    cfg = paper(make_config)
    parts = checkpoint_parts(cfg, "rl", work())

    def said(free, cfg=cfg, trainings=1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1e13, 0, free))
        return disk_line(cfg, work(), parts, 500, trainings, HERE)

    roomy = said(430e9)
    assert roomy.startswith("up to 426.5 GB, 319.9 GB at the end: 4 checkpoints at once, one being written (model 15.2 GB, optimizer state 91.4 GB each)")  # fmt: skip
    assert roomy.endswith("has 430.0 GB free")
    assert said(300e9).endswith("has 300.0 GB free: TOO LITTLE; to write less, set train.keep_optimizer=1 (243.7 GB); or set out= to a larger disk")  # fmt: skip
    assert said(200e9).endswith("to write less, set train.keep_optimizer=1 (243.7 GB), then train.keep_best=false (228.5 GB), then train.keep=1 (213.2 GB); or set out= to a larger disk")  # fmt: skip
    least = paper(make_config, keep=1, keep_best=False, keep_optimizer=1)
    assert said(200e9, least).endswith("TOO LITTLE; set out= to a larger disk")
    assert said(700e9, trainings=2).endswith("TOO LITTLE; to write less, set train.keep_optimizer=1 (243.7 GB); or set out= to a larger disk")  # fmt: skip
    assert said(800e9, trainings=2).startswith("up to 746.3 GB of 2 runs, 639.7 GB at the end")


def test_checkpoints_that_are_there_already_make_room(make_config, monkeypatch):
    cfg = paper(make_config)
    folder = cfg.folder / "checkpoints" / "step-000050"
    folder.mkdir(parents=True)
    (folder / "optimizer.safetensors").write_bytes(b"x" * 3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1e13, 0, 55e6))
    parts = {"model": 2e6, "optimizer state": 12e6}
    said = disk_line(cfg, work(1_000_000), parts, 500, 1, HERE)
    assert said.endswith(f"the disk of {cfg.folder.absolute()} has 55.0 MB free and 3.0 MB of this run's checkpoints")


def test_weights_that_go_to_servers_through_the_run_folder_count(make_config):
    def said(place, **vllm):
        cfg = paper(make_config)
        cfg = replace(cfg, rollout=replace(cfg.rollout, engine="vllm", vllm=VllmConfig(**vllm)))
        return disk_line(cfg, work(), checkpoint_parts(cfg, "rl", work()), 500, 1, place)

    servers, on_gpu = ("http://127.0.0.1:8000",), replace(HERE, on_gpu=True)
    assert said(HERE, servers=servers).startswith("up to 441.7 GB")
    assert said(on_gpu, args={"pipeline_parallel_size": 2}).startswith("up to 441.7 GB")
    assert said(on_gpu, servers=servers).startswith("up to 426.5 GB")
    assert said(HERE).startswith("up to 426.5 GB"), "in this process they go through memory, on a CPU too"
