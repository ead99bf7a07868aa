"""The pool must lose exactly the item that misbehaves, keep its size, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from processes import comes_true, is_running

from luffy.errors import UserError
from luffy.rewards import pool as pool_module
from luffy.rewards.pool import WorkerPool

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


@pytest.fixture(scope="module")
def pool():
    with WorkerPool("reward_functions:misbehave", workers=2, timeout_s=1.5, memory_bytes=512 << 20) as pool:
        pool.wait_ready()
        yield pool


def test_results_come_back_in_the_order_of_the_items(pool):
    outcomes = pool.map(("echo", number) for number in range(500))
    assert [outcome.value for outcome in outcomes] == list(range(500))
    assert {outcome.status for outcome in outcomes} == {"ok"}


def test_answers_of_any_size_and_number_arrive_whole(pool):
    values = ["x" * size for size in (1, pool_module.READ_BYTES - 40, 10, 5 * pool_module.READ_BYTES, 0)] * 3
    assert [outcome.value for outcome in pool.map(("echo", value) for value in values)] == values


def test_a_worker_that_does_not_start_ends_the_run_and_is_named(monkeypatch):
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.0)
    with (
        WorkerPool("reward_functions:misbehave", workers=1, timeout_s=1.5) as late,
        pytest.raises(RuntimeError, match=r"did not start within 0 s: reward_functions:misbehave"),
    ):
        late.map([("echo", 1)])


def test_a_worker_killed_while_it_imports_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "dies_once.py").write_text(
        "import os, signal, pathlib\n"
        f"mark = pathlib.Path({str(tmp_path / 'died')!r})\n"
        "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def double(number):\n    return 2 * number\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerPool("dies_once:double", workers=1, timeout_s=5) as pool:
        assert [outcome.value for outcome in pool.map([(4,)])] == [8]
    assert (tmp_path / "died").exists()


def test_every_kind_of_failure_costs_exactly_its_own_item(pool):
    failures = {
        "hang": ("timeout", "killed after 1.5 s"),
        "hold_the_lock": ("timeout", "killed after 1.5 s"),
        "bomb": ("crashed", "out of memory"),
        "kill": ("crashed", "worker died with SIGKILL"),
        "exit": ("crashed", "worker died with exit code 3"),
        "raise": ("error", "EOFError: nothing left to read"),
        "unpicklable": ("error", None),
    }
    items = []
    for name in failures:
        items += [(name, 8 << 30), ("echo", name)]
    outcomes = pool.map(items)
    for (name, (status, message)), failed, healthy in zip(failures.items(), outcomes[::2], outcomes[1::2], strict=True):
        assert failed.status == status, name
        assert message is None or failed.message == message
        assert (healthy.status, healthy.value) == ("ok", name)
    assert len(set(pool.pids)) == 2


def test_a_failure_among_quick_items_costs_its_own_item_and_no_other_runs_twice(tmp_path):
    record = tmp_path / "runs"
    with WorkerPool("reward_functions:record_call", workers=1, timeout_s=1.0) as pool:
        pool.wait_ready()
        failures = {70: "hang", 75: "kill", 85: "raise"}  # the worker has many items at once by then
        outcomes = pool.map((str(record), i, failures.get(i, "echo")) for i in range(100))
    expected = {70: "timeout", 75: "crashed", 85: "error"}
    assert [outcome.status for outcome in outcomes] == [expected.get(i, "ok") for i in range(100)]
    assert sorted(map(int, record.read_text().split())) == list(range(100))


def test_the_last_timeout_does_not_wait_for_the_new_worker(pool):
    pool.wait_ready()
    old = pool.pids
    assert [outcome.status for outcome in pool.map([("hang",), ("hang",)])] == ["timeout", "timeout"]
    assert not any(worker.ready for worker in pool._workers)
    assert not set(old) & set(pool.pids)


def test_an_item_within_the_memory_limit_is_fine(pool):
    assert pool.map([("bomb", 100 << 20)])[0].value == 100 << 20


def test_kill_9_of_a_worker_in_mid_flight(tmp_path):
    """The other worker's items, before and after the kill, are all answered."""
    mark = tmp_path / "pid"
    with WorkerPool("reward_functions:misbehave", workers=2, timeout_s=60) as pool:

        def kill_the_sleeper():
            assert comes_true(lambda: mark.exists() and mark.read_text())
            os.kill(int(mark.read_text()), signal.SIGKILL)

        killer = threading.Thread(target=kill_the_sleeper)
        killer.start()
        outcomes = pool.map([("echo", -1), ("sleep_marked", str(mark)), *[("echo", n) for n in range(50)]])
        killer.join()
        assert (outcomes[1].status, outcomes[1].message) == ("crashed", "worker died with SIGKILL")
        assert [outcome.value for outcome in outcomes[2:]] == list(range(50))
        assert len(pool.pids) == 2 and all(map(is_running, pool.pids))


