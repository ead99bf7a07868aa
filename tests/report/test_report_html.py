"""The report as a reader gets it: right figures, inert text, one file, nothing silently left out."""

import json
import re
import shutil
import subprocess

import pytest
import yaml
from builders import write_rows

from luffy.cli import main
from luffy.errors import UserError
from luffy.report.charts import process_seconds, update_tokens
from luffy.report.html import POLICY, default_out, write_report
from luffy.report.model_card import CardFacts, model_card
from luffy.report.samples import BRIEF, MOST_GROUPS, MOST_SAMPLES
from luffy.report.tables import borders, stage_cells
from luffy.run_folder.runs import load_run

LUFFY = {"guidance": {"n_prefix": 1}, "train": {"steps": 2}}
ON_POLICY = {"guidance": {"n_prefix": 0}, "train": {"steps": 2}}


@pytest.fixture
def two_methods(write_run, make_metric_row, tmp_path):
    """Final accuracies 0.5, 0.6, 0.7 and 0.2, 0.2, 0.5; best 0.8 and 0.5; start 0.1."""
    start = {"step": 0, "time": 1.0, "val-core/accuracy": 0.1}
    for name, config, finals, best in (
        ("luffy", LUFFY, (0.5, 0.6, 0.7), 0.8),
        ("grpo", ON_POLICY, (0.2, 0.2, 0.5), 0.5),
    ):
        for seed, final in enumerate(finals):
            rows = [make_metric_row(1, best), make_metric_row(2, final)]
            if name == "grpo":  # what was not measured is not on record
                rows = [{key: value for key, value in row.items() if key != "batch/off_solved"} for row in rows]
            write_run(f"{name}/seed-{seed}", [start, *rows], config)
    return tmp_path / "runs"


def test_table_of_final_figures(two_methods, read_page):
    page = read_page(write_report([two_methods]))
    assert page.tables["final"][0] == [
        "Method",
        "Seeds",
        "Steps",
        "Held-out accuracy",
        "Reward",
        "Entropy",
        "Length",
        "Seconds",
    ]
    assert page.tables["final"][1] == ["start", "final", "best", "final", "final", "final", "in all"]
    each = "0.500 \u00b7 0.600 \u00b7 0.700"
    assert page.row("final", "luffy") == [
        "luffy", "3", "2", "0.100", f"0.600 0.500 to 0.700 {each}", "0.800", "0.200", "0.500", "20.0", "4.0",
    ]  # fmt: skip
    assert page.row("final", "grpo")[4] == "0.300 0.200 to 0.500 0.200 \u00b7 0.200 \u00b7 0.500"
    assert "Means over seeds; of fewer than 5, their range and each value." in page.text and "\u00b1" not in page.text


def test_an_interval_is_shown_of_many_seeds_alone(write_run, make_metric_row, read_page):
    for k, accuracy in enumerate((0.1, 0.2, 0.3, 0.4, 0.5)):
        write_run(f"many/seed-{k}", [make_metric_row(1, accuracy)])
    two = [write_run(f"two/seed-{k}", [make_metric_row(1, 0.167 + 0.25 * k)], {"seed": k}) for k in (0, 1)]
    page = read_page(write_report([two[0].parents[1]]))
    assert page.row("final", "many")[3] == "0.300 \u00b1 0.196"  # t(4) = 2.7764 times 0.15811 / sqrt(5)
    assert page.row("final", "two")[3] == "0.292 0.167 to 0.417"  # and not "0.292 ± 1.588"


