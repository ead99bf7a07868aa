"""flash-attn is called where it is there and agrees with torch, and nothing depends on it."""

import contextlib
import importlib.util
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from luffy.models import attention, flash
from luffy.models.attention import FamilyLayout, PackedLayout
from luffy.types import Family

HEADS = flash.Heads(torch.device("cpu"), torch.float32, 4, 2, 8)
LONG_HEADS = HEADS._replace(long=True)
TRIED = [430, 430, 20]  # queries of the trial: with gradients, without, short
LAYOUTS = {
    "whole": PackedLayout((5, 3, 9)),
    "families": FamilyLayout([Family(4, (3, 5)), Family(1, (2, 2))], "cpu"),
}


WINDOWS = (None, 9, 3, 1)  # the longest sequence has nine tokens


def plain_flash_attention(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic,
    window_size=(None, None),
):  # fmt: skip
    """What the package computes: causality and window (tokens before a query's own) are aligned to the end."""
    before, after = window_size
    assert causal and max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        k, v = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for x in (key, value))
        ends = k.shape[1] - q.shape[1]
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(ends)
        if before is not None:
            assert before >= 0 and after == 0
            sees = sees.triu(ends - before)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale, enable_gqa=True)
        out.append(made.transpose(0, 1))
    return torch.cat(out), None


