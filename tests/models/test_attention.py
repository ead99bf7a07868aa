"""A packed forward pass equals separate ones, in values and in gradients."""

import pytest
import torch
from builders import ARCHITECTURES, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from luffy.errors import UserError
from luffy.models import attention, flash
from luffy.models.attention import FamilyLayout, PackedLayout, layout_of
from luffy.models.forward import forward_hidden, head_weight_bias, use_luffy_attention
from luffy.types import Family

UNEVEN = (3, 21, 1, 12)
EVEN = (14, 14, 14)


def tokens(lengths) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 200, (n,), generator=generator) for n in lengths]


def packed_logits(model, sequences) -> torch.Tensor:
    layout = PackedLayout([len(s) for s in sequences])
    hidden = forward_hidden(model, torch.cat(sequences), layout.position_ids, layout)
    return torch.nn.functional.linear(hidden, *head_weight_bias(model))


def separate_logits(model, sequences) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([model(s[None]).logits[0] for s in sequences])


def logit_gradients(model, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss that treats every logit differently."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (torch.log_softmax(logits, -1) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("lengths", [UNEVEN, EVEN, (30,)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_values_equal_separate_ones(architecture, lengths):
    model, sequences = make_model(architecture), tokens(lengths)
    with torch.no_grad():
        packed = packed_logits(model, sequences)
        separate = separate_logits(model, sequences)
    torch.testing.assert_close(packed, separate, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_gradients_equal_separate_ones(architecture, checkpointing):
    model, sequences = make_model(architecture, initializer_range=0.08).train(), tokens(UNEVEN)
    expected = logit_gradients(model, separate_logits(model, sequences))
    if checkpointing:
        model.gradient_checkpointing_enable()
    got = logit_gradients(model, packed_logits(model, sequences))
    assert got.keys() == expected.keys()
    for name in expected:
        error = (got[name] - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_no_token_sees_another_sequence():
    model, (a, b) = make_model("llama"), tokens((9, 6))
    with torch.no_grad():
        before = packed_logits(model, [a, b])
        after = packed_logits(model, [a.flip(0), b])
    assert torch.equal(before[9:], after[9:]) and not torch.equal(before[:9], after[:9])


def test_the_window_is_seen_past_but_not_beyond():
    """Through three layers of window 8 a token reaches back 3 * 7 places and no further."""
    model, (ids,) = make_model("mistral"), tokens((40,))
    changed = ids.clone()
    changed[10] = ids[10] % 150 + 20
    with torch.no_grad():
        moved = (packed_logits(model, [ids]) - packed_logits(model, [changed])).abs().amax(-1) > 0
    assert moved.nonzero().flatten().tolist() == list(range(10, 10 + 3 * 7 + 1))


def test_mixed_full_and_sliding_layers():
    changes = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    model, sequences = make_model("qwen2", **changes), tokens(UNEVEN)
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    with torch.no_grad():
        torch.testing.assert_close(
            packed_logits(model, sequences), separate_logits(model, sequences), atol=1e-4, rtol=1e-4
        )


def test_position_ids_restart_and_last_tokens_end_each_sequence():
    layout = PackedLayout((2, 3, 1))
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 0]
    assert layout.last_tokens.tolist() == [1, 4, 5]
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout((2, 0))


def test_adapters_take_part_in_the_forward_pass():
    peft = pytest.importorskip("peft")
    base, sequences = make_model("qwen2"), tokens(UNEVEN)
    plain = packed_logits(base, sequences)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    got = packed_logits(model, sequences)
    got.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)
    base.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([model(input_ids=s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, plain, atol=1e-2)


def test_an_adapted_head_and_prompt_learning_are_refused():
    peft = pytest.importorskip("peft")
    headed = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UserError, match="leave lm_head out of the adapters"):
        head_weight_bias(headed)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match="prompt learning"):
        packed_logits(peft.get_peft_model(make_model("qwen3"), config), tokens((3,)))


def other_model(kind: str, **changes):
    shape = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
    config = AutoConfig.for_model(kind, **{**shape, **heads, "pad_token_id": 0, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma2", {"final_logit_softcapping": None}, "uses softcap in attention"),
        ("cohere", {"logit_scale": 0.0625}, "logit_scale=0.0625"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_architectures_we_would_get_wrong_are_refused(kind, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        packed_logits(other_model(kind, **changes), tokens((5, 3)))
    assert "\n" not in str(caught.value)


def test_an_architecture_that_bypasses_the_interface_is_named(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(UserError, match="LlamaForCausalLM called luffy's attention 2 times for 3 layers"):
        packed_logits(model, tokens((5,)))


def test_attention_dropout_is_refused_in_training():
    model = make_model("llama", attention_dropout=0.1)
    packed_logits(model, tokens((5,)))
    with pytest.raises(UserError, match=r"attention dropout 0\.1"):
        packed_logits(model.train(), tokens((5,)))


def test_a_plain_call_after_ours_says_how_to_go_back():
    model = make_model("llama")
    use_luffy_attention(model)
    with pytest.raises(UserError, match=r"set_attn_implementation\('sdpa'\)"):
        model(torch.tensor([[5, 6]]))


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_varlen_on_the_gpu_equals_the_padded_path(architecture, monkeypatch):
    """Values and gradients in bfloat16, against the same numbers without the varlen kernel."""
    model, sequences = make_model(architecture, initializer_range=0.05).cuda().to(torch.bfloat16), tokens(UNEVEN)
    # Not the squares of the hidden states: the last norm fixes their sum, so its gradient is rounding alone.
    direction = torch.randn(sum(UNEVEN), model.config.hidden_size, generator=torch.Generator().manual_seed(0)).cuda()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        layout = PackedLayout(UNEVEN, "cuda")
        hidden = forward_hidden(model, torch.cat(sequences).cuda(), layout.position_ids, layout)
        model.zero_grad()
        (hidden.float() * direction).sum().backward()
        return hidden.float(), {n: p.grad.float() for n, p in model.model.named_parameters() if p.grad is not None}

    hidden, grads = run()
    monkeypatch.setattr("luffy.models.attention.varlen_attn", None)
    plain, plain_grads = run()
    torch.testing.assert_close(hidden, plain, atol=0.06, rtol=0.02)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert (grad - plain_grads[name]).norm() <= 0.03 * plain_grads[name].norm() + 1e-3, name


@pytest.fixture
def windows(monkeypatch):
    """torch's kernel serves, and the windows it is called with are kept."""
    kept, kernel = [], attention.varlen_attn

    def counted(*args, window_size, **named):
        kept.append(window_size)
        return kernel(*args, window_size=window_size, **named)

    monkeypatch.setenv(flash.SWITCH, "0")
    monkeypatch.setenv(flash.CUDNN_SWITCH, "0")
    flash.flash_kernel.cache_clear()
    monkeypatch.setattr(attention, "varlen_attn", counted)
    yield kept
    flash.flash_kernel.cache_clear()


def hidden_and_gradients(model, families):
    device = next(model.parameters()).device
    positions = torch.cat([family.positions() for family in families]).to(device)
    ids = torch.randint(3, 200, positions.shape, generator=torch.Generator().manual_seed(1)).to(device)
    hidden = forward_hidden(model, ids, positions, layout_of(families, device)).float()
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(device)
    model.zero_grad()
    (hidden * direction).sum().backward()
    gradients = {n: p.grad.float().clone() for n, p in model.model.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients


@pytest.mark.gpu
@pytest.mark.parametrize(
    "families",
    [[Family(2, (n - 2,)) for n in (3, 40, 8, 9, 21)], [Family(12, (3, 30, 1, 8)), Family(2, (3, 5, 6))]],
    ids=["packed", "families"],
)
def test_a_window_in_bfloat16_stays_within_its_noise_of_padded_float32(families, windows, monkeypatch):
    """The noise is that of the padded path in bfloat16 against the same float32 numbers."""
    model = make_model("mistral", initializer_range=0.05).cuda()
    exact, exact_grads = hidden_and_gradients(model, families)
    assert not windows  # float32 is padded
    model = model.to(torch.bfloat16)
    ours, grads = hidden_and_gradients(model, families)
    assert windows == [(7, 0)] * 3
    monkeypatch.setattr(attention, "varlen_attn", None)
    padded, padded_grads = hidden_and_gradients(model, families)
    noise, error = (padded - exact).norm(), (ours - exact).norm()
    assert error <= 1.5 * noise and noise < 0.03 * exact.norm(), (error, noise, exact.norm())
    assert grads.keys() == exact_grads.keys()
    for name, gradient in exact_grads.items():
        noise, error = ((g[name] - gradient).norm() / gradient.norm() for g in (padded_grads, grads))
        assert error <= 1.5 * noise + 0.01, (name, error, noise)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [2, 8, 64, 129, 511, 1024])
def test_the_kernels_window_is_the_padded_paths(window, windows):
    families = [Family(121, (512, 3, 700)), Family(7, (60, 200))]
    lengths = (700, 33, 1, 1024)
    for layout, tokens in (
        (PackedLayout(lengths, "cuda"), sum(lengths)),
        (FamilyLayout(families, "cuda"), sum(family.tokens for family in families)),
    ):
        generator = torch.Generator().manual_seed(0)
        seen = [torch.randn(tokens, n, 64, generator=generator).cuda().to(torch.bfloat16) for n in (6, 2, 2)]
        weights = torch.randn(tokens, 6, 64, generator=generator).cuda().double()
        results = []
        for dtype in (torch.bfloat16, torch.float64):  # float64 is padded
            inputs = [x.to(dtype).requires_grad_() for x in seen]
            out = layout.attend(0, *inputs, 0.125, window)
            results.append((out, *torch.autograd.grad((out.double() * weights).sum(), inputs)))
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert (ours.double() - theirs).norm() < 0.02 * theirs.norm(), name
    assert windows == [(window - 1 if window < longest else -1, 0) for longest in (1024, 821)]
