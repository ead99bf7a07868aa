"""The gradient under token overrides over whole sequences: which weights make it the policy gradient.

Once enumerated (a table for a policy, up to 4 tokens, no Monte-Carlo error), once through the engine and the trainer.
"""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from builders import make_sample, pack_in_order
from toy_overrides import GIVEN, RULES, TEMPERATURE, count, toy_models, toy_samples, toy_sequences, toy_tables

from luffy.core.losses import Importance, PolicyLoss
from luffy.core.override_rules import Rule
from luffy.learn.objective import Objective
from luffy.learn.policy import Policy
from luffy.types import Sample

D = torch.float64
VOCABULARY, EOS, LENGTH = 3, 0, 4
REDUCTION = "seq-mean-token-sum"
CONTEXTS = [c for n in range(LENGTH) for c in itertools.product(range(1, VOCABULARY), repeat=n)]
SEQUENCES = [(*c, EOS) for c in CONTEXTS] + list(itertools.product(range(1, VOCABULARY), repeat=LENGTH))
TABLE_RULES = {**RULES, "threshold": Rule("threshold", tau=0.3)}


def random_table(seed: int) -> torch.Tensor:
    return torch.randn(len(CONTEXTS), VOCABULARY, dtype=D, generator=torch.Generator().manual_seed(seed))


def rows_and_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Context number and token of every token of every sequence, laid end to end."""
    number = {context: i for i, context in enumerate(CONTEXTS)}
    pairs = [(number[s[:t]], token) for s in SEQUENCES for t, token in enumerate(s)]
    rows, tokens = torch.tensor(pairs).T
    return rows, tokens


def per_sequence(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum() for part in values.split([len(s) for s in SEQUENCES])])


def exact_and_expected_gradient(rule: Rule, importance: Importance) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy gradient, and the expectation of the objective's gradient under the behaviour."""
    logits = random_table(0).requires_grad_(True)
    reward = torch.rand(len(SEQUENCES), dtype=D, generator=torch.Generator().manual_seed(1))
    rows, tokens = rows_and_tokens()
    log_d, log_g = torch.log_softmax(logits, -1)[rows], torch.log_softmax(random_table(2), -1)[rows]
    log_prob = log_d.gather(-1, tokens[:, None])[:, 0]
    chances = per_sequence(log_prob).exp()
    assert float(chances.detach().sum()) == pytest.approx(1.0)
    (exact,) = torch.autograd.grad((chances * reward).sum(), logits, retain_graph=True)
    behavior = rule.behavior_log_probs(log_d.detach(), log_g, tokens)
    drawn = per_sequence(behavior).exp()
    assert float(drawn.sum()) == pytest.approx(1.0)
    parts = behavior.split([len(s) for s in SEQUENCES])
    samples = [
        make_sample((1,), s, advantage=float(r), log_probs=b) for s, r, b in zip(SEQUENCES, reward, parts, strict=True)
    ]
    batch = pack_in_order(samples, REDUCTION, LENGTH)
    expectation = torch.repeat_interleave(drawn, torch.tensor(batch.response_lengths))
    objective = Objective(PolicyLoss(remove_clip=True), importance=importance)
    loss, _ = objective(replace(batch, rl_weights=expectation), log_prob, torch.zeros_like(log_prob))
    (gradient,) = torch.autograd.grad(-loss, logits)
    return exact, gradient


@pytest.mark.parametrize("name", TABLE_RULES)
def test_only_sequence_weights_without_a_second_correction_give_the_policy_gradient(name):
    exact, gradient = exact_and_expected_gradient(TABLE_RULES[name], Importance(clamp_max=math.inf, level="sequence"))
    torch.testing.assert_close(gradient, exact, atol=1e-6, rtol=1e-6)  # rewards pass through float32
    others = [
        Importance(clamp_max=math.inf),
        Importance(clamp_max=math.inf, literal=True),
        Importance(clamp_max=math.inf, literal=True, level="sequence"),
        Importance(clamp_max=1.0, level="sequence"),  # a bound is a bias
    ]
    for importance in others:
        _, gradient = exact_and_expected_gradient(TABLE_RULES[name], importance)
        assert float((gradient - exact).norm() / exact.norm()) > 0.05, importance


