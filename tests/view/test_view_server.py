"""What comes over the wire."""

import json
import os

import pytest
from builders import write_rows

from luffy.cli import main
from luffy.errors import UserError
from luffy.view.server import POLICY, ViewServer

TOKEN = "a-token-of-some-length"


@pytest.fixture
def runs(write_run, make_metric_row, make_sample_row, tmp_path):
    for name, n_prefix in (("luffy", 1), ("grpo", 0)):
        for seed in (0, 1):
            rows = [make_metric_row(s, 0.1 * s + 0.2 * seed) for s in (1, 2)]
            config = {"guidance": {"n_prefix": n_prefix}, "train": {"steps": 2}}
            samples = [make_sample_row(1, k) for k in range(2)] if name == "luffy" else ()
            write_run(f"{name}/seed-{seed}", rows, config, samples)
    return tmp_path / "runs"


def test_every_answer_is_fenced_in(serving, runs):
    with serving([runs]) as client:
        for path in ("/", "/assets/view.js", "/api/state", "/nothing"):
            _, headers, _ = client.ask(path)
            assert headers["Content-Security-Policy"] == POLICY
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert "Access-Control-Allow-Origin" not in headers
    assert "unsafe" not in POLICY and "http" not in POLICY


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_get_and_nothing_else(serving, runs, method):
    with serving([runs]) as client:
        status, headers, _ = client.ask("/api/state", method=method, body=b"x" if method == "POST" else None)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py", "/assets/%2e%2e/server.py", "/assets/", "/assets/report.js", "/../../etc/passwd",
        "//etc/passwd", "/runs/luffy/seed-0/config.yaml", "/api", "/api/state/",
    ],
)  # fmt: skip
def test_nothing_but_the_listed_paths(serving, runs, path):
    with serving([runs]) as client:
        status, _, body = client.ask(path)
    assert (status, body) == (404, {"error": "nothing here"})


def test_a_run_goes_by_its_number_and_never_by_a_path(serving, runs):
    with serving([runs]) as client:
        for name in ("../../etc", str(runs / "luffy" / "seed-0"), "", "0" * 12):
            status, _, body = client.ask("/api/samples", {"run": name})
            assert (status, body) == (400, {"error": "no such run on this page; reload it"})
        status, _, body = client.ask("/api/samples", {"run": client.run, "file": "../config.yaml"})
        assert (status, body["error"]) == (400, "file is '../config.yaml'; known: train, eval")


def test_strange_questions_get_one_line(serving, runs):
    with serving([runs]) as client:
        run = client.run
        for path, query, said in (
            ("/api/curves", {"smoothing": "1.5"}, "smoothing is 1.5; it lies between 0 and 0.99"),
            ("/api/curves", {"smoothing": "nan"}, "smoothing is nan"),
            ("/api/curves", {"smoothing": "x"}, "smoothing is 'x'; it is a number"),
            ("/api/curves", {"method": "x"}, "method is 'x'; it is a number"),
            ("/api/samples", {"run": run, "reward": "<b>"}, "reward is '<b>'; known: solved, unsolved"),
            ("/api/samples", {"run": run, "search": "x" * 1001}, "a search of 1,001 characters; at most 1,000"),
            ("/api/group", {"run": run, "at": "99999"}, "no sample 99999"),
            ("/api/group", {"run": run, "at": "-1"}, "no sample -1"),
            ("/api/state", [(f"f{i}", "1") for i in range(300)], "not an address: Max number of fields exceeded"),
        ):
            status, _, body = client.ask(path, query)
            assert status == 400
            assert body["error"].startswith(said)


