"""Drafts are verified where few rows run and it is faster."""

import pytest

from luffy.rollout.native.draft_pace import FIRST_PAUSE, LONGEST_PAUSE, TRIAL, VERIFIED_TOKENS, Measured, Pace


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def steps_of(pace, clock, rows, steps, step_s, pass_s, kept):
    """The tokens that each of so many steps and passes verified."""
    made = []
    for _ in range(steps):
        tokens = pace.tokens_for(rows)
        made.append(tokens)
        clock.now += step_s if tokens == 1 else pass_s
        if tokens == 1:
            pace.stepped(rows, 1)
        else:
            pace.verified(rows, tokens, kept)
    return made


def test_passes_of_all_sizes_run_few_idle_rows():
    """Two tokens are the fewest that a pass verifies."""
    pytest.importorskip("triton")
    from luffy.rollout.native.decode_graphs import VERIFIED_ROWS

    pace = Pace(2, always=True, clock=Clock())
    assert max(rows for rows in range(1024) if pace.tokens_for(rows) > 1) == VERIFIED_ROWS[-1]


def test_fewer_tokens_for_more_rows_and_none_for_many():
    pace = Pace(8, always=True, clock=Clock())
    most = VERIFIED_TOKENS // 8
    assert [pace.tokens_for(n) for n in (0, 1, most, most + 1, 2 * most, 2 * most + 1)] == [1, 8, 8, 4, 4, 1]
    assert Pace(2, always=True, clock=Clock()).tokens_for(VERIFIED_TOKENS) == 1


def test_drafts_go_on_where_they_are_faster():
    clock = Clock()
    made = steps_of(Pace(8, False, clock), clock, 4, 200, step_s=1.0, pass_s=1.5, kept=2.0)
    assert made == [1, 1] + [8] * 198, "two plain steps measure one"


def test_drafts_pause_where_they_are_slower_and_longer_each_time():
    clock = Clock()
    pace = Pace(8, False, clock)
    made = steps_of(pace, clock, 4, 400, step_s=1.0, pass_s=1.5, kept=1.2)
    trial = [8] * (TRIAL + 1)  # the first of a kind is not measured
    assert made[:2] == [1, 1] and made[2:11] == trial
    pause = FIRST_PAUSE + 1
    assert made[11 : 11 + pause] == [1] * pause
    second = 11 + pause
    assert made[second : second + 9] == trial
    assert made[second + 9 : second + 9 + 2 * FIRST_PAUSE + 1] == [1] * (2 * FIRST_PAUSE + 1)
    assert steps_of(pace, clock, 4, 400, step_s=1.0, pass_s=1.0, kept=2.0)[-1] == 8, "another time they are faster"


def test_other_numbers_of_rows_are_measured_apart():
    clock = Clock()
    pace = Pace(8, False, clock)
    steps_of(pace, clock, 4, 50, step_s=1.0, pass_s=9.0, kept=1.0)
    assert steps_of(pace, clock, 16, 20, step_s=1.0, pass_s=1.0, kept=3.0)[-1] == 8
    assert pace.tokens_for(5) == 1


def test_what_was_interrupted_is_not_measured():
    clock = Clock()
    pace = Pace(8, False, clock)
    pace.tokens_for(4)
    pace.stepped(4, 1)
    clock.now += 100
    pace.interrupted()
    pace.stepped(4, 1)
    assert pace.tokens_for(4) == 1
    clock.now += 1
    pace.stepped(4, 1)
    assert pace.tokens_for(4) == 8


def waits_after(measured, *seconds):
    """Plain steps before the next trial, behind trials whose passes took so long."""
    waits = []
    for each in seconds:
        for _ in range(TRIAL):
            measured.verified(1.0, each)
        waits.append(measured.wait)
        measured.stepped(measured.wait or 1, float(measured.wait or 1))
    return waits


def test_a_pause_doubles_up_to_the_longest_and_is_short_again_behind_a_success():
    measured = Measured(plain=1.0)
    doubled = [FIRST_PAUSE << i for i in range(6)]
    assert waits_after(measured, *[2.0] * 8) == [*doubled, LONGEST_PAUSE, LONGEST_PAUSE]
    assert waits_after(measured, 0.5, 2.0, 2.0) == [0, FIRST_PAUSE, 2 * FIRST_PAUSE]


def test_a_plain_step_is_measured_slowly_and_a_burst_by_each_of_its_steps():
    measured = Measured(wait=100)
    measured.stepped(1, 1.0)
    measured.stepped(60, 120.0)
    assert measured.plain == 1.25 and measured.wait == 39


def test_the_first_step_with_another_number_of_rows_is_not_measured():
    clock = Clock()
    pace = Pace(8, False, clock)
    for rows in (4, 16, 4):
        clock.now += 1
        pace.stepped(rows, 1)
    assert pace.tokens_for(4) == pace.tokens_for(16) == 1