def test_the_final_table_for_programs(two_methods, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["luffy", "report", str(two_methods), "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code and not (two_methods / "report.html").exists()
    out = capsys.readouterr().out
    table = json.loads(out)  # and nothing else
    assert table.keys() == {"version", "methods", "left_out"} and table["left_out"] == []
    grpo, luffy = table["methods"]
    assert grpo["method"] == "grpo" and luffy["method"] == "luffy"
    accuracy = luffy["figures"]["val-core/accuracy"]
    assert accuracy.keys() == {"start", "final", "best"} and accuracy["best"]["mean"] == pytest.approx(0.8)
    half = pytest.approx(0.2484, abs=1e-4)  # t(2) = 4.3027 times 0.1 / sqrt(3)
    assert accuracy["final"] == {"mean": pytest.approx(0.6), "half_width": half, "n": 3, "low": 0.5, "high": 0.7}
    assert luffy["figures"]["seconds"]["in_all"]["mean"] == pytest.approx(4.0)
    assert [run["figures"]["val-core/accuracy"]["final"] for run in luffy["runs"]] == [0.5, 0.6, 0.7]
    assert luffy["runs"][1].items() >= {"seed": 1, "steps": 2, "folder": str(two_methods / "luffy" / "seed-1")}.items()


def test_stages_have_a_table_and_a_border_in_the_curves(write_run, make_metric_row, read_page):
    sft = [{"step": s, "stage": "a-sft", "val-traces/loss": 2.0 - s / 10, "timing_s/step": 1.5} for s in range(5)]
    rl = [{**make_metric_row(s, s / 10), "stage": "b-rl"} for s in (5, 6)]
    stages = {"a-sft": {"method": "sft", "until": "flat_loss", "hand_on": "best"}, "b-rl": {}, "c-more": {}}
    run = write_run("road/seed-0", [*sft, *rl], {"stages": stages})
    done = {
        "name": "a-sft",
        "method": "sft",
        "first": 0,
        "last": 4,
        "ended_by": "flat_loss",
        "handed_on": 3,
        "settings": {},
    }
    (run / "stages.json").write_text(json.dumps({"finished": [done], "ending": None}))
    record = load_run(run)
    assert borders([record]) == {4: "b-rl"} and record.planned_steps is None
    assert stage_cells(record) == [
        ["0", "a-sft", "SFT", "1 to 4", "held-out loss was flat", "step 3", "\u2013", "1.600", "6.0"],
        ["0", "b-rl", "RL", "5 to 6", "\u2013", "\u2013", "0.600", "\u2013", "4.0"],
        ["0", "c-more", "\u2013", "not begun", *["\u2013"] * 5],
    ]
    page = (write_report([run])).read_text()
    assert "held-out loss was flat" in page and 'class="border"' in page
    assert 'class="border"' not in write_report([write_run("plain/seed-0", rl)]).read_text()


def test_time_knobs_and_runs(two_methods, read_page):
    page = read_page(write_report([two_methods]))
    assert page.tables["phases"][0] == ["Method", "Seconds per step", "rollout", "update", "other", "all"]
    assert page.row("phases", "luffy")[2:] == ["1.00", "0.500", "0.500", "2.00"]
    assert page.tables["knobs"] == [["Setting", "grpo", "luffy"], ["guidance.n_prefix", "0", "1"]]
    assert [row[:4] for row in page.tables["runs"][1:4]] == [
        ["grpo", str(k), "2", v] for k, v in enumerate(("0.200", "0.200", "0.500"))
    ]


def test_settings_changed_at_a_resume_are_told(write_run, make_metric_row, read_page):
    rows = [make_metric_row(step) for step in range(1, 13)]
    for seed in (0, 1):
        folder = write_run(f"luffy/seed-{seed}", rows, {"optim": {"lr": 1e-4}, "train": {"steps": 12}})
    assert "changes" not in read_page(write_report([folder.parent])).tables
    first = {"optim": {"lr": 1e-3, "schedule": "cosine"}, "train": {"steps": 4}, "out": "elsewhere"}
    then = {"optim": {"lr": 1e-3}, "train": {"steps": 8}, "rollout": {"n": 4}}
    for step, before in ((4, first), (8, then), (10, {"optim": {"lr": 1e-4}})):
        (folder / f"config-step-{step:06d}.yaml").write_text(yaml.safe_dump({"seed": 1, **before}))
    (folder / "config-step-000002.earlier-1.yaml").write_text("seed: 5")  # of another training
    page = read_page(write_report([folder.parent]))
    assert page.tables["changes"] == [
        ["Method", "Seed", "After step", "Setting", "From", "To"],
        ["luffy", "1", "4", "optim.schedule", "cosine", "constant"],
        ["luffy", "1", "4", "rollout.n", "8", "4"],
        ["luffy", "1", "8", "optim.lr", "0.001", "0.0001"],
        ["luffy", "1", "8", "rollout.n", "4", "8"],
    ]
    (folder / "config-step-000008.yaml").write_text("[damaged")
    assert "changes" not in read_page(write_report([folder.parent])).tables  # nor does it stop the others


def test_seconds_agree_with_the_phases(write_run, make_metric_row, read_page):
    """Steps of 2 s, an evaluation of 3 s in the second and a checkpoint of 1 s: 8 s, 4 a step."""
    late = {"timing_s/eval": 3.0, "timing_s/save": 1.0, "timing_s/plan": 0.001}
    folders = [write_run("a", [make_metric_row(1), make_metric_row(2, **late)])]
    folders.append(write_run("b", [make_metric_row(1, **{"timing_s/plan": 0.5})], {"seed": 5, "optim": {"lr": 0.1}}))
    page = read_page(write_report(folders))
    assert page.row("final", "a")[-1] == "8.0" and page.row("runs", "a")[-2] == "8.0"
    assert "but not the checkpoint at which a training ends or stops" in page.text  # no row of a step follows it
    heads = ["Method", "Seconds per step", "plan", "rollout", "update", "eval", "save", "other", "all"]
    assert page.tables["phases"][0] == heads
    assert page.row("phases", "a")[2:] == ["0.001", "1.00", "0.500", "1.50", "0.500", "0.499", "4.00"]


def test_times_that_are_all_0_are_shown(write_run, make_metric_row, read_page):
    folder = write_run("a", [make_metric_row(1, **{f"timing_s/{name}": 0.0 for name in ("rollout", "update", "step")})])
    assert read_page(write_report([folder])).row("phases", "a")[2:] == ["0.000", "0.000", "0.000"]


def test_samples_open_on_a_guided_group_and_overrides_are_explained_where_they_are(
    write_run, make_metric_row, make_sample_row
):
    trace = {key: value for key, value in make_sample_row(1).items() if key not in ("reward", "advantages", "status")}
    folders = [write_run("sft", [{"step": 1, "actor/sft_loss": 1.0}], samples=[trace])]
    folders.append(write_run("rl", [make_metric_row(1)], samples=[make_sample_row(1)]))
    text = write_report(folders).read_text()
    groups = re.findall(r'data-label="(\w+)" data-step="1" data-teacher="(\d)"', text)
    assert groups == [("sft", "0"), ("rl", "1")]
    assert "#samples:not(:has(.response .override)) .key .override" in text


def test_episodes_show_replies_turns_calls_faults_and_their_end(write_run, make_metric_row, make_sample_row):
    asked = {"tokens": ["add", "<end>", "5", "<ask>", "so 5"], "response": "add5so 5", "advantages": [0.5] * 5}
    rows = [
        make_sample_row(1, 0, **asked, off_policy=[1, 1, 0, 0, 1], replies=[[2, 4]], turns=2, calls=1, end="answer"),
        make_sample_row(
            1, 1, **asked, off_policy=[0] * 5, replies=[[2, 4]], turns=2, calls=0, end="timed_out", message="no answer",
            faults=["unknown_tool", "unknown_tool", "timed_out"], environment_reward=0.5, trace_left_out=True,
        ),
        make_sample_row(1, 2, off_policy=[0, 0, 0]),
    ]  # fmt: skip
    text = write_report([write_run("a", [make_metric_row(1)], samples=rows)]).read_text()
    cards = re.findall(r'data-sample="\d">(.*?)</pre>', text, re.DOTALL)
    assert [re.findall(r"class='(\w+)[^']*'>([^<]*)", card.partition("<pre")[2]) for card in cards[:1]] == [
        [("teacher", "add"), ("teacher", "&lt;end&gt;"), ("reply", "5"), ("reply", "&lt;ask&gt;"), ("teacher", "so 5")]
    ]
    chips = [re.findall(r"<span[^>]*>([^<]+)</span>", card.partition("<pre")[0]) for card in cards]
    assert {"2 turns, 1 call", "teacher", "3 tokens and 2 of replies, finish: stop"} < set(
        chips[0]
    ) and "no turns left" not in chips[0]
    assert {"2 turns, 0 calls", "environment timed out", "unknown tool (2 times)", "timed out"} < set(chips[1])
    assert {"environment's reward 0.50", "played anew"} < {chip.replace("&#39;", "'") for chip in chips[1]}
    assert not any("turn" in chip for chip in chips[2])
    assert "#samples:not(:has(.response .reply)) .key .reply" in text


def test_charts_show_only_what_a_run_has(two_methods, read_page):
    text = write_report([two_methods]).read_text()
    described = dict(re.findall(r'aria-label="([^"]+?) over training steps\. ([^"]*)"', text))
    assert described["Accuracy, held-out"].startswith("grpo goes from 0.100 at step 0 to 0.300 at step 2; luffy goes")
    assert (
        described["Reward, off-policy"] == "luffy goes from 1.000 at step 1 to 1.000 at step 2."
    )  # grpo has no traces
    assert "grpo" in described["Clip fraction"]  # always 0, and truly so
    assert "SFT loss" not in described  # an RL run's zeros are no loss
    assert "No data for: filtered groups, sft loss." in text


def test_traces_by_a_gate_or_a_replay_have_a_reward_too(write_run, make_metric_row):
    """Methods whose recipe says ``n_prefix: 0``, and which have traces in some steps."""
    rows = [make_metric_row(1, **{"batch/off_solved": 0.25}), make_metric_row(2, **{"batch/off_solved": 0.0})]
    text = write_report([write_run("hpt", rows, {"guidance": {"n_prefix": 0}})]).read_text()
    assert "Reward, off-policy over training steps. hpt goes from 0.250 at step 1 to 0.000 at step 2." in text
    early = write_run("early", [make_metric_row(1, **{"batch/off_solved": 0.0})], {"guidance": {"n_prefix": 0}})
    assert "Reward, off-policy over" not in write_report([early]).read_text()  # it has no traces


def test_further_evaluations_are_charted_and_tabled(write_run, make_metric_row, read_page):
    rows = [make_metric_row(1, 0.2, **{"val-ood/accuracy": 0.25, "val-aime/accuracy": 0.125})]
    out = write_report([write_run("a", rows)])
    page = read_page(out)
    assert page.tables["final"][0][3:6] == ["Held-out accuracy", "Aime accuracy", "OOD accuracy"]
    assert page.row("final", "a")[3:9] == ["0.200"] * 2 + ["0.125"] * 2 + ["0.250"] * 2
    assert "Accuracy, OOD over training steps. a goes from 0.250" in out.read_text()


def test_rewards_of_a_weighted_sum_are_shown_where_rewards_are(write_run, make_metric_row, make_sample_row, read_page):
    parts = {"critic/component/math": 0.25, "critic/component/own:<b>f</b>": 0.5}
    samples = [make_sample_row(1, components={"math": 1.0, "<b>own</b>": 0.25, "odd": "x"})]
    folder = write_run("weighted", [make_metric_row(1, 0.5, **parts)], samples=samples)
    path = write_report([folder])
    page, text = read_page(path), path.read_text()
    assert page.tables["final"][0][4:7] == ["Reward", "Reward math", "Reward own:<b>f</b>"]
    assert page.row("final", "weighted")[6:8] == ["0.250", "0.500"]
    assert "Reward math, on-policy" in text and "before its weight in the sum" in text
    assert '<span class="chip" title="before its weight">math 1</span>' in text and "own&lt;/b&gt; 0.25" in text
    assert "<b>own" not in text and "odd x" not in text


def test_accuracy_against_what_it_cost(write_run, make_metric_row):
    """A step is 2 seconds. SFT: 2 steps on one GPU. RL from its model: 2 steps on two GPUs, after those of SFT."""
    start = {"step": 0, "time": 1.0, "val-core/accuracy": 0.1}
    sft = write_run("sft", [start, *(make_metric_row(i, 0.3 * i, **{"perf/update_tokens": 100.0}) for i in (1, 2))])
    second = {
        "model": {"path": str(sft / "checkpoints/latest/model")},
        "launch": "torchrun",
        "parallel": {"workers": 2},
    }
    rows = [start, *(make_metric_row(i, 0.7, **{"perf/update_tokens": 50.0}) for i in (1, 2))]
    both = write_report([sft, write_run("sft-rl", rows, second)]).read_text()

    def drawn(axis):
        figure = re.search(rf'<figure data-chart="val-core/accuracy{axis}">.*?json">(.*?)</script>', both, re.DOTALL)
        return {line["label"]: line["x"] for line in json.loads(figure[1])}

    assert drawn("") == {"sft": [0, 1, 2], "sft-rl": [0, 1, 2]}
    assert drawn(" by GPU seconds") == {"sft": [0.0, 2.0, 4.0], "sft-rl": [4.0, 8.0, 12.0]}
    assert drawn(" by tokens") == {"sft": [0.0, 100.0, 200.0], "sft-rl": [200.0, 250.0, 300.0]}
    assert "sft-rl goes from 0.100 at 4.000 GPU seconds to 0.700 at 12.000 GPU seconds" in both


@pytest.mark.parametrize(("gpus", "axis"), [(0, "seconds"), (1, "GPU seconds"), (None, "GPU seconds")])
def test_seconds_are_those_of_a_gpu_where_there_was_one(write_run, make_metric_row, gpus, axis):
    folder = write_run("a", [make_metric_row(i, 0.1 * i) for i in (1, 2)])
    if gpus is not None:
        (folder / "data.json").write_text(json.dumps({"run": {"processes": 1, "gpus": gpus}}))
    page = write_report([folder]).read_text()
    assert re.findall(r'data-chart="val-core/accuracy by (.*?)"', page)[:1] == [axis]
    assert f"Accuracy, held-out, by {axis}" in page and ("GPU" in page) == (axis == "GPU seconds")


def test_many_runs_are_drawn_where_each_of_them_was(write_run, make_metric_row):
    """Together they have more points than a chart; none of them alone has."""
    for seed in range(12):
        seconds = {"timing_s/step": 10.0 + 0.37 * seed}
        rows = [make_metric_row(i, 0.1, **seconds) for i in range(1, 21)]
        slow = write_run(f"rl/seed-{seed}", rows, {"seed": seed})
    quick = write_run(
        "sft", [make_metric_row(i, 0.01 * i, **{"timing_s/step": 0.5}) for i in range(1, 21)], {"optim": {"lr": 0.5}}
    )
    page = write_report([slow.parent, quick]).read_text()
    figure = re.search(
        r'<figure data-chart="val-core/accuracy by GPU seconds">.*?json">(.*?)</script>', page, re.DOTALL
    )
    drawn = {line["label"]: line for line in json.loads(figure[1])}["sft"]
    assert drawn["x"] == [0.5 * i for i in range(1, 21)] and drawn["y"][-1] == pytest.approx(0.2)
    assert "more than 200 points" not in page


def test_the_whole_of_a_step_is_less_than_its_phases_where_they_overlap(write_run, make_metric_row, read_page):
    times = {"timing_s/rollout": 1.5, "timing_s/update": 1.0, "timing_s/step": 1.75}
    folder = write_run("a", [make_metric_row(1, **times)], {"async": {"max_staleness": 1}})
    out = write_report([folder])
    assert read_page(out).row("phases", "a")[2:] == ["1.50", "1.00", "1.75"]
    assert "the phases sum to more than the whole" in out.read_text()


def test_a_run_from_an_earlier_checkpoint_has_the_cost_up_to_it(write_run, make_metric_row):
    """A step is 2 seconds. The run went on from step 2 of 3, named by its folder, by a link, or by a copy that made a
    folder of the link."""
    sft = write_run("step-000009", [make_metric_row(i, **{"perf/update_tokens": 100.0}) for i in (1, 2, 3)])
    (sft / "checkpoints/step-000002/model").mkdir(parents=True)
    (sft / "checkpoints/latest").symlink_to("step-000002")
    (sft / "checkpoints/copied/model").mkdir(parents=True)
    (sft / "checkpoints/copied/state.json").write_text('{"progress": {"step": 2}}')
    (sft / "final").mkdir()
    folders = {"checkpoints/step-000002": 2, "checkpoints/latest": 2, "checkpoints/copied": 2, "final": 3}
    for place, steps in {f"{folder}/model": steps for folder, steps in folders.items()}.items():
        second = {"model": {"path": str(sft / place)}}
        run = load_run(write_run(f"rl-{place}", [make_metric_row(1, **{"perf/update_tokens": 50.0})], second))
        assert process_seconds(run) == {0: 2.0 * steps, 1: 2.0 * steps + 2}
        assert update_tokens(run) == {0: 100.0 * steps, 1: 100.0 * steps + 50}
        assert f"after {steps} steps of `luffy train`" in model_card(CardFacts(run, 1))


def test_the_run_itself_says_how_many_processes_it_had(write_run, make_metric_row):
    """A step is 2 seconds. ``torchrun`` by hand leaves ``parallel.workers`` alone; older runs, and a damaged file, do
    not say."""
    folder = write_run("a", [make_metric_row(1)], {"launch": "torchrun", "parallel": {"workers": 3}})
    assert process_seconds(load_run(folder)) == {0: 0.0, 1: 6.0}
    for said, processes in (('{"run": {"processes": 64}}', 64), ('{"run": {"processes": 1}}', 1), ('{"train": {}}', 3),
                            ('{"run": {"processes": -2}}', 3), ('{"run": 64}', 3), ("[]", 3), ("{", 3)):  # fmt: skip
        (folder / "data.json").write_text(said)
        assert process_seconds(load_run(folder)) == {0: 0.0, 1: 2.0 * processes}


def test_sft_alone(write_run, read_page):
    rows = [
        {
            "step": s,
            "time": 1.0,
            "actor/sft_loss": 1.0 / s,
            "actor/entropy_loss": 0.0,
            "actor/pg_clipfrac": 0.0,
            "response_length/mean": 9.0,
        }
        for s in (1, 2)
    ]
    out = write_report([write_run("sft/seed-0", rows)])
    page = read_page(out)
    assert page.tables["final"][0] == ["Method", "Seeds", "Steps", "Length"]
    assert page.row("final", "sft") == ["sft", "1", "2", "9.0"]
    assert "phases" not in page.tables
    assert "SFT loss over training steps. sft goes from 1.000 at step 1 to 0.500" in out.read_text()
    assert "Entropy over" not in out.read_text()
    assert "No samples recorded: sft." in page.text


def test_a_run_in_progress_is_said_to_be_one(write_run, make_metric_row, read_page):
    write_run("m/seed-0", [make_metric_row(s, 0.5) for s in (1, 2, 3)], {"train": {"steps": 3}})
    late = write_run("m/seed-1", [make_metric_row(1, 0.1)], {"train": {"steps": 3}}, tail='{"step": 2,')
    write_run("m/seed-2", [], tail='{"st')
    page = read_page(write_report([late.parent]))
    assert page.row("final", "m")[:3] == ["m", "2", "1 to 3"]
    assert page.row("final", "m")[3] == "0.300 0.100 to 0.500"
    assert f"Not at its last step, or stopped early: {late}." in page.text
    assert "seed-2/metrics.jsonl has no complete line yet" in page.text
    assert page.tables["runs"][2][2] == "1 of 3"


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp\x00\ud800\u2028]]>-->"


