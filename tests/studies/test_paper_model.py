"""The extended model really runs with the new base, and its template says what the paper's style says."""

import json
import os

import pytest
import torch
from builders import make_model
from commands import luffy
from prepare_support import CHATML, byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from luffy.data import Encoder
from luffy.data.prompts import PAPER_SYSTEM_PROMPT
from luffy.errors import UserError
from luffy.models.load import load_model
from luffy.types import Message, Problem
from studies.paper.model import extended_config, paper_template, prepare_model

QUESTION = Problem(id="q", prompt="What's $1+1$? {braces} \\n", answer="2")


def save_model(folder, template=CHATML, **config):
    model = make_model("qwen2", vocab_size=300, max_position_embeddings=4096, **config)
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def extended(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "model"
    changes = prepare_model(str(source), out)
    assert changes[:2] == ["rope_theta: 10000 -> 40000", "max_position_embeddings: 4096 -> 16384"]
    return out


def inv_freq(model):
    return model.model.rotary_emb.inv_freq


def test_the_new_base_is_what_the_model_computes_with(source, extended):
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, extended))
    dimensions = torch.arange(0, 16, 2) / 16
    torch.testing.assert_close(inv_freq(before), 10000.0**-dimensions)
    torch.testing.assert_close(inv_freq(after), 40000.0**-dimensions)
    torch.testing.assert_close(inv_freq(load_model(extended)), 40000.0**-dimensions)
    assert after.config.max_position_embeddings == 16384
    ids = torch.arange(3, 40)[None]
    assert (before(ids).logits - after(ids).logits).abs().max() > 1e-3
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name]), name


def test_weights_are_linked_and_the_window_is_out_of_the_way(source, extended):
    assert os.path.samefile(source / "model.safetensors", extended / "model.safetensors")
    config = json.loads((extended / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 40000
    assert config["max_window_layers"] == config["num_hidden_layers"] == 3
    assert json.loads((source / "config.json").read_text())["max_position_embeddings"] == 4096


def test_a_config_of_older_transformers_changes_at_the_top(tmp_path):
    old = {
        "rope_theta": 10000, "max_position_embeddings": 4096, "sliding_window": 4096, "use_sliding_window": False,
        "max_window_layers": 21, "num_hidden_layers": 28,
    }  # fmt: skip
    new, _ = extended_config(old, 40000.0, 16384, tmp_path)
    assert new == old | {
        "rope_theta": 40000.0, "max_position_embeddings": 16384, "sliding_window": 16384, "max_window_layers": 28,
    }  # fmt: skip
    both, _ = extended_config({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4}}, 4e4, None, tmp_path)
    assert both == {"rope_theta": 4e4, "rope_parameters": {"rope_theta": 4e4}}
    live, changes = extended_config({"sliding_window": 4096, "max_position_embeddings": 8192}, None, 16384, tmp_path)
    assert live["sliding_window"] == 4096 and "left as it is" in changes[-1]


def test_the_template_renders_what_the_style_paper_renders(source, extended):
    own, new = (AutoTokenizer.from_pretrained(folder) for folder in (source, extended))
    wanted = Encoder(own, "paper").render(QUESTION)
    assert wanted == (
        f"<|im_start|>system\n{PAPER_SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nThis is the problem: "
        f"{QUESTION.prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert Encoder(new, "paper").render(QUESTION) == wanted
    assert Encoder(new, "chat").render(QUESTION) == wanted  # a bare question, as a server's client sends it
    chat = Problem(id="c", prompt=(Message("system", "Be brief."), Message("user", "Hi")), answer="")
    assert Encoder(new, "chat").render(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nThis is the problem: Hi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    trained = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nx</think>"}]
    assert new.apply_chat_template(trained, tokenize=False).endswith("assistant\n<think>\nx</think><|im_end|>\n")


def render(tokenizer, template):
    chat = [{"role": "user", "content": "Hi"}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, chat_template=template)


def test_tokenizers_without_a_template_get_one():
    chatml, plain = byte_tokenizer(None), byte_tokenizer(None, ["<eos>"])
    assert render(chatml, paper_template(chatml)).endswith(
        "<|im_start|>user\nThis is the problem: Hi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert render(plain, paper_template(plain)) == (
        f"{PAPER_SYSTEM_PROMPT}\n\nUser: This is the problem: Hi\n\nAssistant: <think>\n"
    )


@pytest.mark.parametrize("own_end", ["<think>\n", "<think>"])
def test_a_template_that_opens_thoughts_is_not_doubled(own_end):
    opens = byte_tokenizer(CHATML.replace("assistant\n", "assistant\n" + own_end))
    assert render(opens, paper_template(opens)).endswith("<|im_start|>assistant\n<think>\n")


def test_a_template_of_ones_own_and_none(source, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    changes = prepare_model(str(source), tmp_path / "mine", None, None, str(tmp_path / "mine.jinja"))
    assert len(changes) == 1
    assert Encoder(AutoTokenizer.from_pretrained(tmp_path / "mine"), "chat").render(QUESTION) == f"[{QUESTION.prompt}]"
    assert prepare_model(str(source), tmp_path / "kept", 20000.0, None, None) == ["rope_theta: 10000 -> 20000"]
    assert AutoTokenizer.from_pretrained(tmp_path / "kept").chat_template == CHATML
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    with pytest.raises(UserError, match="chat template .*bad.jinja"):
        prepare_model(str(source), tmp_path / "bad", None, None, str(tmp_path / "bad.jinja"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jinja", "kept", "mine", "mine.jinja"]


def test_refusals(source, extended, tmp_path):
    with pytest.raises(UserError, match="exists and is not empty"):
        prepare_model(str(source), extended)
    with pytest.raises(UserError, match="no such model folder"):
        prepare_model("./nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="takes 4096 positions already, more than --max-position 2048"):
        prepare_model(str(source), tmp_path / "out", max_position=2048)
    with pytest.raises(UserError, match="rope_parameters is 'yarn' already"):
        extended_config({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4e4, None, tmp_path)
    (tmp_path / "empty").mkdir()
    prepare_model(str(source), tmp_path / "empty")  # an empty folder is as good as none


def test_on_the_command_line(source, tmp_path):
    result = luffy("prepare", "model", source, "--out", tmp_path / "made")
    assert result.returncode == 0, result.stderr
    assert "-> 40000" in result.stdout
