"""Reading run folders: in progress, broken, empty, nested."""

import json

import pytest

from luffy.errors import UserError
from luffy.run_folder import recorder
from luffy.run_folder.recorder import JsonLinesWriter, read_json_lines
from luffy.run_folder.runs import EmptyRun, GroupKey, find_runs, load_run


def test_a_run_reads_back(write_run, make_metric_row):
    rows = [{"step": 0, "time": 1.0, "val-core/accuracy": 0.1}, make_metric_row(1, 0.4), make_metric_row(2, 0.3)]
    run = load_run(write_run("luffy/seed-7", rows, {"train": {"steps": 2}}))
    assert (run.seed, run.steps, run.planned_steps, run.unfinished, run.kind) == (7, 2, 2, False, "train")
    assert run.series("val-core/accuracy") == [(0, 0.1), (1, 0.4), (2, 0.3)]
    assert [read("val-core/accuracy") for read in (run.at_start, run.last, run.best)] == [0.1, 0.3, 0.4]
    assert run.last("val-ood/accuracy") is None
    assert run.config["optim.lr"] == 1e-6  # today's default, not in the file


def test_the_half_line_of_a_run_in_progress_is_ignored(write_run, make_metric_row):
    run = load_run(write_run("a", [make_metric_row(1)], {"train": {"steps": 9}}, tail='{"step": 2, "critic/rew'))
    assert run.steps == 1
    assert run.unfinished


def test_values_that_are_not_finite_are_no_points(write_run, make_metric_row):
    rows = [make_metric_row(1), {**make_metric_row(2), "actor/grad_norm": float("nan")}, make_metric_row(3)]
    assert [s for s, _ in load_run(write_run("a", rows)).series("actor/grad_norm")] == [1, 3]


def test_a_line_that_is_not_json_names_the_file(write_run, make_metric_row):
    folder = write_run("a", [make_metric_row(1)], tail="garbage\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl: a line, 'garbage\\n': not JSON .*; mend or remove it"):
        load_run(folder)


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"st')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"""metrics\.jsonl: a line, '{"st\\n': not JSON .*; mend or remove it"""):
        read_json_lines(path)
    path.write_text('{"step": 1}\n\n{"step": 2}\n')
    JsonLinesWriter(path, keep_through_step=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_line_without_a_step_is_an_error(write_run):
    with pytest.raises(UserError, match="without a whole number as 'step'"):
        load_run(write_run("a", [{"time": 1}]))


def test_missing_folder_and_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no run in or below"):
        find_runs([tmp_path])


def test_a_run_before_its_first_step_is_empty(write_run):
    with pytest.raises(EmptyRun, match="no complete line yet"):
        load_run(write_run("a", [], tail='{"step": 0'))


def test_sft_is_known_by_its_rows_not_by_its_config(write_run, make_metric_row):
    rows = [{"step": 0, "val-core/accuracy": 0.0}, {"step": 1, "actor/sft_loss": 0.7, "response_length/mean": 12.0}]
    assert load_run(write_run("sft/seed-0", rows)).kind == "sft"
    assert load_run(write_run("luffy/seed-0", [make_metric_row(1)])).kind == "train"


def test_runs_are_found_below_in_natural_order_and_once(write_run, make_metric_row, tmp_path):
    folders = [write_run(f"luffy/seed-{k}", [make_metric_row(1)]) for k in (0, 2, 10)]
    checkpoint = folders[0] / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metrics.jsonl").write_text("{}\n")
    assert find_runs([tmp_path, folders[1]]) == folders
    assert find_runs([folders[2], tmp_path]) == [folders[2], folders[0], folders[1]]


def test_samples_are_found_by_step_and_problem(write_run, make_metric_row, make_sample_row):
    rows = [
        make_sample_row(1, 0),
        make_sample_row(1, 1),
        make_sample_row(1, 0, problem='q "x" \u00e9'),
        make_sample_row(10),
    ]
    folder = write_run("a", [make_metric_row(1)], samples=rows)
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"problem": "other order", "step": 10}) + "\n" + '{"step": 11, "problem": "half')
    samples = load_run(folder).samples
    assert samples.steps == [1, 10]
    assert samples.groups(1) == [(1, "p1", 0), (1, 'q "x" \u00e9', 0)]
    assert [key.problem for key in samples.groups(10)] == ["p1", "other order"]
    assert samples.group(GroupKey(1, "p1")) == rows[:2]
    assert samples.group(GroupKey(1, 'q "x" \u00e9')) == [rows[2]]


def test_a_problem_drawn_twice_in_a_step_is_two_groups(write_run, make_metric_row, make_sample_row):
    rows = [make_sample_row(1, k, reward=reward) for reward in (0.0, 1.0) for k in range(2)]
    samples = load_run(write_run("a", [make_metric_row(1)], samples=rows)).samples
    assert samples.groups(1) == [(1, "p1", 0), (1, "p1", 1)]
    assert [samples.group(key) for key in samples.groups(1)] == [rows[:2], rows[2:]]


def test_a_config_of_another_version_is_read_as_it_is(write_run, make_metric_row):
    run = load_run(write_run("a", [make_metric_row(1)], {"optim": {"gone": 3}}))
    assert run.config["optim.gone"] == 3
    assert "optim.lr" not in run.config


def test_a_writer_that_is_killed_while_it_drops_rows_keeps_all_of_them(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(4)))
    original, written = recorder._lines_to_keep, []

    def killed(*args):
        for line, kept in original(*args):
            yield line, kept
            written.append(line)
            if len(written) == 5:  # all four were looked at, and the first was copied
                raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "_lines_to_keep", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonLinesWriter(path, keep_through_step=2)
    assert [row["step"] for row in read_json_lines(path)] == [0, 1, 2, 3]


def test_a_writer_drops_later_rows_and_a_torn_line_and_keeps_the_rest(tmp_path):
    path = tmp_path / "samples.jsonl"
    kept = b'{"step": 0, "problem": "caf\\u00e9"}\n{"step":2,"tokens":[1,2]}\n'
    for torn in (b"", b'{"step":2,"tok', b'{"step": 2}'):
        path.write_bytes(kept + b'{"step":3,"tokens":[]}\n{"step":12}\n' + torn)
        writer = JsonLinesWriter(path, 2, (",", ":"), by_head=True)
        writer.write([{"step": 3, "tokens": [4]}])
        writer.close()
        assert path.read_bytes() == kept + b'{"step":3,"tokens":[4]}\n'


def test_a_file_with_nothing_to_drop_stays_the_file_it_is(tmp_path):
    """A page that follows it need not read it again."""
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    before = path.stat()
    JsonLinesWriter(path, 2).close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    JsonLinesWriter(path, 1).close()
    assert path.stat().st_ino != before.st_ino and path.read_text() == '{"step": 1}\n'


def test_of_samples_the_head_alone_is_read(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step":1,"tokens":[damaged\n{"step":2,"tokens":[damaged\n')
    with pytest.raises(UserError, match="samples.jsonl:1: not JSON .* fix or remove that line"):
        JsonLinesWriter(path, 1)
    JsonLinesWriter(path, 1, by_head=True).close()
    assert path.read_text() == '{"step":1,"tokens":[damaged\n'
    path.write_text('{"problem":"p","step":1}\n{"problem":"p","step":2}\n')  # not first: parsed
    JsonLinesWriter(path, 1, by_head=True).close()
    assert path.read_text() == '{"problem":"p","step":1}\n'
    path.write_text("damaged\n")
    with pytest.raises(UserError, match="samples.jsonl:1: not JSON"):
        JsonLinesWriter(path, 1, by_head=True)