def test_sigterm_is_the_parents_to_handle(pool):
    """Schedulers send it to every process of a job, and the training then still finishes its step."""
    pool.wait_ready()
    pids = pool.pids
    sender = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGTERM) for pid in pids])
    sender.start()
    outcomes = pool.map([("nap", 0.8), ("nap", 0.8), ("echo", 3)])
    sender.join()
    assert [(o.status, o.value) for o in outcomes] == [("ok", 0.8), ("ok", 0.8), ("ok", 3)] and pool.pids == pids


def test_a_worker_killed_between_items_costs_nothing(pool):
    pool.wait_ready()
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert comes_true(lambda: not any(map(is_running, pool.pids)))
    assert [outcome.value for outcome in pool.map([("echo", 1), ("echo", 2), ("echo", 3)])] == [1, 2, 3]


def test_a_stopped_worker_is_replaced():
    with WorkerPool("reward_functions:misbehave", workers=2, timeout_s=1.5) as pool:
        pool.wait_ready()
        stopped = pool.pids
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        outcomes = pool.map([("echo", "x" * 4_000_000), ("echo", "small"), ("echo", 3)])
        assert [outcome.status for outcome in outcomes] == ["crashed", "timeout", "ok"]
        assert not set(stopped) & set(pool.pids)


def test_items_that_cannot_be_pickled_are_errors(pool):
    outcomes = pool.map([("echo", lambda: 0), ("echo", 2)])
    assert [outcome.status for outcome in outcomes] == ["error", "ok"]


