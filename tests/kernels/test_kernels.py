"""Every kernel against the plain torch it stands for. On a CPU Triton's interpreter runs them."""

import itertools
import math

import plain_kernels
import pytest
import torch
import torch.nn.functional as F
from builders import DEVICE, GPU_IF_THERE

pytest.importorskip("triton")

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from luffy.core.logprobs import selected_log_probs
from luffy.kernels import draw as sampling
from luffy.kernels import head, paged
from luffy.kernels.elementwise import rotary_angles, rotate, swiglu, swiglu_quantized
from luffy.kernels.gated import fills_the_gpu, gated_product
from luffy.kernels.norm import add_rms_norm, add_rms_norm_quantized
from luffy.kernels.product import Tiling, float8_product, tiling_for
from luffy.kernels.quantize import quantize_rows
from luffy.kernels.sums import add_, column_sums
from luffy.rollout.sampling import SamplingRows, draw_tokens, negative_clocks, sample
from luffy.types import Request, Sampling

pytestmark = GPU_IF_THERE
HALF = [torch.bfloat16] if DEVICE.type == "cuda" else []  # the interpreter cannot multiply bfloat16 matrices


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def input_gradients(outputs, grads, inputs):
    return torch.autograd.grad(outputs, inputs, grads)


def assert_equal(ours, theirs):
    """To the bit; Triton's interpreter cuts bfloat16 off where a GPU rounds."""
    if ours.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        assert_close(ours, theirs, ours.dtype)
    else:
        assert torch.equal(ours, theirs)


def assert_close(ours, theirs, dtype):
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2 if DEVICE.type == "cuda" else 5e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 128])
def test_add_rms_norm_is_sum_and_norm(dtype, width):
    x, residual = (randn(5, width, dtype=dtype, seed=i).requires_grad_() for i in range(2))
    norm = LlamaRMSNorm(width, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data.copy_(randn(width, dtype=dtype, seed=7))
    normed, total = add_rms_norm(x, residual, norm.weight, 1e-5)
    total_there = x + residual
    assert_equal(total, total_there)
    assert_close(normed, norm(total_there), dtype)
    upper = [randn(5, width, dtype=dtype, seed=i) for i in (8, 9)]
    ours = input_gradients((normed, total), upper, (x, residual, norm.weight))
    theirs = input_gradients((norm(x + residual), x + residual), upper, (x, residual, norm.weight))
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference, dtype)


def test_norm_without_a_residual_passes_its_input_on():
    x = randn(3, 64).requires_grad_()
    weight = randn(64, seed=3).requires_grad_()
    normed, same = add_rms_norm(x, None, weight, 1e-6)
    assert torch.equal(same, x)
    (ours,) = input_gradients((normed, same), [randn(3, 64, seed=1), randn(3, 64, seed=2)], [x])
    norm = LlamaRMSNorm(64, eps=1e-6).to(DEVICE)
    norm.weight.data.copy_(weight.data)
    (theirs,) = input_gradients((norm(x), x * 1), [randn(3, 64, seed=1), randn(3, 64, seed=2)], [x])
    assert_close(ours, theirs, torch.float32)
    with torch.no_grad():
        assert torch.equal(add_rms_norm(x, None, weight, 1e-6)[0], normed)


