"""The cost model against what one H200 measured, and the page against the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from luffy.distributed.cost import (
    MEASURED,
    PLANS,
    Gpu,
    checkpoint,
    comparison,
    fsdp_bytes,
    memory,
    network_bound_below,
    places,
    rollout,
    table,
    update,
    weight_sync,
)

DOCS = Path(__file__).parent.parent.parent / "docs"
H200 = Gpu()
SEVEN, FULL_32B, PAIRS_32B, HYBRID_32B, WHOLE_70B, FOURS_70B, _ = PLANS


def test_what_one_h200_measured():
    """Within an eighth, for every rollout and update; the whole step within a twentieth."""
    far = {m.what: m.predicted(H200) / m.seconds - 1 for m in MEASURED}
    assert max(abs(error) for error in far.values()) < 0.125, far
    assert abs(far["1.5B, the whole step"]) < 0.05


@pytest.mark.parametrize(("number", "share"), [(0, 0.385), (1, 0.433), (2, 0.364)])
def test_decoding_by_hand(number, share):
    """What remains of a rollout without its prompts, against weights and cache read once a step."""
    m = MEASURED[number]
    rows, tokens = m.plan.problems, m.plan.response
    prefill = 2 * 1.54e9 * rows * 128 / (790e12 * 0.47)
    cache = 2 * 2 * 28 * 256 * (128 + tokens / 2)
    roofline = tokens * (2 * 1.54e9 + rows * cache) / 4.2e12
    assert roofline / (m.seconds - prefill) == pytest.approx(share, abs=0.002)
    assert m.predicted(H200) == pytest.approx(roofline / 0.38 + prefill)


@pytest.mark.parametrize(("number", "tokens", "share"), [(4, 324_096, 0.50), (5, 81_024, 0.53), (6, 66_560, 0.46)])
def test_updates_by_hand(number, tokens, share):
    m = MEASURED[number]
    assert m.plan.tokens == tokens
    floor = 6 * m.plan.model.parameters * tokens / 790e12
    assert floor / m.seconds == pytest.approx(share, abs=0.006)
    assert m.predicted(H200) == pytest.approx(floor / 0.47)


@pytest.mark.parametrize(
    "figure", ["25,996", "67,886", "88,944", "3.1 s", "7.63", "1.80", "8.31", "10.8 s", "4.20 TB/s"]
)
def test_the_measurements_are_those_of_the_performance_page(figure):
    assert figure in (DOCS / "results" / "performance.md").read_text()


def test_the_page_shows_what_the_model_says():
    page = (DOCS / "results" / "cost.md").read_text()
    assert table() in page and comparison() in page


def test_more_gpus_share_the_work():
    twice = replace(SEVEN, gpus=16)
    assert update(twice, H200).seconds == pytest.approx(update(SEVEN, H200).seconds / 2)
    assert rollout(twice, H200).seconds < rollout(SEVEN, H200).seconds
    assert memory(twice, H200) < memory(SEVEN, H200)


def test_where_it_breaks_first():
    assert places(WHOLE_70B, H200) == 0  # a copy of 141 GB
    assert places(FOURS_70B, H200) > 128
    assert places(FULL_32B, H200) < 64 < 128 == pytest.approx(places(PAIRS_32B, H200), abs=1)
    assert checkpoint(FOURS_70B, H200)["hash"].seconds > checkpoint(FOURS_70B, H200)["write"].seconds


def test_short_micro_batches_wait_for_the_network():
    edge = network_bound_below(H200)
    compute = 6 * FULL_32B.model.parameters * FULL_32B.tokens / 64 / (H200.flops * H200.update_share)
    above, below = (replace(FULL_32B, micro_batch=round(edge * factor)) for factor in (1.2, 0.8))
    assert update(above, H200).seconds == pytest.approx(compute)
    assert update(below, H200).seconds > 1.1 * compute
    hybrid = replace(below, hybrid=True)
    assert update(hybrid, H200).seconds == pytest.approx(compute)


def test_bytes_by_hand():
    n = 32.8e9
    assert fsdp_bytes(FULL_32B, H200) == (0.0, pytest.approx(8 * n))
    assert fsdp_bytes(HYBRID_32B, H200) == (pytest.approx(8 * n), pytest.approx(n))
    assert fsdp_bytes(SEVEN, H200) == (pytest.approx(8 * 7.6e9), 0.0)
    assert fsdp_bytes(replace(SEVEN, gpus=1), H200) == (0.0, 0.0)
    assert weight_sync(FULL_32B, H200).bytes == 2 * n
    assert checkpoint(FULL_32B, H200)["write"].bytes == 14 * n
