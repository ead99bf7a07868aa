"""Who is named when ranks wait for each other, and by whom."""

import threading

import pytest
import torch.distributed as dist

from luffy.doctor.watch import GRACE_S, Board, Hang, Progress, Seen, Watch

LIMIT_S = 60.0


def make_seen(check=3, meeting=1, moved=0.0, renewed=100.0, **more):
    one = Seen(0.0)
    one.progress, one.moved, one.renewed = Progress(check, meeting, **more), moved, renewed
    one.where = "luffy/x.py:7"
    return one


def hang_of(ranks, now=100.0):
    watch = Watch(Board(dist.HashStore()), 0, len(ranks), LIMIT_S, lambda hang: None)
    return watch._hang(ranks, now)


def test_nobody_is_named_within_the_limit():
    assert hang_of([make_seen(moved=50), make_seen(moved=41)]) is None


def test_the_rank_behind_the_others_is_named_with_its_line():
    assert hang_of([make_seen(), make_seen(meeting=0), make_seen()]) == Hang(3, (1,), {1: "luffy/x.py:7"})
    assert hang_of([make_seen(), make_seen(check=2, meeting=5), make_seen()]) == Hang(2, (1,), {1: "luffy/x.py:7"})


def test_a_rank_that_lives_no_more_is_named_though_it_is_as_far_as_the_others():
    assert hang_of([make_seen(), make_seen(), make_seen(renewed=10)]) == Hang(
        3, (2,), {2: "luffy/x.py:7"}, stopped=True
    )


def test_all_are_named_when_the_exchange_itself_hangs():
    assert hang_of([make_seen(), make_seen()]).ranks == (0, 1)


def test_a_rank_that_has_ended_is_not_waited_for():
    assert hang_of([make_seen(ended=True), make_seen(moved=90)]) is None
    assert hang_of([make_seen(ended=True), make_seen()]).ranks == (1,)


def test_a_failed_rank_ends_the_others_after_a_while():
    failed = make_seen(ended=True, failed=True, moved=100 - GRACE_S - 1)
    assert hang_of([make_seen(moved=99), failed]) == Hang(3, (1,), {}, failed=True)
    assert hang_of([make_seen(moved=99), make_seen(ended=True, failed=True, moved=99)]) is None
    assert hang_of([failed, failed]) is None


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_the_first_rank_that_lives_speaks_and_all_end(silent):
    """Three ranks in three threads; one never shows up, and the others wait for it."""
    store, spoken, ended = dist.HashStore(), [], []
    everybody = threading.Barrier(3, timeout=60)

    def rank(number):
        def speak(hang):
            spoken.append((number, hang.ranks, hang.stopped))
            Board(store).put("verdict", False)

        def end(code):
            if number not in ended:  # unlike the process's end it returns, and the watch goes on
                ended.append(number)
                everybody.wait()

        watch = Watch(Board(store), number, 3, 2.0, speak, end)
        watch.enter(0)
        watch.start()
        return watch

    watches = [rank(number) for number in {0, 1, 2} - {silent}]
    everybody.wait()
    for watch in watches:
        watch.stop()
    assert spoken == [(1 if silent == 0 else 0, (silent,), True)]
    assert sorted(ended) == sorted({0, 1, 2} - {silent})