def test_a_trace_prefix_has_no_part_in_the_product():
    old = torch.log(torch.tensor([0.9, 0.5, 0.4]))
    behavior = torch.log(torch.tensor([0.01, 0.25, 0.2]))  # the first is a teacher's token
    batch = pack_in_order(
        [make_sample((1,), (5, 6, 7), prefix=1, advantage=1.0, log_probs=behavior)], REDUCTION, LENGTH
    )
    objective = Objective(PolicyLoss(), importance=Importance(level="sequence"))
    log_prob = old.clone().requires_grad_(True)
    _, stats = objective(batch, log_prob, torch.zeros(3))
    assert float(stats["guidance/weight_max"].numbers[0]) == pytest.approx(4.0)
    total, tokens = stats["guidance/weight_mean"].numbers
    assert (float(total), int(tokens)) == (pytest.approx(8.0), 2)


# The same through the engine, the config and the trainer's own update.

GROUPS = 10


def toy_reward(sequence: tuple[int, ...]) -> float:
    return math.sin(sum((place + 1) * (token + 2) ** 2 for place, token in enumerate(sequence)))


def toy_policy(make_config, **algorithm) -> Policy:
    settings = {
        "remove_clip": True, "entropy_coef": 0.0, "loss_reduction": "seq-mean-token-sum",
        "importance_clamp_max": 1e9, **algorithm,
    }  # fmt: skip
    cfg = make_config(
        algorithm=settings,
        rollout={"temperature": TEMPERATURE, "offpolicy_guidance": {"model_path": "unused"}},
        batch={"tokens": 100_000},
    )
    return Policy(copy.deepcopy(toy_models()[0]), cfg)


def gradient_of(policy: Policy, samples: list[Sample]) -> torch.Tensor:
    """Of one update, all parameters in one vector; the step itself is not taken."""
    kept = []
    policy.optimizer.step = lambda lr, norm: kept.extend(
        m.grad.detach().flatten().clone() for m in policy.optimizer.masters.values()
    )
    policy.update(samples, 0.01)
    return -torch.cat(kept)


def enumerated(policy: Policy, rule: Rule | None) -> torch.Tensor:
    """The gradient's expectation over all sequences, drawn by the rule; None: by the policy itself."""
    drafts, others = toy_tables()
    samples = []
    for s in toy_sequences():
        contexts = [s[:t] for t in range(len(s))]
        log_d, log_g = (torch.stack([table[c] for c in contexts]) for table in (drafts, others))
        tokens = torch.tensor(s)
        own = log_d.gather(-1, tokens[:, None])[:, 0]
        behavior = own if rule is None else rule.behavior_log_probs(log_d, log_g, tokens)
        chance = float(behavior.sum().exp())
        samples.append(
            make_sample(GIVEN, s, advantage=toy_reward(s) * chance * len(toy_sequences()), log_probs=behavior.float())
        )
    return gradient_of(policy, samples)


def estimates(policy: Policy, name: str) -> torch.Tensor:
    """[groups, parameters]: gradients of parts of what the engine really drew."""
    return torch.stack([gradient_of(policy, drawn(toy_samples(name, None)[i::GROUPS])) for i in range(GROUPS)])


def drawn(completions) -> list[Sample]:
    """Equal sequences once, with their number in the advantage: the mean gradient is the same, and cheaper."""
    counts = count(completions)
    reported = {tuple(c.token_ids.tolist()): c.behavior_log_probs for c in completions}
    share = len(counts) / len(completions)
    return [
        make_sample(GIVEN, s, advantage=toy_reward(s) * n * share, log_probs=reported[s]) for s, n in counts.items()
    ]


def deviation(found: torch.Tensor, exact: torch.Tensor, direction: torch.Tensor) -> float:
    """In standard errors, along one direction."""
    along = found @ direction
    return abs(float((along.mean() - exact @ direction) / (along.std() / math.sqrt(GROUPS))))


@pytest.mark.parametrize("name", RULES)
def test_sampled_gradients_are_the_policys_within_their_error_or_are_not(make_config, name):
    whole = toy_policy(make_config, importance_level="sequence")
    exact = enumerated(whole, None)
    torch.testing.assert_close(enumerated(whole, RULES[name]), exact, atol=1e-4, rtol=1e-3)
    right = estimates(whole, name)
    assert deviation(right, exact, exact / exact.norm()) < 3
    for algorithm in ({}, {"importance_objective": "literal"}):
        wrong = toy_policy(make_config, **algorithm)
        bias = enumerated(wrong, RULES[name]) - exact
        direction = bias / bias.norm()
        assert deviation(right, exact, direction) < 3 < deviation(estimates(wrong, name), exact, direction)
