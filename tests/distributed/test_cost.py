"""The cost model against what one H200 measured, and the page against the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from luffy.distributed.cost import (
    PLANS,
    QWEN_7B,
    Gpu,
    Model,
    checkpoint,
    decode_step,
    fsdp_bytes,
    memory,
    network_bound_below,
    places,
    rollout,
    table,
    update,
    weight_sync,
)

H200 = Gpu()
QWEN_1_5B = Model("1.5B", 1.54e9, 28, 1536, 256)
SEVEN, FULL_32B, PAIRS_32B, HYBRID_32B, WHOLE_70B, FOURS_70B, _ = PLANS


@pytest.mark.parametrize(
    ("rows", "length", "roofline", "measured", "share"),
    [
        (64, 256, 77_000, 25_996, 0.34),
        (256, 512, 186_000, 67_886, 0.36),
        (1024, 512, 306_000, 88_944, 0.29),
    ],
)
def test_decoding_on_one_h200(rows, length, roofline, measured, share):
    """docs/performance.md: the native engine on prompts of 128 tokens, prefill included."""
    speed = rows / decode_step(QWEN_1_5B, rows, context=128 + length / 2, gpu=H200)
    assert speed == pytest.approx(roofline, rel=0.02)
    assert measured / speed == pytest.approx(share, abs=0.01)
    assert share <= H200.decode_share + 0.015


@pytest.mark.parametrize(
    ("parameters", "tokens", "seconds", "share"),
    [(1.54e9, 324_096, 7.63, 0.50), (QWEN_7B.parameters, 66_560, 8.31, 0.46)],
)
def test_update_on_one_h200(parameters, tokens, seconds, share):
    """docs/performance.md: 1.5B with recomputed activations, 7B with its optimizer on the host."""
    assert 6 * parameters * tokens / H200.flops / seconds == pytest.approx(share, abs=0.01)
    assert abs(share - H200.update_share) < 0.04


def test_the_page_shows_what_the_model_says():
    page = (Path(__file__).parent.parent.parent / "docs" / "scaling.md").read_text()
    assert table() in page


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
    assert weight_sync(FULL_32B, H200).bytes == 2 * n
    assert checkpoint(FULL_32B, H200)["write"].bytes == 14 * n
