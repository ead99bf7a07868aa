from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.data.dataset import ProblemSampler, epoch_order
from luffy.errors import ConfigError, UserError

sizes = st.integers(1, 40)
seeds = st.integers(-5, 2**63)
draws = st.lists(st.integers(0, 90), max_size=8)


@given(sizes, seeds, draws)
def test_any_split_of_calls_gives_the_same_sequence(size, seed, calls):
    split = ProblemSampler(size, seed)
    whole = ProblemSampler(size, seed)
    assert [index for k in calls for index in split.next(k)] == whole.next(sum(calls))
    assert split.state_dict() == whole.state_dict()
    assert split.epoch == sum(calls) // size


@given(sizes, seeds, draws, draws)
def test_resume_equals_uninterrupted(size, seed, before, after):
    first = ProblemSampler(size, seed)
    for k in before:
        first.next(k)
    second = ProblemSampler(size, seed)
    second.next(3)  # a sampler that was used is moved, not only a fresh one
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.next(k) for k in after] == [second.next(k) for k in after]


@given(sizes, seeds, st.integers(1, 4))
def test_every_epoch_has_every_index_once(size, seed, epochs):
    drawn = np.array(ProblemSampler(size, seed).next(size * epochs)).reshape(epochs, size)
    assert (np.sort(drawn, axis=1) == np.arange(size)).all()


def test_a_sampler_can_be_moved_back():
    sampler = ProblemSampler(10, 1)
    start = sampler.state_dict()
    first = sampler.next(25)
    sampler.load_state_dict(start)
    assert sampler.next(25) == first


def test_order_depends_on_seed_and_epoch_and_never_changes():
    # Frozen on purpose: a different order would break the resume of every older run.
    assert epoch_order(8, 0, 0).tolist() == [2, 6, 0, 5, 7, 1, 4, 3]
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_the_shuffle_is_even():
    """Each index is equally likely at each place: 64 cells, chi-square with 49 degrees of freedom."""
    counts = np.zeros((8, 8))
    for seed in range(4000):
        counts[np.arange(8), epoch_order(8, seed, 0)] += 1
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert 22 < chi_square < 94  # 0.0005 tails


def test_indices_are_plain_ints():
    assert all(type(index) is int for index in ProblemSampler(4, 1).next(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 11}, "sampler state has size 11, this run has 10; the dataset changed"),
        ({"seed": 2}, "sampler state has seed 2, this run has 1; resume with the seed"),
        ({"position": 10}, "position 10 of 10 problems; the checkpoint is damaged"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    sampler = ProblemSampler(10, 1)
    with pytest.raises(UserError, match=message):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_damaged_state_and_wrong_arguments():
    with pytest.raises(UserError, match="sampler state lacks epoch, position"):
        ProblemSampler(10, 1).load_state_dict({"size": 10, "seed": 1})
    with pytest.raises(ConfigError, match="a sampler over 0 problems has nothing to draw"):
        ProblemSampler(0, 1)
    with pytest.raises(ValueError, match="cannot draw -1 problems"):
        ProblemSampler(3, 1).next(-1)
