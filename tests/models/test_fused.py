"""The fused layers compute what the modules compute, forwards and backwards. On a CPU Triton interprets."""

import pytest
import torch
from builders import DEVICE, GPU_IF_THERE, make_model

from luffy.core.gradient_sums import GradientSum, Holder
from luffy.models.attention import layout_of
from luffy.models.forward import forward_hidden
from luffy.types import Family

pytestmark = [pytest.mark.usefixtures("interpreted_kernels"), *GPU_IF_THERE]
ALONE = (Family(3, (2,)), Family(4, (5,)))
SHARED = (Family(3, (2, 1, 4)), Family(1, (3,)))


def fused_hidden_and_gradients(model, checkpointing, families=ALONE):
    model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
    model.zero_grad()
    layout = layout_of(families, DEVICE)
    positions = torch.cat([family.positions() for family in families]).to(DEVICE)
    hidden = forward_hidden(model, torch.arange(14, device=DEVICE) + 3, positions, layout)
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=DEVICE).view_as(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_recomputed_layers_drop_what_they_dropped_before():
    """Adapters' dropout: the backward pass must see the masks of the forward pass."""
    peft = pytest.importorskip("peft")
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    settings = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("llama", **small), settings).to(DEVICE).train()
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        results.append(fused_hidden_and_gradients(model, checkpointing))
    (hidden, grads), (again, grads_again) = results
    torch.testing.assert_close(again, hidden)
    assert grads and grads.keys() == grads_again.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grads_again[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "families", "layers"),
    [("qwen2", ALONE, 2), ("qwen3", SHARED, 1), pytest.param("qwen3", ALONE, 1, marks=pytest.mark.slow)],
)
def test_the_fused_forward_has_the_gradients_of_the_modules(monkeypatch, architecture, families, layers):
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    model = make_model(architecture, **small).to(DEVICE).train()
    fused = [fused_hidden_and_gradients(model, checkpointing, families) for checkpointing in (False, True)]
    monkeypatch.setattr("luffy.models.forward.fused_decoder", lambda causal: None)
    plain, plain_grads = fused_hidden_and_gradients(model, False, families)
    for hidden, grads in fused:
        torch.testing.assert_close(hidden, plain, rtol=1e-4, atol=1e-4)
        assert grads.keys() == plain_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain_grads[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "targets", ["all-linear", pytest.param(["q_proj", "v_proj", "down_proj"], marks=pytest.mark.slow)]
)
def test_adapters_in_the_fused_forward_have_the_gradients_of_the_modules(monkeypatch, targets):
    peft = pytest.importorskip("peft")
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("qwen2", **small), settings).to(DEVICE).train()
    fused = [fused_hidden_and_gradients(model, checkpointing, SHARED) for checkpointing in (False, True)]
    monkeypatch.setattr("luffy.models.forward.fused_decoder", lambda causal: None)
    plain, plain_grads = fused_hidden_and_gradients(model, False, SHARED)
    for hidden, grads in fused:
        torch.testing.assert_close(hidden, plain, rtol=1e-4, atol=1e-4)
        assert all("lora_" in name for name in grads) and grads.keys() == plain_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain_grads[name], rtol=1e-3, atol=1e-3)


def test_gradients_that_an_optimizer_takes_over_are_those_of_the_modules():
    """Over two passes, the second one recomputed. On a GPU in bfloat16: as near to float32 as the modules' own."""
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = make_model("qwen2", **small).to(DEVICE).train()
    plain = exact = fused_hidden_and_gradients(model, False)[1]
    if DEVICE.type == "cuda":
        plain = fused_hidden_and_gradients(model.bfloat16(), False)[1]
    model.zero_grad()
    sums = {name: Holder(None) for name, parameter in model.named_parameters() if name in plain}
    for name, holder in sums.items():
        GradientSum.take_over(model.get_parameter(name), holder)
    left = [fused_hidden_and_gradients(model, checkpointing)[1] for checkpointing in (False, True)]
    assert left == [{}, {}]
    for name, holder in sums.items():
        assert holder.grad.dtype == torch.float32
        error, of_the_modules = ((g.float() - exact[name]).norm() for g in (holder.grad / 2, plain[name]))
        assert error <= 1.5 * of_the_modules + 1e-5 * exact[name].norm()
