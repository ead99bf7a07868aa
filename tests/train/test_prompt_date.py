"""Chat templates that print the date (Llama 3): the date is fixed when a run starts and is the same after a resume."""

import datetime
import json

import pytest
import transformers.utils.chat_template_utils as templates
import yaml
from builders import make_tokenizer

from luffy.config import load_config
from luffy.data import Encoder, prompts
from luffy.errors import ConfigError
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer
from luffy.types import Problem

DATED = "{{ strftime_now('%d%m%Y') }}={{ messages[0]['content'] }}"
PROBLEM = Problem("p", "1+1", "2")


def on(monkeypatch, day):
    monkeypatch.setattr(prompts, "today", lambda: datetime.date.fromisoformat(day))


def test_the_clock_is_read_once(monkeypatch):
    on(monkeypatch, "2024-07-26")
    encoder = Encoder(make_tokenizer(), chat_template=DATED)
    on(monkeypatch, "2024-07-27")
    monkeypatch.setattr(templates, "datetime", None)  # nor does the template read it
    assert encoder.render(PROBLEM) == "26072024=1+1" and encoder.prompt_date == "2024-07-26"


def test_a_given_date_and_a_template_without_one():
    given = Encoder(make_tokenizer(), chat_template=DATED, date="2025-01-02")
    assert given.render(PROBLEM) == "02012025=1+1" and given.prompt_date == "2025-01-02"
    assert Encoder(make_tokenizer(), chat_template="{{ messages[0]['content'] }}").prompt_date is None
    assert Encoder(make_tokenizer(), style="plain").prompt_date is None
    with pytest.raises(ConfigError, match=r"date='tomorrow' is not a date; write it as 2026-01-31"):
        Encoder(make_tokenizer(), style="plain", date="tomorrow")


def train_facts(cfg):
    with Trainer(cfg) as trainer:
        trainer.train()
        return trainer.run.messages.facts


def test_a_run_keeps_its_date(make_config, monkeypatch):
    config = lambda name, **more: make_config(name=name, data={"style": "chat", "chat_template": DATED, **more})  # noqa: E731
    on(monkeypatch, "2024-07-26")
    first = make_config(name="parts", data={"style": "chat", "chat_template": DATED}, train={"steps": 2})
    assert "prompts are dated 2024-07-26 (data.date)" in train_facts(first)
    on(monkeypatch, "2024-07-27")
    parts, whole = config("parts"), config("whole", date="2024-07-26")
    train_facts(parts), train_facts(whole)
    prompts = lambda cfg: [row["prompt"] for row in read_json_lines(cfg.folder / "samples.jsonl")]  # noqa: E731
    assert prompts(parts) == prompts(whole) and all(p.startswith("26072024=") for p in prompts(parts))
    kept = [yaml.safe_load((cfg.folder / "config.yaml").read_text())["data"]["date"] for cfg in (parts, whole)]
    assert kept == ["2024-07-26", "2024-07-26"] and not list(parts.folder.glob("config-step-*"))
    state = json.loads((parts.folder / "checkpoints" / "latest" / "state.json").read_text())
    assert state["date"] == "2024-07-26"


def test_a_run_without_a_date_has_none_on_record(make_config):
    cfg = make_config(train={"steps": 1})
    assert not [fact for fact in train_facts(cfg) if "dated" in fact]
    assert yaml.safe_load((cfg.folder / "config.yaml").read_text())["data"]["date"] is None


def test_a_date_may_stand_unquoted_in_yaml(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text("data: {date: 2024-07-26}\n")
    assert load_config(recipe).data.date == load_config(None, ["data.date=2024-07-26"]).data.date == "2024-07-26"
    assert load_config(None, ["name=2024-07-26"]).name == "2024-07-26"
