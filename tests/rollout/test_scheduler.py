"""Slots are never idle while requests wait, and a prompt is prefilled once."""

import random

from luffy.rollout.native.scheduler import Scheduler
from luffy.types import Request, Sampling


def make(prompt: tuple[int, ...], max_tokens: int = 3, prefix: tuple[int, ...] = ()) -> Request:
    return Request(prompt, 0, Sampling(max_tokens), prefix)


def test_equal_prompt_and_prefix_share_one_admission():
    scheduler = Scheduler([make((1, 2)), make((3,)), make((1,), prefix=(2,)), make((1, 2))], slots=4)
    first, second = scheduler.admit(token_budget=100)
    assert [s.index for s in first.sequences] == [0, 2, 3] and first.source is None and first.slots == (0, 1, 2)
    assert [s.index for s in second.sequences] == [1] and second.source is None


def test_the_token_budget_bounds_one_prefill_but_a_long_prompt_still_goes_alone():
    scheduler = Scheduler([make((1,) * 50), make((2,) * 8), make((3,) * 8), make((4,) * 8)], slots=4)
    counts = []
    while admissions := scheduler.admit(token_budget=20):
        counts.append([len(a.group.token_ids) for a in admissions])
    assert counts == [[50], [8, 8], [8]]


def test_a_freed_slot_goes_to_a_sibling_with_the_prompt_in_place():
    scheduler = Scheduler([make((1, 2), 1), make((1, 2), 1), make((1, 2), 1), make((9,), 1)], slots=2)
    (first,) = scheduler.admit(100)
    first.sequences[1].append(5, 0.0)
    assert [s.index for s in scheduler.release_finished()] == [1]
    (second,) = scheduler.admit(100)
    assert [s.index for s in second.sequences] == [2] and second.slots == (1,) and second.source in (0, 1)


def test_compaction_moves_the_last_into_the_gap_without_its_newest_token():
    scheduler = Scheduler([make((i,) * 4, 9) for i in range(1, 5)], slots=4)
    sequences = [s for a in scheduler.admit(100) for s in a.sequences]
    for sequence in sequences:
        sequence.append(7, -1.0)
    sequences[1].finish = "stop"
    scheduler.release_finished()
    (move,) = scheduler.compact()
    assert (move.source, move.target, move.length) == (3, 1, 4)
    assert [s.index for s in scheduler.live] == [0, 3, 2]


def test_random_runs_prefill_every_prompt_once_and_leave_no_slot_idle():
    """A cache of prompt names stands in for keys and values, with the engine's order of operations."""
    for trial in range(60):
        rng = random.Random(trial)
        requests = [make((rng.randrange(6),), rng.randrange(1, 7)) for _ in range(rng.randrange(1, 40))]
        slots = rng.randrange(1, 6)
        scheduler, held, prefills, done = Scheduler(requests, slots), [None] * slots, [], []
        waiting = len(requests)
        while not scheduler.is_done:
            while admissions := scheduler.admit(rng.randrange(1, 4)):
                for a in admissions:
                    if a.source is None:
                        held[a.slots[0]] = a.group.token_ids
                        prefills.append(a.group.token_ids)
                for a in admissions:
                    source = a.slots[0] if a.source is None else a.source
                    assert held[source] == a.group.token_ids
                    for slot, sequence in zip(a.slots, a.sequences, strict=True):
                        held[slot] = held[source]
                        sequence.append(0, 0.0)
                        waiting -= 1
                done += scheduler.release_finished()
            for move in scheduler.compact():
                held[move.target] = held[move.source]
            assert len(scheduler.live) == slots or waiting == 0
            for slot, sequence in enumerate(scheduler.live):
                assert held[slot] == sequence.request.given_ids
                sequence.append(0, 0.0)
            done += scheduler.release_finished()
        assert sorted(s.index for s in done) == list(range(len(requests)))
        assert all(len(s.token_ids) == s.request.sampling.max_tokens for s in done)
        assert len(prefills) == len(set(prefills)) == len({r.prompt_ids for r in requests})
