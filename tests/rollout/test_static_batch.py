"""Models that luffy's own attention would get wrong train and generate through their own forward pass."""

import copy

import pytest
import torch
from builders import make_request, make_samples, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from luffy import api
from luffy.errors import UserError
from luffy.learn.policy import Policy
from luffy.models.forward import forward_hidden
from luffy.models.load import load_model
from luffy.models.plain import choose_path, differ, plain_log_probs, runs_plain
from luffy.prepare.teachers import LocalTeacher
from luffy.rollout import NativeEngine
from luffy.train.loop import Trainer
from luffy.train.setup import check_context
from luffy.types import Problem

TOKENS = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {**TOKENS, "max_position_embeddings": 128}
DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "initializer_range": 0.3}  # fmt: skip
OLD_NAMES = {"n_layer": 2, "n_head": 4, "initializer_range": 0.3}
KINDS = {
    # Caps both attention scores and logits, and slides.
    "gemma2": {**SMALL, **DECODER, "head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"},
    # Learned positions; does not route its attention through the interface by layers we know.
    "gpt2": {**SMALL, **OLD_NAMES, "n_embd": 32},
    "cohere": {**SMALL, **DECODER, "logit_scale": 0.3},
    # Biases instead of positions: its config names no context.
    "bloom": {**TOKENS, **OLD_NAMES, "hidden_size": 32, "attn_implementation": "eager"},
    # Layers between the last hidden state and the head.
    "modernbert-decoder": {**SMALL, **DECODER, "global_attn_every_n_layers": 2},
    # Runs its layers several times.
    "hrm_text": {**SMALL, **DECODER, "head_dim": 8},
    # Values are narrower than keys.
    "deepseek_v3": {
        **SMALL,
        **DECODER,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def build_engine(kind):
    torch.manual_seed(0)
    settings = dict(KINDS[kind])
    attention = settings.pop("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation=attention)
    return model.eval()


@pytest.fixture(params=["gemma2", "cohere", "bloom", "modernbert-decoder", "hrm_text", "deepseek_v3"])
def plain_model(request):
    model = build_engine(request.param)
    with pytest.warns(UserWarning, match="its own forward pass instead"):
        choose_path(model)
    assert runs_plain(model)
    return model


def test_greedy_tokens_are_those_of_generate(plain_model):
    prompts = [(5, 6, 7, 8, 9, 10), (11, 12), (13,)]
    engine = NativeEngine(plain_model, max_slots=2)
    ours = engine.generate([make_request(p, 9, temperature=0.0) for p in prompts])
    assert engine.stats.decode_steps == 2 * 8  # two batches; the first token comes from the prefill
    for prompt, completion in zip(prompts, ours, strict=True):
        theirs = plain_model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert completion.token_ids.tolist() == theirs[0, len(prompt) :].tolist()


def test_log_probs_of_rollouts_are_the_trainers(plain_model):
    """HRM goes through its layers many times, so that rounding adds up to 7e-4 on some processors."""
    bound = 2e-3 if plain_model.config.model_type == "hrm_text" else 1e-4
    requests = [
        make_request((5, 6, 7), 12, seed=1, temperature=0.7),
        make_request((8, 9), 5, seed=2, temperature=0.7, eos_ids=(3, 4)),
    ]
    with torch.no_grad():
        for request, completion in zip(requests, NativeEngine(plain_model).generate(requests), strict=True):
            ids = torch.cat((torch.tensor(request.prompt_ids), completion.token_ids))
            start, count = len(request.prompt_ids) - 1, len(completion.token_ids)
            log_probs, entropy = plain_log_probs(
                plain_model, ids, [len(ids)], torch.arange(start, start + count), completion.token_ids, 0.7
            )
            torch.testing.assert_close(log_probs, completion.log_probs, rtol=1e-4, atol=bound)
            assert (entropy > 0).all()


def test_packed_scores_are_those_of_sequences_alone(plain_model):
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11])
    both = plain_log_probs(plain_model, ids, [4, 3], torch.tensor([1, 2, 4, 5]), ids[[2, 3, 5, 6]], 1.0)[0]
    first = plain_log_probs(plain_model, ids[:4], [4], torch.tensor([1, 2]), ids[2:4], 1.0)[0]
    second = plain_log_probs(plain_model, ids[4:], [3], torch.tensor([0, 1]), ids[5:], 1.0)[0]
    torch.testing.assert_close(both, torch.cat((first, second)), rtol=1e-4, atol=1e-5)


def test_such_a_model_is_loaded_with_a_warning_and_trained(tmp_path, make_config):
    build_engine("gemma2").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="Gemma2ForCausalLM .* correct, but slower"):
        model = load_model(tmp_path)
    before = copy.deepcopy(model.state_dict())
    metrics = Policy(model, make_config()).update(make_samples(), 1e-2)
    assert metrics["actor/grad_norm"].value > 0
    assert any(not torch.equal(before[n], v) for n, v in model.state_dict().items())
    with pytest.raises(UserError):
        forward_hidden(model, torch.tensor([5]), torch.tensor([0]), None)


