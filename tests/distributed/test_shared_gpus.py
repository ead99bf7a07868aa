"""Several ranks on one GPU, and Ray workers that get a part of one. No GPU is there: ids and counts are made up."""

import importlib.util
import logging
import os
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_ranks

import luffy
from luffy.config import Config
from luffy.distributed.ray_launch import uses_gpus
from luffy.distributed.world import let_devices_be_shared
from luffy.errors import ConfigError
from luffy.schema import build


def host_ids(uuids, given, world):
    """The rank's NCCL_HOSTID, and what it warned of."""
    os.environ.pop("NCCL_HOSTID", None)
    if given:
        os.environ["NCCL_HOSTID"] = given
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("luffy.distributed.world")
    logger.addHandler(handler)
    try:
        let_devices_be_shared(world, uuids[world.rank])
    finally:
        logger.removeHandler(handler)
    return os.environ.get("NCCL_HOSTID"), said


def test_ranks_that_share_a_gpu_get_a_host_id_each_and_the_others_none():
    (first, (warning,)), *others = run_ranks(3, host_ids, ["a", "b", "a"], "")
    assert first == "a-0" and others == [(None, []), ("a-2", [])]
    assert warning.startswith("3 processes share 2 GPUs: for tests only")
    assert run_ranks(3, host_ids, ["a", "b", "c"], "") == [(None, [])] * 3


def test_a_host_id_of_the_user_stays():
    assert [host for host, _ in run_ranks(2, host_ids, ["a", "a"], "mine")] == ["mine", "mine"]


def on_gpus(gpus, workers, part, device="cuda"):
    ray = SimpleNamespace(cluster_resources=lambda: {"GPU": gpus} if gpus else {})
    values = {"workers": workers}, {"gpus_per_worker": part}, {"device": device}
    return uses_gpus(ray, build(Config, dict(zip(("parallel", "ray", "model"), values, strict=True), launch="ray")))


def test_parts_of_gpus_are_counted_by_the_workers_that_fit_on_one():
    assert on_gpus(1, 2, 0.5) and on_gpus(1, 10, 0.1) and on_gpus(2, 2, 1)
    assert on_gpus(2, 4, 0.4)
    with pytest.raises(ConfigError, match=r"is 5 of 0\.4 GPU each, but this machine has 2 GPUs"):
        on_gpus(2, 5, 0.4)
    with pytest.raises(ConfigError, match=r"is 2, but this machine has 1 GPUs; .* ray\.gpus_per_worker below 1"):
        on_gpus(1, 2, 1)
    assert on_gpus(1, 2, 0.5, "auto") and not on_gpus(1, 2, 1, "auto") and not on_gpus(0, 1, 1, "auto")


@pytest.mark.parametrize("part", [0, 1.5])
def test_a_part_lies_between_nothing_and_one_gpu(part):
    with pytest.raises(ConfigError, match="gpus_per_worker"):
        build(Config, {"ray": {"gpus_per_worker": part}})


@dataclass(frozen=True)
class Places:
    """A job whose workers write down the GPU that Ray gave them."""

    cfg: Config
    folder: str

    def as_worker(self, on_step=None, out=None):
        import ray

        (Path(self.folder) / os.environ["RANK"]).write_text(" ".join(map(str, ray.get_gpu_ids())))


@pytest.fixture
def two_gpus(monkeypatch):
    """A cluster of one node that claims to have two GPUs. Its torch has no NCCL."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    here = [str(folder) for folder in (Path(luffy.__file__).parent.parent, *Path(__file__).parents[:2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    import ray
    import ray.train.torch

    monkeypatch.setattr(ray.train.torch, "TorchConfig", partial(with_gloo, ray.train.torch.TorchConfig))
    ray.init(num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def with_gloo(config, backend, timeout_s):
    assert backend == "cpu:gloo,cuda:nccl"
    return config(backend="gloo", timeout_s=timeout_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray")
def test_ray_places_two_workers_on_each_gpu_that_they_share(two_gpus, tmp_path, capfd):
    from luffy.distributed.ray_launch import run_on_ray

    values = {"launch": "ray", "out": str(tmp_path / "runs"), "model": {"device": "cuda"}}
    cfg = build(Config, {**values, "parallel": {"workers": 4}, "ray": {"gpus_per_worker": 0.5}})
    run_on_ray(Places(cfg, str(tmp_path)))
    assert sorted((tmp_path / str(rank)).read_text() for rank in range(4)) == ["0", "0", "1", "1"]
    assert "share a GPU, which is for tests" in capfd.readouterr().err