def test_hostile_text_is_inert(write_run, make_metric_row, make_sample_row, read_page):
    tokens = [HOSTILE, "<mark>"]
    row = make_sample_row(
        1, problem=HOSTILE, prompt=HOSTILE, answer=HOSTILE, response="".join(tokens), tokens=tokens, off_policy=[1, 0],
        log_probs=[0.0, -1.0], status=HOSTILE, finish=HOSTILE,
    )  # fmt: skip
    name = "<script>alert(3)</script>"
    config = {"name": name, "model": {"path": "</style><script>alert(4)</script>"}}
    folder = write_run("a", [make_metric_row(1, 0.5)], config, samples=[row])
    other = write_run("b", [make_metric_row(1, 0.5)], {"name": '"><svg onload=alert(5)>'})
    out = write_report(
        [folder, other], folder / "r.html", title="<script>alert(6)</script>", notes="<img src=x>\n\nsecond"
    )
    page = read_page(out)
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    data = [attrs for attrs in scripts if attrs.get("type") == "application/json"]
    assert len(scripts) == len(data) + 1  # our own, and the charts' figures
    assert [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "base", "form")] == []
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>U+202EgnpU+0000U+D800U+2028]]>-->" in page.text
    assert "<script>alert(6)</script>" in page.text
    assert "\u202e" not in out.read_text(encoding="utf-8")


