"""Traces end where responses end: one set of end tokens for the encoder and the engine."""

import json
import shutil

import pytest
from builders import LETTERS, make_tokenizer, write_rows
from transformers import AutoModelForCausalLM, GenerationConfig

from luffy.errors import DataError
from luffy.run_folder.recorder import read_json_lines
from luffy.step.tasks import build_encoder
from luffy.train.loop import Trainer

EOS, HASH = 1, LETTERS.index("#") + 3
TURNS = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
PAD = 0


@pytest.fixture
def two_ends(tiny_model, tmp_path):
    """A model whose generation config names a second end token, as Qwen2.5-Instruct's does."""
    folder = shutil.copytree(tiny_model, tmp_path / "two-ends")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [HASH, EOS]}))
    return folder


def recorded_traces(tmp_path, *traces):
    path = tmp_path / "recorded.jsonl"
    rows = [{"id": str(i), "prompt": "1+1", "answer": "2", "traces": [{"token_ids": t}]} for i, t in enumerate(traces)]
    write_rows(path, rows)
    return str(path)


def test_a_recorded_trace_gets_no_second_end_token(make_config, two_ends, tmp_path):
    data = recorded_traces(tmp_path, [5, 6, HASH], [5, 6, EOS], [5, 6], [5, HASH, 6, EOS])
    cfg = make_config(model={"path": str(two_ends)}, data={"train": data}, train={"steps": 1}, batch={"problems": 4})
    with Trainer(cfg, "sft") as trainer:
        tasks = [trainer.run.tasks[i] for i in range(4)]
        ends = [task.demonstrations[0].token_ids for task in tasks]
        assert ends == [(5, 6, HASH), (5, 6, EOS), (5, 6, EOS), (5, HASH)]
        assert set(trainer.run.eos_ids) == {EOS, HASH}
        assert any("1 trace(s) cut at an end token inside them" in notice for notice in trainer.notices)


def test_the_engine_stops_where_the_template_ends_a_turn(make_config, tmp_path):
    """Neither the tokenizer nor the generation config knows that token as an end."""
    chat = {"style": "chat", "chat_template": TURNS}
    cfg = make_config(data=chat, train={"steps": 2}, rollout={"n": 8})
    assert build_encoder(cfg, make_tokenizer()).eos_ids == (PAD, EOS)
    with Trainer(cfg) as trainer:
        assert trainer.run.eos_ids == (PAD, EOS)
        model = trainer.train()
    assert GenerationConfig.from_pretrained(model).eos_token_id == [PAD, EOS]
    rows = read_json_lines(cfg.folder / "samples.jsonl")
    assert {row["token_ids"][-1] for row in rows if row["finish"] == "trace"} == {PAD}
    own = [row["token_ids"] for row in rows if row["finish"] == "stop"]
    assert PAD in {ids[-1] for ids in own} and all(PAD not in ids[:-1] and EOS not in ids[:-1] for ids in own)


@pytest.mark.parametrize(
    ("odd", "saved", "told"),
    [
        (
            {"temperature": 0.9, "top_p": 0.6},
            {"do_sample": True, "temperature": 0.9, "top_p": 0.6},
            "do_sample is true",
        ),
        ({"do_sample": False, "temperature": 0.6}, {"do_sample": False}, "temperature 0.6 is left out"),
        ({"early_stopping": True, "length_penalty": 2.0}, {}, "early_stopping True is left out, length_penalty 2.0 is"),
        ({"pad_token_id": -1, "top_k": 20}, {"do_sample": True, "top_k": 20}, "is true, pad_token_id -1 is left out"),
    ],
)
def test_a_generation_config_that_transformers_does_not_save_costs_no_run(
    make_config, tiny_model, tmp_path, caplog, odd, saved, told
):
    folder = shutil.copytree(tiny_model, tmp_path / "odd")
    written = {"eos_token_id": [HASH, EOS], "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps({**written, **odd}))
    with Trainer(make_config(model={"path": str(folder)}, train={"steps": 1})) as trainer:
        model = trainer.train()
    read = AutoModelForCausalLM.from_pretrained(model).generation_config.to_diff_dict()
    assert set(read.pop("eos_token_id")) == {EOS, HASH} and read.pop("transformers_version")
    assert read == {"repetition_penalty": 1.1, **saved}
    assert [told in record.message for record in caplog.records if "generation config" in record.message] == [True]


def test_a_model_without_a_generation_config_is_saved(make_config):
    """A class of one's own need not be one that generates."""
    cfg = make_config(train={"steps": 1})
    with Trainer(cfg) as trainer:
        trainer.model.generation_config, trainer.model.can_generate = None, lambda: False
        assert (trainer.train() / "model.safetensors").exists()


def test_held_out_traces_leave_the_training_data_with_their_repeats(make_config, sums, tmp_path):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    write_rows(tmp_path / "twice.jsonl", [*rows, *({**row, "id": f"{row['id']}-again"} for row in rows)])
    cfg = make_config(
        data={"train": str(tmp_path / "twice.jsonl")}, eval={"hold_out": 4, "every": 1}, train={"steps": 2}
    )
    with Trainer(cfg, "sft") as trainer:
        held = {trainer.run.tokenizer.decode(list(s.prompt_ids)) for s in trainer.held_out.traces}
        left = {trainer.run.tasks[i].problem.prompt for i in range(len(trainer.run.tasks))}
        prompts = {row["prompt"] for row in rows if row["traces"]}
        assert len(held) == 4 and left | {text.strip() for text in held} == prompts and not left & held
        before = trainer.held_out.trace_loss()["val-traces/loss"]
        by_hand = [-log_probs.sum() for log_probs in trainer.run.policy.log_probs(trainer.held_out.traces)]
        assert before.value == pytest.approx(
            float(sum(by_hand)) / sum(s.token_ids.numel() for s in trainer.held_out.traces), rel=1e-5
        )
        trainer.train()
    losses = [row["val-traces/loss"] for row in read_json_lines(cfg.folder / "metrics.jsonl")]
    assert len(losses) == 3 and losses[0] == before.value and losses[2] < losses[0]
    best = json.loads((cfg.folder / "best.json").read_text())
    assert best["step"] in (1, 2) and best["loss"] == pytest.approx(min(losses[1:]))


def test_traces_of_a_file_are_held_out_too(make_config, sums):
    cfg = make_config(data={"eval_traces": str(sums)}, eval={"hold_out": 3})
    with Trainer(cfg, "sft") as trainer:
        assert len(trainer.held_out.traces) == 3 + 16 and len(trainer.run.tasks) == 13
    with pytest.raises(DataError, match=r"'eval.hold_out' \(16\) takes all of the 16 problems that have traces"):
        Trainer(make_config(eval={"hold_out": 16}), "sft")
