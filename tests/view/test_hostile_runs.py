"""Run folders of others may hold anything: a bad one is shown as bad, and the others go on."""

import json
import os
import re

import pytest
from builders import write_rows
from run_folders import metric_row, sample_row

from luffy.errors import UserError
from luffy.report.html import analysis_figures, report_json, write_report
from luffy.run_folder.runs import load_run
from luffy.view.live import Board
from luffy.view.site import Site

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
CONFIGS = {
    "alias bomb": BOMB, "its own alias": "a: &a {b: *a}\n", "brackets": "a: " + "[" * 3000 + "]" * 3000 + "\n",
    "digits": "seed: " + "9" * 5000 + "\n", "a list": "[1, 2]\n", "no text": "a: \x00\n",
}  # fmt: skip
ODD_CONFIGS = {
    "types": "reward: {success: high}\nseed: [1]\nname: {a: 1}\ntrain: {steps: many}\n", "a date": "seed: 2026-01-31\n",
    "bytes": "name: !!binary aGVsbG8=\n", "a set": "plugins: !!set {a, b}\n", "huge": "seed: " + "9" * 400 + "\n",
}  # fmt: skip
LINES = {
    "deep": '{"step": 2, "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "digits": '{"step": 2, "a": ' + "9" * 5000 + "}",
    "a huge step": '{"step": ' + "9" * 400 + "}", "a list": "[1]", "no JSON": "{",
}  # fmt: skip
WRONG = ["text", 7, -1.5, True, {"a": 1}, [["x"]], ["x", None, {}], 10**400, None]


@pytest.fixture
def runs(write_run):
    rows = [metric_row(1, 0.5), metric_row(2, 0.6)]
    return [write_run(name, rows, samples=[sample_row(1), sample_row(1, 1)]) for name in ("good", "bad")]


def report_text(runs, tmp_path):
    return write_report(runs, tmp_path / "report.html").read_text()


def shown(site, path, **query):
    reply = site.answer(path, {name: [str(value)] for name, value in query.items()})
    return reply.status, json.loads(reply.body)


def state(folder):
    site = Site(Board([folder]))
    status, said = shown(site, "/api/state")
    assert status == 200
    for path in ("/api/curves", "/api/tables", "/api/knobs"):
        assert shown(site, path)[0] == 200
    return site, {run["folder"]: run["id"] for m in said["methods"] for run in m["runs"]}, said["remarks"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_cannot_be_read(runs, tmp_path, kind):
    good, bad = runs
    (bad / "config.yaml").write_text(CONFIGS[kind])
    page = report_text([good.parent], tmp_path)
    assert "config.yaml" in page
    with pytest.raises(UserError, match=r"config\.yaml"):
        report_text([bad], tmp_path)
    _, _, remarks = state(good.parent)
    assert [remark for remark in remarks if "config.yaml" in remark]


@pytest.mark.parametrize("kind", ODD_CONFIGS)
def test_a_config_of_odd_values_is_shown(runs, tmp_path, kind):
    good, bad = runs
    (bad / "config.yaml").write_text(ODD_CONFIGS[kind])
    report_text([good.parent], tmp_path)
    site, ids, _ = state(good.parent)
    for run in ids.values():
        assert shown(site, "/api/group", run=run, at=0)[0] == 200


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_cannot_be_read(runs, tmp_path, file, kind):
    good, bad = runs
    with (bad / file).open("a") as stream:
        stream.write(LINES[kind] + "\n")
    report_text([good.parent], tmp_path)
    site, ids, remarks = state(good.parent)
    assert len(ids) == 2 and bool(remarks) == (file == "metrics.jsonl")
    assert shown(site, "/api/group", run=ids[str(good)], at=0)[0] == 200
    assert shown(site, "/api/samples", run=ids[str(bad)])[0] in (200, 400)


OF_EPISODES = ("turns", "calls", "end", "replies", "faults", "message", "environment_reward", "trace_left_out")


@pytest.mark.parametrize(
    "name",
    [*sample_row(1), *OF_EPISODES, "overrides", "policy_probs", "gradient_weights", "length", "versions", "components"],
)
def test_a_sample_of_wrong_types(runs, tmp_path, name):
    good, bad = runs
    samples = [sample_row(1, k) | {name: value} for k, value in enumerate(WRONG)]
    write_rows(bad / "samples.jsonl", samples)
    report_text([good.parent], tmp_path)
    load_run(bad)
    site, ids, _ = state(good.parent)
    status, said = shown(site, "/api/samples", run=ids[str(bad)])
    assert status == 200 and said["of"] == len(WRONG)
    for at in range(len(WRONG)):
        assert shown(site, "/api/group", run=ids[str(bad)], at=at)[0] == 200
        assert shown(site, "/api/text", run=ids[str(bad)], at=at)[0] == 200


def put_hostile(kind, path):
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
def test_what_is_no_file_is_not_read(runs, tmp_path, kind):
    good, bad = runs
    said = "is a folder" if kind == "a folder" else "is a pipe or a device"
    for name in ("config.yaml", "data.json"):
        put_hostile(kind, bad / name)
    assert load_run(bad).config == {} and load_run(bad).processes == 1
    put_hostile(kind, bad / "samples.jsonl")
    with pytest.raises(UserError, match=rf"samples.jsonl: {said}, not a file; remove it"):
        load_run(bad)
    site, ids, _ = state(good.parent)
    status, answer = shown(site, "/api/samples", run=ids[str(bad)])
    assert status == 400 and said in answer["error"]
    put_hostile(kind, bad / "metrics.jsonl")
    with pytest.raises(UserError, match=rf"metrics.jsonl: {said}, not a file; remove it"):
        load_run(bad)
    assert "p1" in report_text([good.parent], tmp_path)  # the other run is shown
    _, ids, remarks = state(good.parent)
    assert list(ids) == [str(good)] and (kind == "a folder" or said in " ".join(remarks))


SECRET = "sesame-opens"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml"])
@pytest.mark.parametrize(
    "text", [f"{SECRET}\n", f'{{"token": "{SECRET}"}}\n', f"token: {SECRET}\n", f'{{"{SECRET}": 1}}\n{{"{SECRET}": [']
)
def test_a_link_to_a_foreign_file_is_not_quoted(runs, tmp_path, name, text):
    good, bad = runs
    (tmp_path / "secret").write_text(text)
    (bad / name).unlink()
    (bad / name).symlink_to("../../secret")
    (bad / "data.json").symlink_to("../../secret")
    page = report_text([good.parent], tmp_path)
    site, ids, remarks = state(good.parent)
    answers = [shown(site, "/api/samples", run=run) for run in ids.values()]
    assert SECRET not in page + json.dumps([remarks, answers]) + read_error(bad)


def read_error(folder):
    with pytest.raises(UserError) as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_of_links_is_read(runs, tmp_path):
    """As the hub's cache keeps it: every file is a link to one outside of the folder."""
    bad = runs[1]
    before = load_run(bad)
    for name in ("metrics.jsonl", "samples.jsonl", "config.yaml"):
        (bad / name).rename(tmp_path / name)
        (bad / name).symlink_to(tmp_path / name)
    after = load_run(bad)
    assert (after.rows, after.config, after.samples.places) == (before.rows, before.config, before.samples.places)


def test_a_line_that_does_not_end(runs, tmp_path, monkeypatch):
    """A file of a terabyte of zeros takes no room on a disk."""
    monkeypatch.setattr("luffy.files.LONGEST_LINE", 1 << 20)
    with (runs[1] / "metrics.jsonl").open("r+b") as file:
        file.truncate(1 << 40)
    assert "a line of 1 MiB or more" in read_error(runs[1])


def test_a_figure_that_is_none_is_not_taken_into_the_report(tmp_path):
    (tmp_path / "analysis.json").write_text('[{"png": "a.png", "title": "t", "caption": "c"}]')
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "a.png").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"a.png: not a PNG; make it again with: luffy analyze"):
        analysis_figures(tmp_path)


