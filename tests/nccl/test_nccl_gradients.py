"""Loss and gradient norm of recorded samples on 1 to 8 NCCL ranks, against one process; then ten whole steps.

All cases of a number of ranks share one launch. The slow cases hold every gather up, which makes a race lose that is
otherwise won (docs/log.md, 2026-11-18).
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from builders import make_tokenizer
from features import base_config
from gathers import slow_gathers
from ranks import run_ranks
from trainings import assert_same_metrics, train, untimed_metrics
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.learn.policy import Policy
from luffy.train.loop import Trainer
from luffy.train.weights import load_policy

RANKS = (1, 2, 3, 4, 8)
SAMPLES = 24
TOKENS = {"one micro-batch a rank": 4096, "two": None, "many": 34}  # None: half of what the fullest rank has
SHARES = {"even": lambda i, ranks: i % ranks, "a rank without a problem": lambda i, ranks: i % max(ranks - 1, 1)}


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory):
    """Tied, with biases; 50 and 19 rows, 3 layers: most shards do not divide by 3, 4 or 8."""
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(make_tokenizer()), hidden_size=64, intermediate_size=50, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recorded(make_config_in, odd_model, tmp_path_factory):
    """Samples of one step with their advantages, and the config they were made with."""
    cfg = make_config_in(tmp_path_factory.mktemp("recorded"))(
        model={"path": str(odd_model), "device": "cuda"},
        batch={"problems": 6}, train={"steps": 1}, algorithm={"reject_extreme": False},
    )  # fmt: skip
    kept = []
    with Trainer(cfg) as trainer, pytest.MonkeyPatch.context() as patch:
        update = Policy.update
        patch.setattr(Policy, "update", lambda self, samples, lr: (kept.extend(samples), update(self, samples, lr))[1])
        trainer.train()
    assert len(kept) == SAMPLES and any(sample.off_policy.any() for sample in kept)
    return cfg, kept


def tokens_under(samples, setting):
    return setting or max(sum(map(len, samples)) // 2 + 1, 34)


def loss_and_norm(cfg, samples, world=None):
    """Of one update that leaves the weights as they are."""
    model = load_policy(cfg.model, "cpu" if world else "cuda")
    metrics = Policy(model, cfg, world=world).update(samples, 0.0)
    return metrics["actor/loss"].value, metrics["actor/grad_norm"].value


def of_all_cases(cfg, samples, world):
    """Loss and norm by (dtype, micro-batches, share, slow)."""
    found = {}
    for dtype, tokens, share, slow in product(("float32", "bfloat16"), TOKENS, SHARES, (False, True)):
        mine = [s for i, s in enumerate(samples) if SHARES[share](i, world.size) == world.rank]
        fullest = max(world.gather(mine), key=len)
        case = with_settings(cfg, dtype, tokens_under(fullest, TOKENS[tokens]))
        if slow:
            with slow_gathers():
                found[dtype, tokens, share, slow] = loss_and_norm(case, mine, world)
        else:
            found[dtype, tokens, share, slow] = loss_and_norm(case, mine, world)
    return found


def with_settings(cfg, dtype, tokens):
    return replace(cfg, model=replace(cfg.model, dtype=dtype), batch=replace(cfg.batch, tokens=tokens))


def at_three_sizes(cfg, samples, dtype, world=None):
    """Loss and norm of all samples in one process, at three values of batch.tokens."""
    sizes = (4096, tokens_under(samples, None), 34)
    return [loss_and_norm(with_settings(cfg, dtype, size), samples, world) for size in sizes]


@pytest.fixture(scope="module")
def alone(recorded):
    """By dtype. In bfloat16 of one sharded process: a plain one runs fused layers, which round otherwise (norms differ
    by 1.5 % here)."""
    (low,) = run_ranks(1, at_three_sizes, *recorded, "bfloat16", device="cuda")
    return {"float32": at_three_sizes(*recorded, "float32"), "bfloat16": low}


@pytest.mark.parametrize("count", RANKS)
def test_ranks_have_the_loss_and_gradient_of_one_process(recorded, alone, count):
    cfg, samples = recorded
    results = run_ranks(count, of_all_cases, cfg, samples, device="cuda")
    assert all(result == results[0] for result in results)
    worst = {"float32": 0.0, "bfloat16": 0.0}
    wrong = {}
    for case, found in results[0].items():
        for value, expected in zip(found, zip(*alone[case[0]], strict=True), strict=True):
            scale = abs(expected[0])
            spread = max(max(expected) - min(expected), scale * 2**-9)  # by chance it may be less than half a rounding
            bound = 1e-4 * scale if case[0] == "float32" else spread
            off = min(abs(value - e) for e in expected)
            worst[case[0]] = max(worst[case[0]], off / scale)
            if off > bound:
                wrong[case] = (found, expected)
    print(f"\n{count} ranks: {len(results[0])} cases, largest relative error {worst}, one process {alone}")
    assert not wrong


def ten_steps(make_config, sums, odd_model, name):
    return base_config(
        make_config, sums, name, model={"path": str(odd_model), "device": "cuda"}, train={"steps": 10, "save_every": 10}
    )


@pytest.fixture(scope="module")
def undisturbed(make_config_in, sums, odd_model, tmp_path_factory):
    cfg = ten_steps(make_config_in(tmp_path_factory.mktemp("ten")), sums, odd_model, "alone")
    train(cfg)
    return cfg


@pytest.mark.parametrize("count", RANKS)
def test_ten_steps_are_those_of_one_process(make_config, sums, odd_model, undisturbed, count):
    cfg = ten_steps(make_config, sums, odd_model, "many")
    run_ranks(count, train, cfg, device="cuda")
    ours, theirs = untimed_metrics(cfg), untimed_metrics(undisturbed)
    assert_same_metrics(ours, theirs, tolerance=1e-3)
    assert ours[-1]["actor/entropy_loss"] != pytest.approx(ours[0]["actor/entropy_loss"], rel=0.02)  # it has learned
