"""Every feature over several processes on the CPU (gloo): the samples, losses, gradients and weights of one process."""

import pytest
import torch
from features import FEATURES, REFUSED, base_config, configs, make_guide, note_seen
from ranks import assert_same_run, run_ranks, train_and_keep_gradients

from luffy.config import Config
from luffy.errors import ConfigError
from luffy.run_folder.runs import load_run
from luffy.schema import build, to_dict

FAST = {"LUFFY, full sharding", "partial rollouts", "several updates a step, KL, partial prefixes",
        "hybrid sharding, rollout groups"}  # fmt: skip


@pytest.fixture(scope="session")
def guide(tiny_model, tmp_path_factory):
    return make_guide(tiny_model, tmp_path_factory.mktemp("guide"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FEATURES])
def test_processes_agree_with_one(make_config, sums, guide, name):
    torch.set_num_threads(1)
    feature = FEATURES[name]
    alone, many = configs(feature, make_config, sums, guide)
    expected = train_and_keep_gradients(alone, feature.method)
    ranks = run_ranks(feature.ranks, train_and_keep_gradients, many, feature.method, fresh=feature.is_hybrid)
    for gradients in ranks:
        assert_same_run(many, alone, gradients, expected)
    assert load_run(alone.folder).processes == 1
    assert load_run(many.folder).processes == feature.ranks
    note_seen(name, "torchrun, gloo", str(feature.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_one_and_four_processes_agree_with_none(make_config, sums, guide, count):
    torch.set_num_threads(1)
    alone, many = configs(FEATURES["LUFFY, full sharding"], make_config, sums, guide)
    expected = train_and_keep_gradients(alone, "rl")
    for gradients in run_ranks(count, train_and_keep_gradients, many, "rl"):
        assert_same_run(many, alone, gradients, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(make_config, sums, name):
    changes, why = REFUSED[name]
    values = to_dict(base_config(make_config, sums, "refused"))
    values |= {"launch": "torchrun", "parallel": {"workers": 2}}
    for section, entries in changes.items():
        values[section] = {**values[section], **entries}
    with pytest.raises(ConfigError) as refused:
        build(Config, values)
    assert why in str(refused.value) and "\n" not in str(refused.value)
    note_seen(name, "refused", why)