def test_the_page_asks_for_nothing(two_methods, read_page):
    text = write_report([two_methods]).read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "fetch(" not in text
    page = read_page(two_methods / "report.html")
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in page.tags
    references = [
        attrs.get(name)
        for _, attrs in page.tags
        for name in ("src", "href", "srcset", "action", "data")
        if attrs.get(name)
    ]
    assert references == ["data:,"]


def test_headings_tables_and_figures_are_accessible(two_methods, read_page):
    page = read_page(write_report([two_methods]))
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    charts = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") in ("chart", "bar")]
    assert charts
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    hover = re.findall(r'<script type="application/json">(.*?)</script>', (two_methods / "report.html").read_text())
    assert [line["label"] for line in json.loads(hover[0])] == ["grpo", "luffy"]


def test_teacher_tokens_are_marked_and_policy_tokens_shaded(write_run, make_metric_row, make_sample_row):
    rows = [
        make_sample_row(1, 0, log_probs=[0.0, 0.0, -1.2]),
        make_sample_row(1, 1, off_policy=[0, 0, 0], reward=0.0, advantages=None),
    ]
    text = write_report([write_run("a", [make_metric_row(1)], samples=rows)]).read_text()
    assert "<mark class='teacher'>a b</mark><span class='p3'> c</span>" in text  # exp(-1.2) = 0.30
    assert "\u2713 reward 1<" in text
    assert "teacher prefix" in text
    assert "advantage +0.250" in text
    assert "\u2717 reward 0<" in text
    assert "advantage none (group rejected)" in text


