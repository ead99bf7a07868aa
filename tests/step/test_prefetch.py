"""Rollouts that overlap the update: which version makes which batch, and what the loss does about it."""

import threading

import pytest
import torch
from trainings import final_weights, samples, train_untimed

from luffy.errors import ConfigError
from luffy.learn.objective import importance_of
from luffy.learn.policy import Policy
from luffy.rollout.native import NativeEngine
from luffy.step.prefetch import PrefetchCancelled, Prefetcher
from luffy.train.loop import Trainer

FROZEN = 1e-30  # a learning rate that moves no weight


def prefetch_config(make_config, name, staleness=None, lr=2e-2, steps=3, **changes):
    extra = {} if staleness is None else {"async": {"max_staleness": staleness}}
    extra |= {"optim": {"lr": lr}, "train": {"steps": steps, "save_every": 2, "keep": 9}}
    return make_config(name=name, record={"samples": 6, "samples_every": 1}, **extra, **changes)


def fields_of_samples(cfg, *fields):
    return [tuple(row[f] for f in fields) for row in samples(cfg)]


def test_no_staleness_is_the_synchronous_run_to_the_bit(make_config):
    plain, zero = prefetch_config(make_config, "plain"), prefetch_config(make_config, "zero", staleness=0)
    assert train_untimed(plain) == train_untimed(zero)
    assert all(
        torch.equal(a, b) for a, b in zip(final_weights(plain).values(), final_weights(zero).values(), strict=True)
    )
    assert fields_of_samples(plain, "token_ids", "versions") == fields_of_samples(zero, "token_ids", "versions")
    with Trainer(prefetch_config(make_config, "nothing-ahead", staleness=0)) as trainer:  # not a lag of nothing: no lag
        assert (
            trainer.run.prefetcher is None
            and trainer.run.engines.replica is None
            and importance_of(trainer.cfg) is None
        )


def test_each_batch_is_made_by_the_version_before_and_says_so(make_config):
    """Step 2 is rolled out while step 1 updates: by the weights of the start, whatever that update does."""
    stale = prefetch_config(make_config, "stale", 1, steps=4)
    sync, frozen = (
        prefetch_config(make_config, name, 0, lr, steps=2) for name, lr in (("sync", 2e-2), ("frozen", FROZEN))
    )
    rows = train_untimed(stale)
    train_untimed(sync), train_untimed(frozen)
    of_step = lambda cfg, step: [r[1:] for r in fields_of_samples(cfg, "step", "problem", "token_ids") if r[0] == step]  # noqa: E731
    assert of_step(stale, 1) == of_step(sync, 1)
    assert of_step(stale, 2) == of_step(frozen, 2) != of_step(sync, 2)
    for step, versions, off_policy in fields_of_samples(stale, "step", "versions", "off_policy"):
        made_by = max(step - 2, 0)
        assert versions == [-1 if off else made_by for off in off_policy]
    assert [r["async/staleness/mean"] for r in rows] == [0, 1, 1, 1]
    assert [r["async/staleness/max"] for r in rows] == [0, 1, 1, 1]


def test_off_policyness_is_corrected_and_logged(make_config):
    rows = train_untimed(prefetch_config(make_config, "stale", 1))
    assert rows[0]["async/weight_mean"] == pytest.approx(1, abs=1e-4) and rows[0]["async/ess"] == pytest.approx(
        1, abs=1e-4
    )
    assert all(0 < r["async/ess"] < 0.999 and r["async/weight_max"] > 1.01 for r in rows[1:])
    calm = train_untimed(prefetch_config(make_config, "calm", 1, lr=FROZEN))
    assert all(r["async/ess"] == pytest.approx(1, abs=1e-4) for r in calm)
    plain = train_untimed(prefetch_config(make_config, "plain", 0, lr=FROZEN))
    for a, b in zip(calm, plain, strict=True):  # weights of 1 correct nothing
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-5)
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)


