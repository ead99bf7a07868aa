"""Calls run at the same time, and one that hangs or raises touches no other. Events stand for time."""

import _thread
import os
import signal
import threading
import time

import pytest

from luffy.environments.workers import Fault, Workers

FOREVER = 600.0


@pytest.fixture
def gate():
    """An event that hanging calls wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def collected(workers, count):
    """The results of so many calls."""
    found = []
    while len(found) < count:
        found += workers.finished(block=True)
    return dict(found)


def test_results_come_with_their_keys():
    with Workers(4, FOREVER) as workers:
        for number in range(20):
            workers.submit(("k", number), pow, number, 2)
        assert collected(workers, 20) == {("k", number): number**2 for number in range(20)}
        assert workers.finished(block=True) == workers.finished() == [] and workers.outstanding == 0


def test_calls_run_at_the_same_time_up_to_the_limit():
    meeting = threading.Barrier(3)
    with Workers(3, FOREVER) as workers:
        for number in range(6):
            workers.submit(number, meeting.wait, FOREVER)  # would wait for ever, were it fewer than three at once
        assert sorted(collected(workers, 6).values()) == [0, 0, 1, 1, 2, 2]
    running, most, lock = set(), [], threading.Lock()

    def count(number):
        with lock:
            running.add(number)
            most.append(len(running))
        with lock:
            running.discard(number)

    with Workers(2, FOREVER) as workers:
        for number in range(50):
            workers.submit(number, count, number)
        collected(workers, 50)
    assert max(most) <= 2


def test_what_raises_is_a_fault():
    def leave():
        raise SystemExit(3)

    with Workers(2, FOREVER) as workers:
        workers.submit("a", int, "x")
        workers.submit("b", leave)
        found = collected(workers, 2)
    assert found["a"].kind == "raised" and found["a"].message.startswith("ValueError: invalid literal")
    assert isinstance(found["a"].error, ValueError) and found["b"].message == "SystemExit: 3"


def test_hanging_calls_are_given_up_and_hold_up_no_other(gate):
    with Workers(2, 0.05) as workers:
        for name in ("h1", "h2", "h3"):
            workers.submit(name, gate.wait)
        assert set(collected(workers, 3).values()) == {
            Fault("timed_out", "no answer within 0.05 s (environment.timeout_s)")
        }
    with Workers(1, FOREVER) as workers:  # the same with calls behind it, whose time is not short
        workers._timeout_s = 0.05
        workers.submit("hangs", gate.wait)
        assert collected(workers, 1)["hangs"].kind == "timed_out"
        workers._timeout_s = FOREVER
        for number in range(5):
            workers.submit(number, abs, -number)
        assert collected(workers, 5) == {number: number for number in range(5)}


def test_a_hang_is_given_up_while_nobody_asks(gate):
    began = threading.Event()
    with Workers(1, 0.05) as workers:
        workers.submit("hangs", gate.wait)
        workers.submit("next", began.set)
        assert began.wait(FOREVER)  # without a call of finished


def test_closing_waits_for_nothing(gate):
    workers = Workers(2, FOREVER)
    for name in ("a", "b", "c"):
        workers.submit(name, gate.wait)
    workers.close()
    workers.close()
    assert workers.finished(block=True) == []
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit("d", abs, 1)


def test_what_ends_behind_the_close_is_no_result(gate, monkeypatch):
    raised, threads, began = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def hang():
        threads.append(threading.current_thread())
        began.set()
        gate.wait()

    workers = Workers(1, FOREVER)
    workers.submit("a", hang)
    assert began.wait(FOREVER)
    workers.submit("b", hang)
    assert workers.outstanding == 2, "one runs, one waits"
    workers.close()
    assert workers.outstanding == 0
    gate.set()
    (thread,) = threads
    thread.join(FOREVER)
    assert raised == workers.finished() == []


def test_an_interrupt_reaches_a_main_thread_that_waits(gate):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait()

    with Workers(1, FOREVER) as workers, pytest.raises(KeyboardInterrupt):
        workers.submit("x", interrupt)
        workers.finished(block=True)


def test_an_interrupt_that_no_wait_is_woken_by_is_heard_before_the_call_ends(gate):
    """Like a Ctrl-C right before the wait: it is noted, and the wait begins all the same."""
    ended = threading.Event()

    def interrupt():
        while not workers._ended._waiters:
            time.sleep(0.01)
        _thread.interrupt_main()
        gate.wait(20)
        ended.set()

    with Workers(1, FOREVER) as workers, pytest.raises(KeyboardInterrupt):
        workers.submit("x", interrupt)
        workers.finished(block=True)
    assert not ended.is_set()


def test_threads_are_made_as_they_are_needed():
    with Workers(64, FOREVER) as workers:
        for number in range(10):
            workers.submit(number, abs, number)
            collected(workers, 1)
        assert workers._threads == 1
