import dataclasses
import math

import pytest
import torch
from builders import make_group, make_rollout

from luffy.config import AlgorithmConfig, RewardConfig
from luffy.config.knobs import MixConfig
from luffy.errors import ConfigError, UserError
from luffy.learn.credit import (
    ScoredTokens,
    TokenCredit,
    credit,
    credit_function,
    credit_metrics,
    find_credit_function,
    group_baseline,
    needs_of,
)
from luffy.run_folder.recorder import read_json_lines
from luffy.step.groups import group_metrics, in_accuracy_band, is_extreme, own_metrics
from luffy.train.loop import Trainer
from luffy.types import Score


def advantages(g, **algorithm):
    (samples,) = credit([g], [[ScoredTokens()] * len(g.rollouts)], AlgorithmConfig(**algorithm))
    return [s.advantages.tolist() for s in samples]


GUIDED = make_group([1.0, 0.0, 1.0, 0.0], [make_rollout(prefix=3), make_rollout(), make_rollout(), make_rollout()])


def test_baseline_of_all_samples_without_std_is_the_default():
    assert advantages(GUIDED) == [[0.5] * 3, [-0.5] * 3, [0.5] * 3, [-0.5] * 3]


def test_split_takes_the_on_policy_samples_and_std_divides():
    third = pytest.approx
    assert [a[0] for a in advantages(GUIDED, advantage="grpo_split")] == third([2 / 3, -1 / 3, 2 / 3, -1 / 3])
    std = math.sqrt(1 / 3) + 1e-6  # of 1, 0, 1, 0, unbiased
    assert advantages(GUIDED, normalize_std=True)[0][0] == pytest.approx(0.5 / std)


