import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import luffy
from luffy.core.losses import (
    PolicyLoss,
    compute_sft_pure_loss,
    compute_token_on_off_policy_loss,
    policy_loss_terms,
)
from luffy.core.reduce import REDUCTIONS, token_weights
from luffy.core.shaping import Shape

D = torch.float64
METRICS = {
    "pg_loss", "off_pg_loss", "on_pg_loss", "off_pg_clipfrac", "on_pg_clipfrac", "ppo_kl", "off_policy_prob",
    "on_policy_prob", "off_ratio_mean", "off_ratio_max_clip_frac", "off_ratio_min_clip_frac",
}  # fmt: skip


def log(rows):
    return torch.log(torch.tensor(rows, dtype=D))


# Two sequences, the second a trace: three valid tokens, then two; NaN under the padding must not leak.
P = [[0.6, 0.1, 0.5, 1.0], [0.2, 0.9, 1.0, 1.0]]
OLD = [[0.4, 0.2, 0.5, 1.0], [0.3, 0.3, 1.0, 1.0]]
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
PREFIX = torch.tensor([[False] * 4, [True] * 4])
ADV = torch.tensor([[2.0] * 4, [-1.0] * 4], dtype=D)


def loss(**changes):
    arguments = dict(
        old_log_prob=log(OLD), log_prob=log(P), advantages=ADV, eos_mask=MASK, cliprange=0.2, clip_upper_bound=1.2,
        prefix_mask=PREFIX, off_cliprange=0.2,
    )  # fmt: skip
    return {k: v.item() for k, v in compute_token_on_off_policy_loss(**{**arguments, **changes}).items()}


def test_signature_is_the_published_one():
    parameters = inspect.signature(luffy.compute_token_on_off_policy_loss).parameters
    assert list(parameters) == [
        "old_log_prob", "log_prob", "advantages", "eos_mask", "cliprange", "clip_upper_bound", "prefix_mask",
        "off_cliprange", "off_normalize", "off_abs_cliprange", "off_max_clip", "off_min_clip", "all_max_clip",
        "off_policy_reshape", "off_policy_reshape_weight", "off_policy_reshape_pow_exp", "on_policy_reshape",
        "on_policy_reshape_weight", "on_policy_reshape_pow_exp", "target_probs", "loss_remove_token_mean",
        "loss_remove_clip",
    ]  # fmt: skip
    defaults = [p.default for p in parameters.values()][8:]
    assert defaults == [
        False,
        None,
        None,
        None,
        None,
        "no_reshape",
        1.0,
        0.5,
        "no_reshape",
        1.0,
        0.5,
        None,
        False,
        False,
    ]
    assert list(inspect.signature(luffy.compute_sft_pure_loss).parameters) == ["log_prob", "eos_mask"]
    split = inspect.signature(luffy.compute_grpo_outcome_advantage_split).parameters
    assert [(k, v.default) for k, v in split.items()][4:] == [("epsilon", 1e-6), ("use_std", True)]


def test_every_metric_by_hand():
    m = loss()
    assert set(m) == METRICS
    on = [-2 * 1.2, -2 * 0.5, -2 * 1.0]  # ratio 1.5 clipped to 1.2; 0.5 stays by the pessimistic max; 1
    off = [0.2, 0.9]  # advantage -1 times -p
    assert m["on_pg_loss"] == pytest.approx(sum(on) / 3)
    assert m["off_pg_loss"] == pytest.approx(sum(off) / 2)
    assert m["pg_loss"] == pytest.approx((sum(on) + sum(off)) / 5)
    # Over all valid tokens: the clipped 1.5, and the trace's first (ratio 2/3 below 0.8, advantage -1).
    assert m["on_pg_clipfrac"] == pytest.approx(2 / 5)
    ratios = [0.6 / 0.4, 0.1 / 0.2, 1.0, 0.2 / 0.3, 0.9 / 0.3]
    assert m["ppo_kl"] == pytest.approx(-sum(map(math.log, ratios)) / 5)
    assert m["off_policy_prob"] == pytest.approx((0.2 + 0.9) / 2)
    assert m["on_policy_prob"] == pytest.approx((0.4 + 0.2 + 0.5) / 3)
    assert m["off_ratio_mean"] == pytest.approx(0.55)
    assert m["off_pg_clipfrac"] == m["off_ratio_max_clip_frac"] == m["off_ratio_min_clip_frac"] == 0.0


