"""The cost model against what one H200 measured, and the page on scaling against the model."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cost_tables import MEASURED, PLANS, checkpoint, network_bound_below  # noqa: E402
from luffy.dry_run.cost import (  # noqa: E402
    Gpu,
    Model,
    fits_gathered,
    fsdp_bytes,
    fsdp_traffic,
    memory,
    places,
    rollout,
    synced_bytes,
    update,
    weight_sync,
)

DOCS = ROOT / "docs"
H200 = Gpu()
SEVEN, SEVEN_ONCE, FULL_32B, PAIRS_32B, HYBRID_32B, WHOLE_70B, FOURS_70B, _ = PLANS


def test_what_one_h200_measured():
    far = {m.what: m.predicted(H200) / m.seconds - 1 for m in MEASURED}
    assert -0.25 < far.pop("1.5B LoRA update, 256 x 512 tokens") < -0.2  # adapters of narrow layers take longer
    assert max(abs(error) for error in far.values()) < 0.09, far


def test_decoding_by_hand():
    """At 64 rows the products wait for the weights, at 1,024 they multiply."""
    few, many = (next(m for m in MEASURED if m.what.startswith(f"1.5B rollout, {rows} x")) for rows in (64, 1024))
    for m, products in ((few, 2 * 1.54e9 / 4.2e12), (many, 2 * 1.54e9 * 1024 / 790e12)):
        rows, tokens = m.plan.problems, m.plan.response
        prefill = 2 * 1.54e9 * rows * 128 / (790e12 * 0.65)
        cache = rows * 2 * 2 * 28 * 256 * (128 + tokens / 2) / 4.2e12
        assert m.predicted(H200) == pytest.approx(tokens * (products / 0.85 + cache + 28 * 29e-6) + prefill)


def test_updates_by_hand():
    m = next(m for m in MEASURED if m.what == "1.5B update, 256 x 512 tokens")
    assert m.plan.tokens == 32 * 121 + 256 * 512
    flops = 6 * 1.54e9 + 12 * (121 + 256) * 28 * 1536
    assert m.predicted(H200) == pytest.approx(m.plan.tokens * flops / (0.65 * 790e12))


def test_updates_that_recompute_and_score_by_hand():
    """Three forward passes' worth for the plain update, one more for recomputing, one for each scoring."""
    forward = 2 * 7.6e9 + 4 * (1024 + 2048) * 28 * 3584
    for training, passes in (({"recomputed": 0.5}, 3.5), ({"scored": 2}, 5), ({"recomputed": 1, "scored": 1}, 5)):
        seconds = SEVEN.tokens / 8 * passes * forward / (0.65 * 790e12)
        assert update(replace(SEVEN, **training), H200) == pytest.approx(seconds)


def test_frozen_weights_take_a_pass_less_on_one_gpu():
    """Attention takes as many."""
    weights, attention = 2 * 7.6e9, 4 * (1024 + 2048) * 28 * 3584
    for gpus, flops in ((1, 2 * weights + 3 * attention), (8, 3 * (weights + attention))):
        seconds = update(replace(SEVEN, adapters=True, gpus=gpus), H200)
        assert seconds == pytest.approx(SEVEN.tokens / gpus * flops / (0.65 * 790e12))


def test_a_step_takes_its_rollout_and_its_update():
    step, update_alone = (
        next(m for m in MEASURED if m.what.startswith(f"1.5B {what}, 256")) for what in ("step", "update")
    )
    made = rollout(step.plan, H200)
    assert step.predicted(H200) == pytest.approx(made + update_alone.predicted(H200))


def test_the_page_on_scaling_says_the_same():
    page = " ".join((DOCS / "scaling.md").read_text().split())
    parts = (rollout, update, weight_sync)
    seven, pairs = (sum(part(plan, H200) for part in parts) for plan in (SEVEN, PAIRS_32B))
    assert f"{seven:.0f} s a step for 7B on 8 GPUs and {pairs:.0f} s for 32B on 64" in page
    assert f"room for only {places(FULL_32B, H200):.0f} of 64 sequences" in page
    assert f"below about {round(network_bound_below(H200), -2):,.0f} tokens" in page


def test_more_gpus_share_the_work():
    twice = replace(SEVEN, gpus=16)
    assert update(twice, H200) == pytest.approx(update(SEVEN, H200) / 2)
    assert rollout(twice, H200) < rollout(SEVEN, H200)
    assert memory(twice) < memory(SEVEN)


def test_memory_with_the_optimizer_in_host_memory_by_hand():
    """Gradients, in float32 and sharded, stay beside the copy that rolls out; masters and two moments do not."""
    for gpus in (1, 8):
        plain, offloaded = (memory(replace(SEVEN, gpus=gpus, offloaded=o)) for o in (False, True))
        assert offloaded == pytest.approx((4 / gpus + 2) * 7.6e9)
        assert plain - offloaded == pytest.approx(12 / gpus * 7.6e9)