def test_a_foreign_host_is_refused_before_anything_is_read(serving, runs):
    with serving([runs]) as client:
        status, _, body = client.ask("/api/state", headers={"Host": f"evil.example:{client.port}"})
        assert status == 421
        assert "does not go by the name" in body["error"]
        assert client.ask("/api/state", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_the_token_opens_once_and_then_the_cookie_does(serving, runs):
    with serving([runs], token=TOKEN) as client:
        assert client.ask("/")[0] == client.ask("/assets/view.js")[0] == client.ask("/api/state")[0] == 401
        assert client.ask("/", {"token": TOKEN + "x"})[0] == 401
        status, headers, _ = client.ask("/", {"token": TOKEN})
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        assert client.ask("/api/state", headers={"Cookie": cookie.split(";")[0]})[0] == 200
        assert client.ask("/api/state", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        assert TOKEN not in client.url


def test_an_open_address_without_a_token_does_not_start(runs, monkeypatch, capsys):
    with pytest.raises(UserError, match="needs a token"):
        ViewServer([runs], "0.0.0.0", 0)
    monkeypatch.setattr("sys.argv", ["luffy", "view", str(runs), "--host", "0.0.0.0", "--port", "0"])
    monkeypatch.delenv("LUFFY_VIEW_TOKEN", raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("luffy: error: --host 0.0.0.0 can be reached by others")


def test_a_port_in_use_is_said_to_be(serving, runs):
    with serving([runs]) as client, pytest.raises(UserError, match=f":{client.port} .*choose another --port"):
        ViewServer([runs], port=client.port)


def test_state_curves_tables_and_differences(serving, runs):
    with serving([runs]) as client:
        state = client.get("/api/state")
        assert [(m["label"], m["style"], [r["seed"] for r in m["runs"]]) for m in state["methods"]] == [
            ("grpo", 0, [0, 1]),
            ("luffy", 1, [0, 1]),
        ]
        assert state["methods"][1]["runs"][0]["files"] == ["train"]
        assert client.get("/api/state", have=state["version"]) == {"version": state["version"]}
        curves = client.get("/api/curves", method=1, metric="timing_s/step")
        assert "Accuracy, held-out over training steps. luffy goes from 0.200 at step 1 to 0.300" in curves["html"]
        assert "grpo" not in curves["html"]
        assert curves["html"].index('data-chart="timing_s/step"') < curves["html"].index(
            'data-chart="val-core/accuracy"'
        )
        assert 'class="mean m1"' in curves["html"] and 'class="mean m0"' not in curves["html"]  # keeps its colour
        assert 'class="band m1"' in curves["html"]
        assert "<b>0.300</b>" in client.get("/api/tables", method=1)["final"]
        knobs = client.get("/api/knobs")
        assert "guidance.n_prefix" in knobs["html"] and "<code>seed</code>" not in knobs["html"]
        single = client.get("/api/knobs", by="run")
        assert single["columns"] == 4 and "<code>seed</code>" in single["html"]
        assert knobs["changes"] == single["changes"] == ""
        resumed = runs / "luffy" / "seed-1"
        (resumed / "config-step-000001.yaml").write_text("seed: 1\nguidance: {n_prefix: 1}\noptim: {lr: 0.5}")
        assert "<code>optim.lr</code>" in client.get("/api/knobs")["changes"]
        assert client.get("/api/knobs", method=0)["changes"] == ""
        assert client.get("/api/curves", method=-1)["html"] == '<div class="charts"></div>'


def test_more_methods_than_colours_are_drawn_by_family(serving, write_run, make_metric_row):
    rows = [make_metric_row(0, 0.0), make_metric_row(1, 0.1)]
    for i in range(9):
        folder = write_run(f"m{i}x", rows, {"guidance": {"n_prefix": i % 2}, "optim": {"lr": 1e-5 * (i + 1)}})
    with serving([folder.parent]) as client:
        html = client.get("/api/curves")["html"]
        assert html.count('data-chart="val-core/accuracy"') == 2 and html.count('<path class="behind"') == 9
        assert client.get("/api/curves", method=1)["html"].count('<path class="behind"') == 0


def test_smoothing_is_a_mean_of_what_was_recorded(serving, runs):
    with serving([runs]) as client:
        html = client.get("/api/curves", method=1, smoothing=0.5)["html"]
    # seeds 0.1, 0.2 and 0.3, 0.4: means 0.2, 0.3; at step 2 (0.3 + 0.5 * 0.2) / 1.5
    assert "luffy goes from 0.200 at step 1 to 0.267 at step 2" in html


def test_a_group_with_its_samples_side_by_side(serving, runs):
    with serving([runs]) as client:
        state = client.get("/api/state")
        run = state["methods"][1]["runs"][0]["id"]
        group = client.get("/api/group", run=run, at=1)
        assert (group["numbers"], group["step"], group["steps"]) == ([0, 1], 1, [[1, 0]])
        assert group["html"].count('<div class="sample"') == 2
        assert "<mark class='teacher' title='teacher'>a</mark>" in group["html"]
        assert "<span class='p9' title='policy, probability 0.905'> c</span>" in group["html"]  # exp(-0.1)
        assert client.get("/api/text", run=run, at=1) == {"text": "a b c"}


def test_lone_surrogates_and_megabytes_come_through(serving, write_run, make_metric_row, make_sample_row):
    row = make_sample_row(
        1, problem="\ud800<b>", response="x" * 1_000_000, tokens=["x" * 1_000_000], off_policy=[0], log_probs=[-1.0]
    )
    with serving([write_run("a", [make_metric_row(1)], samples=[row])]) as client:
        run = client.run
        (entry,) = client.get("/api/samples", run=run)["entries"]
        assert entry["problem"] == "U+D800<b>"
        assert entry["ends"] == "\u2026" + "x" * 40
        group = client.get("/api/group", run=run, at=0)
        assert len(group["html"]) < 40_000
        assert "&lt;b&gt;" in group["html"]
        assert len(client.get("/api/text", run=run, at=0)["text"]) == 1_000_000


def test_a_run_that_goes_on_starts_and_breaks_while_being_watched(
    serving, write_run, make_metric_row, make_sample_row, monkeypatch
):
    monkeypatch.setattr("luffy.view.live.LOOK_FOR_RUNS_S", 0.0)
    folder = write_run("a", [make_metric_row(1, 0.1)], samples=[make_sample_row(1)], tail='{"step": 2, "val-co')
    with serving([folder.parent]) as client:
        before = client.get("/api/state")
        run = client.run
        assert before["methods"][0]["runs"][0]["steps"] == "1"
        assert client.get("/api/samples", run=run)["total"] == 1
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('re/accuracy": 0.5}\n')
        after = client.get("/api/state")
        assert after["version"] != before["version"]
        assert after["methods"][0]["runs"][0]["steps"] == "2"
        assert "from 0.100 at step 1 to 0.500 at step 2" in client.get("/api/curves")["html"]
        write_run("b", [make_metric_row(1, 0.9)], {"optim": {"lr": 0.5}})
        write_run("c", [])
        later = client.get("/api/state")
        assert [(m["label"], m["style"]) for m in later["methods"]] == [("a", 0), ("b", 1)]
        assert later["waiting"] == [str(folder.parent / "c")] and later["remarks"] == []
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("not json\n")
        broken = client.get("/api/state")
        assert "not JSON" in broken["remarks"][0]
        assert broken["methods"][0]["runs"][0]["steps"] == "2"  # what was read stays


def test_a_method_keeps_its_colour_when_others_change_its_name(serving, write_run, make_metric_row, monkeypatch):
    monkeypatch.setattr("luffy.view.live.LOOK_FOR_RUNS_S", 0.0)
    folder = write_run("experiment/a", [make_metric_row(1, time=1.0)])
    with serving([folder.parent.parent]) as client:
        seen = lambda: {m["label"]: m["style"] for m in client.get("/api/state")["methods"]}  # noqa: E731
        assert seen() == {"a": 0}
        write_run("b-s0", [make_metric_row(1, time=2.0)], {"optim": {"lr": 0.5}})
        assert seen() == {"experiment/a": 0, "b": 1}
        write_run("c", [make_metric_row(1, time=0.5)], {"optim": {"lr": 0.25}})  # its clock is behind
        write_run("b-s1", [make_metric_row(1, time=3.0)], {"optim": {"lr": 0.5}})
        assert seen() == {"experiment/a": 0, "b": 1, "c": 2}


def test_it_starts_before_the_first_run_and_shows_it_as_it_comes(serving, make_metric_row, tmp_path, monkeypatch):
    monkeypatch.setattr("luffy.view.live.LOOK_FOR_RUNS_S", 0.0)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    for place in (run.parent, run):  # a folder of runs, and the run itself
        with serving([place]) as client:
            empty = client.get("/api/state")
            assert (empty["methods"], empty["waiting"], empty["places"]) == ([], [], [str(place)])
            assert client.get("/api/curves")["html"] == '<div class="charts"></div>'
            assert client.get("/api/tables")["final"] == client.get("/api/knobs")["html"] == ""
            (run / "config.yaml").write_text("name: a\n")
            begun = client.get("/api/state")
            assert (begun["methods"], begun["waiting"], begun["remarks"]) == ([], [str(run)], [])
            (run / "metrics.jsonl").write_text('{"step": 1, "val-co')
            assert client.get("/api/state")["waiting"] == [str(run)]
            with (run / "metrics.jsonl").open("a") as file:
                file.write("\n")  # a broken line, then a good one
            broken = client.get("/api/state")
            assert broken["waiting"] == [str(run)] and "not JSON" in broken["remarks"][0]
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(make_metric_row(1, 0.1)) + "\n")
            started = client.get("/api/state")
            assert ([m["label"] for m in started["methods"]], started["waiting"]) == (["a"], [])
        (run / "config.yaml").unlink()
        (run / "metrics.jsonl").unlink()


def test_a_folder_that_is_not_there_is_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["luffy", "view", str(tmp_path / "nowhere"), "--port", "0"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"luffy: error: no folder {tmp_path / 'nowhere'};")


def test_only_the_config_of_a_run_is_waited_for(serving, write_run, make_metric_row, tmp_path):
    run = write_run("a", [make_metric_row(1)])
    for stray in (run.parent, run / "checkpoints" / "step-1", tmp_path / "runs" / "wandb" / "run-1" / "files"):
        stray.mkdir(parents=True, exist_ok=True)
        (stray / "config.yaml").write_text("a: 1\n")
    with serving([run.parent]) as client:
        assert client.get("/api/state")["waiting"] == []


def test_a_resumed_run_that_lost_steps_is_read_anew(serving, write_run, make_metric_row, make_sample_row):
    rows, samples = [make_metric_row(s, 0.1 * s) for s in (1, 2, 3)], [make_sample_row(s) for s in (1, 2, 3)]
    folder = write_run("a", rows, samples=samples)
    with serving([folder]) as client:
        run = client.run
        assert client.get("/api/samples", run=run)["steps"] == [1, 2, 3]
        for name, kept in (("metrics.jsonl", rows[:1]), ("samples.jsonl", samples[:1])):
            aside = folder / f".{name}.writing"
            write_rows(aside, kept)
            os.replace(aside, folder / name)
        assert client.get("/api/state")["methods"][0]["runs"][0]["steps"] == "1"
        assert client.get("/api/samples", run=run)["steps"] == [1]
