"""Drawing tokens: the right distribution, the same token in any batch."""

import math

import pytest
import torch
from scipy.stats import chisquare

from luffy.rollout.sampling import SamplingRows, keep_mask, negative_clocks, sample, token_bits
from luffy.types import Request, Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.5, 0.0, -3.0, 1.0, 0.2])


def sampling_rows(samplings, seeds):
    return SamplingRows.of([Request((0,), seed, s) for s, seed in zip(samplings, seeds, strict=True)], CPU)


def draws(sampling: Sampling, count: int, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    rows = sampling_rows([sampling] * count, range(count))
    return sample(logits.expand(count, -1), rows, torch.full((count,), 17))[0]


def assert_follows(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    likely = probs > 0
    expected = probs[likely].double()
    expected = expected / expected.sum() * len(tokens)
    assert chisquare(counts[likely].numpy(), expected.numpy()).pvalue > 1e-3


def reference_bits(seed: int, position: int, token: int) -> int:
    """Plain Python integers, to hold the wrapped tensor arithmetic against."""
    long, short = (1 << 64) - 1, (1 << 32) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & long
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & long
        return z ^ (z >> 31)

    key = mix((mix(seed & long) + (position + 1) * 0x9E3779B97F4A7C15) & long)
    bits = (token * 0x9E3779B1 + (key & 0x7FFFFFFF)) & short
    bits = (((bits ^ (bits >> 16)) * 0x7FEB352D) & short) ^ (key >> 33)
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & short
    return bits ^ (bits >> 16)


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**31, 2**63 - 1, -(2**63)])
def test_the_hash_equals_the_same_hash_in_python_integers(seed):
    positions = torch.tensor([0, 1, 2, 1000, 131072])
    got = token_bits(torch.full((5,), seed), positions, 151_936)[:, [0, 1, 77, 151_935]].long() % 2**32
    assert got.tolist() == [[reference_bits(seed, int(p), t) for t in (0, 1, 77, 151_935)] for p in positions]


def test_clocks_are_exponential_and_uncorrelated_over_seeds_positions_and_tokens():
    seeds, positions = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="ij")
    clocks = -negative_clocks(seeds.flatten(), positions.flatten(), 70).view(60, 60, 70)
    assert clocks.min() > 0 and clocks.isfinite().all()
    flat = 1 - torch.exp(-clocks)
    assert chisquare(torch.histc(flat, bins=200, min=0, max=1).numpy()).pvalue > 1e-3
    for neighbour in (flat[1:], flat[:, 1:], flat[:, :, 1:]):
        here = flat[: neighbour.shape[0], : neighbour.shape[1], : neighbour.shape[2]]
        correlation = torch.corrcoef(torch.stack((here.flatten(), neighbour.flatten())))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(here.numel())


