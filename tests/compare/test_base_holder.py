"""The process that holds what LoRA trainings share: when there is one, how it ends, and that it changes no training."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import write_rows
from processes import comes_true, is_running
from trainings import final_weights, train_untimed, untimed_metrics

from luffy.compare import at_once as rules
from luffy.compare import base_holder, halving
from luffy.compare.arms import Arm
from luffy.compare.base_holder import BaseHolder, room_for
from luffy.compare.halving import Asked, Halving, compare_methods
from luffy.compare.state import ArmState
from luffy.config import load_config
from luffy.dry_run.place import Place
from luffy.errors import UserError
from luffy.models.shared import VARIABLE, Base, taken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared on Linux alone")
# Does what a holder on a GPU does: says that it is ready, and stays. Behind BROKEN it ends at once.
STAND_IN = """#!/bin/sh
test -e {broken} && exit 1
exec {python} -c '
import os, signal
place, _, key = os.environ["LUFFY_SHARED_BASE"].rpartition(" ")
open(place, "r+b").write(bytes.fromhex(key))
signal.pause()
'
"""
GPU = Base("x", "float32", "cuda")


@pytest.fixture
def stand_in(tmp_path):
    script = tmp_path / "stand-in"
    script.write_text(STAND_IN.format(python=sys.executable, broken=tmp_path / "broken"))
    script.chmod(0o755)
    return script


@pytest.fixture
def holder(tmp_path):
    started = []

    def make(base, patience=120.0):
        started.append(BaseHolder(base, tmp_path / "holder.log", patience))
        return started[-1]

    yield make
    for one in started:
        one.close()


def number_of(holder):
    return holder._process._process.pid


def test_on_a_cpu_it_ends_and_the_weights_stay(tiny_model, holder, monkeypatch):
    base = Base(str(tiny_model), "float32", "cpu")
    one = holder(base)
    assert one.environment() == {} and one.start()
    environment = one.environment()
    assert comes_true(lambda: not is_running(number_of(one)), 60)
    assert one.environment() == environment
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    model = taken(base)
    files = set(os.listdir("/proc/self/fd"))
    one.close()
    assert set(os.listdir("/proc/self/fd")) < files and one.environment() == {}
    assert model.get_input_embeddings().weight.isfinite().all()  # a training goes on
    assert taken(base) is None


def test_one_that_fails_is_no_holder(tmp_path, holder):
    one = holder(Base(str(tmp_path / "nothing"), "float32", "cpu"))
    assert not one.start() and "no such folder" in (tmp_path / "holder.log").read_text()


def test_one_that_takes_too_long_is_none(tmp_path, holder, monkeypatch):
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    one = holder(GPU, patience=0.5)
    assert not one.start()
    pid = number_of(one)
    one.close()
    assert not is_running(pid)


def test_one_that_is_lost_is_started_again(tmp_path, holder, stand_in, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(stand_in))
    one = holder(GPU)
    assert one.start()
    first, environment = number_of(one), one.environment()
    assert one.environment() == environment and number_of(one) == first
    os.kill(first, signal.SIGKILL)
    assert comes_true(lambda: not is_running(first))
    assert one.environment() != environment and is_running(number_of(one))
    second = number_of(one)
    (tmp_path / "broken").touch()
    os.kill(second, signal.SIGKILL)
    assert comes_true(lambda: not is_running(second))
    assert one.environment() == {}
    (tmp_path / "broken").unlink()
    assert one.start()
    last = number_of(one)
    one.close()
    assert not is_running(last)


def test_one_that_is_started_again_leaves_nothing_of_the_first(holder, stand_in, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(stand_in))
    one = holder(GPU)
    assert one.start()
    first, files = number_of(one), len(os.listdir("/proc/self/fd"))
    assert one.start()
    assert not is_running(first) and len(os.listdir("/proc/self/fd")) == files


def test_its_memory_can_be_opened_whatever_allocator_the_user_has(holder, stand_in, monkeypatch):
    """Segments that expand have no handles of CUDA IPC."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setattr(sys, "executable", str(stand_in))
    one = holder(GPU)
    assert one.start()
    of_it = Path(f"/proc/{number_of(one)}/environ").read_text().split("\0")
    assert {f"{name}=expandable_segments:False" for name in names} <= set(of_it)