@pytest.mark.slow
def test_norm_gradient_over_more_rows_than_programs():
    x, weight = randn(1030, 16).requires_grad_(), randn(16, seed=3).requires_grad_()
    upper = randn(1030, 16, seed=5)
    ours = input_gradients(add_rms_norm(x, None, weight, 1e-6)[0], upper, (x, weight))
    norm = LlamaRMSNorm(16, eps=1e-6).to(DEVICE)
    norm.weight.data.copy_(weight.data)
    theirs = input_gradients(norm(x), upper, (x, norm.weight))
    assert_close(ours[0], theirs[0], torch.float32)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(dtype):
    total, gradient = randn(3, 1000), randn(3, 1000, dtype=dtype, seed=1)
    expected = total + gradient.float()
    add_(total, gradient)
    assert torch.equal(total, expected)
    for rows in (1, 5, 1030):
        x = randn(rows, 40, dtype=dtype)[:, :35]  # rows lie apart
        sums = column_sums(x, torch.float32)
        torch.testing.assert_close(sums, x.double().sum(0).float(), rtol=1e-5, atol=1e-4)
        assert_equal(column_sums(x, torch.bfloat16), sums.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype):
    gate, up = (randn(7, 300, dtype=dtype, seed=i).requires_grad_() for i in range(2))
    upper = randn(7, 300, dtype=dtype, seed=4)
    assert_close(swiglu(gate, up), F.silu(gate) * up, dtype)
    ours = input_gradients(swiglu(gate, up), upper, (gate, up))
    theirs = input_gradients(F.silu(gate) * up, upper, (gate, up))
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_rows(dtype):
    x = randn(5, 300, dtype=dtype, seed=6)
    x[2], x[3] = 0, x[3] * 1e4
    rows, scales = quantize_rows(x)
    assert scales.tolist() == pytest.approx((x.float().abs().amax(1).clamp(min=1e-12) / 448).tolist())
    exact = (x.float() / scales[:, None]).to(torch.float8_e4m3fn).float()
    # Triton's interpreter loses the carry where a number rounds up to a power of two.
    right = rows.float() == exact if DEVICE.type == "cuda" else (rows.float() == exact) | (rows.float() * 2 == exact)
    assert right.float().mean() > 0.99


