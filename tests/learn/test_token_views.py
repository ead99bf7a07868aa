"""What the record keeps of each token: the policy's own probability and the pull of the update on it."""

from dataclasses import replace

import torch
from builders import make_samples
from transformers import AutoModelForCausalLM

from luffy.core.losses import PolicyLoss
from luffy.core.shaping import Shape, gradient_weight
from luffy.learn.objective import Objective
from luffy.learn.packing import pack
from luffy.learn.policy import Policy
from luffy.models.load import load_model
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer

SHAPE = Shape("p_div_p_0.1")


def batch_of(samples):
    (batch,) = pack(samples, 10_000, None, 16)
    return batch


def test_weights_are_the_closed_forms_of_the_paper():
    """Teacher tokens: f'(p) p (1 - p), Eq. 8; the policy's own at ratio 1: 1 - p; whatever the advantage's size."""
    samples = make_samples(off_policy=True)
    batch = batch_of(samples)
    log_prob = batch.old_log_probs.clone()
    weights = Objective(PolicyLoss(remove_clip=True, off_shape=SHAPE)).gradient_weights(batch, log_prob)
    p, off = log_prob.exp(), batch.off_policy
    assert off.any() and (~off).any()
    torch.testing.assert_close(weights[off], gradient_weight(p[off], SHAPE))
    torch.testing.assert_close(weights[~off], 1 - p[~off])


def test_a_clipped_token_is_not_pulled_and_a_ratio_counts():
    (sample,) = make_samples(1, off_policy=False)
    batch = batch_of([sample])
    ratio = torch.full_like(batch.old_log_probs, 1.5)
    log_prob = batch.old_log_probs + ratio.log()
    pull = lambda advantages, **settings: Objective(PolicyLoss(**settings)).gradient_weights(  # noqa: E731
        type(batch)(**{**vars(batch), "advantages": torch.full_like(ratio, advantages)}), log_prob
    )
    open_end = 1.5 * (1 - log_prob.exp())
    assert pull(0.3).count_nonzero() == 0  # already above the clip, and wanted higher
    torch.testing.assert_close(pull(-0.3), open_end)  # wanted lower: nothing holds it
    torch.testing.assert_close(pull(0.3, remove_clip=True), open_end)


def test_sft_tokens_pull_by_their_own_term_and_uncounted_tokens_not_at_all():
    (sample,) = make_samples(1, off_policy=True)
    n = sample.token_ids.numel()
    nothing, everything = torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
    log_prob = torch.linspace(-3, -0.1, n)
    objective = Objective(PolicyLoss(), sft_coef=0.5)
    streams = vars(sample)
    in_sft = batch_of([type(sample)(**{**streams, "rl_weights": nothing, "sft_weights": everything})])
    torch.testing.assert_close(objective.gradient_weights(in_sft, log_prob), 0.5 * (1 - log_prob.exp()))
    uncounted = batch_of([type(sample)(**{**streams, "rl_weights": nothing})])
    assert objective.gradient_weights(uncounted, log_prob).count_nonzero() == 0


def test_old_is_current_for_all_where_some_have_no_old_log_probs(make_config):
    """As in a step of several mini-batches."""
    cfg = make_config(algorithm={"remove_clip": True})
    policy = Policy(load_model(cfg.model.path, cfg.model.dtype, "cpu"), cfg)
    samples = make_samples(off_policy=False)
    mixed = [replace(s, old_log_probs=None if i < 2 else s.old_log_probs) for i, s in enumerate(samples)]
    for views, known in ((policy.token_views(mixed), False), (policy.token_views(samples), True)):
        for view, sample in zip(views, samples, strict=True):
            ratio = (view.log_probs - sample.old_log_probs).exp() if known else 1.0
            torch.testing.assert_close(view.gradient_weights, ratio * (1 - view.log_probs.exp()))


def test_a_run_records_them_as_transformers_would_score_them(make_config):
    cfg = make_config(
        train={"steps": 1, "save_every": 1}, algorithm={"off_policy_reshape": "p_div_p_0.1"}, record={"samples": 6},
        eval={"every": 1}, data={"eval": make_config().data.train},
    )  # fmt: skip
    with Trainer(cfg) as trainer:
        trainer.train()
    rows = read_json_lines(cfg.folder / "samples.jsonl")
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    tokenizer = trainer.run.tokenizer
    assert {r["off_policy_tokens"] > 0 for r in rows} == {True, False}
    assert {r["gradient_weights"] is None for r in rows} == {r["advantages"] is None for r in rows} == {True, False}
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor(prompt + row["token_ids"])
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
        p = log_p[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1).exp()
        torch.testing.assert_close(torch.tensor(row["policy_probs"]), p, rtol=6e-3, atol=1e-6)
        if row["gradient_weights"] is not None:
            off = torch.tensor(row["off_policy"]).bool()
            expected = torch.where(off, gradient_weight(p, SHAPE), 1 - p)
            torch.testing.assert_close(torch.tensor(row["gradient_weights"]), expected, rtol=6e-3, atol=1e-4)
    assert all(r["length"] == len(r["token_ids"]) and r["off_policy_tokens"] == sum(r["off_policy"]) for r in rows)


def test_the_same_held_out_problems_at_every_evaluation(make_config):
    cfg = make_config(train={"steps": 2, "save_every": 2}, eval={"every": 1, "n": 2}, record={"samples": 3},
                      data={"eval": make_config().data.train})  # fmt: skip
    with Trainer(cfg) as trainer:
        trainer.train()
    rows = read_json_lines(cfg.folder / "eval_samples.jsonl")
    assert [(r["step"], r["problem"], r["sample"]) for r in rows] == [
        (step, f"core/p{i}", k) for step in (0, 1, 2) for i in range(3) for k in range(2)
    ]
    assert all(not any(r["off_policy"]) and "advantages" not in r for r in rows)
    assert all(r["reward"] in (0.0, 1.0) and len(r["log_probs"]) == r["length"] for r in rows)


def test_sft_records_its_traces_with_probabilities(make_config):
    cfg = make_config(train={"steps": 1, "save_every": 1})
    with Trainer(cfg, "sft") as trainer:
        trainer.train()
    rows = read_json_lines(cfg.folder / "samples.jsonl")
    assert rows
    for row in rows:
        p = torch.tensor(row["policy_probs"])
        assert len(p) == row["length"] == row["off_policy_tokens"]
        torch.testing.assert_close(torch.tensor(row["gradient_weights"]), 1 - p, rtol=6e-3, atol=6e-3)


def test_no_samples_no_held_out_record(make_config):
    cfg = make_config(train={"steps": 1, "save_every": 1}, eval={"every": 1}, record={"samples_every": 0},
                      data={"eval": make_config().data.train})  # fmt: skip
    with Trainer(cfg) as trainer:
        trainer.train()
    assert read_json_lines(cfg.folder / "eval_samples.jsonl") == []