class LostOnTheWay:
    """Can be pickled; to unpickle it is to call ``function(*arguments)``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def many_at_once(pool, monkeypatch):
    """The pool, whose messages are as large as they may be, however slow this machine is."""
    for bound in ("QUICK_S", "SLOW_S"):
        monkeypatch.setattr(pool_module, bound, float("inf"))
    pool.wait_ready()
    pool.map([("echo", 0)] * 8 * pool_module.MOST_AT_ONCE)
    return pool


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (lambda: 0, "error"),
        (LostOnTheWay(int, "no number"), "error"),
        (LostOnTheWay(bytearray, 1 << 40), "crashed"),  # out of memory
        (LostOnTheWay(os._exit, 3), "crashed"),
    ],
    ids=["not pickled", "not unpickled", "too large", "deadly"],
)
def test_an_item_that_does_not_arrive_costs_no_other_of_its_message(many_at_once, bad, status):
    values = list(range(100))
    values[7] = values[8] = values[70] = bad
    outcomes = many_at_once.map([("echo", value) for value in values])
    assert [i for i, outcome in enumerate(outcomes) if outcome.status == status] == [7, 8, 70]
    assert all(outcome.value == i for i, outcome in enumerate(outcomes) if outcome.status == "ok")


def test_what_the_function_does_to_an_item_is_not_seen_by_others_that_share_it(many_at_once):
    shared = []
    outcomes = many_at_once.map([("append", shared)] * 100)
    assert [outcome.value for outcome in outcomes] == [["append"]] * 100


def test_a_few_items_are_shared_by_all_workers(many_at_once):
    """Also when a message could take all of them."""
    pids = [outcome.value for outcome in many_at_once.map([("pid",)] * 8)]
    assert sorted(map(pids.count, many_at_once.pids)) in ([2, 6], [4, 4])  # in messages of two


@pytest.fixture
def sizes(monkeypatch):
    """The number of items in each message, as they are sent."""
    found, send = [], pool_module.WorkerProcess.send

    def counted(worker, items, *rest):
        found.append(len(items))
        send(worker, items, *rest)

    monkeypatch.setattr(pool_module.WorkerProcess, "send", counted)
    return found


@pytest.mark.parametrize(("count", "expected"), [(8, [2] * 4), (9, [3] * 3), (3, [1] * 3), (200, [32] * 6 + [8])])
def test_a_call_is_two_messages_for_each_of_two_workers_and_none_is_too_long(many_at_once, sizes, count, expected):
    many_at_once.map([("echo", 0)] * count)
    assert sizes == expected


def test_messages_grow_when_full_ones_were_quick_and_are_one_item_after_a_slow_one(many_at_once, sizes, monkeypatch):
    many = [("echo", 0)] * 64
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "QUICK_S", 0.0)
        patch.setattr(pool_module, "SLOW_S", 0.0)
        many_at_once.map(many)
    assert sizes == [16, 16] + [1] * 32
    for _ in range(4):
        many_at_once.map(many[:1])
    sizes.clear()
    many_at_once.map(many)
    assert sizes[:2] == [2, 2] and max(sizes) == 16


def test_an_interrupted_map_leaves_no_late_reply(pool, monkeypatch):
    def interrupt(size, seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "_note_seconds", interrupt)
        pool.map([("echo", "old")] * 8)
    assert [outcome.value for outcome in pool.map([("echo", n) for n in range(4)])] == [0, 1, 2, 3]


def test_called_from_threads(pool):
    results = {}

    def work(name):
        results[name] = [outcome.value for outcome in pool.map([("echo", (name, n)) for n in range(50)])]

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {name: [(name, n) for n in range(50)] for name in "abc"}


def test_printing_does_not_reach_our_standard_output(pool, capfd):
    assert pool.map([("print", 7)])[0].value == 7
    captured = capfd.readouterr()
    assert captured.out == ""


def test_a_timeout_also_ends_what_the_worker_started():
    with WorkerPool("reward_functions:misbehave", workers=1, timeout_s=1.0) as pool:
        grandchild = pool.map([("grandchild",)])[0].value
        assert is_running(grandchild)
        assert pool.map([("hang",)])[0].status == "timeout"
        assert comes_true(lambda: not is_running(grandchild))


@pytest.mark.parametrize("end", ["exit", "kill", "bomb"])
def test_what_a_worker_started_ends_with_it_however_it_ends(end):
    with WorkerPool("reward_functions:misbehave", workers=1, timeout_s=60, memory_bytes=256 << 20) as pool:
        grandchild = pool.map([("grandchild",)])[0].value
        assert is_running(grandchild)
        assert pool.map([(end, 1 << 30)])[0].status == "crashed"
        assert comes_true(lambda: not is_running(grandchild))


def test_what_a_worker_started_ends_when_the_worker_is_killed_between_items():
    with WorkerPool("reward_functions:misbehave", workers=1, timeout_s=60) as pool:
        grandchild = pool.map([("grandchild",)])[0].value
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        assert comes_true(lambda: not is_running(pid))
        assert pool.map([("echo", 1)])[0].value == 1
        assert comes_true(lambda: not is_running(grandchild))


def test_close_leaves_no_process_and_refuses_further_work():
    pool = WorkerPool("reward_functions:square")
    pids = pool.pids
    assert [outcome.value for outcome in pool.map([(3,), (4,)])] == [9, 16]
    pool.close()
    pool.close()
    assert not any(map(is_running, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.map([(1,)])


def test_close_from_another_thread_ends_a_running_map():
    pool = WorkerPool("reward_functions:misbehave", workers=1, timeout_s=10_000)  # longer than a test may take
    pool.wait_ready()
    threading.Timer(0.3, pool.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        pool.map([("hang",), ("hang",)])


def run_script(body, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HERE)])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)], env=environment, text=True, stdout=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("occupation", ["idle", "hang", "hold_the_lock"])
def test_workers_end_when_the_parent_is_killed(occupation):
    parent = run_script(f"""
        import threading, time
        from luffy.rewards.pool import WorkerPool
        pool = WorkerPool("reward_functions:misbehave", timeout_s=60)
        pool.wait_ready()
        started = [outcome.value for outcome in pool.map([("grandchild",)] * 2)]
        print(*pool.pids, *started, flush=True)
        if {occupation!r} == "idle":
            time.sleep(1000)
        pool.map([({occupation!r},)] * 2)
    """)
    pids = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.5)
    assert len(pids) == 4 and all(map(is_running, pids))
    parent.kill()
    parent.wait()
    assert comes_true(lambda: not any(map(is_running, pids)))


def test_script_without_guard_without_stdin_and_without_close():
    """No ``__main__`` guard, standard streams closed, torch loaded, used off the main thread, never closed."""
    script = run_script("""
        import os, sys, threading
        os.close(0)
        import torch
        from luffy.rewards.pool import WorkerPool
        out = []
        def work():
            pool = WorkerPool("reward_functions:misbehave")
            out.append(pool.map([("environment",), ("echo", 5)]))
            out.append(pool.pids)
        thread = threading.Thread(target=work)
        thread.start(); thread.join()
        print(out[0][0].value["stdin"], out[0][1].value, *out[1], flush=True)
    """)
    words = script.communicate(timeout=90)[0].split()
    assert script.returncode == 0
    assert words[:2] == ["/dev/null", "5"]
    assert not any(is_running(int(pid)) for pid in words[2:])


def test_a_copy_in_another_process_leaves_the_workers_alone(pool, monkeypatch):
    """What a fork of a user's would have."""
    pool.wait_ready()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        pool.close()
        with pytest.raises(RuntimeError, match="belongs to another process"):
            pool.map([("echo", 1)])
    assert all(map(is_running, pool.pids))
    assert pool.map([("echo", 1)])[0].value == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", r"cannot import 'no_such_module' .*No module named 'no_such_module'"),
        ("reward_functions:nothing", r"module 'reward_functions' \(.*\) has no 'nothing'"),
        ("reward_functions:NOT_A_FUNCTION", "is a int, not a function"),
        ("reward_functions", "write it as module:function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_one_clear_error(path, message):
    with WorkerPool(path, workers=1) as pool, pytest.raises(UserError, match=message):
        pool.map([(1,)])


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        WorkerPool("reward_functions:square", **options)


@pytest.mark.parametrize("timeout_s", [1e7, 1e308])  # in ms more than poll takes; more than a C long
def test_a_timeout_may_be_as_long_as_one_likes(timeout_s):
    with WorkerPool("reward_functions:square", workers=1, timeout_s=timeout_s) as pool:
        assert [outcome.value for outcome in pool.map([(3,), (4,)])] == [9, 16]