def assert_same_rows(ours, theirs):
    assert torch.equal(ours.values.float(), theirs.values.float()) and torch.equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_norm_quantizes_its_rows(dtype):
    x, residual, weight = randn(5, 300, dtype=dtype), randn(5, 300, dtype=dtype, seed=1), randn(300, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    quantized, same = add_rms_norm_quantized(x, residual, weight, 1e-5)
    assert torch.equal(same, total)
    assert_same_rows(quantized, quantize_rows(normed))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_norm_adds_up_the_sums_of_a_product(dtype):
    sums, residual, weight = randn(3, 5, 300), randn(5, 300, dtype=dtype, seed=1), randn(300, dtype=dtype)
    x = (sums[0] + sums[1] + sums[2]).to(dtype)
    for ours, theirs in zip(
        add_rms_norm(sums, residual, weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert_same_rows(
        add_rms_norm_quantized(sums, residual, weight, 1e-5)[0], add_rms_norm_quantized(x, residual, weight, 1e-5)[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_swiglu_quantizes_its_rows(dtype):
    for width in (1300, 128):
        gate, up = randn(7, 2 * width, dtype=dtype, seed=3).split(width, dim=1)
        assert_same_rows(swiglu_quantized(gate, up), quantize_rows(swiglu(gate, up)))


@pytest.mark.parametrize(("rows", "tile", "with_bias"), [(5, (64, 64), True), (130, (128, 128), False)])
def test_float8_product_of_few_rows(rows, tile, with_bias):
    dtype = HALF[0] if HALF else torch.float32
    x, weight = quantize_rows(randn(rows, 640)), quantize_rows(randn(128, 640, seed=1))
    bias = randn(128, seed=2) if with_bias else None
    exact = (x.values.double() * x.scales[:, None]) @ (weight.values.double() * weight.scales[:, None]).T
    exact = exact if bias is None else exact + bias.double()
    tolerance = 1e-6 if DEVICE.type == "cpu" else 5e-3  # bfloat16, and sums that the hardware keeps short
    for stretches, shape in [
        (1, (rows, 128)),
        (2, (2, rows, 128)),
        (4, (3, rows, 128)),
    ]:  # 5 steps: 5, 3 + 2, 2 + 2 + 1
        tiling = Tiling(*tile, stretches)
        out = float8_product(x, weight, bias, dtype, tiling)
        assert out.shape == shape and out.dtype == (dtype if stretches == 1 else torch.float32)
        total = out.double() if stretches == 1 else out.double().sum(0)
        assert (total - exact).norm() < tolerance * exact.norm()
        assert torch.equal(out, float8_product(x, weight, bias, dtype, tiling))


def test_tilings_of_a_7b_model():
    """The fastest of docs/log.md: products with few tiles, the deep one cut until all of the GPU works on it."""
    down, qkv, gate_up = (3584, 18944), (4608, 3584), (37888, 3584)
    assert [tiling_for(rows, *down, may_cut=True) for rows in (64, 128, 192, 256, 257)] == [
        Tiling(64, 64, 4), Tiling(128, 64, 4), Tiling(128, 128, 2), Tiling(128, 128, 2), None,
    ]  # fmt: skip
    assert [tiling_for(rows, *qkv, may_cut=False) for rows in (1, 128, 256)] == [
        Tiling(64, 64), Tiling(128, 64), Tiling(128, 128),
    ]  # fmt: skip
    assert [tiling_for(rows, *gate_up, may_cut=False) for rows in (64, 65)] == [Tiling(64, 64), None]
    assert tiling_for(64, 3584, 3584, may_cut=True) == Tiling(64, 64, 2)
    assert tiling_for(64, 96, 256, may_cut=True) is None and tiling_for(64, 64, 192, may_cut=True) is None


def test_swiglu_of_the_halves_of_one_product():
    both = randn(7, 2600, seed=3)
    gate, up = both.split(1300, dim=1)
    assert_close(swiglu(gate, up), F.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("rows", [5, 64])
def test_product_and_activation_in_one(dtype, rows):
    x, weight = randn(rows, 192, dtype=dtype), randn(256, 192, dtype=dtype, seed=1) / 8
    gate, up = F.linear(x.double(), weight.double()).to(dtype).split(128, dim=1)
    assert_close(gated_product(x, weight), F.silu(gate) * up, dtype)


def test_product_and_activation_in_one_where_it_measured_faster():
    assert fills_the_gpu(64, 1536, 8960) and fills_the_gpu(48, 896, 4864) and fills_the_gpu(64, 3584, 18944)
    assert not fills_the_gpu(32, 1536, 8960) and not fills_the_gpu(96, 1536, 8960)
    assert not any(fills_the_gpu(64, 1536, columns) for columns in (1024, 29568, 8961))
    assert not fills_the_gpu(64, 1500, 8960)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}])
def test_rotary_angles(dtype, rope):
    config = LlamaConfig(hidden_size=96, num_attention_heads=2, rope_parameters={"rope_theta": 1e4, **rope})
    module = LlamaRotaryEmbedding(config).to(DEVICE)
    positions = torch.tensor([0, 1, 77, 8191, 32767], device=DEVICE)
    theirs = module(torch.zeros(1, dtype=dtype, device=DEVICE), positions[None])
    ours = rotary_angles(positions, module.inv_freq, module.attention_scaling, dtype)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference[0], rtol=0, atol=1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(3, 12), (4, 64)])
def test_rotate(dtype, heads, width):
    x = randn(6, heads, width, dtype=dtype).requires_grad_()
    angles = randn(6, width // 2, seed=1)
    cos, sin = (f(torch.cat((angles, angles), dim=-1)).to(dtype) for f in (torch.cos, torch.sin))
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)
    ours = rotate(x, cos, sin)
    assert_close(ours, theirs, dtype)
    upper = randn(6, heads, width, dtype=dtype, seed=2)
    assert_close(*(input_gradients(out, upper, [x])[0] for out in (ours, theirs)), dtype)


def paged_case(lengths, kv_heads, width, layers=2, dtype=torch.float32):
    """A shuffled paged cache and the dense keys and values it was filled from."""
    counts = [-(-n // paged.PAGE) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(order[:count])
        order = order[count:]
    block = torch.zeros(sum(counts), layers, 2, kv_heads, paged.PAGE, width, dtype=dtype, device=DEVICE)
    address = torch.tensor([block.data_ptr()], device=DEVICE)
    dense = [randn(2, n, kv_heads, width, dtype=dtype, seed=n) for n in lengths]
    return block, address, tables.to(DEVICE), dense


def fill_cache(case, lengths, layer):
    block, address, tables, dense = case
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    keys, values = (torch.cat([d[i] for d in dense]) for i in range(2))
    plain_kernels.BLOCKS[int(address)] = block
    plain_kernels.store(keys, values, address, tables, rows, positions, layer, block.stride(0))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("kv_heads", "sharing", "width"), [(2, 3, 16), (1, 1, 24)])
@pytest.mark.parametrize("window", [None, 70])
def test_paged_attention_is_attention(dtype, splits, kv_heads, sharing, width, window):
    lengths, layer = [1, 64, 65, 200], 1
    case = paged_case(lengths, kv_heads, width, dtype=dtype)
    fill_cache(case, lengths, layer)
    block, address, tables, dense = case
    q = randn(len(lengths), kv_heads * sharing, width, dtype=dtype, seed=3)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    out = paged.attend(q, address, tables, positions, layer, block.stride(0), kv_heads, 0.25, window, splits)
    for row, n in enumerate(lengths):
        start = 0 if window is None else max(0, n - window)
        keys, values = (x[start:].transpose(0, 1).repeat_interleave(sharing, dim=0) for x in dense[row])
        there = F.scaled_dot_product_attention(q[row, :, None].float(), keys.float(), values.float(), scale=0.25)
        assert_close(out[row], there[:, 0], dtype)
    assert not block[:, 0].any()  # the other layer was not touched


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("splits", "window", "rotates"),
    [*itertools.product((1, 4), (None, 1, 66), (True,)), (1, None, False), (4, 66, False)],
)
def test_attention_takes_and_stores_the_newest_token(dtype, splits, window, rotates):
    """What storing first and reading everything from the pages gives; the pages are the same too."""
    lengths, kv_heads, width = [1, 65, 136], 2, 24
    rows = len(lengths)
    block, address, tables, _ = paged_case(lengths, kv_heads, width, dtype=dtype)
    block.copy_(randn(*block.shape, dtype=dtype))
    apart = block.clone()
    there = torch.tensor([apart.data_ptr()], device=DEVICE)
    # As a merged product leaves them: rows lie apart.
    q, k, v = randn(rows, 10, width, dtype=dtype).split([6, kv_heads, kv_heads], dim=1)
    turns = randn(rows, width // 2, seed=3)
    angles = tuple(f(torch.cat((turns, turns), dim=-1)).to(dtype) for f in (torch.cos, torch.sin)) if rotates else None
    positions = torch.tensor(lengths, device=DEVICE) - 1
    place = (tables, positions, 1, block.stride(0), kv_heads, 0.25, window)
    out = paged.attend(q, address, *place, splits, angles, (k, v))

    paged.store(k, v, there, tables, torch.arange(rows, device=DEVICE), positions, 1, block.stride(0), angles)
    assert_close(out, paged.attend(q, there, *place, 1, angles), dtype)
    assert_close(block, apart, dtype)
    turned = apply_rotary_pos_emb(q, k, *angles, unsqueeze_dim=1)[1] if rotates else k
    for row, position in enumerate(positions.tolist()):
        page = tables[row, position // paged.PAGE]
        assert_close(block[page, 1, 0, :, position % paged.PAGE], turned[row], dtype)
        assert torch.equal(block[page, 1, 1, :, position % paged.PAGE], v[row])


def draw(logits, seeds, positions, temperatures, greedy):
    rows = len(logits)
    positions, limits = positions.clone(), positions + 1
    limits[0] -= 1
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    every = torch.zeros(3, rows, dtype=torch.int64, device=DEVICE)
    log_probs = torch.zeros(3, rows, device=DEVICE)
    step = torch.tensor([1], device=DEVICE)
    sampling.sample_and_advance(logits, seeds, temperatures, greedy, tokens, positions, limits, step, every, log_probs)
    return tokens, positions, step, every, log_probs


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_device_sampling_draws_what_the_host_draws(vocabulary):
    rows = 20
    logits = randn(rows, vocabulary) * 3
    settings = [Sampling(temperature=0.0 if i % 5 == 0 else 0.5 + i / 20, max_tokens=1) for i in range(rows)]
    host_rows = SamplingRows.of([Request((0,), i * 7919 - 50, one) for i, one in enumerate(settings)], DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 3
    expected, expected_log_probs = sample(logits, host_rows, positions + 1)
    tokens, moved, step, every, log_probs = draw(
        logits, host_rows.seeds, positions, host_rows.temperatures[:, 0], host_rows.greedy
    )
    assert torch.equal(tokens, expected)
    assert torch.equal(every[1], expected) and not every[[0, 2]].any()
    torch.testing.assert_close(log_probs[1], expected_log_probs, rtol=1e-5, atol=1e-5)
    assert step.item() == 2
    assert moved[0] == positions[0] and torch.equal(moved[1:], positions[1:] + 1)


def test_tokens_drawn_from_log_probs_are_the_hosts():
    log_probs = (randn(20, 5000) * 3).log_softmax(-1)
    log_probs[:, ::3] = -math.inf
    seeds, positions = torch.arange(20, device=DEVICE) * 7919 - 50, torch.arange(20, device=DEVICE) * 3
    before = positions.clone()
    drawn = sampling.draw_tokens(log_probs, seeds, positions)
    assert torch.equal(drawn, draw_tokens(log_probs, seeds, positions)) and torch.equal(positions, before)
    assert (drawn % 3 != 0).all()


def test_device_noise_is_the_hosts():
    tokens = 4000
    seeds, positions = torch.tensor([12, -5], device=DEVICE), torch.tensor([0, 900], device=DEVICE)
    there = (-negative_clocks(seeds, positions + 1, tokens)).log()
    flat = torch.zeros(2, tokens, device=DEVICE)
    # One hot token at a time would be slow: equal logits, so the winner is the smallest clock.
    winners, *_ = draw(flat, seeds, positions, torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE).bool())
    assert torch.equal(winners, there.argmin(dim=-1))


def test_device_clocks_are_the_hosts_to_four_digits():
    rows = 32
    seeds = (torch.arange(rows, device=DEVICE) * 7919 - 50).repeat(2)
    positions = torch.arange(rows, device=DEVICE).repeat(2)
    times = (-negative_clocks(seeds, positions + 1, 2)).log()
    logits = torch.zeros(2 * rows, 2, device=DEVICE)
    logits[:, 0] = times[:, 0] - times[:, 1]  # both would ring at once
    logits[:rows, 0] += 1e-4
    logits[rows:, 0] -= 1e-4
    winners, *_ = draw(logits, seeds, positions, torch.ones(2 * rows, device=DEVICE), torch.zeros_like(seeds).bool())
    assert winners.tolist() == [0] * rows + [1] * rows
    assert times.exp().min() < 0.06 and times.exp().max() > 2  # both formulas


def test_log_probs_of_the_coldest_rows():
    logits = torch.full((1, 40), -20.0, device=DEVICE)
    logits[0, [3, 30]] = 30.1
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    tokens, _, _, _, log_probs = draw(logits, zeros, zeros + 1, torch.full((1,), 1e-3, device=DEVICE), zeros.bool())
    assert tokens.item() in (3, 30) and log_probs[1].item() == pytest.approx(-math.log(2), abs=1e-5)


def test_a_masked_stretch_of_the_vocabulary_weighs_nothing():
    logits = torch.full((2, 2 * sampling.BLOCK), -200.0, device=DEVICE)
    logits[:, sampling.BLOCK :] = float("-inf")
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tokens, _, _, _, log_probs = draw(logits, zeros, zeros + 1, torch.ones(2, device=DEVICE), zeros.bool())
    assert (tokens < sampling.BLOCK).all()
    torch.testing.assert_close(log_probs[1], torch.full((2,), -math.log(sampling.BLOCK), device=DEVICE))


def test_nan_logits_give_nan_log_probs():
    logits = randn(2, 30)
    logits[1, 4] = float("nan")
    ones = torch.ones(2, device=DEVICE)
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    _, _, _, _, log_probs = draw(logits, zeros, zeros + 1, ones, zeros.bool())
    assert log_probs[1, 0].isfinite() and log_probs[1, 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_scores_and_gradients(dtype, temperature):
    rows, vocabulary = 6, 5000
    logits = (randn(rows, vocabulary) * 2).to(dtype)
    logits[2, :100] = float("-inf")
    targets = torch.arange(rows, device=DEVICE) * 800 + 100
    reference = logits.double().requires_grad_()
    log_p = torch.log_softmax(reference / temperature, dim=-1)
    p = log_p.exp()
    entropy_there = -torch.where(p > 0, p * log_p.clamp(min=-1e4), 0.0).sum(-1)
    chosen_there = log_p.gather(1, targets[:, None])[:, 0]
    chosen, entropy, log_total = (torch.empty(rows, device=DEVICE) for _ in range(3))
    head.score_rows(logits, targets, temperature, chosen, entropy, log_total)
    torch.testing.assert_close(chosen.double(), chosen_there, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), entropy_there, rtol=1e-4, atol=1e-4)
    upper = randn(rows, seed=1), randn(rows, seed=2)
    (there,) = input_gradients((chosen_there, entropy_there), [u.double() for u in upper], [reference])
    ours = head.grad_logits_(logits.clone(), targets, temperature, entropy, log_total, *upper)
    scale = there.abs().max().item()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.double(), there, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("with_bias", [False, True])
def test_selected_log_probs_use_the_kernels_and_agree(monkeypatch, with_bias):
    hidden = randn(9, 24).requires_grad_()
    weight = randn(700, 24, seed=1).requires_grad_()
    bias = randn(700, seed=2).requires_grad_() if with_bias else None
    targets = torch.arange(9, device=DEVICE) * 70
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    results = []
    for serve in (False, True):
        monkeypatch.setattr("luffy.core.logprobs.kernels_serve", lambda device, serve=serve: serve)
        out = selected_log_probs(hidden, weight, bias, targets, temperature=0.8, chunk_rows=4)
        results.append((out, input_gradients(out, [randn(9, seed=5), randn(9, seed=6)], inputs)))
    for part in (0, 1):
        for ours, theirs in zip(results[1][part], results[0][part], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("splits", "window"), [(4, None), (1, 66), (4, 3)])
def test_several_queries_of_a_sequence_are_as_many_with_one(dtype, splits, window, queries=4, sharing=3):
    """Also where a query ends pages before another, and where the last ones stand at the same position."""
    lengths, kv_heads, width = [8, 65, 130], 2, 16
    block, address, tables, _ = paged_case(lengths, kv_heads, width, dtype=dtype)
    block.copy_(randn(*block.shape, dtype=dtype))
    q = randn(len(lengths) * queries, kv_heads * sharing, width, dtype=dtype)
    turns = randn(len(q), width // 2, seed=3)
    angles = tuple(f(torch.cat((turns, turns), dim=-1)).to(dtype) for f in (torch.cos, torch.sin))
    ends = [[min(n - queries + j, n - 3) for j in range(queries)] for n in lengths]
    positions = torch.tensor(ends, device=DEVICE).flatten()
    sizes = (1, block.stride(0), kv_heads, 0.25, window, splits, angles)
    alone = paged.attend(q, address, tables.repeat_interleave(queries, dim=0), positions, *sizes)
    assert_close(paged.attend(q, address, tables, positions, *sizes), alone, dtype)
