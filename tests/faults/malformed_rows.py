"""One line of every kind that cannot be a problem: bytes as they stand in the file."""

from __future__ import annotations

import json


def malformed_row(**changes: object) -> bytes:
    """A sound row of our own layout, changed."""
    return json.dumps({"id": "x", "prompt": "1+1", "answer": "2", "traces": ["2"]} | changes).encode()


def trace_of_parts(**parts: object) -> bytes:
    return malformed_row(traces=[parts])


def without(*keys: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(malformed_row()).items() if k not in keys}).encode()


MALFORMED: dict[str, bytes] = {
    # not JSON, or not an object
    "cut off": b'{"prompt": "1+1", "ans',
    "trailing comma": b'{"prompt": "1+1", "answer": "2",}',
    "single quotes": b"{'prompt': '1+1', 'answer': '2'}",
    "two objects": malformed_row() + malformed_row(),
    "a list": b"[1, 2]",
    "a string": b'"prompt"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
    "not UTF-8": b'{"prompt": "\xff\xfe", "answer": "2"}',
    "NUL bytes": b"\x00\x00\x00",
    "a raw newline's remains": b'1+1", "answer": "2"}',
    "half a surrogate pair": rb'{"prompt": "\ud83d", "answer": "2"}',
    "half a pair in a key": rb'{"prompt": "1", "answer": "2", "\udc00": 1}',
    "deep nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b', "answer": "2"}',
    "a number of 5,000 digits": b'{"prompt": "1", "answer": ' + b"9" * 5000 + b"}",
    "no columns": b"{}",
    # prompt
    "prompt missing": without("prompt"),
    "prompt null": malformed_row(prompt=None),
    "prompt empty": malformed_row(prompt=""),
    "prompt blank": malformed_row(prompt=" \n"),
    "prompt a number": malformed_row(prompt=5),
    "prompt true": malformed_row(prompt=True),
    "prompt an object": malformed_row(prompt={"role": "user", "content": "1+1"}),
    "prompt an empty chat": malformed_row(prompt=[]),
    "prompt a list of strings": malformed_row(prompt=["1+1"]),
    "message without role": malformed_row(prompt=[{"content": "1+1"}]),
    "message without content": malformed_row(prompt=[{"role": "user"}]),
    "message with a list": malformed_row(prompt=[{"role": "user", "content": ["1+1"]}]),
    # answer
    "answer missing": without("answer"),
    "answer null": malformed_row(answer=None),
    "answer empty": malformed_row(answer=""),
    "answer blank": malformed_row(answer="  "),
    "answer true": malformed_row(answer=True),
    "answer a list of two": malformed_row(answer=["1", "2"]),
    "answer an object": malformed_row(answer={"value": 2}),
    "answer NaN": b'{"prompt": "1+1", "answer": NaN}',
    "answer infinite": b'{"prompt": "1+1", "answer": -Infinity}',
    # id, source
    "id empty": malformed_row(id=""),
    "id a list": malformed_row(id=[1]),
    "id true": malformed_row(id=True),
    "id a fraction": malformed_row(id=1.5),
    "source a number": malformed_row(source=3),
    # traces
    "traces a number": malformed_row(traces=5),
    "traces true": malformed_row(traces=True),
    "trace null": malformed_row(traces=[None]),
    "trace null beside another": malformed_row(traces=["2", None]),
    "trace of mixed ids": malformed_row(traces=[[1, "2"]]),
    "trace of negative ids": malformed_row(traces=[[1, -2]]),
    "trace of true": malformed_row(traces=[[True, False]]),
    "trace without parts": trace_of_parts(),
    "trace of text and ids": trace_of_parts(text="2", token_ids=[5]),
    "trace teacher a number": trace_of_parts(text="2", teacher=3),
    "chat trace of two answers": malformed_row(traces=[[{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]]),
    "chat trace without answer": malformed_row(traces=[[{"role": "user", "content": "1"}]]),
    "log-probs of a text": trace_of_parts(text="2", log_probs=[-1.0]),
    "log-probs too few": trace_of_parts(token_ids=[5, 6, 7, 8], log_probs=[-1.0]),
    "log-probs too many": trace_of_parts(token_ids=[5], log_probs=[-1.0, -1.0, -1.0]),
    "log-probs above 0": trace_of_parts(token_ids=[5, 6], log_probs=[-1.0, 0.5]),
    "log-probs NaN": b'{"id": "x", "prompt": "1", "answer": "2", "traces": [{"token_ids": [5], "log_probs": [NaN]}]}',
    "log-probs infinite": b'{"id": "x", "prompt": "1", "answer": "2", "traces": [{"token_ids": [5], "log_probs": [-Infinity]}]}',
    "log-probs a string": trace_of_parts(token_ids=[5], log_probs=["-1"]),
    "log-probs no list": trace_of_parts(token_ids=[5], log_probs=-1.0),
}  # fmt: skip