LARGE = [1e308, -1e308, 1.7e308, 1e200, -1e120, 1e99, 5e-324, 10**15]
TIMES = [1e300, -1e300, 253402300800, -62135596801, 1e18, 1e99]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("value", LARGE)
def test_metrics_too_large_to_compute_with(write_run, tmp_path, value, alone):
    names = [name for name in metric_row(1, 0.5) if name not in ("step", "time")]
    for seed, sign in enumerate([1] if alone else [1, -1, 0.5]):
        rows = [metric_row(step, **{name: sign * value * (-1) ** step for name in names}) for step in range(1, 5)]
        write_run(f"method/seed-{seed}", rows)
    folder = tmp_path / "runs"
    page = report_text([folder], tmp_path)
    assert "NaN" not in page and "Infinity" not in page and "inf" not in re.sub(r"<script>.*</script>", "", page)
    json.dumps(report_json([folder]), allow_nan=False)
    site, _, remarks = state(folder)
    assert not remarks
    curves = shown(site, "/api/curves", smoothing=0.9)[1]["html"]
    assert "nan" not in curves and "inf" not in curves


@pytest.mark.parametrize("time", TIMES)
def test_times_that_no_calendar_has(write_run, tmp_path, time):
    write_run("a", [metric_row(1, 0.5, time=time), metric_row(2, 0.6, time=1002.0)])
    assert "last step recorded 1970-01-01 00:16 UTC" in report_text([tmp_path / "runs"], tmp_path)
    site, _, _ = state(tmp_path / "runs")
    (method,) = shown(site, "/api/state")[1]["methods"]
    assert method["runs"][0]["time"] == 1002.0


@pytest.mark.parametrize("value", LARGE)
def test_samples_with_numbers_too_large(write_run, tmp_path, value):
    changes = {name: [value, -value, value] for name in ("advantages", "log_probs", "policy_probs", "gradient_weights")}
    folder = write_run("a", [metric_row(1, 0.5)], samples=[sample_row(1, k, reward=value, **changes) for k in (0, 1)])
    report_text([folder], tmp_path)
    site, ids, _ = state(folder)
    assert shown(site, "/api/group", run=ids[str(folder)], at=0)[0] == 200
    assert shown(site, "/api/samples", run=ids[str(folder)])[0] == 200
