"""Traces from a server that limits, fails, counts tokens differently and must never learn to leak the key."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import write_rows
from prepare_support import byte_tokenizer
from transformers import AutoModelForCausalLM

import luffy.quickstart
from luffy.data import Encoder, load_problems
from luffy.errors import DataError, UserError
from luffy.models.load import load_tokenizer
from luffy.prepare import teachers
from luffy.prepare.dataset_files import ROWS_PER_GROUP, column_types
from luffy.prepare.endpoint import Endpoint, EndpointError, Reply
from luffy.prepare.teachers import EndpointTeacher, LocalTeacher, endpoint_teacher, recorded_ids
from luffy.prepare.traces import prepare_traces, verdicts
from luffy.rewards import Verifier
from luffy.rewards.own_function import CALL_FAILED
from luffy.rollout.native import NativeEngine
from luffy.types import Score
from studies.quickstart.task import write_dataset

BASE = Path(luffy.quickstart.__file__).parent / "assets" / "base"
KEY = "sk-very-secret"


class Server:
    """``reply(body, number)`` gives (status, JSON or text, headers) for the number-th request."""

    def __init__(self, reply):
        self.requests = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append((self.path, dict(self.headers), body))
                status, content, headers = reply(body, number)
                if status is None:
                    return  # the connection breaks off
                raw = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(reply):
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def solved(body, logprobs=True, finish="stop"):
    """Adds the two numbers of the question; every odd seed is wrong."""
    a, b = body["messages"][-1]["content"].split("+")
    text = f"#### {int(a) + int(b) + body['seed'] % 2}"
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if logprobs:
        content = [{"token": letter, "logprob": -0.5 - place} for place, letter in enumerate(text)]
        choice["logprobs"] = {"content": [*content, {"token": "", "logprob": -0.25}]}
    return 200, {"choices": [choice]}, {}


@pytest.fixture
def sums_file(tmp_path):
    path = tmp_path / "sums.jsonl"
    write_rows(path, ({"id": f"s{i}", "prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)))
    return str(path)


def teacher_of(server, tokenizer=None, **changes):
    endpoint = Endpoint(server.url, "big", api_key=KEY, first_wait_s=0.01, **changes)
    return EndpointTeacher(endpoint, {"max_tokens": 50, "temperature": 1.0}, concurrency=4, tokenizer=tokenizer)


def sample_traces(file, out, teacher, **options):
    settings = {"model": "big", "endpoint": teacher.endpoint.url}
    return prepare_traces(file, out, teacher, "big", settings, reward="gsm8k", **{"n": 3, **options})


def everything_written(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_verified_traces_with_their_log_probs(serve, sums_file, tmp_path):
    server = serve(lambda body, number: solved(body))
    card = sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server, byte_tokenizer()))
    assert len(server.requests) == 24
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body["model"] == "big" and body["logprobs"] is True and body["max_tokens"] == 50
    right = [body["seed"] % 2 == 0 for _, _, body in server.requests]
    counts = card["counts"]
    assert 0 < counts["samples_right"] == sum(right) < 24
    assert counts["samples_wrong"] == 24 - sum(right)
    assert counts["samples_kept"] + counts["samples_repeated"] == sum(right)
    assert counts["samples_log_probs_recorded"] == 24
    problems = load_problems(tmp_path / "out.parquet")
    assert len(problems) == 8
    encoder = Encoder(byte_tokenizer(), "plain")
    for problem in problems:
        for trace, shown in zip(problem.traces, encoder.encode(problem).demonstrations, strict=True):
            text = f"#### {problem.answer}"
            assert trace.teacher == "big"
            assert byte_tokenizer().decode(trace.token_ids) == text + "<eos>"
            assert trace.log_probs == (*(-0.5 - place for place in range(len(text))), -0.25)
            assert (shown.token_ids, shown.log_probs) == (trace.token_ids, trace.log_probs)
    assert KEY.encode() not in everything_written(tmp_path)


def test_without_a_tokenizer_text_stays_and_log_probs_go(serve, sums_file, tmp_path):
    server = serve(lambda body, number: solved(body))
    card = sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server), keep_wrong=True)
    assert card["counts"]["samples_log_probs_without_matching_ids"] == 24
    traces = [trace for problem in load_problems(tmp_path / "out.parquet") for trace in problem.traces]
    assert all(trace.text.startswith("#### ") and trace.token_ids is None for trace in traces)
    assert card["counts"]["samples_kept"] == len(traces) > card["counts"]["problems"]


def test_columns_that_luffy_does_not_use_go_along(serve, tmp_path, caplog):
    server = serve(lambda body, number: solved(body))
    own = {"level": 3, "share": 0.50, "hints": ["think", "it is two"], "info": {"split": "train", "tests": [[1, 2]]}}
    rows = [{"id": f"s{i}", "prompt": f"{i}+{i}", "answer": str(2 * i), **own} for i in range(600)]  # of two row groups
    rows[550] |= {"level": 3.5, "info": {"split": "rest", "tests": []}, "late": "x"}
    file, out = str(write_rows(tmp_path / "sums.jsonl", rows)), tmp_path / "out.parquet"
    sample_traces(file, out, teacher_of(server), n=1)
    for before, after in zip(load_problems(file), load_problems(out), strict=True):
        kept = {name: value for name, value in after.meta.items() if name != "__row__"}
        assert kept == {"late": None} | {name: value for name, value in before.meta.items() if name != "__row__"}
    assert not caplog.text
    first = pq.read_table(out)
    sample_traces(file, out, teacher_of(server), n=1)  # nothing is asked, and the same is written
    assert len(server.requests) == 600 and pq.read_table(out).equals(first)


def test_a_type_for_all_rows_holds_the_values_of_each():
    rows = [{"uid": 2**60 + 1, "level": 3}] * ROWS_PER_GROUP + [{"uid": 0.5, "level": 3.5}]  # the last one is a group
    assert column_types(lambda: rows) == {"uid": None, "level": pa.float64()}


def test_columns_that_cannot_go_along_are_named(serve, tmp_path, caplog):
    server = serve(lambda body, number: solved(body))
    rows = [{"prompt": f"{i}+{i}", "reward_model": {"ground_truth": str(2 * i)}, "problem": "x", "none": None,
             "mixed": i or "zero", "empty": {}, "huge": 10**30} for i in range(2)]  # fmt: skip
    out = tmp_path / "out.parquet"
    sample_traces(str(write_rows(tmp_path / "verl.jsonl", rows)), out, teacher_of(server), n=1, keep_wrong=True)
    assert "columns left out of the output: problem, mixed, empty, huge (values that no one type" in caplog.text
    problems = load_problems(out)
    assert problems.schemas == ("luffy",) and set(problems[0].meta) == {"__row__", "none"}


def test_traces_of_the_file_are_replaced_or_kept_in_front(serve, tmp_path):
    server = serve(lambda body, number: solved(body))
    ids = {"token_ids": [4, 12], "log_probs": [-0.5, -0.25], "teacher": "small"}
    rows = [
        {"id": "a", "prompt": "1+1", "answer": "2", "traces": ["#### 2", ids]},
        {"id": "b", "prompt": "2+2", "answer": "4"},
    ]
    file = str(write_rows(tmp_path / "sums.jsonl", rows))
    counts = sample_traces(file, tmp_path / "replaced.parquet", teacher_of(server), n=4)["counts"]
    assert counts["traces_of_the_file_left_out"] == 2
    new = [problem.traces for problem in load_problems(tmp_path / "replaced.parquet")]
    assert [{trace.teacher for trace in traces} for traces in new] == [{"big"}, {"big"}]
    counts = sample_traces(file, tmp_path / "kept.parquet", teacher_of(server), n=4, keep_traces=True)["counts"]
    assert counts["traces_of_the_file_kept"] == 2 and "traces_of_the_file_left_out" not in counts
    kept = [problem.traces for problem in load_problems(tmp_path / "kept.parquet")]
    assert kept == [load_problems(file)[0].traces, new[1]]  # the teacher's right answer to a is there already


def test_tool_calls_in_prompts_and_in_kept_traces_are_written(serve, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    calls = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    shown = [{"role": "user", "content": "2+3"}, *calls, {"role": "assistant", "content": "It is 5."}]
    prompt = [*shown, {"role": "user", "content": "1+1"}]
    rows = [
        {"id": "a", "prompt": prompt, "answer": "2", "traces": [[*calls, {"role": "assistant", "content": "#### 2"}]]},
        {"id": "b", "prompt": prompt[-1:], "answer": "2"},
    ]
    file = write_rows(tmp_path / "sums.jsonl", rows)
    teacher = teacher_of(serve(lambda body, number: solved({**body, "seed": 0})))
    sample_traces(str(file), tmp_path / "out.parquet", teacher, n=1, keep_traces=True)
    before, after = load_problems(file), load_problems(tmp_path / "out.parquet")
    assert [problem.prompt for problem in after] == [problem.prompt for problem in before]
    assert after[0].traces[0] == before[0].traces[0] and after[0].prompt[1].tool_calls
    assert [[trace.teacher for trace in problem.traces] for problem in after] == [["teacher", "big"], ["big"]]


def test_a_limited_server_is_asked_again(serve, sums_file, tmp_path):
    def reply(body, number):
        if number < 3:
            return (429, 409, 408)[number], {"error": "slow down"}, {"Retry-After": "0.01"}
        return (503, "busy", {}) if number == 3 else (None, None, {}) if number == 4 else solved(body)

    server = serve(reply)
    card = sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server), n=1)
    assert card["counts"]["samples"] == 8
    assert len(server.requests) == 13


def test_a_server_that_fails_for_ever_ends_the_run_and_loses_nothing(serve, sums_file, tmp_path):
    broken = [True]

    def reply(body, number):
        hard = body["messages"][-1]["content"] == "6+6"
        return (500, f"boom {KEY}", {}) if hard and broken[0] else solved(body)

    server = serve(reply)
    with pytest.raises(EndpointError) as error:
        sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server, retries=2))
    assert f"{server.url}/chat/completions: HTTP 500" in str(error.value)
    assert "boom *** (tried 3 times)" in str(error.value)
    assert KEY not in str(error.value)
    assert not (tmp_path / "out.parquet").exists()
    journal = tmp_path / "out.progress.jsonl"
    done = {json.loads(line)["id"] for line in journal.read_text().splitlines()[1:]}
    assert {"s0", "s1", "s2", "s3"} <= done and "s6" not in done
    before, broken[0] = len(server.requests), False
    sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server))
    assert len(server.requests) - before == 3 * (8 - len(done))  # only what was missing
    assert len(load_problems(tmp_path / "out.parquet")) == 8
    with pytest.raises(DataError, match="was made with n=3, now it is 2"):
        sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server), n=2)
    first, *rest = journal.read_text().splitlines(keepends=True)
    for damaged, said in (
        (["[]\n", *rest], "jsonl:1: not a JSON object; it is no journal of earlier work"),
        (['{"settings": 3}\n', *rest], "jsonl:1: needs an object as 'settings'; it is no journal"),
        ([first, '{"id": "s0"}\n'], "jsonl:2: needs a list as 'samples'; cut off the file before that line"),
    ):
        journal.write_text("".join(damaged))
        with pytest.raises(UserError, match=said):
            sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server))
    assert KEY.encode() not in everything_written(tmp_path)


def test_samples_that_were_not_scored_are_scored_by_the_next_call(serve, sums_file, tmp_path, monkeypatch, caplog):
    server, score, answer = serve(lambda body, number: solved(body)), Verifier.score, EndpointTeacher.answer

    def one_by_one(self, problems, n):
        return ([pair] for answered in answer(self, problems, n) for pair in answered)

    def failing(self, items):
        scores = zip(items, score(self, items), strict=True)
        return [Score(0.0, CALL_FAILED) if item[0].id == "s3" else found for item, found in scores]

    out = tmp_path / "out.parquet"
    with monkeypatch.context() as broken:
        broken.setattr(Verifier, "score", failing)
        broken.setattr(EndpointTeacher, "answer", one_by_one)
        with pytest.raises(UserError, match="the reward failed on all 3 samples"):
            sample_traces(sums_file, out, teacher_of(server))
        for _ in range(2):  # what was not scored is kept
            counts = sample_traces(sums_file, out, teacher_of(server))["counts"]
            assert counts["samples_unscored"] == 3 and "3 samples have no score" in caplog.text
            caplog.clear()
    asked = len(server.requests)
    mended = sample_traces(sums_file, out, teacher_of(server))["counts"]
    assert len(server.requests) == asked and "samples_unscored" not in mended and not caplog.text
    assert mended == sample_traces(sums_file, tmp_path / "other.parquet", teacher_of(server))["counts"]


def test_a_sample_that_was_cut_off_does_not_make_the_next_one_a_repetition():
    sample = {"text": "x", "finished": True, "score": 1.1, "status": "ok"}
    cut = {**sample, "finished": False}
    assert list(verdicts([cut, sample, sample], keep_wrong=False)) == ["cut_off", "kept", "repeated"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, f"bad key {KEY}", {}), r"HTTP 401: bad key \*\*\*"),
        ((400, "logprobs are not supported", {}), "HTTP 400: .*; give --no-logprobs"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
        ((200, "<html>", {}), "unexpected answer .JSONDecodeError .*: <html>"),
        ((200, {"choices": []}, {}), "unexpected answer .IndexError"),
    ],
)
def test_what_cannot_get_better_is_not_retried(serve, sums_file, tmp_path, answer, message):
    server = serve(lambda body, number: answer)
    with pytest.raises(UserError, match=message) as error:
        sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server), n=1)
    assert KEY not in str(error.value) and server.url in str(error.value)
    assert len(server.requests) <= 8


TOO_LONG = {"error": {"code": "context_length_exceeded"}}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_problems_that_the_teacher_refuses_get_no_trace(serve, sums_file, tmp_path, caplog, status):
    refused = {"2+2", "5+5"}

    def reply(body, number):
        is_refused = body["messages"][-1]["content"] in refused
        return (status, TOO_LONG, {}) if is_refused else solved({**body, "seed": 0})

    card = sample_traces(sums_file, out := tmp_path / "out.parquet", teacher_of(serve(reply)))
    assert card["counts"]["problems_refused"] == 2 and card["counts"]["problems_with_a_trace"] == 6
    assert [problem.id for problem in load_problems(out) if not problem.traces] == ["s2", "s5"]
    [told] = caplog.messages
    assert told.startswith(f"2 problems get no trace: the teacher refuses them, first: {sums_file}:")
    assert f"HTTP {status}: " in told and "context_length_exceeded" in told
    refused.clear()  # the server has more room now, at another address
    again = serve(reply)
    assert sample_traces(sums_file, out, teacher_of(again))["counts"]["problems_with_a_trace"] == 8
    assert len(again.requests) == 2 * 3


def test_samples_beside_a_refused_one_are_kept(serve, sums_file, tmp_path, caplog):
    first = {teachers.seed_of(f"0:s{i}:0") & 0x7FFFFFFF for i in range(8)}

    def reply(body, number):
        return (400, TOO_LONG, {}) if body["seed"] in first else solved({**body, "seed": 0})

    card = sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(serve(reply)))
    assert card["counts"]["samples"] == 8 * 2 and card["counts"]["problems_with_a_trace"] == 8
    assert card["counts"]["problems_refused"] == 0 and card["counts"]["samples_refused"] == 8 and not caplog.messages


@pytest.mark.parametrize("answered", [0, 30])
def test_a_teacher_that_refuses_everything_is_not_asked_for_ever(serve, tmp_path, answered):
    file = write_rows(tmp_path / "many.jsonl", [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(400)])
    server = serve(lambda body, number: solved(body) if number < answered else (400, "credit balance too low", {}))
    for calls in (1, 2):
        with pytest.raises(
            UserError, match=r"\d+ problems in a row were refused by the teacher, first: .*credit balance"
        ):
            sample_traces(file, tmp_path / "out.parquet", teacher_of(server), n=1)
        assert answered + 64 * calls <= len(server.requests) <= answered + 80 * calls
    assert not (tmp_path / "out.parquet").exists()
    done = (tmp_path / "out.progress.jsonl").read_text().splitlines()[1:]
    assert len(done) == answered


def test_many_refused_problems_between_others_do_not_end_the_run(serve, tmp_path):
    file = write_rows(tmp_path / "many.jsonl", [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(140)])

    def reply(body, number):
        odd = int(body["messages"][-1]["content"].split("+")[0]) % 2
        return (400, TOO_LONG, {}) if odd else solved({**body, "seed": 0})

    assert (
        sample_traces(file, tmp_path / "out.parquet", teacher_of(serve(reply)), n=1)["counts"]["problems_refused"] == 70
    )


def test_a_chat_that_the_template_refuses_is_a_refused_problem(serve, tmp_path):
    tokenizer = byte_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    encoder = Encoder(tokenizer, "chat")
    system = {"role": "system", "content": "Add."}
    chats = [[{"role": "user", "content": "1+1"}], [system, {"role": "user", "content": "2+2"}]]
    file = write_rows(tmp_path / "chats.jsonl", [{"prompt": chat, "answer": "2"} for chat in chats])
    reply = 200, {"choices": [{"text": "#### 2", "finish_reason": "stop"}]}, {}
    teacher = replace(teacher_of(serve(lambda body, number: reply), api="completions"), encoder=encoder)
    counts = sample_traces(file, tmp_path / "out.parquet", teacher)["counts"]
    assert counts["problems_refused"] == 1 and counts["problems_with_a_trace"] == 1


def test_an_answer_that_is_none_is_asked_for_again_if_there_were_others(serve, sums_file, tmp_path):
    odd = {4: {"error": {"code": 502}}, 6: "<html>", 8: {"choices": []}, 10: {"choices": [{"message": {"content": 3}}]}}
    server = serve(lambda body, number: (200, odd[number], {}) if number in odd else solved(body))
    card = sample_traces(sums_file, tmp_path / "out.parquet", teacher_of(server, retries=3), n=1)
    assert card["counts"]["samples"] == 8 and len(server.requests) == 8 + len(odd)


def test_odd_texts_and_log_probs_of_a_server(serve, tmp_path):
    """Half of a surrogate pair, text in parts, log-probs that are no numbers."""
    parts = [{"type": "text", "text": "#### "}, {"type": "refusal", "text": "no"}, {"text": "4"}]
    texts = {"1+1": "\ud83d#### 2", "2+2": parts, "3+3": "#### 6"}

    def reply(body, number):
        question = body["messages"][-1]["content"]
        logprobs = {"content": [{"token": "#", "logprob": value} for value in (None, "-inf")]}
        choice = {"message": {"content": texts[question]}, "finish_reason": "stop", "logprobs": logprobs}
        return 200, {"choices": [choice]}, {}

    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in (1, 2, 3)]
    file, out = str(write_rows(tmp_path / "rows.jsonl", rows)), tmp_path / "out.parquet"
    card = sample_traces(file, out, teacher_of(serve(reply), byte_tokenizer()), n=1)
    assert [problem.traces[0].text for problem in load_problems(out)] == ["\ufffd#### 2", "#### 4", "#### 6"]
    assert card["counts"]["samples_log_probs_not_finite"] == 3
    journal = tmp_path / "out.progress.jsonl"  # one that holds such a text already
    journal.write_bytes(journal.read_bytes().replace("\ufffd".encode(), "\ud83d".encode("utf-8", "surrogatepass")))
    sample_traces(file, out, teacher_of(serve(reply)), n=1)
    assert load_problems(out)[0].traces[0].text == "\ufffd#### 2"


def test_cut_off_responses_are_no_traces_and_thoughts_are_joined(serve, sums_file, tmp_path, caplog):
    server = serve(lambda body, number: solved(body, finish=("length", "content_filter")[number % 2]))
    card = sample_traces(sums_file, tmp_path / "cut.parquet", teacher_of(server), keep_wrong=True)
    assert card["counts"]["samples_cut_off"] == 24 and card["counts"]["problems_with_a_trace"] == 0
    assert "no problem has a trace" in caplog.text
    message = {"reasoning_content": "one and one\n", "content": "\n#### 2"}
    server = serve(lambda body, number: (200, {"choices": [{"message": message, "finish_reason": "stop"}]}, {}))
    sample_traces(sums_file, tmp_path / "r1.parquet", teacher_of(server), n=1)
    assert load_problems(tmp_path / "r1.parquet")[1].traces[0].text == "<think>\none and one\n</think>\n\n#### 2"


def test_answers_inside_thoughts_count_on_request(serve, sums_file, tmp_path):
    message = {"reasoning_content": "#### 2", "content": "That is it."}
    server = serve(lambda body, number: (200, {"choices": [{"message": message, "finish_reason": "stop"}]}, {}))
    kept = {}
    for inside in (False, True):
        out = tmp_path / f"{inside}.parquet"
        card = sample_traces(sums_file, out, teacher_of(server), n=1, answer_in_thought=inside)
        kept[inside] = card["counts"]["samples_right"]
        assert card["settings"].get("answer_in_thought", False) == inside
    assert kept == {False: 0, True: 1}


def test_completions_take_the_rendered_text(serve, tmp_path, sums_file, tokenizer_folder):
    def asked(name, text):
        """The request that a server got, and the traces of the second problem."""
        logprobs = {"tokens": list(text), "token_logprobs": [-1] * len(text)} if name == "ids" else None
        choice = {"text": text, "finish_reason": "stop", "logprobs": logprobs}
        server = serve(lambda body, number: (200, {"choices": [choice]}, {}))
        sampling, tokenizer = {"max_tokens": 5}, str(tokenizer_folder)
        endpoint = Endpoint(server.url, "big", "completions", log_probs=name == "ids", retries=0, timeout_s=60)
        teacher, settings = endpoint_teacher(endpoint, sampling, 0, "paper", None, tokenizer, 2)
        out = tmp_path / f"{name}.parquet"
        prepare_traces(sums_file, out, teacher, "big", settings, n=1, reward="gsm8k")
        assert teacher.endpoint.timeout_s == 60
        return server.requests[0], load_problems(out)[1].traces

    said = "1</think>\n#### 2"
    (path, headers, body), [trace] = asked("ids", said)
    assert path == "/v1/completions" and "Authorization" not in headers
    assert body["prompt"].endswith("<|im_start|>assistant\n<think>\n")
    assert trace.log_probs == (-1.0,) * len(said)
    _, [trace] = asked("text", said)
    assert trace.text == f"<think>\n{said}"  # whole, whatever prompt it will follow
    assert asked("unfinished", "#### 2")[1] == ()  # the thought that the prompt opened never ends


def test_ids_are_recorded_only_where_they_are_the_tokenizers():
    tokenizer = byte_tokenizer()
    ids = tuple(tokenizer("ab").input_ids)
    assert recorded_ids(Reply("ab", "stop", ("a", "b"), None, (-1.0, 1e-9)), tokenizer) == (
        ids,
        (-1.0, 0.0),
        "log_probs_recorded",
    )
    merged = recorded_ids(Reply("ab", "stop", ("ab",), None, (-1.0,)), tokenizer)
    assert merged == (None, None, "log_probs_without_matching_ids")
    named = Reply("ab", "stop", tuple(f"token_id:{i}" for i in ids), None, (-1.0, -2.0))
    assert recorded_ids(named, tokenizer)[0] == ids
    assert recorded_ids(named, None) == (None, None, "log_probs_without_matching_ids")  # whose ids?
    given = Reply("ab", "stop", ("a", "b"), (*ids, tokenizer.eos_token_id), (-1.0, -2.0, -3.0))
    assert recorded_ids(given, tokenizer)[0] == (*ids, tokenizer.eos_token_id)
    foreign = Reply("ab", "stop", None, (9_999_999, 3), (-1.0, -2.0))
    assert recorded_ids(foreign, tokenizer)[2] == "log_probs_without_matching_ids"
    assert (
        recorded_ids(Reply("ab", "stop", ("a", "b"), None, (-1.0, float("-inf"))), tokenizer)[2]
        == "log_probs_not_finite"
    )
    assert recorded_ids(Reply("ab", "stop"), tokenizer)[2] == "no_log_probs"


def test_addresses_that_carry_secrets_or_nothing():
    for url, message in [
        ("localhost:8000", "http"),
        ("http://me:pw@host/v1", "a key does not belong"),
        ("http://h/?key=1", "a key does not belong"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            Endpoint(url, "m")
        assert "pw" not in str(error.value)
    assert KEY not in repr(Endpoint("http://h/v1", "m", api_key=KEY))


def local(temperature=1.0, **changes):
    options = {"style": "plain", "device": "cpu", "tokenizer": load_tokenizer(str(BASE)), **changes}
    return LocalTeacher(str(BASE), max_tokens=20, temperature=temperature, **options)


def test_a_local_model_records_exact_ids_and_log_probs(tmp_path):
    chains = write_dataset(tmp_path / "data", seed=0, train=24, heldout=1, ood=1, terms=2)["train"]
    out = tmp_path / "out.parquet"
    card = prepare_traces(str(chains), out, local(), "base", {}, n=4, reward="gsm8k", keep_wrong=True)
    counts = card["counts"]
    assert counts["samples"] == 96 and counts["samples_log_probs_recorded"] == 96
    assert 0 < counts["samples_right"] < 30  # one step, right once in twenty
    tokenizer = load_tokenizer(str(BASE))
    traces = [trace for problem in load_problems(out) for trace in problem.traces]
    assert len(traces) == counts["samples_kept"] == counts["traces_with_log_probs"]
    assert all(trace.token_ids[-1] == tokenizer.eos_token_id for trace in traces)
    assert all(len(trace.log_probs) == len(trace.token_ids) for trace in traces)
    again = prepare_traces(
        str(chains), tmp_path / "again.parquet", local(), "base", {}, n=4, reward="gsm8k", keep_wrong=True
    )
    assert again["counts"] == counts
    assert load_problems(tmp_path / "again.parquet")[3].traces == load_problems(out)[3].traces


def test_a_local_model_skips_prompts_without_room_and_does_not_read_traces(tmp_path, caplog):
    rows = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    rows[1]["prompt"] *= 1000
    rows[2]["traces"] = [{"token_ids": [10**6], "teacher": "another"}]  # no id of this model's
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    card = prepare_traces(str(path), tmp_path / "out.parquet", local(), "base", {}, n=2, reward="gsm8k")
    assert card["counts"]["samples"] == 6 and card["counts"]["problems_refused"] == 1
    assert f"1 problems get no trace: the teacher refuses them, first: {path}:2: --max-tokens 20 leaves" in caplog.text


def test_local_samples_belong_to_their_problems_where_some_end_before_others_begin(tmp_path, monkeypatch):
    rows = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    problems = load_problems(str(write_rows(tmp_path / "rows.jsonl", rows)))

    def drawn():
        """The tokens of each problem's samples; their log-probs are rounded by how many are computed at once."""
        return {p.id: [s.token_ids for s in samples] for part in local().answer(problems, 2) for p, samples, _ in part}

    whole = drawn()

    def by_threes(engine, requests):
        rest, begun = iter(requests), 0
        while some := list(islice(rest, 3)):
            yield from enumerate(engine.generate(some), begun)
            begun += len(some)

    monkeypatch.setattr(NativeEngine, "stream", by_threes)
    assert drawn() == whole


