"""How a run of several processes ends when somebody ends it."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from processes import comes_true, is_running

from luffy.config import to_yaml

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 60.0  # of this test, on a busy machine


# In a mutex that nobody unlocks, as in an exchange that another process never joins: Python sees no signal there.
WORKER = """
    import ctypes, os, sys, time
    from luffy.distributed.follow import follow_launcher
    follow_launcher()
    print(os.getpid(), "torch" in sys.modules, flush=True)
    mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)
    time.sleep(1000)
"""
LAUNCHER = """
    import subprocess, sys
    subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def start():
    """A launcher with one worker; the launcher's process and the worker's id."""
    command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), textwrap.dedent(WORKER)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    pid, torch_is_loaded = launcher.stdout.readline().split()
    assert torch_is_loaded == "False"
    return launcher, int(pid)


def test_a_worker_ends_when_its_launcher_is_killed():
    launcher, worker = start()
    assert is_running(worker)
    launcher.kill()
    launcher.wait()
    assert comes_true(lambda: not is_running(worker), PATIENCE_S)


def test_sigint_ends_a_worker_that_waits_for_others():
    launcher, worker = start()
    os.kill(worker, signal.SIGINT)
    assert comes_true(lambda: not is_running(worker), PATIENCE_S)
    launcher.wait()


def begun_training(make_config, tmp_path):
    """``luffy train`` of two processes that has its first checkpoint, and the ids of its workers."""
    cfg = make_config(launch="torchrun", parallel={"workers": 2})
    cfg = replace(cfg, train=replace(cfg.train, steps=2000, save_every=1))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "luffy", "train", str(recipe)]
    running = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert comes_true((cfg.folder / "checkpoints" / "latest").exists, 200)
    children = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    return running, [int(pid) for pid in children]


@pytest.mark.slow
def test_workers_of_a_killed_launcher_end(make_config, tmp_path):
    running, workers = begun_training(make_config, tmp_path)
    running.kill()
    running.communicate(timeout=PATIENCE_S)  # until the last process that holds its standard error is gone
    assert not any(map(is_running, workers))


@pytest.mark.slow
def test_ctrl_c_needs_no_second_signal(make_config, tmp_path):
    running, workers = begun_training(make_config, tmp_path)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130 and said.splitlines()[-1].startswith("luffy: interrupted; run the same")
    assert "Unable to shutdown" not in said and "Traceback" not in said  # no worker had to be killed
    assert not any(map(is_running, workers))
