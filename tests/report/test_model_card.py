import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from luffy.config import load_config
from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.hub import hub_id
from luffy.report.methods import about_recipe, closest_recipe, paper_of
from luffy.report.model_card import BenchmarkFigure, CardFacts, interval, model_card, thinned
from luffy.run_folder.runs import flat_config, read_config, without_samples

METHODS = sorted(path.stem for path in (BUILT_IN_RECIPES / "methods").glob("*.yaml"))
PUBLISHED = [method for method in METHODS if paper_of(method)]


def facts_of(folder, step=3, **more):
    return CardFacts(without_samples(folder, read_config(folder / "config.yaml"), step), step, **more)


def figure(**changes):
    known = {"name": "aime24", "title": "AIME 24", "items": 30, "k": 32, "accuracy": 0.2, "pass_at_k": 0.5}
    return BenchmarkFigure(**{**known, "settings": {"temperature": 0.6, "style": "chat"}, **changes})


def test_the_hub_reads_the_front_matter(write_run, make_metric_row, tmp_path):
    config = {
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "data": {"train": ["openai/gsm8k/main", "org/more"], "system_prompt": "a | b\n`c`"},
        "train": {"steps": 5},
    }
    folder = write_run("mine", [make_metric_row(i, 0.1 * i) for i in range(5)], config)
    data = {"train": {"usable": 1200, "with_traces": 900}, "held_out": {"core": 10}}
    text = model_card(facts_of(folder, data=data, benchmarks=[figure()], known={"license": "apache-2.0"}))
    (tmp_path / "README.md").write_text(text)
    card = ModelCard.load(tmp_path / "README.md").data
    assert card.base_model == "Qwen/Qwen2.5-0.5B" and card.license == "apache-2.0"
    assert card.library_name == "transformers" and card.pipeline_tag == "text-generation"
    assert card.datasets == ["openai/gsm8k", "org/more"] and card.tags == ["luffy", "reinforcement-learning"]
    (result,) = card.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("AIME 24", "accuracy", 20.0)
    assert result.metric_args == {"interval_95": [9.51, 37.31], "problems": 30}
    assert metadata_load(tmp_path / "README.md")["model-index"][0]["name"] == "mine"
    assert "1,200 problems, 900 with traces" in text and "- Steps: 3 of 5" in text
    assert "https://arxiv.org/abs/2504.14945" in text
    assert "| held-out, during training | 10 | 30.0 | 10.8 to 60.3 |  |" in text
    assert "| AIME 24 (avg@32) | 30 | 20.0 | 9.5 to 37.3 | 50.0 |" in text
    assert "| 3 | 0.300 | 0.300 |" in text and "| 4 |" not in text  # not of a later step
    assert "| `data.system_prompt` | `a ¦ b 'c'` |" in text


def test_an_evaluation_of_another_step_is_said_to_be(write_run, make_metric_row):
    start = {"step": 0, "time": 1.0, "val-core/accuracy": 0.5}
    rows = [
        start,
        make_metric_row(1, **{"val-core/accuracy": None}),
        make_metric_row(2, 0.25),
        make_metric_row(3, None),
    ]
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    folder = write_run("mine", rows)
    assert "## Evaluation" not in model_card(facts_of(folder, 1))
    assert "| held-out, during training |  | 25.0 |" in model_card(facts_of(folder, 2))
    assert "| held-out, during training, at step 2 |  | 25.0 |" in model_card(facts_of(folder, 3))


def test_what_is_not_known_is_left_out(write_run, make_metric_row):
    text = model_card(facts_of(write_run("mine", [make_metric_row(1)], {"model": {"path": "here"}})))
    card = ModelCard(text).data.to_dict()
    assert card.keys() == {"library_name", "pipeline_tag", "tags"}
    assert "a local model" in text and "## Evaluation" not in text