def test_rounding_changes_no_more_draws_than_the_probabilities_differ():
    """What keeps a response the same in another batch: noise of 1e-4 in 20,000 near-equal logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 20_000, generator=generator)
    nudged = logits + 1e-4 * torch.randn(400, 20_000, generator=generator)
    rows = sampling_rows([Sampling(1)] * 400, range(400))
    before, after = (sample(x, rows, torch.zeros(400, dtype=torch.long))[0] for x in (logits, nudged))
    assert (before != after).sum() <= 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tempered_draws_follow_the_distribution(temperature):
    tokens = draws(Sampling(1, temperature=temperature), 20_000)
    assert_follows(tokens, torch.softmax(LOGITS / temperature, -1))


def test_top_k_keeps_the_k_likeliest():
    tokens = draws(Sampling(1, top_k=3), 20_000)
    probs = torch.softmax(LOGITS, -1)
    probs[[1, 2, 4, 5, 7]] = 0  # the three largest logits are 0, 3 and 6
    assert_follows(tokens, probs)


def test_top_p_keeps_the_fewest_that_reach_it():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert_follows(draws(Sampling(1, top_p=0.79), 20_000, probs.log()), probs * torch.tensor([1, 1, 0, 0]))
    assert_follows(draws(Sampling(1, top_p=0.81), 20_000, probs.log()), probs * torch.tensor([1, 1, 1, 0]))
    assert draws(Sampling(1, top_p=1e-9), 100, probs.log()).eq(0).all()


def test_top_p_stops_where_it_is_reached_exactly():
    """Two tokens of the same probability and half of it asked for: one is enough."""
    log_probs = torch.tensor([[0.5, 0.5]]).log()
    no_limit = torch.tensor([[2]])
    assert keep_mask(log_probs, no_limit, torch.tensor([[0.5]], dtype=torch.float64)).tolist() == [[True, False]]
    above = torch.tensor([[0.5 + 1e-9]], dtype=torch.float64)
    assert keep_mask(log_probs, no_limit, above).tolist() == [[True, True]]


def test_top_p_counts_what_top_k_left():
    log_probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two that top-k keeps the first has 0.4 / 0.7 = 0.571.
    kept = [keep_mask(log_probs, torch.tensor([[2]]), torch.tensor([[p]], dtype=torch.float64)) for p in (0.55, 0.6)]
    assert kept[0].tolist() == [[True, False, False, False]]
    assert kept[1].tolist() == [[True, True, False, False]]


def test_ties_at_the_edge_of_top_k_go_to_the_smaller_ids():
    kept = keep_mask(torch.full((1, 5), 0.2).log(), torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.float64))
    assert kept.tolist() == [[True, True, False, False, False]]


def test_greedy_takes_the_largest_and_reports_its_log_prob_at_temperature_one():
    rows = sampling_rows([Sampling(1, temperature=0.0), Sampling(1, temperature=2.0)], [5, 5])
    tokens, log_probs = sample(LOGITS.expand(2, -1), rows, torch.tensor([3, 3]))
    assert tokens[0] == 0
    assert log_probs[0] == torch.log_softmax(LOGITS, -1)[0]
    assert log_probs[1] == torch.log_softmax(LOGITS / 2, -1)[tokens[1]]


def test_greedy_draws_are_not_filtered():
    settings = [Sampling(1, 0.0, top_p=0.5), Sampling(1, 0.0, top_k=2), Sampling(1, 1.0), Sampling(1, 1.0, top_k=2)]
    assert [sampling.is_filtered for sampling in settings] == [False, False, False, True]
    assert sampling_rows(settings, [0] * 4).filtered.tolist() == [3]


def test_log_probs_ignore_the_filters():
    rows = sampling_rows([Sampling(1, temperature=0.7, top_k=1, top_p=0.2)], [0])
    tokens, log_probs = sample(LOGITS[None], rows, torch.tensor([0]))
    assert tokens.tolist() == [0]
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS / 0.7, -1)[:1])


def test_a_row_draws_the_same_whatever_its_neighbours_ask_for():
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    plain = [Sampling(1, temperature=0.9)] * 40
    mixed = [plain[0] if i % 2 else Sampling(1, temperature=1.3, top_p=0.5, top_k=7) for i in range(40)]
    seeds, positions = list(range(40)), torch.arange(40)
    alone = sample(logits, sampling_rows(plain, seeds), positions)[0]
    together = sample(logits, sampling_rows(mixed, seeds), positions)[0]
    assert alone[1::2].tolist() == together[1::2].tolist()
    assert alone[0::2].tolist() != together[0::2].tolist()


def test_impossible_tokens_are_never_drawn_from_a_large_vocabulary():
    logits = torch.zeros(150_000)
    logits[:75_000] = -torch.inf
    tokens = draws(Sampling(1), 200, logits)
    assert tokens.min() >= 75_000 and tokens.max() < 150_000
    assert abs(tokens.float().mean() - 112_500) < 4 * 75_000 / math.sqrt(12 * 200)


def test_the_sort_is_skipped_when_no_row_filters(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("sorted without need"))
    assert len(draws(Sampling(1), 4)) == 4
    assert len(draws(Sampling(1, temperature=0.0, top_k=3), 4)) == 4