@pytest.mark.parametrize(
    "settings",
    [{}, {"trace_term": "sft"}, {"advantage": "grpo_split", "prefix_beta": 0.3}, {"trace_entropy_share": 0.4}],
)
def test_a_group_is_credited_alike_alone_and_among_others(settings):
    """To the bit: the groups of a step are credited at once."""
    cfg = AlgorithmConfig(normalize_std=True, trace_advantage="relu", **settings)
    own = make_group([0.1, 0.7, 0.7], [make_rollout(5), make_rollout(1), make_rollout(3)])
    groups = [own, GUIDED, make_group([0.0, 1.0], [make_rollout(4, prefix=2), make_rollout(2)]), make_group([0.3, 0.3])]
    scored = [[ScoredTokens(entropy=torch.rand(r.token_ids.numel())) for r in g.rollouts] for g in groups]
    together = credit(groups, scored, cfg)
    for g, tokens, samples in zip(groups, scored, together, strict=True):
        (alone,) = credit([g], [tokens], cfg)
        for ours, theirs in zip(samples, alone, strict=True):
            for name in ("advantages", "rl_weights", "sft_weights"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert credit([], [], cfg) == []


def test_prefix_weights_scale_teacher_and_own_tokens():
    g = make_group([1.0, 0.0], [make_rollout(4, prefix=2), make_rollout(2)])
    assert advantages(g, prefix_alpha=2.0, prefix_beta=0.5) == [[1.0, 1.0, 0.25, 0.25], [-0.25, -0.25]]


def test_trace_term_sft_moves_the_trace_out_of_the_rl_term_and_baseline():
    (samples,) = credit([GUIDED], [[ScoredTokens()] * 4], AlgorithmConfig(trace_term="sft"))
    assert samples[0].sft_weights.all() and not samples[0].rl_weights.any()
    assert all(s.rl_weights.all() and not s.sft_weights.any() for s in samples[1:])
    assert samples[1].advantages[0].item() == pytest.approx(-1 / 3)  # mean of 0, 1, 0


def test_a_lone_trace_goes_into_the_sft_term_and_other_groups_keep_their_baseline():
    alone = make_group([1.0], [make_rollout(4, prefix=4, finish="trace")])
    cut = make_group([1.0, 0.0], [make_rollout(4, prefix=2), make_rollout(prefix=3, finish="trace")])
    tokens = [[ScoredTokens()] * len(g.rollouts) for g in (alone, GUIDED, cut)]
    (trace,), *others = credit([alone, GUIDED, cut], tokens, AlgorithmConfig(credit="lone_trace_sft"))
    assert trace.sft_weights.tolist() == [1.0] * 4
    assert trace.rl_weights.tolist() == trace.advantages.tolist() == [0.0] * 4
    assert [[s.advantages.tolist() for s in g] for g in others] == [advantages(GUIDED), advantages(cut)]
    assert all(s.rl_weights.all() and not s.sft_weights.any() for g in others for s in g)


def test_the_advantage_of_trace_tokens_may_be_constant_or_never_negative():
    g = make_group([0.0, 1.0], [make_rollout(3, prefix=2), make_rollout(3, prefix=3)])
    assert advantages(g) == [[-0.5] * 3, [0.5] * 3]
    assert advantages(g, trace_advantage="relu") == [[0.0, 0.0, -0.5], [0.5] * 3]
    assert advantages(g, trace_advantage="constant", prefix_alpha=2.0) == [[2.0, 2.0, -0.5], [2.0] * 3]


@pytest.mark.parametrize(("share", "counted"), [(0.2, [1]), (0.4, [1, 4]), (0.5, [1, 3, 4]), (1.0, [0, 1, 2, 3, 4])])
def test_only_the_trace_tokens_of_highest_entropy_count(share, counted):
    """Of five teacher tokens; the two own ones behind them count always, whatever their entropy."""
    g = make_group([1.0, 0.0], [make_rollout(7, prefix=5), make_rollout(7)])
    tokens = [ScoredTokens(entropy=torch.tensor([0.1, 2.0, 0.3, 0.5, 0.6, 9.0, 0.0]))] * 2
    cfg = AlgorithmConfig(trace_entropy_share=share)
    ((guided, own),) = credit([g], [tokens], cfg)
    assert guided.rl_weights.nonzero().flatten().tolist() == [*counted, 5, 6] and own.rl_weights.all()
    assert needs_of(cfg) == (() if share == 1 else ("entropy",))
    assert needs_of(dataclasses.replace(cfg, credit="srft")) == ("entropy",)


def test_of_equal_entropies_the_first_trace_tokens_count():
    g = make_group([1.0, 0.0], [make_rollout(4, prefix=4), make_rollout()])
    tokens = [ScoredTokens(entropy=torch.ones(4)), ScoredTokens(entropy=torch.ones(3))]
    ((trace, _),) = credit([g], [tokens], AlgorithmConfig(trace_entropy_share=0.5))
    assert trace.rl_weights.tolist() == [1, 1, 0, 0]


def test_hints_go_into_the_sft_term_and_their_continuations_into_the_rl_term():
    """UFT: every sample starts with a hint. The baseline is of all that have tokens of their own."""
    cfg = AlgorithmConfig(trace_term="sft", sft_coef=0.001)
    hinted = [make_rollout(4, prefix=2), make_rollout(3, prefix=2), make_rollout(3, prefix=3, finish="trace")]
    ((a, b, whole),) = credit([make_group([1.0, 0.0, 1.0], hinted)], [[ScoredTokens()] * 3], cfg)
    assert a.sft_weights.tolist() == [1, 1, 0, 0] and a.rl_weights.tolist() == [0, 0, 1, 1]
    assert a.advantages.tolist() == [0.5] * 4 and b.advantages.tolist() == [-0.5] * 3  # mean of 1 and 0
    assert whole.sft_weights.all() and not whole.rl_weights.any()
    ((alone,),) = credit([make_group([1.0], [hinted[2]])], [[ScoredTokens()]], cfg)
    assert alone.sft_weights.all() and not alone.rl_weights.any()


def test_srft_by_hand():
    g = make_group([1.0, 0.0, 1.0, 0.0], [make_rollout(prefix=3), make_rollout(), make_rollout(), make_rollout()])
    entropies = [torch.tensor([0.0, 1.0, 2.0]), torch.ones(3), torch.tensor([0.0, 0.0, 1.5]), torch.zeros(3)]
    cfg = AlgorithmConfig(credit="srft", on_policy_reshape="logp")
    ((trace, *own),) = credit([g], [[ScoredTokens(entropy=e) for e in entropies]], cfg)
    assert trace.advantages.tolist() == [0.5] * 3 and trace.rl_weights.tolist() == [1] * 3
    assert trace.sft_weights.tolist() == pytest.approx([0.5 * math.exp(-1.0)] * 3)
    assert [s.advantages.tolist() for s in own] == [[-1] * 3, pytest.approx([0.1 * math.exp(0.5)] * 3), [-1] * 3]
    assert not any(s.sft_weights.any() for s in own)


MIX = {"start": 0.9, "end": 0.1, "steps": 4, "warmup": 2}


def test_the_mix_follows_its_schedule():
    at = [MixConfig(**MIX).at(step, 100) for step in range(8)]
    assert at == pytest.approx([0.0, 0.45, 0.9, 0.5 + 0.4 * math.sqrt(0.5), 0.5, 0.5 - 0.4 * math.sqrt(0.5), 0.1, 0.1])
    assert [MixConfig(start=0.3).at(step, 4) for step in range(6)] == [0.3] * 6
    assert [MixConfig(start=1, end=0).at(step, 4) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])