def test_nothing_of_this_machine_is_told(write_run, make_metric_row, tmp_path):
    """Every path and address that a config can hold, in turn; SFT before it lies on the same machine."""
    secret = "/home/alice smith/secret"
    first = write_run("sft", [{"step": 7, "actor/sft_loss": 1.0}], {"model": {"path": f"{secret}/base"}})
    config = {
        "name": f"{secret}/run",
        "model": {"path": str(first / "checkpoints" / "latest" / "model"), "tokenizer": secret, "reference": secret},
        "data": {
            "train": [f"{secret}/train.jsonl", "C:\\alice\\b.jsonl", "~alice/c.jsonl"],
            "chat_template": f"{secret}/turns.jinja",
        },
        "reward": {"kind": "choice"},
        "teacher": {"path": f"{secret}/teacher", "servers": ["http://alice-box:8000"]},
        "rollout": {"vllm": {"servers": ["http://alice-box:8001"]}},
        "ray": {"address": "ray://alice-box"},
        "plugins": [f"{secret}/mine.py"],
    }
    folder = write_run("mine", [make_metric_row(1, 0.5)], config)
    text = model_card(facts_of(folder))
    assert not [word for word in ("alice", "secret", "home", str(tmp_path)) if word in text]
    assert "| `data.chat_template` | `turns.jinja` |" in text
    assert "`train.jsonl`, `b.jsonl`, `c.jsonl`" in text and "`teacher.path=teacher`" in text
    assert "a local model, after 7 steps of `luffy sft`" in text and text.count("# run\n") == 1


@pytest.mark.parametrize("size", ["tiny", "small", "paper"])
def test_the_method_of_every_recipe_is_found(size):
    assert len(PUBLISHED) == 33
    for method in PUBLISHED:
        cfg = load_config(f"{size}/{method}")
        name, differences = closest_recipe(flat_config(cfg), sft=cfg.made_for == "sft")
        assert name == method
        own = {"tiny": 0.01, "small": 0.0, "paper": 0.01}[size]  # the entropy bonus is the size's
        assert differences.pop("algorithm.entropy_coef", own) == own
        assert size == "tiny" or differences == {}
    assert closest_recipe(flat_config(load_config(f"{size}/luffy")), sft=True) == ("sft", {})


def test_settings_that_differ_from_the_recipe_are_told(write_run, make_metric_row):
    folder = write_run(
        "mine", [make_metric_row(1)], {"algorithm": {"kl_coef": 0.5}, "guidance": {"gate": "trace_alone"}}
    )
    name, differences = closest_recipe(read_config(folder / "config.yaml"), sft=False)
    assert (name, differences) == ("luffy", {"guidance.gate": "trace_alone", "algorithm.kl_coef": 0.5})
    assert "recipe `luffy`, with `guidance.gate=trace_alone`, `algorithm.kl_coef=0.5`" in model_card(facts_of(folder))


def test_a_method_is_told_without_counts_that_a_run_may_have_otherwise(write_run, make_metric_row):
    folder = write_run("mine", [make_metric_row(1)], {"rollout": {"n": 2}})
    assert "- Method: LUFFY: on-policy samples and a trace in the group, " in model_card(facts_of(folder))
    assert not [name for name in PUBLISHED if re.search(r"\d (own )?samples", about_recipe(name))]


def test_settings_that_a_resume_changed_are_told_up_to_the_checkpoint(write_run, make_metric_row):
    folder = write_run("mine", [make_metric_row(step) for step in range(1, 9)], {"optim": {"lr": 1e-4}})
    first = {"optim": {"lr": 1e-3}, "model": {"reference": "/home/alice/a"}, "ray": {"address": "alice-box:6379"}}
    for step, before in ((3, first), (6, {"optim": {"lr": 5e-4}})):
        (folder / f"config-step-{step:06d}.yaml").write_text(yaml.safe_dump(before))
    told = ["| 3 | `optim.lr` | `0.001` | `0.0005` |", "| 6 | `optim.lr` | `0.0005` | `0.0001` |"]
    for step, changes in ((3, 0), (4, 1), (6, 1), (7, 2)):
        text = model_card(facts_of(folder, step))
        assert [line in text for line in told] == [changes > 0, changes > 1]
        assert ("| 3 | `model.reference` | `a` | `null` |" in text) == (changes > 0) and "alice" not in text
        assert ("Changed when the run was resumed:" in text) == (changes > 0)


