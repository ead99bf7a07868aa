import json
import stat

import pytest
from builders import write_rows

from luffy.errors import DataError, UserError
from luffy.rewards import build_verifier
from luffy.rewards.scores import score_file


@pytest.fixture
def verifier():
    with build_verifier("gsm8k") as verifier:
        yield verifier


def test_scores_in_order_with_identity_copied(tmp_path, verifier, capfd):
    rows = [{"id": n, "answer": str(n), "response": f"#### {n if n % 3 else n + 1}", "extra": [1]} for n in range(300)]
    rows[7] = {"problem": "2+3?", "answer": "5", "response": "five \ud800"}
    rows_path = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "scores.jsonl"
    summary = score_file(rows_path, out, verifier)
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(scores) == 300
    assert scores[4] == {"id": 4, "score": 1.0, "status": "ok"}
    assert scores[6] == {"id": 6, "score": 0.0, "status": "ok"}
    assert scores[7] == {"problem": "2+3?", "score": 0.0, "status": "no_answer"}
    assert [row.get("id", 7) for row in scores] == list(range(300))
    assert summary.rows == 300
    assert summary.mean_score == pytest.approx(199 / 300)
    assert summary.counts == {"ok": 299, "no_answer": 1}
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "verified rows 300/300 (100%)" in captured.err
    assert "\x1b" not in captured.err


def test_a_reward_of_your_own_sees_the_problem_of_each_row(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"answer": "5", "response": "5", "problem": "2+3 = ?"}\n{"answer": "5", "response": "5"}\n', encoding="utf-8"
    )
    with build_verifier("reward_functions:prompt_reward", workers=1) as own:
        score_file(rows, tmp_path / "out.jsonl", own, progress=False)
    scores = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert scores == [7.0, 0.0]


def test_progress_can_be_silent_and_files_are_world_readable(tmp_path, verifier, capfd):
    out = tmp_path / "scores.jsonl"
    score_file(
        write_rows(tmp_path / "rows.jsonl", [{"answer": "5", "response": "#### 5"}]), out, verifier, progress=False
    )
    assert capfd.readouterr().err == ""
    (tmp_path / "other").touch()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_empty_file_and_blank_lines(tmp_path, verifier):
    out = tmp_path / "scores.jsonl"
    (tmp_path / "rows.jsonl").write_text("\n\n")
    assert score_file(tmp_path / "rows.jsonl", out, verifier).rows == 0
    assert out.read_text() == ""
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"answer": "5", "response": "#### 5"}\r\n\r\n')
    assert score_file(tmp_path / "rows.jsonl", out, verifier).mean_score == 1.0
    (tmp_path / "rows.jsonl").write_text('{"answer": 5, "response": "#### 5"}\n')  # a whole number has one spelling
    assert score_file(tmp_path / "rows.jsonl", out, verifier).mean_score == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json}", r"rows.jsonl:2: not JSON .*; fix the line"),
        (b"\xff\xfe", r"rows.jsonl:2: not JSON .*; fix the line"),
        (b"[" * 100_000, r"rows.jsonl:2: not JSON .*; fix the line"),
        (b"[1]", r"rows.jsonl:2: not a JSON object; fix the line"),
        (b'{"answer": "5"}', r"rows.jsonl:2: column 'response' is missing \(found: answer\)"),
        (b'{"answer": 0.50, "response": ""}', r"rows.jsonl:2: column 'answer' must be a string, found float 0.5"),
        (b'{"answer": "5", "response": null}', r"rows.jsonl:2: column 'response' must be a string, found NoneType"),
        (b'{"answer": " ", "response": ""}', r"rows.jsonl:2: column 'answer' is empty"),
    ],
)
def test_a_bad_row_is_found_before_anything_is_scored(tmp_path, verifier, line, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"answer": "5", "response": "#### 5"}\n' + line + b"\n")
    out = tmp_path / "scores.jsonl"
    out.write_text("old")
    with pytest.raises(UserError, match=message):
        score_file(rows, out, verifier)
    assert out.read_text() == "old"
    assert not verifier.counts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "scores.jsonl"]


def test_nothing_half_written_when_scoring_stops(tmp_path, verifier, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", [{"answer": "5", "response": "#### 5"}] * 400)
    calls = []
    real_score = verifier.score

    def interrupted(items):
        calls.append(len(items))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real_score(items)

    monkeypatch.setattr(verifier, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score_file(rows, tmp_path / "scores.jsonl", verifier)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_missing_files_and_folders(tmp_path, verifier):
    with pytest.raises(DataError, match="no such file"):
        score_file(tmp_path / "rows.jsonl", tmp_path / "out.jsonl", verifier)
    rows = write_rows(tmp_path / "rows.jsonl", [{"answer": "5", "response": "5"}])
    with pytest.raises(UserError, match="does not exist"):
        score_file(rows, tmp_path / "nowhere" / "out.jsonl", verifier)
    with pytest.raises(UserError, match="is a folder"):
        score_file(rows, tmp_path, verifier)
