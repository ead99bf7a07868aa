"""A reward that is a server: a real one, in a process of its own, that fails in all the ways servers fail."""

import email.message
import json
import logging
import urllib.error
from pathlib import Path

import pytest
from processes import serving

from luffy.config import load_config
from luffy.errors import ConfigError, UserError
from luffy.rewards import build_verifier
from luffy.rewards.kinds import HttpRewardConfig
from luffy.types import Message, Problem, Score
from luffy.web import retry_after

SERVER = Path(__file__).parents[1] / "reward_server.py"
FAILED = Score(0.0, "call_failed")
SECRET = "sesame-15"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(SERVER, folder) as address:
        yield f"{address}/score", folder


@pytest.fixture
def ask(server, monkeypatch):
    """``ask(script, responses, batch_size=2)``: scores, and the requests that had samples."""
    monkeypatch.setenv("REWARD_KEY", SECRET)

    def ask(script, responses, **settings):
        url, folder = server
        (folder / "script.json").write_text("[]")
        (folder / "requests.jsonl").write_text("")
        given = {"batch_size": 2, "concurrency": 1, "wait_s": 0.01, "header_env": {"X-Key": "REWARD_KEY"}} | settings
        with build_verifier(url, http=HttpRewardConfig(**given)) as verifier:
            (folder / "script.json").write_text(json.dumps(script))
            items = [(Problem(f"p{i}", "2+3?", "5"), text) for i, text in enumerate(responses)]
            scores = verifier.score(items)
        requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
        reasons = [score.reason for score in scores if score.reason]
        return scores, [request for request in requests if request["samples"]], reasons[-1] if reasons else ""

    return ask


def test_scores_come_back_in_order_whatever_the_batches(ask):
    responses = ["x" * n for n in (1, 2, 3, 5, 8)]
    expected = [Score(1.0), Score(0.0), Score(1.0), Score(1.0), Score(0.0)]
    for settings in ({"batch_size": 2, "concurrency": 3}, {"batch_size": 1}, {"batch_size": 16}):
        scores, requests, _ = ask([], responses, **settings)
        assert scores == expected and len(requests) == -(-5 // settings["batch_size"])
    assert [s["response"] for s in requests[0]["samples"]] == responses
    assert requests[0]["path"] == "/score" and requests[0]["key"] == SECRET


def test_a_server_is_asked_when_all_responses_are_there(server):
    with build_verifier(server[0]) as verifier:
        assert not verifier.may_score_early


def test_what_the_server_is_told(server):
    url, folder = server
    (folder / "requests.jsonl").write_text("")
    chat = (Message("system", "be brief"), Message("user", "2+3?"))
    meta = {
        "__row__": "file:1",
        "tests": ["assert f(1)"],
        "level": 3,
        "odd": [{"a": float("nan"), "b": 0.5}, float("-inf")],
        "id": 7,
        "answer": "of a column that is not read",
    }
    with build_verifier(url) as verifier:
        assert verifier.score([(Problem("a", chat, "5", meta=meta), "5", [7])]) == [Score(1.0)]
    check, request = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert check["samples"] == []  # at the start: is it there, and does it speak the format?
    assert request["samples"] == [
        {
            "id": "a",
            "answer": "5",
            "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}],
            "response": "5",
            "columns": {"tests": ["assert f(1)"], "level": 3, "odd": [{"a": None, "b": 0.5}, None]},
        }
    ]


def test_what_passes_is_sent_again_and_what_does_not_costs_its_batch_alone(ask, caplog):
    scores, requests, _ = ask([503, 429, "drop", "score"], ["a", "b"])
    assert scores == [Score(1.0)] * 2 and len(requests) == 4 and not caplog.records
    scores, requests, failure = ask([500, 500, "score"], ["a", "b", "c"], retries=1)
    assert scores == [FAILED, FAILED, Score(1.0)] and len(requests) == 3
    assert "HTTP 500: not now, *** (tried 2 times)" in failure and SECRET not in caplog.text + failure
    line = next(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "requests to the reward's server failed; 2 of 3 samples score 0 (the last:" in line


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (307, "HTTP 307"),
        ({"scores": [1.0]}, 'expected {"scores": [...]} with 2 entries, found {"scores": [1.0]}'),
        ({"score": 1.0}, 'expected {"scores": [...]} with 2 entries'),
        ("garbage", 'found "garbage"'),
        ("nested", "with 2 entries, found [[[["),
    ],
)
def test_an_answer_that_will_not_change_is_not_asked_for_again(ask, action, reason):
    scores, requests, failure = ask([action], ["a", "b"])
    assert scores == [FAILED] * 2 and len(requests) == 1 and reason in failure


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_batch_is_asked_about_sample_by_sample(ask, status, caplog):
    script = [status, "score", status, 503, "score", status]  # of the second batch the one sample is refused
    scores, requests, failure = ask(script, ["a", "b", "c", "d"], batch_size=3)
    assert scores == [Score(1.0), FAILED, Score(1.0), FAILED] and f"HTTP {status}: not now, ***" in failure
    assert [len(request["samples"]) for request in requests] == [3, 1, 1, 1, 1, 1]
    assert "2 of 4 samples score 0" in caplog.text