def test_changed_settings_name_no_address_and_of_sft_only_what_it_uses(write_run, make_metric_row):
    weights = {"math": 1, "http://alice-box:9000/score": 0.5}
    before = {"optim": {"lr": 1e-3}, "reward": {"weights": weights}, "rollout": {"temperature": 0.7}}
    for name, rows in (("rl", [make_metric_row(4)]), ("sft", [{"step": 4, "actor/sft_loss": 1.0}])):
        folder = write_run(name, rows, {"optim": {"lr": 1e-4}, "rollout": {"temperature": 1.0}})
        (folder / "config-step-000002.yaml").write_text(yaml.safe_dump(before))
        text = model_card(facts_of(folder, 4))
        changed = text.partition("Changed when the run was resumed:")[2].partition("##")[0]
        assert "`optim.lr`" in changed and "alice" not in text
        assert ("`rollout.temperature`" in changed) == ("`(an address)`" in changed) == (name == "rl")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"kind": "gsm8k"}, "gsm8k"),
        ({"weights": {"math": 1, "my.own:reward": 0.5}}, "1.0 math + 0.5 my.own:reward"),
        ({"weights": {"math": 1, "http://alice-box:9000": 0.5}}, "0.5 (an address) + 1.0 math"),
    ],
)
def test_the_reward_of_an_evaluation_is_told(write_run, make_metric_row, reward, said):
    folder = write_run("mine", [make_metric_row(3, 0.5)], {"reward": reward})
    settings = {"temperature": 0.6, "reward": "http://alice-box:9000"}
    text = model_card(facts_of(folder, benchmarks=[figure(settings=settings)]))
    assert f"During training: reward {said}. `luffy eval`: temperature 0.6, reward (an address)." in text
    without = write_run("without", [{"step": 3}], {"reward": reward})
    assert "During training" not in model_card(facts_of(without, benchmarks=[figure()]))


def test_a_config_of_a_version_whose_keys_are_gone_still_has_a_card(write_run, make_metric_row):
    gone = {"guidance": {"n_prefix": 0}, "algorithm": {"remove_clip": False, "no_such_knob": 3}}
    text = model_card(facts_of(write_run("old", [make_metric_row(1)], gone)))
    assert "recipe `on_policy`" in text and "null" not in text


@pytest.mark.parametrize(
    ("share", "n", "low", "high"), [(0.8, 10, 0.4902, 0.9433), (0.0, 256, 0.0, 0.0148), (1.0, 1, 0.2065, 1.0)]
)
def test_wilson_interval(share, n, low, high):
    assert interval(share, n) == pytest.approx((low, high), abs=1e-4)


def test_a_table_of_a_long_run_is_short():
    steps = thinned(range(0, 501, 10))
    assert len(steps) == 10 and steps[0] == 0 and steps[-1] == 500


def test_the_base_of_a_prepared_model_and_of_prepared_data(write_run, make_metric_row, tmp_path):
    (tmp_path / "card.json").write_text(json.dumps({"settings": {"source": "open-r1/OpenR1-Math-220k"}}))
    config = {
        "model": {"path": "models/long"},
        "data": {"train": str(tmp_path / "train.parquet")},
        "prepare": {"models/long": "luffy prepare model Qwen/Qwen2.5-Math-7B --out models/long"},
    }
    first = write_run("first", [make_metric_row(1)], config)
    second = write_run("second", [make_metric_row(1)], {"model": {"path": str(first / "checkpoints/latest/model")}})
    assert facts_of(first).base == facts_of(second).base == "Qwen/Qwen2.5-Math-7B"
    assert facts_of(first).datasets == ["open-r1/OpenR1-Math-220k"]


def test_paths_that_name_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_id("org/name") == "org/name" and hub_id("openai/gsm8k/main", inside=True) == "openai/gsm8k"
    assert hub_id("/cache/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0f") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "name", "runs/a/model", "data/train.jsonl", "/org/name", "~/name", "../org", "a b/c"):
        assert hub_id(path) is None