@pytest.mark.filterwarnings("ignore:.* correct, but slower")
def test_a_model_without_a_limit_of_positions_generates_is_evaluated_and_trained(tmp_path, make_config, sums):
    build_engine("bloom").save_pretrained(tmp_path / "bloom")
    make_tokenizer().save_pretrained(tmp_path / "bloom")
    path, options = str(tmp_path / "bloom"), {"max_tokens": 4, "style": "plain", "device": "cpu"}
    (row,) = api.generate(path, "1+2=", **options)
    assert 1 <= len(row["token_ids"]) <= 4
    result = api.evaluate(path, str(sums), tmp_path / "eval", reward="numeric", limit=2, workers=1, **options)
    assert len(result.benchmarks) == 1
    teacher = LocalTeacher(path, temperature=1.0, **options)
    assert [len(drawn) for part in teacher.answer([Problem("0", "1+2=", "3")], 2) for _, drawn, _ in part] == [2]
    with api.Trainer(make_config(model={"path": path}, train={"steps": 1})) as trainer:
        ((_, metrics),) = trainer.steps()
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"is_decoder": False}, "BertLMHeadModel lets tokens see later ones"),
        ("roberta", {"is_decoder": True}, "RobertaForCausalLM does not count its positions from 0"),
    ],
)
def test_a_model_whose_own_forward_pass_would_be_used_wrongly_is_refused(kind, changes, message):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **DECODER, **changes}))
    with pytest.raises(UserError, match=message):
        choose_path(model)
    assert model.training


def test_logits_are_compared_up_to_rounding_and_a_constant():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert not differ(rows + 5.0, rows) and not differ(1e-6 * rows, 1e-6 * rows)
    assert not differ((rows + 100).bfloat16(), rows.bfloat16() + 100)
    assert differ(rows.roll(1, dims=0), rows) and differ(rows[:, 1:], rows) and differ(rows * float("nan"), rows)
    assert not differ(rows, rows * float("nan")) and not differ(rows, torch.zeros_like(rows))


def test_a_trial_leaves_the_model_as_it_was(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train()
    model.model.layers[1].eval()
    modes, state = [m.training for m in model.modules()], torch.random.get_rng_state()
    choose_path(model)
    assert not runs_plain(model) and modes == [m.training for m in model.modules()]
    assert torch.equal(state, torch.random.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_a_model_for_images_and_text_trains_on_text(tmp_path, make_config):
    text = {**SMALL, **DECODER, "head_dim": 8, "sliding_window": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    (ours,) = NativeEngine(model).generate([make_request((5, 6, 7), 8, temperature=0.0)])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = theirs.generate(torch.tensor([(5, 6, 7)]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert ours.token_ids.tolist() == expected[0, 3:].tolist()
    assert Policy(model, make_config()).update(make_samples(), 1e-2)["actor/grad_norm"].value > 0


def longrope():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 8.0,
            "original_max_position_embeddings": 16, "rope_theta": 1e4}  # fmt: skip
    torch.manual_seed(0)
    shape = {**SMALL, **DECODER, "original_max_position_embeddings": 16, "rope_parameters": rope}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **shape)).eval()


@pytest.mark.filterwarnings("ignore:.* correct, but slower")
def test_longrope_ends_where_its_frequencies_change(make_config):
    model = longrope()
    choose_path(model)
    engine = NativeEngine(model)
    with pytest.raises(UserError, match="exceed the context of 16"):
        engine.generate([make_request((5, 6, 7), 14)])
    # The longer prompt has ended when the other comes to its last token.
    short, _ = engine.generate([make_request((5, 6), 14, seed=1), make_request(range(5, 17), 4)])
    ids = torch.cat((torch.tensor([5, 6]), short.token_ids))
    expected = plain_log_probs(model, ids, [16], torch.arange(1, 15), short.token_ids, 1.0)[0]
    torch.testing.assert_close(short.log_probs, expected.detach(), rtol=1e-4, atol=1e-4)
    check_context(make_config(data={"max_prompt_tokens": 8}, rollout={"max_tokens": 8}), model.config)
    with pytest.raises(UserError, match=r"rollout\.max_tokens = 17 exceeds the model's context of 16, .* \(longrope\)"):
        check_context(make_config(data={"max_prompt_tokens": 9}, rollout={"max_tokens": 8}), model.config)


def test_a_model_we_serve_is_not_warned_about(tiny_model, recwarn):
    assert not runs_plain(load_model(tiny_model))
    assert not [w for w in recwarn if "forward pass" in str(w.message)]


def test_learned_positions_are_served_too():
    model = build_engine("gpt2")
    choose_path(model)  # by whichever way
    (ours,) = NativeEngine(model).generate([make_request((5, 6, 7), 8, temperature=0.0)])
    model.set_attn_implementation("sdpa")
    theirs = model.generate(torch.tensor([(5, 6, 7)]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert ours.token_ids.tolist() == theirs[0, 3:].tolist()


def test_a_training_with_a_recurrent_model_is_refused_in_one_line(make_config, tmp_path):
    """The dry run tries the class; the run itself must say the same before its first step."""
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("mamba", **shape, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    tokenizer.save_pretrained(tmp_path / "mamba")
    with Trainer(make_config(model={"path": str(tmp_path / "mamba")})) as trainer:
        with pytest.raises(
            UserError, match=r"^MambaForCausalLM keeps no keys and values .*; choose a transformer model$"
        ):
            trainer.train()
        assert trainer.progress.step == 0
