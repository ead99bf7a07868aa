"""Training, evaluation and the command line with a reward that is a server in a process of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from children import Child
from processes import serving, wait_until
from trainings import train_untimed, untimed_metrics
from typer.testing import CliRunner

from luffy.cli import app
from luffy.config import to_yaml
from luffy.errors import TrainingStopped, UserError
from luffy.evaluation.plan import Options
from luffy.evaluation.runner import run_evaluation
from luffy.rewards.kinds import reward
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer

SERVER = Path(__file__).parents[1] / "reward_server.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(SERVER, folder) as address:
        yield f"{address}/score", folder


def http_config(make_config, sums, name, url=None):
    http = {"url": url, "batch_size": 5, "wait_s": 0.01, "retries": 1} if url else {}
    return make_config(
        name=name,
        reward={"kind": "http" if url else "odd_length", "http": http},
        data={"eval": str(sums)},
        eval={"every": 2, "limit": 3},
        train={"steps": 3, "save_every": 1},
    )


@pytest.fixture(scope="module")
def undisturbed(make_config_in, sums, tmp_path_factory):
    """The same training with what the server computes as a function of this process."""

    @reward("odd_length")
    def odd_length(response, answer, problem):
        return len(response) % 2

    return train_untimed(http_config(make_config_in(tmp_path_factory.mktemp("undisturbed")), sums, "undisturbed"))


def test_a_server_is_as_good_as_a_function_also_after_a_few_errors(make_config, sums, server, undisturbed):
    url, folder = server
    cfg = http_config(make_config, sums, "served", url)
    (folder / "script.json").write_text(json.dumps([503, "score", "score", "drop"]))
    assert train_untimed(cfg) == undisturbed
    assert {row["critic/rewards/mean"] for row in undisturbed[1:]} - {0.0, 1.0}


@pytest.mark.slow
def test_killed_while_requests_are_under_way_and_resumed_equals_undisturbed(make_config, sums, server, undisturbed):
    url, folder = server
    cfg = http_config(make_config, sums, "killed", url)
    (folder / "script.json").write_text(json.dumps(["score"] * 7 + ["hang"] * 5))  # in the second step
    child = Child()
    child.start(train_untimed, cfg)
    wait_until((folder / "hangs").exists, child.process)
    child.end()
    assert [row["step"] for row in untimed_metrics(cfg)] == [0, 1]
    (folder / "script.json").write_text("[]")
    assert train_untimed(cfg) == undisturbed


def test_failures_are_counted_and_a_step_without_any_score_stops_the_run(make_config, sums, server, undisturbed):
    url, folder = server
    cfg = http_config(make_config, sums, "failing", url)
    # the evaluation at the start takes 1 request, a step 5: of the first step the last fails, of the second all
    (folder / "script.json").write_text(json.dumps(["score"] * 5 + [307] * 6))
    with (
        Trainer(cfg) as trainer,
        pytest.raises(TrainingStopped, match=r"at step 2: the reward failed on all 24 samples.*HTTP 307"),
    ):
        trainer.train()
    first = untimed_metrics(cfg)[-1]
    assert first["step"] == 1 and first["batch/verifier_failures"] == first["batch/verifier_call_failed"] > 0
    (folder / "script.json").write_text("[]")
    assert [row["step"] for row in train_untimed(cfg)] == [0, 1, 2, 3]


def test_verify_and_eval_ask_the_same_server(make_config, sums, server, tmp_path, tiny_model, monkeypatch):
    url, folder = server
    (folder / "script.json").write_text("[]")
    monkeypatch.setenv("REWARD_KEY", "sesame")
    recipe = tmp_path / "mine.yaml"
    cfg = make_config(reward={"kind": "http", "http": {"url": url, "header_env": {"X-Key": "REWARD_KEY"}}})
    recipe.write_text(to_yaml(cfg))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"answer": "5", "response": "5", "level": 3}\n{"answer": "5", "response": "56"}\n')
    for how in (["--reward", url], ["--reward-of", str(recipe)]):
        result = CliRunner().invoke(app, ["verify", str(rows), *how])
        assert [json.loads(line) for line in result.stdout.splitlines()] == [
            {"score": 1.0, "status": "ok"},
            {"score": 0.0, "status": "ok"},
        ]
    said = read_json_lines(folder / "requests.jsonl")[-1]
    assert said["key"] == "sesame" and said["samples"][0]["columns"] == {"level": 3}

    options = Options(str(tiny_model), str(sums), tmp_path / "eval", limit=4, max_tokens=8, style="plain",
                      chunk=2, reward_settings=cfg.reward)  # fmt: skip
    run_evaluation(options)
    items = read_json_lines(tmp_path / "eval" / "items.jsonl")
    assert len(items) == 4 and all(item["score"] == len(item["response"]) % 2 for item in items)
    assert url in (tmp_path / "eval" / "settings.json").read_text()
    shutil.rmtree(tmp_path / "eval")


@pytest.mark.parametrize("before", [[], ["score"]])
def test_eval_keeps_a_part_whose_requests_all_failed(make_config, sums, server, tmp_path, tiny_model, caplog, before):
    """Also the first part. The next call does not make it again, and ends also if the server refuses it again."""
    url, folder = server
    settings = make_config(reward={"kind": "http", "http": {"url": url}}).reward
    options = Options(str(tiny_model), str(sums), tmp_path / "eval", limit=2 * len(before) + 2, max_tokens=8,
                      style="plain", chunk=2, reward_settings=settings)  # fmt: skip

    def evaluate(script):
        (folder / "script.json").write_text(json.dumps(script))
        return run_evaluation(options).benchmarks["train"].statuses

    with pytest.raises(UserError, match="the reward failed on all 2 responses.*HTTP 400.*rerun the same command"):
        evaluate([*before, 400, 400, 400])  # a batch, then its two samples
    saved = read_json_lines(tmp_path / "eval" / "items.jsonl")
    assert [item["status"] for item in saved] == ["ok"] * 2 * len(before) + ["call_failed"] * 2
    ok = {"ok": 2 * len(before)} if before else {}
    assert evaluate([400, 400, 400]) == {**ok, "call_failed": 2} and "2 responses have no score" in caplog.text
    assert evaluate([400, "score", 400]) == {"ok": 2 * len(before) + 1, "call_failed": 1}
    assert evaluate([]) == {"ok": 2 * len(before) + 2}
    items = read_json_lines(tmp_path / "eval" / "items.jsonl")
    assert [item["response"] for item in items] == [item["response"] for item in saved]


def test_eval_asks_again_for_scores_of_requests_that_failed(make_config, sums, server, tmp_path, tiny_model, caplog):
    """With the responses of the first time: none is made anew, and those that have a score are not asked about."""
    url, folder = server
    cfg = make_config(reward={"kind": "http", "http": {"url": url, "batch_size": 2, "concurrency": 1, "retries": 0}})
    options = Options(
        str(tiny_model), str(sums), limit=6, max_tokens=8, style="plain", reward_settings=cfg.reward, temperature=1.0
    )

    def evaluate(name, script):
        (folder / "script.json").write_text(json.dumps(script))
        (folder / "requests.jsonl").write_text("")
        result = run_evaluation(replace(options, out=tmp_path / name))
        asked = [len(request["samples"]) for request in read_json_lines(folder / "requests.jsonl")]
        return result, read_json_lines(tmp_path / name / "items.jsonl"), asked[1:]  # the first is the self-check

    expected = evaluate("undisturbed", [])
    assert expected[2] == [2, 2, 2]
    first, rows, _ = evaluate("failed", ["score", 500, "score"])
    assert first.benchmarks["train"].statuses == {"ok": 4, "call_failed": 2}
    assert [row["status"] for row in rows if "token_ids" in row] == ["call_failed"] * 2
    assert "2 responses have no score" in caplog.text
    second, same, asked = evaluate("failed", [500])  # and once more
    assert (second, same, asked) == (first, rows, [2])
    assert evaluate("failed", []) == (expected[0], expected[1], [2])
