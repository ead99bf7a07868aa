"""A winner is named only where the test problems support it."""

import pytest

from luffy.compare.arms import Arm
from luffy.compare.outcome import markdown, outcome_of
from luffy.compare.state import ArmState
from luffy.config import load_config


def found(**scores):
    """The outcome of methods that get the first so many of 40 test problems right."""
    cfg = load_config("tiny/luffy")
    arms = [Arm(method, 1e-3, seed, cfg) for method in scores for seed in range(2)]
    items = {m: {str(i): float(i < right) for i in range(40)} for m, right in scores.items() if right is not None}
    states = {a.name: ArmState(seconds=10.0, rungs=[0.5], items=items.get(a.method, {})) for a in arms}
    return outcome_of(arms, states), states, arms


def test_a_clear_lead_wins():
    outcome, _, _ = found(luffy=30, on_policy=10, sft_rl=None)
    assert outcome.winner.name == "luffy-lr0.001" and outcome.words[0] == "Winner: luffy-lr0.001."
    assert "luffy-lr0.001 is 50.0 points ahead of on-policy-lr0.001 (95 % interval +3" in outcome.words[1]
    assert [row.name for row in outcome.rows][-1] == "sft-rl-lr0.001" and outcome.rows[
        -1
    ].fate == "dropped after rung 1"
    assert [row.seconds for row in outcome.rows] == [20.0] * 3


@pytest.mark.parametrize(("luffy", "on_policy"), [(21, 20), (20, 20)])
def test_a_lead_within_the_noise_does_not(luffy, on_policy):
    outcome, _, _ = found(luffy=luffy, on_policy=on_policy)
    assert outcome.winner is None and outcome.words[0].startswith("No winner: the test of 40 problems does not tell")
    assert outcome.words[1].endswith("within the noise.")
    assert "within the noise" in markdown(outcome, "6m")


def test_one_finalist_or_none_is_no_winner():
    alone, states, arms = found(luffy=40)
    assert alone.winner is None and "nothing was compared with it" in alone.words[0]
    for state in states.values():
        state.items, state.status, state.why = {}, "failed", "no step in 600 s"
    nothing = outcome_of(arms, states)
    assert (
        nothing.words == ("No arm reached the test: no winner.",) and nothing.rows[0].fate == "failed: no step in 600 s"
    )


def test_a_candidate_has_a_test_if_all_its_seeds_have():
    _, states, arms = found(luffy=30, on_policy=10)
    states[arms[0].name].items = {}
    outcome = outcome_of(arms, states)
    assert [row.name for row in outcome.rows if row.test is not None] == ["on-policy-lr0.001"]
    assert outcome.winner is None


def test_level_tests_are_ordered_by_validation_and_seeds_share_problems():
    _, states, arms = found(luffy=20, on_policy=20)
    for arm in arms:
        states[arm.name].rungs = [0.5, 0.7 if arm.method == "on_policy" else 0.6][: 2 - arm.seed]
    states[arms[0].name].items = {str(i): 1.0 for i in range(10)}
    outcome = outcome_of(arms, states)
    assert [(row.name, row.test) for row in outcome.rows] == [("luffy-lr0.001", 1.0), ("on-policy-lr0.001", 0.5)]
    states[arms[0].name].items = states[arms[1].name].items
    outcome = outcome_of(arms, states)
    assert [row.validation for row in outcome.rows] == [0.6, 0.55]
    for state in states.values():
        state.items = {}
    assert {row.fate for row in outcome_of(arms, states).rows} == {"dropped after rung 2"}