torch_reference = flash._adapted(plain_flash_attention)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU in name; tensors stay on the CPU, and cuDNN is turned off."""
    monkeypatch.setenv(flash.CUDNN_SWITCH, "0")
    monkeypatch.setattr(flash, "gpu_generation", lambda device: 9)
    monkeypatch.setattr(attention, "varlen_serves", lambda query: True)
    monkeypatch.setattr("luffy.models.attention.varlen_serves", lambda query: True)
    monkeypatch.setattr(attention, "torch_varlen", torch_reference)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)  # not installed
    flash.flash_kernel.cache_clear()
    yield monkeypatch
    flash.flash_kernel.cache_clear()


def install_flash(monkeypatch, name, function):
    module = types.ModuleType(name)
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, name, module)
    if "." in name:
        monkeypatch.setitem(sys.modules, name.split(".")[0], types.ModuleType(name.split(".")[0]))


def changed(calls, change=lambda x: x, windows=None):
    """The right kernel, with its calls (and their windows) kept and its output changed."""

    def kernel(*args, **named):
        calls.append(args[0].shape[0])
        if windows is not None:
            windows.append(named.get("window_size"))
        return change(plain_flash_attention(*args, **named)[0])

    return kernel


def heads(tokens):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, count, 8, generator=generator, requires_grad=True) for count in (4, 2, 2)]


def check_against_padded(hopper, layout, tensors, out, window):
    """``out`` and its gradients are those of the padded path."""
    grads = torch.autograd.grad((out * out.detach().sin()).sum(), tensors)
    hopper.setattr(attention, "varlen_serves", lambda query: False)
    hopper.setattr("luffy.models.attention.varlen_serves", lambda query: False)
    padded = layout.attend(0, *tensors, 0.3, window)
    torch.testing.assert_close(out, padded)
    for ours, theirs in zip(grads, torch.autograd.grad((padded * out.detach().sin()).sum(), tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_are_those_of_the_padded_path(hopper, layout, window):
    tensors, calls, windows = heads(17), [], []
    install_flash(hopper, "flash_attn.cute", changed(calls, windows=windows))
    out = layout.attend(0, *tensors, 0.3, window)
    assert calls == [*TRIED, 17]
    # Tried with a window where it is used with one; a window that holds every sequence is none.
    assert windows == ([None] * 4 if window in (None, 9) else [(99, 0), (99, 0), (4, 0), (window - 1, 0)])
    check_against_padded(hopper, layout, tensors, out, window)


def test_one_that_is_wrong_with_windows_serves_without_them(hopper):
    def blind(*args, window_size=None, **named):
        return plain_flash_attention(*args, **named)

    install_flash(hopper, "flash_attn.cute", blind)
    tensors = heads(9)
    with pytest.warns(UserWarning, match="flash_attn.cute is installed but not used"):
        ours = PackedLayout((9,)).attend(0, *tensors, 0.3, 4)
    torch.testing.assert_close(ours, PackedLayout((9,))._attend_padded(*tensors, 0.3, 4))
    assert flash.flash_kernel(HEADS, torch_reference) is not None
    assert flash.flash_kernel(HEADS._replace(windowed=True), torch_reference) is None


@pytest.mark.parametrize("inference", [False, True])
def test_it_is_tried_once_for_all_layers_and_steps(hopper, inference):
    calls = []
    install_flash(hopper, "flash_attn.cute", changed(calls))
    with torch.inference_mode(inference):
        for _ in range(3):
            PackedLayout((5,)).attend(0, *heads(5), 0.3, None)
    assert calls == [*TRIED, 5, 5, 5]


def test_the_trial_leaves_no_trace_in_a_layer_that_is_checkpointed(hopper):
    """Such a layer counts what it saves, and runs again without a trial."""
    install_flash(hopper, "flash_attn.cute", plain_flash_attention)
    tensors, plain = heads(5), heads(5)
    out = checkpoint(lambda *qkv: PackedLayout((5,)).attend(0, *qkv, 0.3, None), *tensors, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), tensors)
    want = torch.autograd.grad(PackedLayout((5,)).attend(0, *plain, 0.3, None).square().sum(), plain)
    torch.testing.assert_close(got, want)


def test_the_newest_package_is_taken(hopper):
    third, fourth = [], []
    install_flash(hopper, "flash_attn_interface", changed(third))
    assert flash.flash_kernel(HEADS, torch_reference) and (len(third), len(fourth)) == (3, 0)
    install_flash(hopper, "flash_attn.cute", changed(fourth))
    flash.flash_kernel.cache_clear()
    assert flash.flash_kernel(HEADS, torch_reference) and (len(third), len(fourth)) == (3, 3)


def test_without_a_package_on_an_older_gpu_or_switched_off_torch_serves(hopper):
    assert flash.flash_kernel(HEADS, torch_reference) is None
    install_flash(hopper, "flash_attn.cute", plain_flash_attention)
    for block in (
        lambda patch: patch.setattr(flash, "gpu_generation", lambda device: 8),
        lambda patch: patch.setenv(flash.SWITCH, "0"),
    ):
        flash.flash_kernel.cache_clear()
        with hopper.context() as patch:
            block(patch)
            assert flash.flash_kernel(HEADS, torch_reference) is None
    flash.flash_kernel.cache_clear()
    assert flash.flash_kernel(HEADS, torch_reference) is not None


def wrong_backward(out):
    return out.detach() + (out - out.detach()) * 1.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: out * 1.1, "out by 0.1"),
        (wrong_backward, "torch's in dq by 0.1, dk by 0.1, dv by 0.1"),
        (lambda out: out * float("nan"), "out by nan"),
        (lambda out: out.nope, "AttributeError: .*nope"),
    ],
)
def test_one_that_fails_or_differs_is_not_used_and_says_so_once(hopper, change, said):
    calls = []
    install_flash(hopper, "flash_attn.cute", changed(calls, change))
    with pytest.warns(UserWarning, match=said):
        first = PackedLayout((5,)).attend(0, *heads(5), 0.3, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(PackedLayout((5,)).attend(0, *heads(5), 0.3, None), first)
    assert calls and set(calls) <= set(TRIED)


@pytest.mark.parametrize(
    "trouble", [ModuleNotFoundError("no cutlass", name="cutlass"), OSError("libcute.so"), RuntimeError("CUDA 13")]
)
def test_one_that_cannot_be_imported_is_told_apart_from_one_that_is_not_there(hopper, trouble):
    def fails(name):
        raise trouble if name == "flash_attn.cute" else ModuleNotFoundError(name=name)

    hopper.setattr(flash.importlib, "import_module", fails)
    with pytest.warns(UserWarning, match="flash_attn.cute is installed but not used.*" + str(trouble)):
        assert flash.flash_kernel(HEADS, torch_reference) is None


@pytest.mark.parametrize("which", ["no gradient", "short"])
def test_a_kernel_that_only_some_calls_reach_is_tried_too(hopper, which):
    def wrong(query, *args, **named):
        right = plain_flash_attention(query, *args, **named)[0]
        hit = query.shape[0] < 100 if which == "short" else query.shape[0] == 430 and not torch.is_grad_enabled()
        return right * 1.1 if hit else right

    install_flash(hopper, "flash_attn.cute", wrong)
    with pytest.warns(UserWarning, match="scored by 0.1" if which == "no gradient" else "short by 0.1"):
        assert flash.flash_kernel(HEADS, torch_reference) is None


def test_the_trial_is_on_the_gpu_that_asks(hopper):
    """A new thread begins with the first GPU."""
    entered = []

    @contextlib.contextmanager
    def device(which):
        entered.append(which)
        yield

    hopper.setattr(torch.cuda, "device", device)
    hopper.setattr(flash, "_question", lambda *_: entered.append("asked") or ([], None))
    second = torch.device("cuda", 1)
    with pytest.raises(TypeError):  # there is nothing to ask with
        flash._tried(torch_reference, HEADS._replace(device=second))
    assert entered == [second, "asked"]


def test_determinism_asked_for_later_is_tried_anew(hopper):
    query, key, _ = heads(5)
    assert not flash.heads_of(query, key, None, 5).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert flash.heads_of(query, key, None, 5).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_runs_out_is_no_reason_to_leave_it(hopper):
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    install_flash(hopper, "flash_attn.cute", full)
    with pytest.raises(torch.OutOfMemoryError):
        PackedLayout((5,)).attend(0, *heads(5), 0.3, None)


@pytest.fixture
def cudnn(hopper):
    """cuDNN counted; sequences of six tokens are long and padded to eights. Its calls: queries as they are padded."""
    calls, causal = [], flash._causal

    def counted(query, *rest):
        calls.append(query.shape[2])
        return causal(query, *rest)

    hopper.delenv(flash.CUDNN_SWITCH)
    hopper.setattr(flash, "LONG", 6)
    hopper.setattr(flash, "STEP", 8)
    hopper.setattr(flash, "MOST_WASTE", 4.0)
    hopper.setattr(flash, "_causal", counted)
    return calls


TRIED_DENSE = [304, 216, 8] * 2 + [24, 8]


@pytest.mark.parametrize(
    ("layout", "dense"),
    [
        (PackedLayout((5, 3, 9)), [16]),  # 5 and 3 are short
        (PackedLayout((8, 9)), [8, 16]),
        (PackedLayout((17,)), [24]),
        (FamilyLayout([Family(4, (3, 5)), Family(1, (2, 2))], "cpu"), [8, 16]),  # sequences of 7 and 9, 3 and 3
    ],
)
def test_long_sequences_one_by_one_have_the_values_and_gradients_of_the_padded_path(cudnn, hopper, layout, dense):
    tensors = heads(17)
    out = layout.attend(0, *tensors, 0.3, None)
    assert cudnn == [*TRIED_DENSE, *dense]
    check_against_padded(hopper, layout, tensors, out, None)


@pytest.mark.parametrize("tokens", [16, 17])
def test_cudnn_gets_gradients_of_one_layout(cudnn, hopper, tokens):
    """torch would use a plan that it made for another one, and the gradients would be wrong."""
    causal, strides = flash._causal, []

    def watched(*args):
        out = causal(*args)
        if out.requires_grad:
            out.register_hook(lambda gradient: strides.append(gradient.stride()[1:]))
        return out

    tensors = heads(tokens)
    PackedLayout((tokens,)).attend(0, *tensors, 0.3, None)  # the trial
    hopper.setattr(flash, "_causal", watched)
    for gradient in (
        torch.ones(tokens, 4, 8),
        torch.ones(4, tokens, 8).transpose(0, 1),
        torch.ones(()).expand(tokens, 4, 8),
    ):
        torch.autograd.grad(PackedLayout((tokens,)).attend(0, *tensors, 0.3, None), tensors, gradient)
    assert strides == [(8, 32, 1)] * 3  # heads side by side, token after token


def test_cudnn_is_left_alone_where_it_is_turned_off_or_does_not_serve(cudnn, hopper):
    for block in (
        lambda patch: patch.setenv(flash.CUDNN_SWITCH, "0"),
        lambda patch: patch.setattr(flash, "gpu_generation", lambda device: 8),
    ):
        with hopper.context() as patch:
            block(patch)
            assert flash.flash_kernel(LONG_HEADS, torch_reference) is None
        flash.flash_kernel.cache_clear()
    for other in ({"windowed": True}, {"deterministic": True}, {"size": 192}, {"long": False}):
        assert flash.flash_kernel(LONG_HEADS._replace(**other), torch_reference) is None
    assert not cudnn
    assert flash.flash_kernel(LONG_HEADS, torch_reference) is not None


def test_a_response_that_is_short_beside_its_prompt_stays_packed():
    """Over the whole sequence the dense call would multiply 8,448 by 8,448 tokens for 121 of them."""
    assert flash.pays(8192, 8313) and flash.pays(8000, 8000)
    assert not flash.pays(121, 8313) and not flash.pays(7999, 7999)


def test_cudnn_has_few_lengths_to_plan_and_little_to_pad():
    planned = {n: flash._rounded(n) for n in range(flash.LONG, 32769)}
    assert [len({m for m in planned.values() if m <= most}) for most in (8448, 16384, 32768)] == [2, 33, 65]
    assert all(n <= m < n + max(256, n / 32 + 1) for n, m in planned.items())


def test_cudnn_that_is_wrong_is_not_used_and_says_so(cudnn, hopper):
    right = flash._causal
    hopper.setattr(flash, "_causal", lambda *args: right(*args) * 1.1)
    with pytest.warns(UserWarning, match="cuDNN's attention is installed but not used.*out by 0.1"):
        assert flash.flash_kernel(LONG_HEADS, torch_reference) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("queries", "keys", "size"), [(12, 2, 128), (28, 4, 128), (9, 3, 64)])
def test_on_the_gpu_cudnn_is_used_and_right(monkeypatch, queries, keys, size):
    """As close to float64 as torch's own kernel is, with long and short sequences in one row."""
    if flash.gpu_generation(torch.device("cuda", 0)) not in flash.GENERATIONS:
        pytest.skip("this GPU is not served")
    monkeypatch.setattr(flash, "LONG", 500)
    layouts = (
        (PackedLayout((700, 33, 1, 1024), "cuda"), 1758),
        (FamilyLayout([Family(121, (512, 3, 700)), Family(7, (60, 200))], "cuda"), 1603),
    )
    for layout, tokens in layouts:
        seen = [torch.randn(tokens, n, size, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys)]
        found = {}
        for switch in ("1", "0"):
            monkeypatch.setenv(flash.CUDNN_SWITCH, switch)
            monkeypatch.setenv(flash.SWITCH, "0")
            flash.flash_kernel.cache_clear()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*installed but not used")
                found[switch] = _with_gradients(layout, seen, None)
        flash.flash_kernel.cache_clear()
        want = _with_gradients(layout, [x.double() for x in seen], None)  # the padded path
        for a, b, truth in zip(found["1"], found["0"], want, strict=True):
            scale = truth.norm()
            assert float((a - truth).norm() / scale) < 1.5 * float((b - truth).norm() / scale) + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.skipif(
    not any(importlib.util.find_spec(name.split(".")[0]) for name, _ in flash.PACKAGES),
    reason="needs flash-attn 3 or 4",
)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("queries", "keys", "size"), [(12, 2, 128), (9, 3, 64), (16, 8, 128)])
def test_on_the_gpu_the_installed_package_is_used_and_right(queries, keys, size, window):
    """As close to float64 as torch's own kernel is, over whole sequences and shared prompts. With windows it may
    be left aside, with a warning, for torch's kernel."""
    shape = flash.Heads(torch.device("cuda", 0), torch.bfloat16, queries, keys, size, window is not None)
    with warnings.catch_warnings():
        if window is None:
            warnings.filterwarnings("error", message=".*installed but not used")
        kernel = flash.flash_kernel(shape, attention.torch_varlen)
    assert kernel is not None or window is not None
    families = [Family(121, (512, 3, 700)), Family(7, (60, 200))]
    lengths = (700, 33, 1, 1024)
    for layout, tokens in (
        (PackedLayout(lengths, "cuda"), sum(lengths)),
        (FamilyLayout(families, "cuda"), sum(family.tokens for family in families)),
    ):
        seen = [torch.randn(tokens, n, size, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys)]
        want = _with_gradients(layout, [x.double() for x in seen], window)  # the padded path
        ours = _with_gradients(layout, seen, window)
        flash.flash_kernel.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(flash.SWITCH, "0")
            torchs = _with_gradients(layout, seen, window)
        flash.flash_kernel.cache_clear()
        for a, b, truth in zip(ours, torchs, want, strict=True):
            scale = truth.norm()
            assert float((a - truth).norm() / scale) < 1.5 * float((b - truth).norm() / scale) + 1e-4


def _with_gradients(layout, tensors, window):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = layout.attend(0, *tensors, tensors[0].shape[-1] ** -0.5, window)
    weights = torch.linspace(-1, 1, out.shape[0], device=out.device, dtype=out.dtype)[:, None, None]
    return [x.double() for x in (out, *torch.autograd.grad((out * weights).sum(), tensors))]
