"""The simulation of separate trainers and rollout servers, against closed forms; its page against it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import simulate_scale as scale  # noqa: E402
from benchmarks.cost_tables import QWEN_7B  # noqa: E402
from luffy.dry_run.cost import Gpu, decode_step  # noqa: E402

# Two servers with 8 responses of one token each, so that a step can be computed by hand.
SMALL = scale.Cluster(QWEN_7B, trainers=8, servers=2, width=4, staleness=0, problems=2, longest=1)


def test_a_step_by_hand():
    """Weights travel, prompts are computed, each response gets its token, the trainers update."""
    prefill = 8 * 2 * 7.6e9 * scale.PROMPT / scale.SAMPLES / (790e12 * 0.65) / 4
    decode = decode_step(QWEN_7B, 8, scale.PROMPT + 0.5, Gpu(), 4)
    transfer = 2 * 7.6e9 / 50e9 + 12 * 28 * scale.MESSAGE_S
    update = scale.update_seconds(SMALL, [1] * 16)
    assert SMALL.transfer == pytest.approx(transfer)
    assert scale.simulated(SMALL).step == pytest.approx(transfer + prefill + decode + update)


def test_the_longest_response_bounds_an_update():
    alike, one_long = [1000] * 16, [1] * 15 + [16_000]
    assert scale.update_seconds(SMALL, one_long) > 5 * scale.update_seconds(SMALL, alike)


def test_staleness_hides_the_rollout_behind_the_update():
    cluster = scale.replace(SMALL, problems=8, longest=500)
    steps = [scale.simulated(scale.replace(cluster, staleness=k)).step for k in (0, 1, 4)]
    assert steps[0] > steps[1] >= steps[2] * 0.99
    found = scale.simulated(scale.replace(cluster, staleness=4))
    assert found.step >= found.training / found.cluster.steps  # it cannot be shorter than its update
    assert all(left == 0 for left in found.left[: found.cluster.steps])


def test_a_lost_trainer_costs_its_restart_and_half_an_interval():
    done = scale.simulated(SMALL).updated[-1]
    late = scale.simulated(SMALL, "trainer").updated[-1] - done
    update = scale.update_seconds(SMALL, [1] * 16)
    assert late == pytest.approx(scale.RESTART_S + scale.CHECKPOINT_EVERY / 2 * update)


def test_a_lost_server_costs_less_than_its_restart_if_another_takes_its_responses():
    cluster = scale.replace(SMALL, problems=8, longest=500)
    one = scale.simulated(cluster, "server")
    late = one.updated[-1] - scale.simulated(cluster).updated[-1]
    assert 0 < late < scale.RESTART_S
    assert all(left == 0 for left in one.left[: cluster.steps])


def test_the_page_has_the_simulated_rows():
    page = (ROOT / "docs" / "results" / "scale.md").read_text()
    assert len(page.split()) <= 1500 + page.count("|")  # cells of tables aside
    assert "| " + " | ".join(scale.HEADER) + " |" in page
    assert "| " + " | ".join(scale.size_row(QWEN_7B, 16, 0)) + " |" in page
