"""What a training keeps to its end is no work for the garbage collector, until the training is over."""

import gc

from luffy.train.loop import Trainer


def test_objects_of_a_training_are_frozen_after_its_first_step_until_its_end(make_config):
    before = gc.get_freeze_count()
    with Trainer(make_config(train={"steps": 2})) as trainer:
        frozen = [gc.get_freeze_count() for _ in trainer.steps()]
        assert min(frozen) > before + 10_000  # modules alone are more
    assert gc.get_freeze_count() <= before


def test_a_step_by_itself_sets_nothing_aside(make_config):
    before = gc.get_freeze_count()
    with Trainer(make_config()) as trainer:
        trainer.step()
    assert gc.get_freeze_count() == before
