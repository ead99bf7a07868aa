"""Run folders of others may hold anything: a bad one is shown as bad, and the others go on."""

import json

import pytest
from run_folders import metric_row, sample_row

from luffy.errors import UserError
from luffy.report.html import write_report
from luffy.report.runs import load_run
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


def report(runs, tmp_path):
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
    page = report([good.parent], tmp_path)
    assert "config.yaml" in page
    with pytest.raises(UserError, match=r"config\.yaml"):
        report([bad], tmp_path)
    _, _, remarks = state(good.parent)
    assert [remark for remark in remarks if "config.yaml" in remark]


@pytest.mark.parametrize("kind", ODD_CONFIGS)
def test_a_config_of_odd_values_is_shown(runs, tmp_path, kind):
    good, bad = runs
    (bad / "config.yaml").write_text(ODD_CONFIGS[kind])
    report([good.parent], tmp_path)
    site, ids, _ = state(good.parent)
    for run in ids.values():
        assert shown(site, "/api/group", run=run, at=0)[0] == 200


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_cannot_be_read(runs, tmp_path, file, kind):
    good, bad = runs
    with (bad / file).open("a") as stream:
        stream.write(LINES[kind] + "\n")
    report([good.parent], tmp_path)
    site, ids, remarks = state(good.parent)
    assert len(ids) == 2 and bool(remarks) == (file == "metrics.jsonl")
    assert shown(site, "/api/group", run=ids[str(good)], at=0)[0] == 200
    assert shown(site, "/api/samples", run=ids[str(bad)])[0] in (200, 400)


@pytest.mark.parametrize(
    "name", [*sample_row(1), "overrides", "policy_probs", "gradient_weights", "length", "versions"]
)
def test_a_sample_of_wrong_types(runs, tmp_path, name):
    good, bad = runs
    samples = [sample_row(1, k) | {name: value} for k, value in enumerate(WRONG)]
    (bad / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    report([good.parent], tmp_path)
    load_run(bad)
    site, ids, _ = state(good.parent)
    status, said = shown(site, "/api/samples", run=ids[str(bad)])
    assert status == 200 and said["of"] == len(WRONG)
    for at in range(len(WRONG)):
        assert shown(site, "/api/group", run=ids[str(bad)], at=at)[0] == 200
        assert shown(site, "/api/text", run=ids[str(bad)], at=at)[0] == 200