def test_long_responses_and_many_groups_are_cut_and_said_to_be(write_run, make_metric_row, make_sample_row, read_page):
    tokens = [f" t{i}" for i in range(1000)]
    long = make_sample_row(
        1,
        tokens=tokens,
        response="".join(tokens),
        off_policy=[0] * 1000,
        log_probs=[-0.01] * 1000,
        advantages=[0.1] * 1000,
    )
    rows = [
        {**long, "step": s, "problem": f"p{p}", "sample": k}
        for s in (1, 2, 3, 4)
        for p in range(3)
        for k in range(MOST_SAMPLES + 2)
    ]
    out = write_report([write_run("a", [make_metric_row(s) for s in range(1, 5)], samples=rows)])
    page = read_page(out)
    groups = [attrs for tag, attrs in page.tags if tag == "article"]
    assert [(g["data-step"]) for g in groups] == ["1", "1", "3", "3", "4", "4"]
    assert len(groups) <= MOST_GROUPS
    assert f"[{1000 - BRIEF.head - BRIEF.tail:,} tokens left out]" in page.text
    assert f"{MOST_SAMPLES} of {MOST_SAMPLES + 2} samples shown." in page.text
    assert "6 of 12 recorded groups of samples are shown." in page.text
    assert out.stat().st_size < 1_000_000


