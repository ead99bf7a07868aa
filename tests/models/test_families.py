"""The copies that attention makes of a shared prompt, and the way back of their gradients."""

import plain_kernels
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luffy.models.attention import Copies, FamilyLayout, PackedLayout, layout_of
from luffy.types import Family

ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=20).map(lambda more: torch.tensor([*range(6), *more]))


@given(ROWS)
def test_gradients_come_back_from_every_place(rows):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_(True)
    weights = torch.randn(len(rows), 2, 3, generator=generator, dtype=torch.float64)
    copied, expected = Copies(rows, 6, "cpu").of(ours), theirs[rows]
    assert torch.equal(copied, expected)
    (copied * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_half_precision_is_summed_in_float32():
    """257 does not exist in bfloat16: adding one at a time would stay at 256."""
    rows = torch.tensor([0] * 300 + [1])
    flat = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    Copies(rows, 2, "cpu").of(flat).sum().backward()
    assert flat.grad.flatten().tolist() == [300.0, 1.0]


def test_without_a_shared_prompt_nothing_is_copied():
    layout = layout_of([Family(3, (4,)), Family(2, (1,))], "cpu")
    assert isinstance(layout, PackedLayout) and layout.lengths == (7, 3)
    assert isinstance(layout_of([Family(3, (4,)), Family(2, (1, 1))], "cpu"), FamilyLayout)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 7, 8])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_response_sees_its_prompt_and_itself(kernel, window, monkeypatch):
    """Both ways through attention, within the window; an empty response has no place in either."""
    if kernel:
        monkeypatch.setattr("luffy.models.attention.varlen_serves", lambda query: True)
        monkeypatch.setattr("luffy.models.attention.varlen_attn", plain_kernels.varlen_attn)
    torch.manual_seed(0)
    families = [Family(3, (4, 2, 0)), Family(1, (2,)), Family(2, (1, 5, 1))]
    query, key, value = torch.randn(21, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
    out = FamilyLayout(families, "cpu").attend(0, query, key, value, 0.3, window)
    start = 0
    for family in families:
        prompt = torch.arange(start, start + family.prompt)
        end = start + family.prompt
        for n in family.responses:
            rows = torch.cat([prompt, torch.arange(end, end + n)])
            expected = plain_kernels.attend_last(query[rows], key[rows], value[rows], 0.3, window)
            torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-5)
            end += n
        start = end
    assert start == len(out)