def test_a_key_that_is_refused_is_no_fault_of_a_sample(ask):
    scores, requests, failure = ask([401, "score"], ["a", "b"], batch_size=3)
    assert scores == [FAILED] * 2 and len(requests) == 1 and "HTTP 401" in failure


@pytest.mark.parametrize("action", ["hang", "trickle", "slow headers"])
def test_a_server_that_does_not_come_to_an_end(ask, action):
    scores, requests, failure = ask([action, action, "score"], ["a", "b", "c"], timeout_s=0.5, retries=1)
    assert scores == [FAILED, FAILED, Score(1.0)] and len(requests) == 3
    assert "no answer in 0.5 s (tried 2 times)" in failure


def test_an_error_has_no_more_time_than_an_answer(ask):
    scores, requests, failure = ask(["slow error", "slow error", "score"], ["a", "b", "c"], timeout_s=0.5, retries=1)
    assert scores == [FAILED, FAILED, Score(1.0)] and len(requests) == 3
    assert "HTTP 503: (empty) (tried 2 times)" in failure


def test_a_server_that_asks_to_wait_for_years_is_asked_again_soon(ask, monkeypatch):
    monkeypatch.setattr("luffy.web.LONGEST_WAIT_S", 1e4)  # so that a wish that is heeded would outlast the test
    scores, requests, _ = ask(["much later", "score"], ["a", "b"])
    assert scores == [Score(1.0)] * 2 and len(requests) == 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("-1", 0.0), ("3600", 3600.0), ("1e9", None), ("nan", None), ("inf", None), ("tomorrow", None)],
)
def test_what_a_server_asks_to_wait(header, seconds):
    headers = email.message.Message()
    headers["Retry-After"] = header
    assert retry_after(urllib.error.HTTPError("http://x/", 429, "", headers, None)) == seconds


def test_single_samples_may_fail_or_have_no_score(ask):
    scores, _, failure = ask(
        [{"scores": [0.5, None, {"error": f"no compiler for {SECRET}"}, "1", True]}], "abcde", batch_size=5
    )
    assert scores == [Score(0.5), Score(0.0, "not_scored"), Score(0.0, "error"), Score(0.0, "error"), Score(1.0)]
    assert "must return a number, found str '1'" in failure
    scores, _, failure = ask([{"scores": [10**400, 1]}], "ab")
    assert scores == [Score(0.0, "error"), Score(1.0)] and "must return a finite number" in failure


def test_a_server_that_is_not_there_is_an_error_before_the_first_step(server, monkeypatch):
    url, _ = server
    quick = HttpRewardConfig(retries=1, wait_s=0.01)
    with pytest.raises(UserError, match=r"server does not work: http://127.0.0.1:9/: no connection \(Conn.*2 times"):
        build_verifier("http://127.0.0.1:9/", http=quick)
    for address, message in {
        "http://me:secret@host/": "a key does not belong in an address",
        "http://host/?key=secret": "a key does not belong in an address",
        "http://": "is not an address",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            build_verifier(address, http=quick)
        assert "secret" not in str(caught.value)
    for value, message in {"": "empty", f"{SECRET}\nX: 1": "no header's value"}.items():
        monkeypatch.setenv("REWARD_KEY", value)
        with pytest.raises(UserError, match=f"variable REWARD_KEY of header X-Key is {message}") as caught:
            build_verifier(url, http=HttpRewardConfig(header_env={"X-Key": "REWARD_KEY"}))
        assert SECRET not in str(caught.value)


def test_settings_that_do_not_fit():
    with pytest.raises(ConfigError, match="'reward.kind' http needs 'reward.http.url'"):
        load_config("tiny/luffy", ["reward.kind=http"])
    with pytest.raises(ConfigError, match="'reward.http.url' .* is not asked: set reward.kind=http"):
        load_config("tiny/luffy", ["reward.http.url=http://127.0.0.1:1/"])
    both = load_config("tiny/luffy", ["reward.weights={http: 1, format: 0.1}", "reward.http.url=http://127.0.0.1:1/"])
    assert both.reward.name == "1 http + 0.1 format"
