"""Trainings under Ray: over two nodes, and with workers that are killed. `make test-ray` sets Ray up and runs these."""

import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deadly import DeadlyJob
from features import FEATURES, configs, make_guide, note_seen
from ranks import run_ranks
from trainings import assert_same_metrics, assert_same_weights, final_weights, samples, train, untimed_metrics

import luffy
from luffy.config import Config
from luffy.errors import TrainingStopped, UserError
from luffy.schema import build
from luffy.trainer import Job

# Ray reads its token settings when it is imported, so it must not be before the fixture below has made them.
absent = importlib.util.find_spec("ray") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(absent, reason="Ray is not installed: make test-ray"),
]

KILLS = [("rollout", 1), ("update", 0), ("checkpoint", 0)]


@pytest.fixture(scope="module")
def make(tiny_model, sums, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")

    def config(name, **changes):
        values = {
            "name": name,
            "out": str(out),
            "launch": "ray",
            "model": {"path": str(tiny_model), "device": "cpu"},
            "data": {"train": str(sums), "eval": str(sums), "style": "plain", "max_prompt_tokens": 16},
            "reward": {"kind": "numeric", "workers": 1},
            "rollout": {"n": 4, "max_tokens": 16, "slots": 16},
            "optim": {"lr": 1e-2},
            "batch": {"problems": 6, "tokens": 128, "mini_batch": 3},
            "train": {"steps": 6, "save_every": 2, "threads": 1},
            "eval": {"every": 3, "limit": 4},
            "record": {"tensorboard": False, "samples_every": 1},
            "parallel": {"workers": 2, "timeout_s": 60},
            "ray": {"spread": True, "address": "auto"},
        }
        for section, entries in changes.items():
            values[section] = {**values.get(section, {}), **entries}
        return build(Config, values)

    return config


@pytest.fixture(scope="module")
def undisturbed(make):
    """Two processes without Ray: what every run below must equal."""
    cfg = make("undisturbed")
    run_ranks(2, train, cfg)
    return cfg


@pytest.fixture(scope="module")
def cluster(undisturbed):
    """Two raylets on this machine, one core each, closed by a token: two workers must share them."""
    here = Path(__file__).parent
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join([str(Path(luffy.__file__).parent.parent), str(here)]),
        "OMP_NUM_THREADS": "1",
    }
    before = dict(os.environ)
    os.environ |= settings
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.connect()  # while there is only the head: the other one can then be taken away
    cluster.add_node(num_cpus=1)
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ |= before


def run_killed(cfg, tmp_path, moment, victim=0, resume="auto"):
    """The node of every worker that was started, in order."""
    from luffy.distributed.ray_launch import run_on_ray

    marker = tmp_path / "nodes"
    run_on_ray(DeadlyJob(cfg, resume=resume, moment=moment, victim=victim, marker=str(marker)))
    assert marker.with_suffix(".died").exists() == (moment != "never")
    return marker.read_text().split()


def assert_equal_run(ours, theirs):
    assert untimed_metrics(ours) == untimed_metrics(theirs)
    assert samples(ours) == samples(theirs)
    a, b = final_weights(ours), final_weights(theirs)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_training_over_two_nodes_reports_to_the_driver(cluster, make, undisturbed, tmp_path, capfd):
    cfg = make("nodes")
    nodes = run_killed(cfg, tmp_path, "never")
    assert len(nodes) == len(set(nodes)) == 2
    assert_equal_run(cfg, undisturbed)
    said = capfd.readouterr().err
    assert "2 workers started, 2 machine(s)" in said and "nodes  step 6/6" in said and "model " in said


@pytest.mark.parametrize(("moment", "victim"), KILLS)
def test_a_killed_worker_costs_nothing_but_time(cluster, make, undisturbed, tmp_path, moment, victim, capfd):
    cfg = make(f"{moment}{victim}")
    started = run_killed(cfg, tmp_path, moment, victim)
    assert len(started) == 4  # two workers, twice
    assert "resumed at step" in capfd.readouterr().err
    assert_equal_run(cfg, undisturbed)
    note_seen("one process killed, then resumed", "ray, gloo", "2")


def test_a_killed_worker_of_a_run_that_was_not_to_resume_costs_nothing_either(cluster, make, undisturbed, tmp_path):
    cfg = make("anew")
    assert len(run_killed(cfg, tmp_path, "update", resume="never")) == 4
    assert_equal_run(cfg, undisturbed)


def test_a_lost_node_costs_nothing_but_time(cluster, make, undisturbed, tmp_path):
    """The raylet that has the second worker is killed, and the worker goes with it; a spare node takes their place."""
    cfg = make("lost")
    cluster.add_node(num_cpus=1)

    def lose():
        while not (cfg.folder / "checkpoints" / "step-000002").exists():
            time.sleep(0.05)
        used = (tmp_path / "nodes").read_text().split()
        (victim,) = [n for n in cluster.list_all_nodes() if n.node_id in used and n is not cluster.head_node][:1]
        victim.kill_raylet(check_alive=False)

    thread = threading.Thread(target=lose)
    thread.start()
    started = run_killed(cfg, tmp_path, "never")
    thread.join()
    assert len(started) == 4 and len(set(started)) == 3
    assert_equal_run(cfg, undisturbed)


@pytest.fixture(scope="module")
def guide(tiny_model, tmp_path_factory):
    return make_guide(tiny_model, tmp_path_factory.mktemp("guide"))


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_has_the_metrics_and_weights_of_one_process(cluster, make_config, sums, guide, name):
    from luffy.distributed.ray_launch import run_on_ray

    torch.set_num_threads(1)
    feature = FEATURES[name]
    alone, many = configs(feature, make_config, sums, guide, launch="ray")
    many = replace(many, ray=replace(many.ray, address="auto", cpus_per_worker=2 / feature.ranks))
    train(alone, None, feature.method)
    run_on_ray(Job(many, feature.method))
    assert_same_metrics(untimed_metrics(many), untimed_metrics(alone))
    assert_same_weights(final_weights(many), final_weights(alone))
    note_seen(name, "ray, gloo", str(feature.ranks))


def test_mistakes_are_not_tried_again(cluster, make, tmp_path):
    from luffy.distributed.ray_launch import run_on_ray

    with pytest.raises(UserError, match="already holds a run"):
        run_on_ray(Job(make("undisturbed"), resume="never"))
    hopeless = make("hopeless", algorithm={"oversample_rounds": 1}, guidance={"n_prefix": 0})
    with pytest.raises(TrainingStopped, match="unequal rewards"):
        run_on_ray(Job(hopeless))


def test_who_has_no_token_stays_outside(cluster):
    """A process with another token cannot even ask what is running."""
    code = f"import ray; ray.init(address={cluster.address!r}, logging_level=50); print(ray.nodes())"
    env = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    stranger = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert stranger.returncode != 0
    assert "auth" in (stranger.stdout + stranger.stderr).lower()
