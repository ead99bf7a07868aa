"""What the base does before training: the same numbers as its own samples and log-probs, and no more than was asked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from luffy.dry_run import base_lines, base_model
from luffy.dry_run.base_model import (
    CASES,
    CLOSE,
    FAR,
    NEW,
    NO_TRACES,
    PROBLEMS,
    RARE,
    SECONDS,
    SOME,
    STUCK,
    TRIES,
    Found,
    case_of,
    measure,
)
from luffy.dry_run.check import dry_run
from luffy.dry_run.place import Place
from luffy.guidance.plan import given
from luffy.models.load import load_model
from luffy.step.tasks import build_encoder
from luffy.train import setup
from luffy.train.build import load_tasks
from luffy.train.build_engines import scores_of
from luffy.types import Request, Sampling

PAGE = Path(__file__).parents[2] / "docs" / "choose.md"


def tasks_of(cfg, method="rl"):
    encoder = build_encoder(cfg, setup.load_policy_tokenizer(cfg.model))
    return load_tasks(cfg, method, encoder, encoder)[0]


def test_probabilities_are_those_of_the_models_own_forward_pass(make_config):
    cfg = make_config(rollout={"temperature": 0.5})
    tasks = tasks_of(cfg)
    some = [task for task in (tasks[i] for i in range(len(tasks))) if task.demonstrations][:3]
    found = measure(cfg, "rl", tasks, some)
    model, expected = AutoModelForCausalLM.from_pretrained(cfg.model.path).eval(), []
    for task in some:
        for demo in task.demonstrations:
            ids = torch.tensor([[*task.prompt_ids, *demo.token_ids]])
            with torch.no_grad():
                probs = (model(ids).logits[0] / 0.5).softmax(-1)
            expected += [probs[len(task.prompt_ids) - 1 + i, t] for i, t in enumerate(demo.token_ids)]
    assert torch.allclose(found.probs, torch.stack(expected), atol=1e-5) and found.traces == 3
    assert found.unlikely == float((torch.stack(expected) < 0.05).float().mean())
    assert (found.asked, found.problems, found.has_traces) == (3, 3, True)


def test_of_qlora_it_is_measured_in_four_bits(make_config):
    pytest.importorskip("bitsandbytes")
    cfg = make_config(model={"lora": {"quantize": "nf4"}})
    tasks = tasks_of(cfg)
    found = measure(cfg, "sft", tasks, some := [task for task in (tasks[0], tasks[1]) if task.demonstrations])
    score = scores_of(load_model(cfg.model.path, four_bits=True), 1.0, cfg.batch.tokens)
    task, trace = some[0], given(some[0], some[0].demonstrations[0])
    (expected,) = score([Request(task.prompt_ids, 0, Sampling(1))], [trace.token_ids])
    assert torch.equal(found.probs[: len(expected)], expected.exp())


def test_a_problem_is_solved_by_one_of_eight(make_config, monkeypatch):
    cfg = make_config()
    tasks = tasks_of(cfg)
    some = [tasks[i] for i in range(5)]
    seen = []

    def solved(self, value):
        seen.append(value)
        return len(seen) in (8, 17)  # the last sample of the first problem, the first one of the third

    monkeypatch.setattr(type(cfg.reward), "solved", solved)
    assert measure(cfg, "rl", tasks, some).solved == 2


def test_a_reward_that_always_fails_solves_no_problem_and_says_why(make_config):
    cfg = make_config(reward={"kind": "loop_rewards:always_raises"})
    (line,) = base_lines.base_lines(cfg, "rl", tasks_of(cfg), 1000, Place.of(cfg))
    assert line.startswith("base       not measured: the reward failed on all samples, first: ")
    assert "KeyError: 'verdict'" in line


def test_it_ends_when_its_time_is_up(make_config, monkeypatch):
    cfg = make_config()
    tasks = tasks_of(cfg)
    monkeypatch.setattr(base_model, "SECONDS", -1.0)
    found = measure(cfg, "rl", tasks, [tasks[0], tasks[1]])
    assert (found.asked, found.problems, found.solved_share) == (2, 0, None) and found.traces > 0
    assert base_lines.said(found)[0].startswith(
        "base       no problem was finished with 8 samples each in 60 s; tokens of"
    )
    assert len(base_lines.said(found)) == 1  # what decides is not known
    monkeypatch.setattr(base_model, "TRACE_SECONDS", -1.0)
    assert measure(cfg, "rl", tasks, [tasks[0], tasks[1]]).unlikely is None


def test_a_dry_run_says_it_once_and_only_if_asked(make_config):
    cfg = make_config(stages={"sft": {"method": "sft", "train": {"steps": 2}}, "rl": {"train": {"steps": 2}}})
    plain, lines = dry_run(cfg, "rl"), dry_run(cfg, "rl", measures=True)
    said = [line for line in lines if line.startswith(("base ", "method "))]
    assert said[0].startswith("base       solves ") and "of 16 problems with 8 samples each; tokens of" in said[0]
    assert said[1].startswith("method     ") and "docs/choose.md" in said[1] and len(said) == 2
    untimed = [[line for line in part if not line.startswith(("memory", "time", "disk"))] for part in (plain, lines)]
    assert untimed[0] == [line for line in untimed[1] if line not in said]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"LARGEST_ON_CPU": 10}, "M parameters are too many for this CPU"),
        ({"ROOM": 1e9}, "GiB need more memory than the"),
        ({"measure": None}, None),
    ],
)
def test_what_is_skipped_is_said(make_config, monkeypatch, changes, why):
    def fails(*_):
        raise FloatingPointError("the model gave NaN logits\nmore")

    for name, value in changes.items():
        monkeypatch.setattr(base_lines, name, value or fails)
    (line,) = [line for line in dry_run(make_config(), "rl", measures=True) if line.startswith("base ")]
    assert line.startswith("base       not measured: ") and (why or "the model gave NaN logits") in line


def test_weights_that_are_not_here_are_not_downloaded(make_config, tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    cfg = make_config(model={"path": str(tmp_path)})
    (line,) = [line for line in dry_run(cfg, "rl", measures=True) if line.startswith("base ")]
    assert line.endswith(f"the weights of {tmp_path} are not in a folder of this machine")


@pytest.mark.parametrize(
    ("solved", "unlikely", "case"),
    [
        (0.0, 0.0, STUCK), (0.05, 0.9, STUCK), (0.0501, 0.0, SOME), (0.499, 0.9, SOME), (0.5, 0.0499, CLOSE),
        (1.0, 0.0, CLOSE), (0.5, 0.05, FAR), (0.4, None, SOME), (0.6, None, None), (None, 0.1, None),
    ],
)  # fmt: skip
def test_the_case_at_its_borders(solved, unlikely, case):
    assert case_of(solved, unlikely) is case
    assert case_of(solved, unlikely, has_traces=False) is NO_TRACES


def test_tokens_that_are_never_sampled_need_sft_first():
    probs = torch.tensor([0.9] * 997 + [0.9, 9e-6, 1e-9])
    found = Found(2, 2, 1, True, 3, probs, ())
    assert found.never == pytest.approx(0.002) and found.case is NEW
    assert base_lines.said(found)[0].endswith("unlikely (below 0.05), 0.20% never sampled (below 0.00001)")
    assert replace(found, probs=probs.clip(min=8e-6)).case is NEW
    found = replace(found, probs=torch.cat([probs, torch.ones(1)]))  # a little less
    assert found.case is CLOSE and "0.20% never sampled" in base_lines.said(found)[0]
    assert replace(found, probs=probs.clip(min=1.1e-5)).never == 0
    assert replace(found, traces=0, probs=torch.zeros(0)).case is None
    assert replace(found, has_traces=False).case is NO_TRACES


def test_the_page_has_the_same_table_and_numbers():
    text = PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[2:] == [[case.when, case.take] for case in CASES]
    said = " ".join(text.split())
    assert f"samples {PROBLEMS} training problems {TRIES} times" in said
    assert f"if the base gives it less than {RARE:g}" in said and SECONDS == 60
