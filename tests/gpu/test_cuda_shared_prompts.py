"""A group's prompt computed once, on a GPU: the flash kernel over copied keys, and gradients that repeat."""

from dataclasses import replace

import pytest
import torch
from builders import make_model, make_sample

from luffy.learn.packing import pack
from luffy.learn.scorer import TokenScorer
from luffy.models.attention import Copies, layout_of

pytestmark = pytest.mark.gpu

GROUP, PROMPT = 6, 90


def long_samples():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, 200, (n,), generator=generator)  # noqa: E731
    prompts = [tuple(draw(PROMPT - 40 * g).tolist()) for g in range(2)]
    return [make_sample(prompts[i % 2], draw(20 + 13 * i)) for i in range(2 * GROUP)]


def scored_on_gpu(model, share):
    (batch,) = pack(long_samples(), 100_000, "token-mean", 300, share=share)
    log_probs = TokenScorer(model)(batch.to("cuda"), 1.0).log_prob
    model.zero_grad()
    pieces = log_probs.split(batch.response_lengths)
    in_order = torch.cat([piece for _, piece in sorted(zip(batch.order, pieces, strict=True), key=lambda p: p[0])])
    (in_order * torch.linspace(-1, 2, len(in_order), device="cuda")).mean().backward()
    return in_order.detach().float(), {n: p.grad.float().clone() for n, p in model.named_parameters()}


def test_the_next_batch_is_laid_out_while_the_gpu_is_busy():
    rows = [replace(s, **{k: v.repeat(40) for k, v in vars(s).items() if torch.is_tensor(v)}) for s in long_samples()]
    (batch,) = pack(rows, 100_000, "token-mean", 12_000)
    assert batch.input_ids.nbytes > 2**17  # small copies never wait

    def lay_out():
        return batch.to("cuda"), layout_of(batch.families, "cuda")

    for _ in range(2):  # pinned memory is allocated once, and that waits
        lay_out()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    moved, _ = lay_out()
    assert not torch.cuda.current_stream().query()
    assert torch.equal(moved.input_ids.cpu(), batch.input_ids)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_shared_bfloat16_stays_within_its_noise_of_whole_float32(architecture):
    """The noise is that of whole samples in bfloat16 against the same float32 numbers."""
    exact, exact_grads = scored_on_gpu(make_model(architecture, initializer_range=0.05).cuda(), share=False)
    half = make_model(architecture, initializer_range=0.05).cuda().to(torch.bfloat16)
    whole, whole_grads = scored_on_gpu(half, share=False)
    shared, shared_grads = scored_on_gpu(half, share=True)
    noise = (whole - exact).abs()
    error = (shared - exact).abs()
    assert error.mean() <= 1.5 * noise.mean() + 1e-4 and error.max() <= 3 * noise.max() + 1e-3
    for name, gradient in exact_grads.items():
        noise, error = ((g[name] - gradient).norm() / gradient.norm() for g in (whole_grads, shared_grads))
        assert error <= 3 * noise + 0.02, (name, error, noise)


def test_shared_float32_equals_whole_float32():
    model = make_model("qwen3", initializer_range=0.05).cuda()
    (whole, whole_grads), (shared, shared_grads) = scored_on_gpu(model, share=False), scored_on_gpu(model, share=True)
    torch.testing.assert_close(shared, whole, atol=1e-4, rtol=1e-4)
    for name, gradient in whole_grads.items():
        assert (shared_grads[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_gradients_of_copies_have_the_same_bits_every_time():
    """Summed from 500 places each: adding atomically would give other bits now and then."""
    rows = torch.cat([torch.arange(64).repeat(500), torch.arange(64, 1000)])
    copies = Copies(rows, 1000, "cuda")
    flat = torch.randn(1000, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(len(rows), 8, 128, device="cuda", dtype=torch.bfloat16)
    gradients = [torch.autograd.grad(copies.of(flat), flat, upstream)[0] for _ in range(5)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    expected = torch.zeros(1000, 8, 128, device="cuda").index_add_(0, rows.cuda(), upstream.float())
    torch.testing.assert_close(gradients[0].float(), expected, atol=0.3, rtol=0.01)
