"""Tokens of an environment inside a response: in no loss, no denominator and no metric."""

from dataclasses import replace

import pytest
import torch
from builders import TASK, make_group, make_rollout

from luffy.config import Config
from luffy.learn.credit import ScoredTokens, credit, credit_metrics
from luffy.learn.objective import Objective
from luffy.learn.packing import pack
from luffy.metrics import fetch
from luffy.schema import build
from luffy.types import Author, Episode


def with_environment(episode: Episode) -> Episode:
    """The episode with three tokens of an environment behind its second token, whose log-probs are absurd."""
    absurd = torch.full((3,), -50.0)

    def widened(stream, inside):
        return torch.cat([stream[:2], inside.to(stream.dtype), stream[2:]])

    return replace(
        episode,
        token_ids=widened(episode.token_ids, torch.tensor([9, 9, 9])),
        authors=widened(episode.authors, torch.full((3,), Author.ENVIRONMENT)),
        behavior_log_probs=widened(episode.behavior_log_probs, absurd),
        engine_log_probs=widened(episode.engine_log_probs, absurd),
    )


def outcome(wide, settings):
    """Loss, slopes at the tokens that the engine drew or a teacher wrote, and metrics of a group of three responses."""
    cfg = build(Config, {"algorithm": {"reject_extreme": False, **settings}})
    own = [make_rollout(4, log_prob=-0.7), make_rollout(5, 3, log_prob=-0.4), make_rollout(3, log_prob=-0.2)]
    if wide:
        own[0] = with_environment(own[0])
    lengths = [e.token_ids.numel() for e in own]
    written = [e.authors != Author.ENVIRONMENT for e in own]
    values = torch.linspace(-2.0, -0.1, sum(int(w.sum()) for w in written))
    filled, at = [], 0
    for mask in written:
        stream = torch.full((len(mask),), -30.0)
        stream[mask] = values[at : at + int(mask.sum())]
        at += int(mask.sum())
        filled.append(stream)
    scored = [ScoredTokens(old=0.9 * s, ref=0.8 * s, entropy=-s) for s in filled]
    group = make_group([1.0, 0.0, 0.0], own, TASK)
    (samples,) = credit([group], [scored], cfg.algorithm)
    batch = pack(samples, 1000, cfg.algorithm.loss_reduction, 16)[0]
    log_prob = torch.cat([filled[i] for i in batch.order]).requires_grad_(True)
    loss, stats = Objective.of(cfg)(batch, log_prob, -log_prob.detach())
    (slopes,) = torch.autograd.grad(loss, log_prob)
    parts = slopes.split([lengths[i] for i in batch.order])
    by_response = [parts[batch.order.index(i)] for i in range(3)]
    metrics = credit_metrics([samples], [scored], cfg.algorithm) | fetch([stats])
    assert all(float(s[~w].abs().sum()) == 0 for s, w in zip(by_response, written, strict=True))
    return loss.item(), torch.cat([s[w] for s, w in zip(by_response, written, strict=True)]), metrics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_reduction": "token-mean", "trace_term": "sft"},
        {"loss_reduction": "seq-mean-token-mean", "kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "reward"},
        {"credit": "srft"},
        {"mismatch_correction": "truncated"},
    ],
)
def test_a_token_of_an_environment_changes_no_loss_no_gradient_and_no_metric(settings):
    loss, slopes, metrics = outcome(False, settings)
    wide_loss, wide_slopes, wide_metrics = outcome(True, settings)
    assert wide_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(wide_slopes, slopes)
    assert wide_metrics.keys() == metrics.keys()
    for name, metric in metrics.items():
        found = wide_metrics[name]
        assert found.measured == metric.measured, name
        assert not metric.measured or found.value == pytest.approx(metric.value, abs=1e-6), name


def test_a_token_of_an_environment_is_in_no_sft_term():
    """A credit function gives all tokens of a lone trace a weight."""
    trace = with_environment(make_rollout(4, 4, finish="trace"))
    cfg = build(Config, {"algorithm": {"credit": "lone_trace_sft"}}).algorithm
    ((sample,),) = credit([make_group([1.0], [trace], TASK)], [[ScoredTokens()]], cfg)
    assert sample.sft_weights.tolist() == [1, 1, 0, 0, 0, 1, 1] and not sample.rl_weights.any()


def test_the_mean_advantage_of_a_response_leaves_out_replies():
    cfg = build(Config, {}).algorithm
    ((sample,),) = credit([make_group([1.0], [with_environment(make_rollout(4))], TASK)], [[ScoredTokens()]], cfg)
    by_turn = replace(sample, advantages=torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]))
    assert credit_metrics([[by_turn]], [[ScoredTokens()]], cfg)["critic/advantages/mean"].value == 2.0


def test_an_environments_tokens_are_not_of_the_responses_length():
    own = make_rollout(4)
    wide = with_environment(own)
    assert (wide.length, wide.drawn, wide.prefix) == (own.length, own.drawn, own.prefix) == (4, 4, 0)
    assert wide.is_on_policy and wide.versions.tolist() == [0, 0, -1, -1, -1, 0, 0]