def test_it_ends_with_a_comparison_that_is_killed(tmp_path, stand_in):
    code = f"""
import sys, signal
from pathlib import Path
from luffy.compare.base_holder import BaseHolder
from luffy.models.shared import Base
sys.executable = {str(stand_in)!r}
one = BaseHolder(Base("x", "float32", "cuda"), Path({str(tmp_path / "log")!r}), 60.0)
assert one.start()
print(one._process._process.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as comparison:
        pid = int(comparison.stdout.readline())
        assert is_running(pid)
        comparison.kill()
    assert comes_true(lambda: not is_running(pid))


def lora_arm(cfg, lr, method="luffy", **model):
    return Arm(method, lr, 0, replace(cfg, model=replace(cfg.model, **model)))


def test_a_comparison_has_one_if_two_train_at_once(make_config, tmp_path, monkeypatch):
    cfg = make_config(model={"lora": {"rank": 4}})
    started, closed = [], []
    monkeypatch.setattr(BaseHolder, "start", lambda self: started.append(self.base) or "bad" not in self.base.path)
    monkeypatch.setattr(BaseHolder, "close", lambda self: closed.append(self.base))
    base = Base(cfg.model.path, "float32", "cpu")

    def room(arms, wanted=2, over=False):
        started.clear(), closed.clear()
        with room_for(arms, wanted, tmp_path, 60.0, over) as found:
            assert not closed
        assert started == closed
        return found

    lora, full = [lora_arm(cfg, lr) for lr in (1e-3, 3e-3)], lora_arm(cfg, 1e-3, lora=None)
    assert room(lora).why == "--at-once, sharing the frozen weights" and started == [base]
    assert room([full, *lora]).holder is not None
    for fit, evaluated in ((1, 1), (3, 2)):
        monkeypatch.setattr(base_holder, "evaluations_at_once", lambda *_, fit=fit: fit)
        assert room(lora).evaluated == evaluated
    for none in ([full, full], [full, lora[0]], [lora[0], lora_arm(cfg, 1e-3, dtype="bfloat16")],
                 [lora_arm(cfg, lr, trust_remote_code=True) for lr in (1e-3, 3e-3)]):  # fmt: skip
        assert room(none).holder is None and not started
    assert room(lora, wanted=1).holder is None and not started
    assert room(lora, over=True).holder is None and not started
    failed = room([lora_arm(cfg, lr, path="bad/one") for lr in (1e-3, 3e-3)])
    assert failed.holder is None and failed.environment() == {} and len(started) == 1
    assert failed.why == f"--at-once, the frozen weights cannot be shared: {tmp_path / base_holder.LOG}"
    assert (failed.trained, failed.evaluated) == (2, 2)
    with pytest.raises(KeyboardInterrupt), room_for(lora, 2, tmp_path, 60.0, over=False):
        raise KeyboardInterrupt
    assert len(closed) == 2


def test_more_train_at_once_only_where_they_do_share(make_config, tmp_path, monkeypatch):
    cfg = make_config(model={"lora": {"rank": 4}})
    arms = [lora_arm(cfg, lr) for lr in (1e-3, 3e-3)]
    there = Place.of(cfg)
    monkeypatch.setattr(base_holder, "evaluations_at_once", lambda *_: 9)
    monkeypatch.setattr(rules, "available_cores", lambda: 64)
    monkeypatch.setattr(rules.Place, "of", lambda *_: replace(there, free=30 * 2**30))
    monkeypatch.setattr(rules, "peak_bytes", lambda *_: 10 * 2**30)
    monkeypatch.setattr(rules, "weight_bytes", lambda *_: 7 * 2**30)
    for starts, most in ((True, 6), (False, 2)):  # of 27 GiB: 7 and 3 each, or 10 each
        monkeypatch.setattr(BaseHolder, "start", lambda self, starts=starts: starts)
        with room_for(arms, None, tmp_path, 60.0, over=False) as room:
            assert room.trained == most and (room.holder is not None) == starts


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_arms_end_as_they_do_with_weights_of_their_own(make_config, tmp_path, monkeypatch, quantize):
    """The weights are taken away once the holder has them, so no arm can load its own."""
    for package in ("peft", "bitsandbytes")[: 1 + bool(quantize)]:
        pytest.importorskip(package)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "traces": [f"#### {i + 1}"]} for i in range(80)]
    data = write_rows(tmp_path / "train.jsonl", [{"id": str(i), **row} for i, row in enumerate(rows)])
    folder = tmp_path / "model"
    made = make_config(model={"lora": {"rank": 4, "quantize": quantize}}, data={"train": str(data)}, optim={"lr": 1e-2})
    folder.mkdir()
    for file in Path(made.model.path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    cfg = replace(made, model=replace(made.model, path=str(folder)), train=replace(made.train, steps=2))
    train, weights = Halving._train, folder / "model.safetensors"

    def without_weights(self, arms, target):
        weights.rename(tmp_path / "away")
        try:
            return train(self, arms, target)
        finally:
            (tmp_path / "away").rename(weights)

    monkeypatch.setattr(Halving, "_train", without_weights)
    monkeypatch.setattr(Halving, "_accuracies", lambda self, arms, *_: [{"a": arm.lr, "b": 0.0} for arm in arms])
    said = []
    asked = Asked(cfg, ["luffy"], [1e-2, 3e-2], 1, 7200.0, tmp_path / "out", at_once=2)
    outcome = compare_methods(asked, said.append)
    assert "at most 2 at once (--at-once, sharing the frozen weights)" in said
    assert [row.fate for row in outcome.rows] == ["finalist"] * 2, said
    for name in ("luffy-lr0.01-s0", "luffy-lr0.03-s0"):
        shared = load_config(tmp_path / "out" / "recipes" / f"{name}.yaml")
        alone = replace(shared, out=str(tmp_path / "alone"))
        assert train_untimed(alone) == untimed_metrics(shared)
        ours, theirs = final_weights(shared), final_weights(alone)
        assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)


def test_loading_them_costs_the_budget_of_what_is_left(tmp_path, monkeypatch):
    """A comparison that has nothing left to train or test is told so."""
    clock, told, spent = [100.0], [], []

    @contextmanager
    def room(arms, wanted, folder, patience, over):
        told.append(over)
        clock[0] += 7.0
        yield base_holder.Room(1, "", 1)

    monkeypatch.setattr(halving, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(halving, "room_for", room)
    monkeypatch.setattr(Halving, "run", lambda self: spent.append(self.state.spent))
    cfg = load_config("tiny/luffy", {"out": str(tmp_path)})
    asked = Asked(cfg, ["luffy"], [1e-3], 1, 60.0, tmp_path / "out")
    for state in (ArmState(), ArmState(items={"p": 1.0}), ArmState(status="failed")):
        monkeypatch.setattr(halving, "ArmState", lambda state=state: state)
        with suppress(UserError):  # there is no table yet
            compare_methods(asked, str)
    assert spent == [7.0] * 3 and told == [False, True, True]


def test_evaluations_have_a_room_of_their_own(monkeypatch, tmp_path):
    """Each loads the whole model, so fewer of them than of trainings may fit."""
    at_once = []
    monkeypatch.setattr(
        halving, "together", lambda jobs, _: at_once.append(len(jobs)) or [halving.Ended(True)] * len(jobs)
    )
    monkeypatch.setattr(halving, "evaluation", lambda *_: None)
    monkeypatch.setattr(halving, "accuracies", lambda *_: {})
    one = object.__new__(Halving)
    one.asked = Asked(None, [], [], 1, 1.0, tmp_path)
    one.room = base_holder.Room(5, "", 2)
    assert len(one._accuracies([None] * 5, tmp_path, "test")) == 5 and at_once == [2, 2, 1]


def test_trainings_alone_share_the_base_and_those_that_run_share_the_cores(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(halving, "together", lambda jobs, env: given.append(env) or [halving.Ended(True)] * len(jobs))
    for made in ("training", "evaluation", "accuracies"):
        monkeypatch.setattr(halving, made, lambda *_: {})
    monkeypatch.setattr(rules, "available_cores", lambda: 6)
    one = object.__new__(Halving)
    one.asked = Asked(None, [], [], 1, 1.0, tmp_path)
    one.room = base_holder.Room(3, "", 2, SimpleNamespace(environment=lambda: {VARIABLE: "x"}))
    one._train([None] * 3, 1.0)
    one._train([], 1.0)
    one._accuracies([None] * 3, tmp_path, "test")
    assert given == [{"OMP_NUM_THREADS": "2", VARIABLE: "x"}, {"OMP_NUM_THREADS": "3"}, {}]