def test_a_local_run_that_was_stopped_makes_only_the_rest(tmp_path, monkeypatch):
    chains = write_dataset(tmp_path / "data", seed=0, train=24, heldout=1, ood=1, terms=2)["train"]
    asked, stream, options = [], NativeEngine.stream, {"n": 4, "reward": "gsm8k", "keep_wrong": True}

    def breaks_off(engine, requests, after=50):
        for number, finished in enumerate(stream(engine, requests)):
            if number == after:
                raise KeyboardInterrupt
            yield finished

    monkeypatch.setattr(teachers, "SAVED_AT_ONCE", 8)
    monkeypatch.setattr(NativeEngine, "stream", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        prepare_traces(str(chains), tmp_path / "out.parquet", local(), "base", {}, **options)
    saved = len((tmp_path / "out.progress.jsonl").read_text().splitlines()) - 1
    assert 0 < saved <= 50 // 4

    def counted(engine, requests):
        return stream(engine, (asked.append(request) or request for request in requests))

    monkeypatch.setattr(NativeEngine, "stream", counted)
    prepare_traces(str(chains), tmp_path / "out.parquet", local(), "base", {}, **options)
    assert len(asked) == 96 - 4 * saved
    monkeypatch.undo()
    prepare_traces(str(chains), tmp_path / "whole.parquet", local(), "base", {}, **options)
    rest, whole = (load_problems(tmp_path / f"{name}.parquet") for name in ("out", "whole"))
    for mine, theirs in zip(rest, whole, strict=True):
        assert [t.token_ids for t in mine.traces] == [t.token_ids for t in theirs.traces]


def test_local_log_probs_are_at_the_sampling_temperature(tmp_path):
    chains = write_dataset(tmp_path / "data", seed=0, train=2, heldout=1, ood=1, terms=2)["train"]
    [problem, _] = load_problems(str(chains))
    [(_, [drawn], _)] = next(local(temperature=0.5).answer([problem], 1))
    tokenizer = load_tokenizer(str(BASE))
    prompt = tokenizer(problem.prompt, add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(BASE)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *drawn.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.5, dim=-1).gather(-1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(drawn.log_probs), expected, atol=1e-4, rtol=0)
    for other in (byte_tokenizer(), None):  # without one, nobody knows who will read the ids
        [(_, [foreign], _)] = next(local(tokenizer=other).answer([problem], 1))
        assert foreign.token_ids is foreign.log_probs is None
        assert foreign.log_prob_status == "log_probs_without_matching_ids"
        assert foreign.text.startswith(("+", "-"))