def test_clip_upper_bound_is_an_absolute_ratio_never_below_one_plus_cliprange():
    assert loss(clip_upper_bound=1.4)["on_pg_loss"] == pytest.approx(-2 * (1.4 + 0.5 + 1.0) / 3)
    assert loss(clip_upper_bound=100.0)["on_pg_loss"] == pytest.approx(-2 * (1.5 + 0.5 + 1.0) / 3)
    assert loss(clip_upper_bound=0.3)["on_pg_loss"] == loss()["on_pg_loss"]


def test_remove_clip():
    m = loss(loss_remove_clip=True)
    assert m["on_pg_loss"] == pytest.approx(-2 * (1.5 + 0.5 + 1.0) / 3) and m["on_pg_clipfrac"] == 0.0


def test_negative_advantage_clips_from_below():
    m = loss(advantages=-ADV)
    assert m["on_pg_loss"] == pytest.approx(2 * (1.5 + 0.8 + 1.0) / 3)


def test_remove_token_mean_divides_by_the_padded_width():
    assert loss(loss_remove_token_mean=True)["pg_loss"] == pytest.approx((-2 * 2.7 + 1.1) / 4)


def test_off_policy_clips_and_their_fractions():
    m = loss(off_max_clip=0.5)
    assert (m["off_ratio_mean"], m["off_ratio_max_clip_frac"]) == (pytest.approx(0.35), 0.5)
    m = loss(off_min_clip=0.4)
    assert (m["off_ratio_mean"], m["off_ratio_min_clip_frac"]) == (pytest.approx(0.65), 0.5)
    assert loss(off_max_clip=0.5, off_min_clip=0.3)["off_pg_loss"] == pytest.approx((0.3 + 0.5) / 2)


def test_clip_fractions_count_the_tokens_at_or_beyond_their_own_bound():
    """Off-policy ratios 0.125, 0.5 and 0.75: a bound at a token's own ratio counts that token."""
    p = torch.tensor([[0.125, 0.5, 0.75]], dtype=D).log()
    every = torch.ones(1, 3, dtype=torch.bool)
    arguments = dict(
        old_log_prob=p, log_prob=p, advantages=torch.ones(1, 3, dtype=D), eos_mask=every, prefix_mask=every
    )
    fraction = lambda name, **bound: loss(**arguments, **bound)[f"off_ratio_{name}_clip_frac"]  # noqa: E731
    assert [fraction("max", off_max_clip=b) for b in (0.1, 0.2, 0.6, 0.8)] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [fraction("min", off_min_clip=b) for b in (0.1, 0.2, 0.6, 0.8)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    exact = torch.tensor([[0.0, -1.0, -2.0]], dtype=D)  # exp(0) is exactly 1
    arguments |= {"old_log_prob": exact, "log_prob": exact}
    assert fraction("max", off_max_clip=1.0) == pytest.approx(1 / 3) and fraction("min", off_min_clip=1.0) == 1.0


def test_off_normalize_divides_by_the_detached_mean():
    m = loss(off_normalize=True)
    assert m["off_ratio_mean"] == pytest.approx(1.0)
    assert m["off_pg_loss"] == pytest.approx((0.2 + 0.9) / 2 / 0.55)
    log_prob = log(P).requires_grad_(True)
    out = compute_token_on_off_policy_loss(log(OLD), log_prob, ADV, MASK, 0.2, 1.2, PREFIX, 0.2, off_normalize=True)
    out["off_pg_loss"].backward()
    # advantage -1, the mean a constant: d/dlogp of mean(p / 0.55) is p / 0.55 / 2
    torch.testing.assert_close(log_prob.grad[1, :2], torch.tensor([0.2, 0.9], dtype=D) / 0.55 / 2)


def test_target_probs_replace_the_reshape():
    target = torch.tensor([[0.5] * 4, [0.4, 0.9, 0.0, 0.0]], dtype=D)
    m = loss(target_probs=target, off_policy_reshape="p_div_p_0.1")
    assert m["off_pg_loss"] == pytest.approx((0.2 / (0.4 + 1e-6) + 0.9 / (0.9 + 1e-6)) / 2)
    assert m["on_pg_loss"] == loss()["on_pg_loss"]


def test_all_max_clip_drops_tokens_from_sum_and_count():
    m = loss(all_max_clip=0.55)  # keeps 0.1, 0.5 of the first and 0.2 of the second
    assert m["pg_loss"] == pytest.approx((-2 * 0.5 - 2 * 1.0 + 0.2) / 3)
    assert m["on_pg_loss"] == loss()["on_pg_loss"]


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("no_reshape", [0.2, 0.9]),
        ("logp", [0.7 * math.log(0.2), 0.7 * math.log(0.9)]),
        ("p_logp", [0.2 + 0.7 * math.log(0.2), 0.9 + 0.7 * math.log(0.9)]),
        ("square_root", [math.sqrt(0.2), math.sqrt(0.9)]),
        ("pow", [0.2**0.25, 0.9**0.25]),
        ("p_div_p_0.1", [0.2 / 0.3, 0.9 / 1.0]),
        ("p_div_p_0.3", [0.2 / 0.5, 0.9 / 1.2]),
    ],
)
def test_off_policy_reshapes_in_the_loss(name, off):
    m = loss(off_policy_reshape=name, off_policy_reshape_weight=0.7, off_policy_reshape_pow_exp=0.25)
    assert m["off_ratio_mean"] == pytest.approx(sum(off) / 2)
    assert m["off_pg_loss"] == pytest.approx(sum(off) / 2)
    assert m["on_pg_loss"] == loss()["on_pg_loss"]


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("logp", [math.log(1.5), math.log(0.5), 0.0]),
        ("p_logp", [1.5 + 0.7 * math.log(1.5), 0.5 + 0.7 * math.log(0.5), 1.0]),
        ("square_root", [math.sqrt(1.5), math.sqrt(0.5), 1.0]),
        ("pow", [1.5**0.25, 0.5**0.25, 1.0]),
        ("p_div_p_0.1", [(0.6 / 0.7) / (0.4 / 0.5), (0.1 / 0.2) / (0.2 / 0.3), 1.0]),
    ],
)
def test_on_policy_reshapes_in_the_loss(name, on):
    m = loss(
        on_policy_reshape=name, on_policy_reshape_weight=0.7, on_policy_reshape_pow_exp=0.25, loss_remove_clip=True
    )
    assert m["on_pg_loss"] == pytest.approx(-2 * sum(on) / 3)
    assert m["off_pg_loss"] == loss()["off_pg_loss"]