def test_a_staleness_of_one_is_reproducible(make_config):
    first, again = prefetch_config(make_config, "first", 1), prefetch_config(make_config, "again", 1)
    assert train_untimed(first) == train_untimed(again)


def test_more_staleness_is_bounded(make_config):
    rows = train_untimed(prefetch_config(make_config, "three", 3, steps=8))
    lags = [r["async/staleness/max"] for r in rows]
    assert lags[0] == 0 and max(lags) <= 3 and all(lag >= 1 for lag in lags[3:])


def test_the_update_overlaps_the_next_rollout(make_config, monkeypatch):
    """The update of step 1 waits for the rollout of step 2 to be over: taking turns, it would wait for ever."""
    generate, update, made = NativeEngine.generate, Policy.update, []
    second = threading.Event()

    def counted(self, *args):
        result = generate(self, *args)
        made.append(threading.current_thread().name)
        if len(made) == 2:
            second.set()
        return result

    def patient(self, *args):
        assert second.wait(60)
        return update(self, *args)

    monkeypatch.setattr(NativeEngine, "generate", counted)
    monkeypatch.setattr(Policy, "update", patient)
    train_untimed(prefetch_config(make_config, "run", 1, steps=2))
    assert made == ["rollouts", "rollouts"]


def test_a_resumed_run_takes_up_the_data_where_it_was(make_config):
    whole, parts = prefetch_config(make_config, "whole", 1, steps=4), prefetch_config(make_config, "parts", 1, steps=2)
    train_untimed(whole), train_untimed(parts)
    rows = train_untimed(prefetch_config(make_config, "parts", 1, steps=4))
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[2]["async/staleness/max"] == 0 and rows[3]["async/staleness/max"] == 1
    problems = [{r for r in fields_of_samples(cfg, "step", "problem")} for cfg in (whole, parts)]
    assert problems[0] == problems[1]


def test_an_error_in_a_rollout_ends_the_run(make_config):
    cfg = prefetch_config(make_config, "run", 1)
    with Trainer(cfg) as trainer:
        with torch.no_grad():
            trainer.run.engines.replica.model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(FloatingPointError, match="NaN"):
            trainer.train()
    assert not [t for t in threading.enumerate() if t.name == "rollouts"]


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_batch_begins_with_weights_older_than_the_bound(bound):
    """Weights are published late: a thread that may run further ahead has the time to do so."""
    made = []

    def make(step, version, check):
        made.append((step, version))
        return step

    total = 8
    prefetcher = Prefetcher(lambda: None, bound, total)
    try:
        for step in range(total):
            taker = threading.Thread(target=prefetcher.take, args=(step, make))
            taker.start()
            taker.join(0.1)  # it may be waiting for weights that the next batch can begin with
            with prefetcher.publishing(step + 1):
                pass
            taker.join()
    finally:
        prefetcher.close()
    assert [step for step, _ in made] == list(range(total))
    assert made[0] == (0, 0) and all(0 <= step - version <= bound for step, version in made)


def test_closing_abandons_a_batch_in_the_making():
    """The thread stops at its next check, not at the end of the batch."""
    begun = threading.Event()

    def endless(step, version, check):
        begun.set()
        while True:
            check()

    prefetcher = Prefetcher(lambda: None, 1, 10)
    with prefetcher.publishing(0):
        pass
    closer = threading.Thread(target=lambda: begun.wait(10) and prefetcher.close())
    closer.start()
    with pytest.raises(PrefetchCancelled):
        prefetcher.take(0, endless)
    closer.join(10)
    assert not closer.is_alive()


@pytest.mark.parametrize(
    ("section", "values"),
    [("algorithm", {"oversample_rounds": 2}), ("rollout", {"top_p": 0.9}), ("rollout", {"engine": "vllm"})],
)
def test_what_cannot_be_corrected_is_refused(make_config, section, values):
    with pytest.raises(ConfigError, match=r"async\.max_staleness"):
        make_config(**{section: values, "async": {"max_staleness": 1}})