def test_a_long_run_is_thinned_out_and_said_to_be(write_run, make_metric_row, read_page):
    out = write_report([write_run("a", [make_metric_row(s) for s in range(1, 5001)])])
    page = read_page(out)
    assert "Gradient norm: more than 200 steps, so each point is a mean over 25 of them." in page.text
    hover = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', out.read_text())[0])
    assert len(hover[0]["x"]) == 200
    assert out.stat().st_size < 500_000


def test_the_same_runs_give_the_same_bytes(two_methods):
    first = write_report([two_methods]).read_bytes()
    assert write_report([two_methods]).read_bytes() == first
    assert sorted(p.name for p in two_methods.iterdir()) == ["grpo", "luffy", "report.html"]


def test_where_the_report_goes(two_methods, tmp_path):
    assert default_out([two_methods / "luffy" / "seed-0"]) == two_methods / "luffy" / "seed-0" / "report.html"
    assert default_out([two_methods / "luffy", two_methods / "grpo"]) == two_methods / "report.html"
    assert write_report([two_methods], tmp_path / "new" / "x.html") == tmp_path / "new" / "x.html"
    assert (tmp_path / "new" / "x.html").exists()
    with pytest.raises(UserError, match="is a folder"):
        write_report([two_methods], tmp_path)


def test_nothing_to_report_is_an_error(write_run, tmp_path):
    with pytest.raises(UserError, match="no run was named"):
        write_report([])
    with pytest.raises(UserError, match="no complete line yet"):
        write_report([write_run("a", [])])
    assert not (tmp_path / "runs" / "a" / "report.html").exists()


def test_command_line(two_methods, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "sys.argv",
        ["luffy", "report", str(two_methods / "luffy"), str(two_methods / "grpo"), "--out", str(tmp_path / "r.html")],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert capsys.readouterr().out == f"report     {tmp_path / 'r.html'}\n"
    monkeypatch.setattr("sys.argv", ["luffy", "report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("luffy: error: no folder")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_script_runs_in_a_browser(two_methods, make_sample_row, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium or google-chrome")
    rows = [make_sample_row(step) for step in (1, 2)]
    write_rows(two_methods / "luffy" / "seed-0" / "samples.jsonl", rows)
    out = write_report([two_methods])
    point = "document.querySelector('.chart').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))"
    out.write_text(out.read_text().replace("</body>", f"<script>{point}</script></body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", out.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert '<div class="readout"><b>step 2</b>' in dom  # at the last step, with both methods
    assert "grpo  0.3" in dom
    assert "luffy  0.6" in dom
    assert len(re.findall(r'<article class="group"[^>]*hidden', dom)) == 1  # of two steps, one is shown
    assert '<div class="tools" hidden' not in dom