def test_unknown_reshape():
    with pytest.raises(ValueError, match="known: no_reshape, logp"):
        loss(off_policy_reshape="cube")


@pytest.mark.parametrize("prefix", [torch.zeros_like(PREFIX), torch.ones_like(PREFIX)])
def test_a_metric_over_an_empty_set_is_zero(prefix):
    m = loss(prefix_mask=prefix)
    assert all(math.isfinite(v) for v in m.values())
    empty = ["on_pg_loss", "on_policy_prob"] if prefix.all() else ["off_pg_loss", "off_policy_prob", "off_ratio_mean"]
    assert all(m[name] == 0.0 for name in empty)
    assert all(v == 0.0 for v in loss(eos_mask=torch.zeros_like(MASK)).values())


SHAPES = ["no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p_0.1"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("remove_clip", [True, False])
def test_gradients_against_finite_differences(shape, remove_clip):
    g = torch.Generator().manual_seed(3)
    log_prob = torch.log(torch.rand(4, 5, generator=g, dtype=D) * 0.8 + 0.1).requires_grad_(True)
    old = (log_prob + 0.3 * torch.randn(4, 5, generator=g, dtype=D)).detach()
    advantages = torch.randn(4, 1, generator=g, dtype=D).expand(4, 5)
    mask = torch.ones(4, 5).tril(1)
    prefix = torch.tensor([[True] * 5, [True, True, False, False, False], [False] * 5, [False] * 5])

    def f(lp):
        return compute_token_on_off_policy_loss(
            old, lp, advantages, mask, 0.2, 1.3, prefix, 0.2, off_policy_reshape=shape, on_policy_reshape=shape,
            loss_remove_clip=remove_clip, off_max_clip=0.95,
        )["pg_loss"]  # fmt: skip

    assert torch.autograd.gradcheck(f, (log_prob,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_finite_at_log_prob_minus_200_and_beside_overflow(shape):
    """In float32 exp(-200) is 0 and exp(199) is inf: neither may turn a gradient into NaN."""
    log_prob = torch.tensor([[-200.0, -1.0, -0.5], [-200.0, -1.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.2, -0.4], [-1.0, -200.0, -0.4]])  # second row is off-policy: its old is unused
    prefix = torch.tensor([[False] * 3, [True] * 3])
    out = compute_token_on_off_policy_loss(
        old, log_prob, torch.ones(2, 3), torch.ones(2, 3), 0.2, 1.2, prefix, 0.2,
        off_policy_reshape=shape, on_policy_reshape=shape,
    )  # fmt: skip
    out["pg_loss"].backward()
    assert torch.isfinite(out["pg_loss"]) and torch.isfinite(log_prob.grad).all()


def test_what_lies_under_the_padding_cannot_leak():
    clean, dirty = log(P).requires_grad_(True), log(P)
    dirty[MASK == 0] = float("nan")
    dirty.requires_grad_(True)
    old, advantages = log(OLD), ADV.clone()
    run = lambda lp, o, a: compute_token_on_off_policy_loss(o, lp, a, MASK, 0.2, 1.2, PREFIX, 0.2)  # noqa: E731
    first = run(clean, old, advantages)
    first["pg_loss"].backward()
    old[MASK == 0] = float("inf")
    advantages[MASK == 0] = float("nan")
    second = run(dirty, old, advantages)
    second["pg_loss"].backward()
    for name in METRICS:
        assert first[name].item() == second[name].item()
    torch.testing.assert_close(clean.grad, dirty.grad, rtol=0, atol=0)


batches = st.lists(
    st.tuples(
        st.lists(st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01)), min_size=1, max_size=5),
        st.booleans(),
        st.floats(-2, 2),
    ),
    min_size=1,
    max_size=6,
)


def padded_streams(samples, extra=0):
    width = max(len(tokens) for tokens, _, _ in samples) + extra
    log_prob, old = torch.full((2, len(samples), width), -1.0, dtype=D)
    mask = torch.zeros(len(samples), width)
    for i, (tokens, _, _) in enumerate(samples):
        log_prob[i, : len(tokens)] = torch.tensor([a for a, _ in tokens], dtype=D)
        old[i, : len(tokens)] = torch.tensor([b for _, b in tokens], dtype=D)
        mask[i, : len(tokens)] = 1
    advantages = torch.tensor([a for _, _, a in samples], dtype=D)[:, None].expand(-1, width)
    prefix = torch.tensor([off for _, off, _ in samples])[:, None].expand(-1, width)
    return old, log_prob.clone().requires_grad_(True), advantages, mask, prefix


def mixed(samples, extra=0):
    old, log_prob, advantages, mask, prefix = padded_streams(samples, extra)
    out = compute_token_on_off_policy_loss(
        old, log_prob, advantages, mask, 0.2, 1.2, prefix, 0.2, off_policy_reshape="p_div_p_0.1"
    )
    out["pg_loss"].backward()
    grads = [log_prob.grad[i, : len(tokens)] for i, (tokens, _, _) in enumerate(samples)]
    return {k: v.item() for k, v in out.items()}, grads


@given(batches, st.integers(1, 4))
@settings(max_examples=50)
def test_more_padding_changes_nothing(samples, extra):
    narrow, wide = mixed(samples), mixed(samples, extra)
    assert narrow[0] == pytest.approx(wide[0], rel=1e-9, abs=1e-12)
    for a, b in zip(narrow[1], wide[1], strict=True):
        torch.testing.assert_close(a, b)


@given(batches, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_order_of_samples_changes_nothing(samples, rng):
    order = list(range(len(samples)))
    rng.shuffle(order)
    first, second = mixed(samples), mixed([samples[i] for i in order])
    assert first[0] == pytest.approx(second[0], rel=1e-9, abs=1e-12)
    for i, j in enumerate(order):
        torch.testing.assert_close(second[1][i], first[1][j])


@given(batches, st.integers(1, 6), st.sampled_from(REDUCTIONS))
@settings(max_examples=50)
def test_cutting_into_micro_batches_changes_nothing(samples, cut, reduction):
    """With the weights of the whole mini-batch, packed pieces add up to the whole, gradients too."""
    weights = token_weights([torch.ones(len(t), dtype=torch.bool) for t, _, _ in samples], reduction, 7)
    shape = PolicyLoss(off_shape=Shape("p_div_p_0.1"))

    def piece(part):
        rows = [(a, b, adv, off, w) for i in part for (a, b), w in zip(samples[i][0], weights[i], strict=True)
                for off, adv in [samples[i][1:]]]  # fmt: skip
        lp, old, adv, off, w = (torch.tensor(c) for c in zip(*rows, strict=True))
        lp = lp.to(D).requires_grad_(True)
        terms = policy_loss_terms(old.to(D), lp, adv.to(D), torch.ones_like(off), off, shape)
        total = (terms.loss * w).sum()
        total.backward()
        return total.item(), lp.grad

    everyone = range(len(samples))
    whole, whole_grad = piece(everyone)
    parts = [piece(everyone[i : i + cut]) for i in range(0, len(samples), cut)]
    assert sum(p for p, _ in parts) == pytest.approx(whole, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), whole_grad)


@pytest.mark.parametrize("remove_clip", [False, True])
def test_traces_under_ppo_have_the_term_of_own_tokens(remove_clip):
    """Ratios inside and outside the clip, both signs of the advantage: loss and gradient of p / p_old, clipped."""
    old = log([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    adv = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=D)
    everywhere = torch.ones(6, dtype=torch.bool)
    found = []
    for off in (everywhere, ~everywhere):
        lp = log([0.3, 0.52, 0.8, 0.3, 0.52, 0.8]).requires_grad_(True)
        terms = policy_loss_terms(old, lp, adv, everywhere, off, PolicyLoss(off_ppo=True, remove_clip=remove_clip))
        terms.loss.sum().backward()
        found.append((terms.loss.detach(), lp.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    ratio = [0.6, 1.04, 1.6, 0.6, 1.04, 1.6]
    flat = () if remove_clip else (2, 3)  # where the clip leaves no gradient
    expected = [0.0 if i in flat else -a * r for i, (a, r) in enumerate(zip(adv.tolist(), ratio, strict=True))]
    assert found[0][1].tolist() == pytest.approx(expected)


def test_token_mean_weights_reproduce_the_public_function():
    old, lp, adv = log(OLD), log(P), ADV
    weights = torch.nn.utils.rnn.pad_sequence(
        token_weights([m.bool() for m in MASK], "token-mean", 4), batch_first=True
    )
    terms = policy_loss_terms(old, lp, adv, MASK, PREFIX, PolicyLoss())
    assert (terms.loss * weights).sum().item() == pytest.approx(loss()["pg_loss"])


def test_adding_a_group_without_traces_leaves_the_off_policy_terms():
    extra = padded_streams([([(-0.5, -0.7), (-1.0, -1.0)], False, 1.0)])
    args = [log(OLD)[:, :2], log(P)[:, :2], ADV[:, :2], MASK[:, :2].float(), PREFIX[:, :2]]
    joined = [torch.cat([a, b]) for a, b in zip(args, extra, strict=True)]
    run = lambda o, lp, a, m, p: compute_token_on_off_policy_loss(o, lp, a, m, 0.2, 1.2, p, 0.2)  # noqa: E731
    before, after = run(*args), run(*joined)
    for name in METRICS:
        if name.startswith("off_"):
            assert before[name].item() == pytest.approx(after[name].item())


def test_sft_loss():
    log_prob = log(P).requires_grad_(True)
    value = compute_sft_pure_loss(log_prob, MASK)
    expected = -sum(map(math.log, [0.6, 0.1, 0.5, 0.2, 0.9])) / 5
    assert value.item() == pytest.approx(expected)
    value.backward()
    torch.testing.assert_close(log_prob.grad, -MASK.to(D) / 5)


def test_sft_loss_of_nothing_is_zero_with_zero_gradient():
    log_prob = log(P).requires_grad_(True)
    value = compute_sft_pure_loss(log_prob, torch.zeros_like(MASK))
    value.backward()
    assert value.item() == 0.0 and (log_prob.grad == 0).all()


def test_mixed_estimator_with_exact_teacher_probabilities_is_unbiased():
    """Enumerable toy: one-token responses over 4 actions. The expected gradient of the mixed estimator,
    on-policy samples from pi and off-policy samples from a teacher with known probabilities, is the
    policy gradient of the expected reward, whatever the teacher."""
    logits = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=D, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 0.25, -0.5], dtype=D)
    teacher = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=D)
    log_pi = torch.log_softmax(logits, 0)
    (true_gradient,) = torch.autograd.grad((log_pi.exp() * reward).sum(), logits, retain_graph=True)

    actions = torch.arange(4)
    weights = torch.cat([log_pi.exp().detach(), teacher])  # each action's probability of being drawn
    both = torch.cat([actions, actions])
    off = torch.arange(8) >= 4
    terms = policy_loss_terms(
        log_pi.detach()[both], log_pi[both], reward[both], torch.ones(8), off, PolicyLoss(remove_clip=True),
        target_probs=teacher[both],
    )  # fmt: skip
    expected_loss = (terms.loss * weights).sum() / 2  # one on-policy and one off-policy sample, averaged
    (gradient,) = torch.autograd.grad(-expected_loss, logits, retain_graph=True)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-4, atol=1e-6)  # 1e-6 in the denominator

    biased = policy_loss_terms(
        log_pi.detach()[both], log_pi[both], reward[both], torch.ones(8), off, PolicyLoss(remove_clip=True)
    )
    (taken_as_one,) = torch.autograd.grad(-(biased.loss * weights).sum() / 2, logits)
    assert (taken_as_one - true_gradient).abs().max() > 1e-2
