"""Linear layers with adapters: what peft makes of them, in the precision of the weights beside them."""

import pytest
import torch
from builders import DEVICE, GPU_IF_THERE
from torch import nn

from luffy.models.products import separate

peft = pytest.importorskip("peft")
pytestmark = GPU_IF_THERE
WIDTHS = {"first": 24, "second": 40, "third": 8}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        for name, width in WIDTHS.items():
            setattr(self, name, nn.Linear(16, width, bias=name != "third"))


def adapted_layers(dtype=torch.float32, **settings):
    """Float32 adapters, none of them zero, beside frozen weights of ``dtype``."""
    torch.manual_seed(0)
    chosen = {"r": 4, "lora_alpha": 12, "target_modules": list(WIDTHS), "init_lora_weights": False} | settings
    model = peft.get_peft_model(Layers(), peft.LoraConfig(**chosen)).to(DEVICE)
    for name, p in model.named_parameters():
        p.data = p.data if "lora_" in name else p.data.to(dtype)
    return model


def separate_modules(model):
    return [getattr(model.base_model.model, name) for name in WIDTHS]


def by_peft(x, group):
    return tuple(layer(x) for layer in group)


def results(products, model, dtype=torch.float32):
    """What the layers make of some rows, the gradient of the rows, those of the adapters."""
    model.zero_grad()
    rows = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype).requires_grad_()
    outs = products(rows, separate_modules(model))
    sum((out.float() * torch.linspace(-1, 2, out.numel(), device=DEVICE).view_as(out)).sum() for out in outs).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [*(out.detach() for out in outs), rows.grad], grads


@pytest.fixture
def no_peft(monkeypatch):
    def refuse(*_):
        raise AssertionError("peft's own forward pass ran")

    return lambda: monkeypatch.setattr(peft.tuners.lora.layer.Linear, "forward", refuse)


@pytest.mark.parametrize("targets", [list(WIDTHS), ["first", "third"]])
def test_values_and_gradients_are_those_of_peft(no_peft, targets):
    model = adapted_layers(target_modules=targets, rank_pattern={"first": 2, "third": 7}, use_rslora=True)
    expected, expected_grads = results(by_peft, model)
    no_peft()
    found, grads = results(separate, model)
    torch.testing.assert_close(found, expected)
    assert len(grads) == 2 * len(targets)
    torch.testing.assert_close(grads, expected_grads)


def test_rounded_adapters_are_as_near_to_the_exact_ones_as_rounded_weights(no_peft):
    """The measure: the same layers with weights and adapters in bfloat16."""
    exact, rounded, ours = adapted_layers(), adapted_layers().bfloat16(), adapted_layers(torch.bfloat16)
    expected, expected_grads = results(by_peft, exact)
    plain, plain_grads = results(by_peft, rounded, torch.bfloat16)
    no_peft()
    found, grads = results(separate, ours, torch.bfloat16)
    assert {out.dtype for out in found} == {torch.bfloat16} and {g.dtype for g in grads.values()} == {torch.float32}
    triples = [
        *zip(found, plain, expected, strict=True),
        *((grads[n], plain_grads[n], expected_grads[n]) for n in grads),
    ]
    for value, other, wanted in triples:
        error, of_the_rounded = ((v.float() - wanted).norm() for v in (value, other))
        assert error <= 1.5 * of_the_rounded


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.5},
        {"use_dora": True},
        {"lora_bias": True, "target_modules": ["first", "second"]},
        {"bias": "all", "target_modules": ["first", "second"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_adapters_are_left_to_peft(settings):
    model = adapted_layers(**settings).train()
    torch.manual_seed(2)
    expected = results(by_peft, model)
    torch.manual_seed(2)
    torch.testing.assert_close(results(separate, model), expected, rtol=0, atol=0)


def test_adapters_that_are_switched_off_merged_or_several_are_left_to_peft():
    model = adapted_layers()
    rows = torch.randn(3, 16, device=DEVICE)
    with model.disable_adapter():
        alone = [layer.base_layer(rows) for layer in separate_modules(model)]
        torch.testing.assert_close(list(separate(rows, separate_modules(model))), alone, rtol=0, atol=0)
    expected = by_peft(rows, separate_modules(model))
    model.base_model.merge_adapter()
    torch.testing.assert_close(separate(rows, separate_modules(model)), expected)
    model.base_model.unmerge_adapter()
    model.add_adapter("more", peft.LoraConfig(r=2, target_modules=list(WIDTHS), init_lora_weights=False))
    model.base_model.set_adapter(["default", "more"])
    both = by_peft(rows, separate_modules(model))
    torch.testing.assert_close(separate(rows, separate_modules(model)), both, rtol=0, atol=0)
