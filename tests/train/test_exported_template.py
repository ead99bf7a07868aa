"""The model of a checkpoint is asked as the training asked it, by whoever loads it."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from luffy.data import Encoder
from luffy.train import build
from luffy.train.loop import Trainer

OWN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
GIVEN = "{% for m in messages %}1+{{ m.content }}={% endfor %}\n"


@pytest.fixture
def model_with_template(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "with-template")
    (folder / "chat_template.jinja").write_text(OWN)
    return folder


def template_in(cfg, step):
    return AutoTokenizer.from_pretrained(cfg.folder / "checkpoints" / f"step-{step:06d}" / "model").chat_template


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("method", ["rl", "sft"])
def test_a_checkpoint_has_the_chat_template_of_the_training(make_config, tiny_model, tmp_path, method, lora):
    (tmp_path / "turns.jinja").write_text(GIVEN)
    chat = {"style": "chat", "chat_template": str(tmp_path / "turns.jinja")}
    cfg = make_config(data=chat, model={"lora": lora}, train={"steps": 1})
    with Trainer(cfg, method) as trainer:
        trainer.train()
        tasks = [trainer.run.tasks[i] for i in range(3)]
        assert trainer.run.tokenizer.chat_template is None
    assert template_in(cfg, 1) == GIVEN
    loaded = Encoder(AutoTokenizer.from_pretrained(cfg.folder / "checkpoints" / "latest" / "model"))
    assert [loaded.prompt_ids(task.problem) for task in tasks] == [task.prompt_ids for task in tasks]


def test_a_template_given_instead_of_the_model_s_own_takes_its_place(make_config, model_with_template):
    model = {"path": str(model_with_template)}
    own = make_config(name="own", model=model, data={"style": "chat"}, train={"steps": 1})
    given = make_config(name="given", model=model, data={"style": "chat", "chat_template": GIVEN}, train={"steps": 1})
    for cfg in (own, given):
        with Trainer(cfg) as trainer:
            trainer.train()
            assert trainer.run.tokenizer.chat_template == OWN
    assert (template_in(own, 1), template_in(given, 1)) == (OWN, GIVEN)
    settings = json.loads((given.folder / "checkpoints" / "latest" / "model" / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings


def test_a_run_whose_earlier_checkpoints_lack_the_template_has_it_in_the_next(make_config, monkeypatch):
    chat = {"style": "chat", "chat_template": GIVEN}
    with monkeypatch.context() as before:
        before.setattr(build, "with_template", lambda tokenizer, template: tokenizer)
        with Trainer(make_config(data=chat, train={"steps": 1})) as trainer:
            trainer.train()
    cfg = make_config(data=chat, train={"steps": 2})
    with Trainer(cfg) as trainer:
        trainer.train()
    assert (template_in(cfg, 1), template_in(cfg, 2)) == (None, GIVEN)