def test_the_mix_shares_the_loss_out_between_both_terms():
    """(1 - mu) RL + mu SFT: own samples weigh 1 - mu in the one term, the trace mu in the other."""
    cfg = AlgorithmConfig(trace_term="sft", mix=MixConfig(**MIX))
    tokens = [[ScoredTokens()] * 4]
    ((trace, own, *_),) = credit([GUIDED], tokens, cfg, step=4, total_steps=100)
    assert trace.sft_weights.tolist() == own.rl_weights.tolist() == [0.5] * 3
    ((trace, own, *_),) = credit([GUIDED], tokens, cfg, step=6)
    assert trace.sft_weights.tolist() == pytest.approx([0.1] * 3) and own.rl_weights.tolist() == pytest.approx(
        [0.9] * 3
    )
    assert credit_metrics([[trace]], tokens, cfg, step=6)["method/mix_coef"].value == pytest.approx(0.1)


def test_kl_in_the_reward_is_subtracted_before_the_baseline():
    g = make_group([1.0, 0.0])
    old, ref = torch.full((3,), -1.0), torch.full((3,), -1.5)
    tokens = [[ScoredTokens(old, ref), ScoredTokens(old, old)]]
    (samples,) = credit([g], tokens, AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1"))
    # first reward becomes 1 - 0.1 * 3 * 0.5 = 0.85; mean 0.425
    assert samples[0].advantages[0].item() == pytest.approx(0.425)
    assert samples[0].ref_log_probs is None  # not a second time in the loss
    (in_loss,) = credit([g], tokens, AlgorithmConfig(kl_coef=0.1, kl_in="loss"))
    assert in_loss[0].ref_log_probs is ref and in_loss[0].advantages[0].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rewards", "extreme"), [([1.0, 1.0], True), ([0.0, 0.0], True), ([1.0, 0.0], False), ([0.5, 0.5], False)]
)
def test_extreme_groups_are_all_success_or_all_failure(rewards, extreme):
    assert is_extreme(make_group(rewards), RewardConfig()) is extreme


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.0, 1.0, True), (1 / 3, 1.0, True), (0.4, 1.0, False), (0.0, 0.3, False)]
)
def test_the_accuracy_band_counts_own_samples_alone(low, high, kept):
    """One of GUIDED's three own samples is right, and so is its trace."""
    assert in_accuracy_band(GUIDED, RewardConfig(), low, high) is kept
    assert in_accuracy_band(make_group([1.0], [make_rollout(prefix=3)]), RewardConfig(), low, high)


def test_groups_outside_the_accuracy_band_are_rejected(make_config):
    """All own samples of the untrained model are wrong, so a lower end above 0 leaves nothing."""
    for low, rejected in ((0.0, 2), (0.1, 6)):  # two of six problems have no trace
        cfg = make_config(name=f"band-{low}", algorithm={"min_accuracy": low}, train={"steps": 1})
        with Trainer(cfg) as trainer:
            trainer.train()
        (row,) = read_json_lines(cfg.folder / "metrics.jsonl")
        assert row["batch/on_solved"] == 0 and row["batch/rejected"] == rejected
    with pytest.raises(ConfigError, match="no group would be left"):
        AlgorithmConfig(min_accuracy=0.6, max_accuracy=0.5)


