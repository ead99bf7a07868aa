"""Scores of a teacher on vLLM servers, against servers of our own making that compute them with a small model."""

import json

import pytest
import torch
from builders import make_model, make_rollout, make_task, make_tokenizer
from fake_servers import KEY, FakeScorer

from luffy.errors import TrainingStopped, UserError
from luffy.learn.credit import uncredited
from luffy.rollout.vllm.frozen_servers import ScoringServers
from luffy.rollout.vllm.http_client import Server


@pytest.fixture
def model():
    return make_model("llama", vocab_size=18)


@pytest.fixture
def start(model):
    made = []

    def build(tokenizer=None, **knobs):
        made.append(FakeScorer(model, tokenizer or make_tokenizer(), **knobs))
        return made[-1]

    yield build
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def scoring(*servers, **knobs):
    clients = [Server(s.url, KEY, timeout_s=20) for s in servers]
    return ScoringServers(clients, make_tokenizer(), slots=3, **knobs)


def random_samples(count=8):
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(count):
        ids = torch.randint(3, 18, (2 + i,), generator=generator)
        out.append(uncredited(make_rollout(ids.tolist(), task=make_task((4, 13, 3 + i // 4)))))
    return out


def expected_log_probs(model, sample):
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids.tolist()]])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0], -1)[len(sample.prompt_ids) - 1 : -1]
    return rows.gather(-1, sample.token_ids[:, None])[:, 0]


def test_every_response_token_is_scored_behind_its_prompt(model, start):
    servers = [start(max_context=40), start(max_context=60)]
    scores = scoring(*servers)
    samples = random_samples()
    for sample, found in zip(samples, scores.log_probs(samples), strict=True):
        torch.testing.assert_close(found, expected_log_probs(model, sample), atol=1e-5, rtol=1e-5)
    assert scores.longest == 39 and scores.log_probs([]) == []
    assert all(server.scored for server in servers) and sum(server.scored for server in servers) == len(samples)


def test_a_lost_server_is_made_up_for_and_asked_again_later(model, start):
    servers, warnings, samples = [start(), start()], [], random_samples()
    scores = scoring(*servers, warn=warnings.append)
    servers[0].die_after, servers[1].broken = 1, 1
    for sample, found in zip(samples, scores.log_probs(samples), strict=True):
        torch.testing.assert_close(found, expected_log_probs(model, sample), atol=1e-5, rtol=1e-5)
    assert len(warnings) == 1 and servers[0].url in warnings[0] and KEY not in warnings[0]
    servers[1].dead = True
    with pytest.raises(TrainingStopped, match="no vLLM server of the teacher answers"):
        scores.log_probs(samples)
    servers[0].dead, servers[0].die_after = False, None
    assert len(scores.log_probs(samples)) == len(samples)


def test_what_is_no_teacher_is_refused(model, start, monkeypatch):
    with pytest.raises(UserError, match=r"the tokenizers differ: http://127.*\d+ for the teacher\)"):
        scoring(start(FlippedTokenizer()))
    server = start()
    scores = scoring(server)
    monkeypatch.setattr(server, "complete", lambda body: (200, {"choices": [{"text": ""}]}))
    with pytest.raises(UserError, match="needs a list as 'prompt_logprobs'; name a vLLM server in rollout"):
        scores.log_probs(random_samples(1))
    server.dead = True
    with pytest.raises(UserError, match="the teacher's vLLM server does not answer"):
        scoring(server)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda ids: ids[:2], "token 2: [0-9]+ for the policy, nothing for the teacher"),
        (lambda ids: [], "token 0: [0-9]+ for the policy, nothing for the teacher"),
        (lambda ids: [*ids, 7], "token [1-9][0-9]*: nothing for the policy, 7 for the teacher"),
    ],
)
def test_a_tokenizer_that_ends_sooner_or_later_is_refused_where_one_has_ended(start, change, place):
    server = start()
    plain = server.reply

    def changed(path, body):
        status, reply = plain(path, body)
        return status, {"tokens": change(reply["tokens"])} if path == "tokenize" else reply

    server.reply = changed
    with pytest.raises(UserError, match=rf"the tokenizers differ: .*\({place}\)"):
        scoring(server)


class Raw(str):
    """The text of an answer, as it is."""


