"""Servers that speak as vLLM's with luffy's worker do, in threads of the test."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from luffy.models.load import drop_padding_tokens, token_count
from luffy.rollout import NativeEngine
from luffy.rollout.vllm.worker_extension import model_fields, tensors_in
from luffy.types import Request, Sampling

KEY = "a-key-that-must-not-be-seen"


class FakeServer:
    """Answers as a vLLM server with luffy's worker does; ``die_after`` requests it hangs up on everybody."""

    def __init__(self, model, max_context=512, delay=0.0, world_size=1, tokens=100):
        self.config, self.max_context, self.delay, self.world_size = (
            model_fields(model.config),
            max_context,
            delay,
            world_size,
        )
        self.tokens = tokens
        self.version, self.weights, self.calls, self.prompts = -1, {}, [], []
        self.takes_adapters, self.base, self.adapters, self.asked_for = False, None, {}, []
        self.dead, self.die_after, self.broken = False, None, 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.answer(self, {})

            def do_POST(self):
                outer.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, handler, body):
        path = handler.path.strip("/")
        self.calls.append(path)
        if self.dead:
            handler.connection.close()
            return
        if handler.headers["Authorization"] != f"Bearer {KEY}":
            status, reply = 401, {"error": "no key, you sent " + str(handler.headers["Authorization"])}
        else:
            status, reply = self.reply(path, body)
        if self.dead:  # died while it worked on this
            handler.connection.close()
            return
        raw = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        with contextlib.suppress(ConnectionError):  # who asked has stopped waiting
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(raw)))
            handler.end_headers()
            handler.wfile.write(raw)

    def reply(self, path, body):
        if path == "v1/completions":
            return self.complete(body)
        if path == "collective_rpc":
            return 200, {"results": [getattr(self, body["method"])(**body["kwargs"])]}
        if path == "v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = dict(tensors_in([Path(body["lora_path"]) / "adapter_model.safetensors"]))
            return 200, "Success: loaded"
        if path == "v1/unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(body["lora_name"], None) else (404, {"error": "not found"})
        known = {"v1/models": {"data": [{"id": "m"}]}, "get_world_size": {"world_size": self.world_size}}
        return 200, known.get(path, {})

    def complete(self, body):
        self.asked_for.append(body["model"])
        self.prompts.append(tuple(body["prompt"]))
        time.sleep(self.delay)
        if self.die_after is not None and len(self.prompts) > self.die_after:
            self.dead = True
        if self.broken:
            self.broken -= 1
            return 500, {"error": "hiccup"}
        ids = [body["seed"] % self.tokens, 3, 4][: body["max_tokens"]]
        return 200, {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}]}

    def luffy_state(self):
        more = {"base": self.base, "takes_adapters": self.takes_adapters}
        return {"version": self.version, "max_context": self.max_context, "config": self.config, **more}

    def luffy_load(self, version, folder, base=None):
        self.weights = dict(tensors_in(sorted(Path(folder).glob("*.safetensors"))))
        self.version, self.base = version, base
        return {"version": version}

    def luffy_note_version(self, version):
        self.version = version
        return {"version": version}


class FakeScorer(FakeServer):
    """Scores prompts as vLLM does: nothing for the first token, then the token itself and, as it may, likelier ones."""

    def __init__(self, model, tokenizer, **knobs):
        super().__init__(model, **knobs)
        self.model, self.tokenizer, self.scored = model, tokenizer, 0

    def reply(self, path, body):
        if path == "tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.max_context}
        if path == "v1/models":
            return 200, {"data": [{"id": "teacher", "max_model_len": self.max_context}]}
        return super().reply(path, body)

    def complete(self, body):
        assert body["model"] == "teacher" and body["max_tokens"] == 1 and body["prompt_logprobs"] == 0
        self.scored += 1
        if self.die_after is not None and self.scored > self.die_after:
            self.dead = True
        if self.broken:
            self.broken -= 1
            return 500, {"error": "hiccup"}
        ids = body["prompt"]
        assert len(ids) < self.max_context
        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)
        places = [None]
        for place, token in enumerate(ids[1:]):
            best = int(rows[place].argmax())
            places.append({str(t): {"logprob": float(rows[place, t])} for t in (best, token)})
        return 200, {"choices": [{"text": "", "prompt_logprobs": places}]}


class FakeGenerator(FakeScorer):
    """Generates with a frozen model as `luffy serve` does: log-probs at the sampling temperature, and no token that a
    bias of -100 forbids."""

    def __init__(self, model, tokenizer, **knobs):
        super().__init__(model, tokenizer, **knobs)
        self.forbidden = {str(token): -100.0 for token in range(token_count(tokenizer), model.config.vocab_size)}
        drop_padding_tokens(model, token_count(tokenizer))
        self.engine, self.one_at_a_time = NativeEngine(model), threading.Lock()
        self.asked = []

    def complete(self, body):
        assert body["model"] == "teacher" and body["logprobs"] == 0 and body["ignore_eos"]
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
        assert body.get("logit_bias", {}) == self.forbidden
        self.asked.append(body)
        if self.die_after is not None and len(self.asked) > self.die_after:
            self.dead = True
        if self.broken:
            self.broken -= 1
            return 500, {"error": "hiccup"}
        assert len(body["prompt"]) + body["max_tokens"] <= self.max_context
        sampling = Sampling(body["max_tokens"], body["temperature"], eos_ids=tuple(body["stop_token_ids"]))
        with self.one_at_a_time:
            (made,) = self.engine.generate([Request(tuple(body["prompt"]), body["seed"], sampling)])
        choice = {"token_ids": made.token_ids.tolist(), "logprobs": {"token_logprobs": made.log_probs.tolist()}}
        return 200, {"choices": [choice]}