def test_metrics_by_hand():
    cut_off = make_rollout(5, finish="length")
    groups = [GUIDED, make_group([0.0, 0.0], [cut_off, make_rollout(1)])]
    found = group_metrics(groups, RewardConfig()) | own_metrics(groups, RewardConfig())
    m = {k: v.value for k, v in found.items()}
    assert m["batch/on_solved"] == pytest.approx(1 / 5) and m["batch/off_solved"] == 1.0
    assert (m["batch/solve_all"], m["batch/solve_none"], m["batch/avg_prefix_ratio"]) == (0, 1, 1.0)
    assert m["critic/score/mean"] == pytest.approx(2 / 6) and m["critic/rewards/mean"] == pytest.approx(1 / 5)
    assert m["response_length/mean"] == pytest.approx((3 * 3 + 5 + 1) / 5)  # on-policy responses only
    assert m["response_length/clip_ratio"] == pytest.approx(1 / 5)


def test_no_guided_sample_gives_zero_not_nan():
    m = group_metrics([make_group([1.0, 0.0])], RewardConfig())
    assert m["batch/off_solved"].value == 0.0 and m["batch/avg_prefix_ratio"].value == 0.0


def test_verifier_failures_are_counted():
    g = dataclasses.replace(make_group([0.0, 0.0]), scores=(Score(0.0, "timeout"), Score(0.0, "no_answer")))
    assert group_metrics([g], RewardConfig())["batch/verifier_failures"].value == 1


@credit_function("test_both_terms", needs=("entropy",))
def both_terms(group, cfg):
    """The trace's tokens in both terms, in the SFT term by exp(-entropy)."""
    return [
        dataclasses.replace(c, sft_weights=r.off_policy * torch.exp(-t.entropy))
        for c, r, t in zip(group_baseline(group, cfg), group.group.rollouts, group.tokens, strict=True)
    ]


def no_credit(group, cfg):
    return [TokenCredit(*[torch.zeros(r.token_ids.numel())] * 3) for r in group.group.rollouts]


def test_a_credit_function_is_chosen_by_name_and_sees_entropies():
    entropy = torch.tensor([0.0, 1.0, 2.0])
    tokens = [ScoredTokens(entropy=entropy)] * 4
    (samples,) = credit([GUIDED], [tokens], AlgorithmConfig(credit="test_both_terms"))
    torch.testing.assert_close(samples[0].sft_weights, torch.exp(-entropy))
    assert samples[0].rl_weights.tolist() == [1, 1, 1] and samples[0].advantages.tolist() == [0.5] * 3
    assert all(s.sft_weights.count_nonzero() == 0 for s in samples[1:])
    assert find_credit_function("test_both_terms").needs == ("entropy",)
    (nothing,) = credit([GUIDED], [tokens], AlgorithmConfig(credit=f"{__name__}:no_credit"))
    assert all(s.rl_weights.count_nonzero() == s.sft_weights.count_nonzero() == 0 for s in nothing)
    with pytest.raises(UserError, match=r"'algorithm\.credit': unknown credit function 'x'; known: group_baseline"):
        find_credit_function("x")


def one_credit(group, cfg):
    return no_credit(group, cfg)[:1]


def test_a_credit_function_that_leaves_responses_out_is_named():
    name = f"{__name__}:one_credit"
    message = rf"'algorithm\.credit' \({name}\) gave 1 credits for the 4 responses of problem 'p'; it must return one"
    with pytest.raises(UserError, match=message):
        credit([GUIDED], [[ScoredTokens()] * 4], AlgorithmConfig(credit=name))


def test_a_run_computes_what_its_credit_function_needs(make_config):
    cfg = make_config(
        algorithm={"credit": "test_both_terms", "reject_extreme": False},
        train={"steps": 2, "save_every": 2},
        record={"samples": 6},
    )
    with Trainer(cfg) as trainer:
        trainer.train()
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert all(r["actor/sft_loss"] > 0 and r["actor/off_pg_loss"] != 0 and "timing_s/old_log_probs" in r for r in rows)
    with pytest.raises(UserError, match=r"algorithm\.credit"):
        Trainer(make_config(name="wrong", algorithm={"credit": "no_such_function"}))