def test_memory_with_adapters_by_hand():
    """Frozen weights are sharded in float32; one GPU has them once, in bfloat16."""
    eight, one = (memory(replace(SEVEN, adapters=True, gpus=gpus)) for gpus in (8, 1))
    assert eight == pytest.approx((4 / 8 + 2) * 7.6e9) and one == pytest.approx(2 * 7.6e9)


def test_where_it_breaks_first():
    assert places(WHOLE_70B, H200) == 0  # a copy of 141 GB
    assert places(FOURS_70B, H200) > 128
    assert places(FULL_32B, H200) < 64 and places(PAIRS_32B, H200) > 128
    assert checkpoint(FOURS_70B, H200)["hash"] > checkpoint(FOURS_70B, H200)["write"]


def test_short_micro_batches_wait_for_the_network():
    edge = network_bound_below(H200)
    flops = 6 * 32.8e9 + 12 * (1024 + 2048) * 64 * 5120
    compute = flops * FULL_32B.tokens / 64 / (H200.flops * H200.update_share)
    above, below = (replace(FULL_32B, micro_batch=round(edge * factor)) for factor in (1.2, 0.8))
    assert update(above, H200) == pytest.approx(compute)
    assert update(below, H200) > 1.1 * compute
    hybrid = replace(below, hybrid=True)
    assert update(hybrid, H200) == pytest.approx(compute)


def test_collectives_by_hand():
    """Of a model with 3 layers of 100 weights and 50 outside them: what benchmarks/count_collectives.py counts."""
    model = Model("", 350, 3, 0, 0, outside=50, itemsize=2)
    assert fsdp_traffic(model, 1) == (0, 0, 0, 0, 0)
    two = fsdp_traffic(model, 2, updates=2, passes=5)
    assert two == (10 * 7, 10 * 2 * (350 + 300) / 2, 10 * 4, 10 * 4 * 350 / 2, 0)
    assert fsdp_traffic(model, 2, updates=2, passes=5, once=True) == (2 * 4, 2 * 700 / 2, 2 * 4, 2 * 1400 / 2, 0)
    scored = fsdp_traffic(model, 2, updates=2, passes=5, scored=10)
    assert (scored.gathers, scored.gathered) == (two.gathers + 30, two.gathered + 10 * 600 / 2)
    hybrid = fsdp_traffic(model, 2, 4, passes=5)
    assert (hybrid.reduced, hybrid.summed) == (5 * 1400 / 2, 5 * 2 * 3 / 4 * 1400 / 2)
    assert fsdp_traffic(model, 2, passes=5, adapters=True)[2:] == (5 * 3, 0, 0)


def test_bytes_by_hand():
    n, m, passes = 32.8e9, 1.56e9, FULL_32B.micro_batches
    assert passes == 9 and SEVEN.micro_batches == 17 and replace(SEVEN, updates=2).micro_batches == 9
    one = 2 * (2 * n - m) + 4 * n
    assert fsdp_bytes(FULL_32B) == (0.0, pytest.approx(passes * 63 / 64 * one))
    assert fsdp_bytes(HYBRID_32B) == (pytest.approx(passes * 7 / 8 * one), pytest.approx(passes * 7 / 8 * n))
    assert fsdp_bytes(SEVEN) == (pytest.approx(17 * 7 / 8 * (8 * 7.6e9 - 2 * 1.09e9)), 0.0)
    assert fsdp_bytes(SEVEN_ONCE) == (pytest.approx(7 / 8 * 6 * 7.6e9), 0.0)
    assert fsdp_bytes(replace(SEVEN, gpus=1)) == (0.0, 0.0)
    scored = fsdp_bytes(replace(FULL_32B, scored=2))[1] - fsdp_bytes(FULL_32B)[1]
    assert scored == pytest.approx(passes * 63 / 64 * 2 * 2 * (n - m))
    scored = fsdp_bytes(replace(SEVEN_ONCE, scored=2))[0] - fsdp_bytes(SEVEN_ONCE)[0]
    assert scored == pytest.approx(7 / 8 * 2 * 2 * (7.6e9 - 1.09e9))
    assert fsdp_bytes(replace(HYBRID_32B, adapters=True)) == (pytest.approx(passes * 7 / 8 * 2 * (2 * n - m)), 0.0)
    assert synced_bytes(FULL_32B) == pytest.approx(63 / 64 * 2 * n)
    assert synced_bytes(replace(FULL_32B, gpus=1)) == 0
    assert checkpoint(FULL_32B, H200)["bytes"] == 14 * n


def test_which_models_fit_gathered():
    """Weights and gradients take 6 bytes a parameter: 46 GB of 7B, 197 GB of 32B, whose adapters take 66 GB."""
    assert fits_gathered(SEVEN, H200) and not fits_gathered(FULL_32B, H200)
    assert not fits_gathered(replace(FULL_32B, adapters=True), H200)
    assert fits_gathered(replace(PAIRS_32B, adapters=True), H200)
