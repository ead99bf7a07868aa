"""What stages.json says holds as long as the recipe says what it said then."""

from dataclasses import replace

import pytest

from luffy.config import Config
from luffy.config.stages import Stage, StageKnobs
from luffy.errors import UserError
from luffy.run_folder.stages import Ending, FinishedStage, StageFile, check_unchanged, read_stages, settings_of
from luffy.schema import build, to_dict

STAGE = Stage("sft", 1, "sft", StageKnobs(seconds=9.0), Config())


def test_a_decision_holds_for_the_stage_and_the_knobs_that_it_was_taken_by(tmp_path):
    ending = Ending("sft", 3, "seconds", to_dict(STAGE.knobs))
    StageFile(ending=ending).write(tmp_path)
    read = read_stages(tmp_path)
    assert read.ending_of(STAGE) == ending
    assert read.ending_of(replace(STAGE, knobs=replace(STAGE.knobs, seconds=10.0))) is None
    assert read.ending_of(replace(STAGE, name="rl")) is None
    assert read_stages(tmp_path / "none").ending_of(STAGE) is None


def done_with(stage, **settings):
    return FinishedStage("sft", "sft", 0, 3, "steps", 3, {**settings_of(stage), **settings})


def with_values(**values):
    return replace(STAGE, cfg=build(Config, values))


def test_a_finished_stage_may_have_other_settings_of_what_it_leaves_alone():
    later = with_values(train={"keep": 7, "save_every": 3}, record={"samples": 9}, name="other")
    check_unchanged([done_with(STAGE)], [later])
    check_unchanged([done_with(STAGE, **{"train.keep": 7, "record.samples": 9})], [STAGE])
    with pytest.raises(UserError, match=r"stage sft is finished, and optim\.lr .* would change it"):
        check_unchanged([done_with(STAGE)], [with_values(optim={"lr": 0.5})])


def test_a_setting_that_an_older_record_lacks_had_its_default():
    done = done_with(STAGE)
    older = {key: value for key, value in done.settings.items() if key != "optim.lr"}
    check_unchanged([replace(done, settings=older)], [STAGE])
    with pytest.raises(UserError, match=r"optim\.lr .* -> 0\.5"):
        check_unchanged([replace(done, settings=older)], [with_values(optim={"lr": 0.5})])
