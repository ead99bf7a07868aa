"""Who gets which request, without any server."""

import queue
import threading

import pytest

from luffy.rollout.vllm.dispatch import ATTEMPTS, Dispatch


def test_samples_of_a_prompt_stay_together_and_an_idle_server_helps_out():
    dispatch = Dispatch(["a", "b", "a", "b", "a", "c"], ["one", "two"])
    assert dispatch.share == 3
    assert [dispatch.take("one"), dispatch.take("two"), dispatch.take("one")] == [0, 1, 2]
    assert [dispatch.take("two"), dispatch.take("two")] == [3, 5]  # b is through, then c
    assert dispatch.take("two") == 4  # nobody began anything else: taken from the other's queue


def test_a_lost_servers_requests_go_elsewhere_and_are_counted():
    dispatch = Dispatch(["a"] * 3 + ["b"] * 3, ["one", "two"])
    assert [dispatch.take("one"), dispatch.take("two")] == [0, 3]
    dispatch.lose("one", 0, OSError("gone"))
    assert dispatch.take("one") is None and dispatch.lost == {"one": "gone"} and dispatch.failure is None
    assert [dispatch.take("two") for _ in range(5)] == [4, 5, 0, 1, 2]
    assert dispatch.resent == 3


def test_when_all_are_lost_everybody_stops():
    dispatch = Dispatch(["a"] * 2, ["one", "two"])
    error = OSError("the last one")
    dispatch.lose("one", dispatch.take("one"), OSError("first"))
    dispatch.lose("two", dispatch.take("two"), error)
    assert dispatch.failure is error and dispatch.take("one") is None and dispatch.take("two") is None


def test_a_request_that_fails_everywhere_is_to_blame():
    dispatch = Dispatch(["a", "b"], ["one"])
    error = OSError("bad")
    for _ in range(ATTEMPTS):
        assert dispatch.take("one") == 0
        dispatch.retry(0, error)
    assert dispatch.failure is error and not dispatch.lost


def test_a_waiting_thread_gets_what_comes_back_and_ends_when_all_is_done():
    dispatch = Dispatch(["a"], ["one", "two"])
    seen: queue.Queue[int | None] = queue.Queue()
    assert dispatch.take("one") == 0
    waiting = threading.Thread(target=lambda: [seen.put(dispatch.take("two")) for _ in range(2)])
    waiting.start()
    with pytest.raises(queue.Empty):
        seen.get(timeout=0.05)  # the other is still at it
    dispatch.lose("one", 0, OSError("gone"))
    assert seen.get(timeout=10) == 0
    counted: list[int] = []
    dispatch.done(lambda: counted.append(1))
    assert seen.get(timeout=10) is None and counted == [1]
    waiting.join(10)
