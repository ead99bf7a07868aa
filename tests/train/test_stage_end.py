"""A stage ends by its own seconds and scores, whatever the stages before it took and reached."""

import json

import pytest

from luffy.config import Config
from luffy.config.stages import Stage, StageKnobs
from luffy.distributed.world import World
from luffy.run_folder.layout import METRICS
from luffy.run_folder.stages import Span, read_stages
from luffy.train.stage_end import StageEnd

STEP = {"timing_s/step": 1.0, "timing_s/eval": 0.5, "timing_s/save": 0.25, "timing_s/rollout": 9.0}


def end_of(folder, first=4, through=6, **knobs):
    stage = Stage("rl", 2, "rl", StageKnobs(**knobs), Config())
    return StageEnd.of(Span(stage, Config(), first), World(), folder, through)


def test_the_seconds_of_the_stages_own_steps_count(tmp_path):
    (tmp_path / METRICS).write_text("".join(json.dumps({"step": step, **STEP}) + "\n" for step in range(9)))
    end = end_of(tmp_path, seconds=10.0)
    assert end.spent == 2 * 1.75, "steps 5 and 6; a resumed run makes those behind them again"
    end.note(4, STEP)
    assert end.spent == 3.5
    end.note(7, {"timing_s/step": 2.0, "timing_s/save": 1.5})
    assert end.spent == 7.0
    assert not end.is_out_of_time(2.5) and end.is_out_of_time(3.0)
    assert not end_of(tmp_path).is_out_of_time(1e9)


@pytest.mark.parametrize(
    ("first", "until", "evaluated", "flat"),
    [
        (4, "flat_accuracy", {4: 0.9, 5: 0.1, 6: 0.2, 7: 0.2}, False),
        (4, "flat_accuracy", {7: 0.2, 6: 0.2, 5: 0.3, 4: 0.1}, True),
        (0, "flat_accuracy", {0: 0.5, 1: 0.4, 2: 0.5}, True),
        (4, "flat_loss", {5: 0.2, 6: 0.3, 7: 0.4}, False),
        (4, "flat_loss", {5: 0.2, 6: 0.21, 7: 0.22}, True),  # of the loss, 0.095 nats
        (4, "steps", {5: 0.5, 6: 0.4, 7: 0.3}, False),
    ],
)
def test_flat_are_the_scores_behind_the_stages_beginning(tmp_path, first, until, evaluated, flat):
    knobs = {"until": until, "patience": 2, "min_delta": 0.098 if until == "flat_loss" else 0.0}
    assert end_of(tmp_path, first, **knobs).is_flat(evaluated) == flat


def test_a_decision_is_on_record_with_its_knobs(tmp_path):
    end = end_of(tmp_path, seconds=10.0)
    end.decide(7, "seconds")
    ending = read_stages(tmp_path).ending_of(end.span.stage)
    assert (ending.name, ending.step, ending.ended_by) == ("rl", 7, "seconds")