ANSWERS = {
    "a web page": Raw("<html>hello</html>"), "nothing": Raw(""), "null": None, "a number": 7, "a text": "ok", "a list": [1],
    "half of JSON": Raw('{"data": ['), "deep": Raw("[" * 100_000), "many digits": Raw("9" * 6000), "no text": Raw("\udcff"),
    "another object": {"models": []}, "an error": {"error": {"message": "no"}}, "NaN": Raw("NaN"),
}  # fmt: skip
MODELS = {
    "no list": {"data": {"id": "m"}}, "empty": {"data": []}, "names alone": {"data": ["m"]}, "no id": {"data": [{}]},
    "odd id": {"data": [{"id": 7}]}, "odd context": {"data": [{"id": "m", "max_model_len": "long"}]},
    "no context": {"data": [{"id": "m", "max_model_len": 0}]},
    "huge context": {"data": [{"id": "m", "max_model_len": 10**400}]},
}  # fmt: skip
TOKENS = {"no list": {"tokens": 7}, "null": {"tokens": None}, "texts": {"tokens": ["a"]}, "lists": {"tokens": [[1]]}}
SCORES = {
    "no choices": {"choices": []}, "choices of text": {"choices": ["a"]}, "no scores": {"choices": [{"text": ""}]},
    "null": {"choices": [{"prompt_logprobs": None}]}, "too few": {"choices": [{"prompt_logprobs": [None]}]},
    "all null": [None] * 5, "lists": [[0.5]] * 5, "no entry": [{}] * 5, "a text": [{"3": "x"}] * 5,
}  # fmt: skip
FAULTS = [5, 5.0, "-1", None, True, float("-inf"), float("inf"), float("nan"), 10**400, -(10**400), 0.01]


def answering(server, path, answer):
    """Let a server give one answer at one path, and its own elsewhere."""
    own = server.answer

    def changed(handler, body):
        if handler.path.strip("/") != path:
            return own(handler, body)
        raw = (answer if isinstance(answer, Raw) else json.dumps(answer)).encode("utf-8", "surrogateescape")
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    server.answer = changed
    return server


def refused_by(act):
    with pytest.raises(
        UserError, match=r"^http://127\.0\.0\.1:\d+/.*; name a vLLM server in rollout\.vllm\.servers$"
    ) as caught:
        act()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        *((path, answer) for path in ("v1/models", "tokenize", "v1/completions") for answer in ANSWERS.values()),
        *(("v1/models", answer) for answer in MODELS.values()),
        *(("tokenize", answer) for answer in TOKENS.values()),
        *(("v1/completions", answer) for answer in SCORES.values()),
    ],
)
def test_a_server_that_is_no_vllm_server_is_refused_in_one_line(start, path, answer):
    if isinstance(answer, list) and len(answer) == 5:
        answer = {"choices": [{"prompt_logprobs": answer}]}
    server = answering(start(), path, answer)
    refused_by(lambda: scoring(server).log_probs(random_samples(1)))


@pytest.mark.parametrize("value", FAULTS, ids=lambda value: str(value)[:8])
def test_a_log_prob_that_no_probability_has_is_refused(start, value):
    (sample,) = random_samples(1)
    ids = [*sample.prompt_ids, *sample.token_ids.tolist()]
    places = [None, *({str(token): {"logprob": -1.0}} for token in ids[1:-1]), {str(ids[-1]): {"logprob": value}}]
    server = answering(start(), "v1/completions", {"choices": [{"prompt_logprobs": places}]})
    refused_by(lambda: scoring(server).log_probs([sample]))
    places[-1] = {str(ids[-1]): {"logprob": 1e-6}}
    assert scoring(server).log_probs([sample])[0][-1] == pytest.approx(1e-6)


class FlippedTokenizer:
    """Two letters change places."""

    def __call__(self, text, **options):
        ids = make_tokenizer()(text, **options)["input_ids"]
        return {"input_ids": [{5: 6, 6: 5}.get(i, i) for i in ids]}


@pytest.mark.vllm
def test_a_server_of_vllm_itself_gives_the_scores_of_its_model(tmp_path):
    import vllm_engines
    from transformers import AutoTokenizer

    served = make_model("llama", hidden_size=128)
    server = vllm_engines.server_for(served, "scoring")
    vllm_engines.save_with_tokenizer(served, tmp_path)
    scores = ScoringServers([server], AutoTokenizer.from_pretrained(tmp_path), slots=4)
    assert scores.longest == 511
    for sample, found in zip(random_samples(), scores.log_probs(random_samples()), strict=True):
        torch.testing.assert_close(found, expected_log_probs(served, sample), atol=1e-3, rtol=1e-3)
