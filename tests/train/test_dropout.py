"""A policy with dropout (OPT has 0.1 unless told otherwise): random only in the gradient passes of an update."""

import pytest
import torch
from builders import LETTERS, make_samples, make_tokenizer
from transformers import AutoModelForCausalLM, Gemma3Config, OPTConfig, OPTForCausalLM

from luffy.learn.policy import Policy
from luffy.models.load import load_model
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer
from luffy.train.setup import dropout_notice


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(LETTERS) + 3, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        init_std=0.2,
    )  # fmt: skip
    assert config.dropout == 0.1
    OPTForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("extra", [{}, {"off_normalize": True}, {"all_max_clip": 0.5}])
def test_scores_before_and_after_an_update_are_those_of_the_model_itself(make_config, opt, extra):
    cfg = make_config(model={"path": str(opt)}, algorithm=extra)
    policy = Policy(load_model(opt, "float32", "cpu").train(), cfg)
    samples = make_samples()
    policy.update(samples, 0.0)
    state = torch.get_rng_state()
    views, ours = policy.token_views(samples), policy.log_probs(samples)
    assert torch.equal(torch.get_rng_state(), state)  # scoring draws no random numbers
    reference = AutoModelForCausalLM.from_pretrained(opt).eval()
    for sample, view, own in zip(samples, views, ours, strict=True):
        ids = torch.cat([torch.tensor(sample.prompt_ids), sample.token_ids])
        log_p = torch.log_softmax(reference(ids[None]).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
        expected = log_p.gather(1, sample.token_ids[:, None]).squeeze(1).detach()
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(view.log_probs, expected, rtol=1e-4, atol=1e-5)


def test_an_update_applies_dropout(make_config, opt):
    losses = []
    for seed in (1, 2):
        policy = Policy(load_model(opt, "float32", "cpu"), make_config(model={"path": str(opt)}))
        torch.manual_seed(seed)
        losses.append(policy.update(make_samples(), 0.0)["actor/on_pg_loss"].value)
    assert losses[0] != losses[1]


def train_figures_and_notices(cfg):
    with Trainer(cfg) as trainer:
        trainer.train()
        facts = trainer.notices
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    figures = [{k: v for k, v in row.items() if k.startswith(("actor/", "critic/", "rollout/log"))} for row in rows]
    return figures, facts


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}},
        pytest.param({"batch": {"mini_batch": 2}}, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_two_parts_and_one_without_samples_equal_one_in_one_go(make_config, opt, changes):
    make = lambda name, **more: make_config(name=name, model={"path": str(opt)}, **changes, **more)  # noqa: E731
    whole, _ = train_figures_and_notices(make("whole"))
    assert len(whole) == 4 and whole[-1]["actor/grad_norm"] > 0
    train_figures_and_notices(make("parts", train={"steps": 2}))
    assert train_figures_and_notices(make("parts"))[0] == whole
    assert train_figures_and_notices(make("bare", record={"samples_every": 0}))[0] == whole


def test_the_run_says_that_its_model_has_dropout(make_config, opt, tiny_model):
    _, said = train_figures_and_notices(make_config(model={"path": str(opt)}, train={"steps": 1}))
    assert [line for line in said if "dropout=0.1" in line]
    _, said = train_figures_and_notices(make_config(model={"path": str(tiny_model)}, train={"steps": 1}, name="llama"))
    assert not [line for line in said if "dropout" in line]


def test_the_dropout_of_a_model_for_images_and_text_is_that_of_its_text_part():
    config = Gemma3Config(text_config={"attention_dropout": 0.25}, vision_config={"attention_dropout": 0.125})
    (said,) = dropout_notice(config)
    assert "attention_dropout=0.25:" in said
