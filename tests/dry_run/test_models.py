"""The dry run tries a small model of the same class: what cannot be trained is said in one line."""

import json
import shutil

import pytest
from transformers import AutoConfig

from luffy.config import load_config
from luffy.dry_run import dry_run
from luffy.dry_run.models import try_model
from luffy.errors import UserError

CFG = load_config(None, ["model.path=somewhere", "model.device=cpu"])


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "opt", "gemma2", "gpt_neox", "qwen3_moe", "gptj", "falcon"]
)
def test_what_can_be_trained_passes(kind):
    try_model(AutoConfig.for_model(kind), CFG)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt2", r"\(GPT2LMHeadModel\) cannot be trained: .* attention dropout 0\.1: set attn_pdrop to 0"),
        ("seed_oss", r"attention dropout 0\.1: set attention_dropout to 0"),
        ("gpt_bigcode", r"attention dropout 0\.1: set attn_pdrop to 0"),
        ("biogpt", r"attention dropout 0\.1: set attention_probs_dropout_prob to 0"),
        ("mamba", r"\(MambaForCausalLM\) cannot be trained: MambaForCausalLM keeps no keys and values"),
        ("mamba2", r"\(Mamba2ForCausalLM\) cannot be trained: Mamba2ForCausalLM keeps no keys and values"),
        (
            "falcon_mamba",
            r"\(FalconMambaForCausalLM\) cannot be trained: FalconMambaForCausalLM keeps no keys and values",
        ),
        ("rwkv", r"\(RwkvForCausalLM\) cannot be trained: RwkvForCausalLM keeps no keys and values"),
        (
            "recurrent_gemma",
            r"\(RecurrentGemmaForCausalLM\) cannot be trained: RecurrentGemmaForCausalLM keeps no keys and values",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(kind, message):
    with pytest.raises(UserError, match=message) as caught:
        try_model(AutoConfig.for_model(kind), CFG)
    assert "\n" not in str(caught.value)


def test_dropout_that_is_off_is_fine():
    try_model(AutoConfig.for_model("gpt2", attn_pdrop=0.0), CFG)


def test_the_dry_run_tries_the_model(make_config, tiny_model, tmp_path):
    folder = tmp_path / "dropout"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    with pytest.raises(UserError, match="set attention_dropout to 0 in the model's config.json"):
        dry_run(make_config(model={"path": str(folder)}), "rl")
    assert dry_run(make_config(), "rl")
