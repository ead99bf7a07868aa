"""What a process may take of its machine: threads, workers and memory."""

import os

import pytest
import torch

from luffy.evaluation.engines import load_native
from luffy.generate import generate_texts
from luffy.models import machine as machine_module
from luffy.types import Problem


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Eight cores and eight threads, no quota, nothing said by the user; torch is left as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine_module, "CGROUP", tmp_path)
    yield tmp_path
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_quota_bounds_the_threads(machine, files, cores):
    for name, text in files.items():
        (machine / name).parent.mkdir(exist_ok=True)
        (machine / name).write_text(text)
    machine_module.use_threads(None)
    assert torch.get_num_threads() == machine_module.available_cores() == cores


def test_few_cores_bound_them_and_many_do_not_add_any(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    machine_module.use_threads(None)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    machine_module.use_threads(None)
    assert torch.get_num_threads() == 2


def test_what_the_user_says_stands(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    machine_module.use_threads(4)
    assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    machine_module.use_threads(None)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("module", ["luffy.evaluation.engines", "luffy.generate"])
def test_evaluation_and_generation_hold_to_it(machine, monkeypatch, module, tiny_model):
    """Eight threads were set; this process has two cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    if module == "luffy.generate":
        options = {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 1, "seed": 0, "style": "plain"}
        list(
            generate_texts(
                str(tiny_model), [Problem("0", "1", "")], **options, system_prompt=None, dtype="float32", device="cpu"
            )
        )
    else:
        load_native(str(tiny_model), dtype="float32", device="cpu", slots=2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("cores", "workers", "of_four"), [(1, 2, 2), (6, 3, 2), (16, 8, 2), (32, 8, 4), (96, 8, 8)])
def test_verifiers_beside_a_gpu(monkeypatch, cores, workers, of_four):
    monkeypatch.setattr(machine_module, "available_cores", lambda: cores)
    assert machine_module.default_workers("cuda") == workers and machine_module.default_workers("cpu") == 2
    assert machine_module.default_workers("cuda", processes=4) == of_four


@pytest.mark.parametrize(("fraction", "free", "unused"), [(1.0, 60, 70), (0.5, 60, 40), (0.5, 15, 25), (0.2, 60, 10)])
def test_a_process_counts_the_memory_that_it_may_use(monkeypatch, fraction, free, unused):
    """Of 100 bytes it has reserved 20 and allocated 10."""
    answers = {
        "mem_get_info": (free, 100),
        "memory_reserved": 20,
        "memory_allocated": 10,
        "get_per_process_memory_fraction": fraction,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert machine_module.unused_bytes(torch.device("cuda")) == unused
