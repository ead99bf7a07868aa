"""One line of every kind that cannot be a problem: bytes as they stand in the file."""

from __future__ import annotations

import json


def row(**changes: object) -> bytes:
    """A sound row of our own layout, changed."""
    return json.dumps({"id": "x", "prompt": "1+1", "answer": "2", "traces": ["2"]} | changes).encode()


def trace(**parts: object) -> bytes:
    return row(traces=[parts])


def without(*keys: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(row()).items() if k not in keys}).encode()


MALFORMED: dict[str, bytes] = {
    # not JSON, or not an object
    "cut off": b'{"prompt": "1+1", "ans',
    "trailing comma": b'{"prompt": "1+1", "answer": "2",}',
    "single quotes": b"{'prompt': '1+1', 'answer': '2'}",
    "two objects": row() + row(),
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
    "prompt null": row(prompt=None),
    "prompt empty": row(prompt=""),
    "prompt blank": row(prompt=" \n"),
    "prompt a number": row(prompt=5),
    "prompt true": row(prompt=True),
    "prompt an object": row(prompt={"role": "user", "content": "1+1"}),
    "prompt an empty chat": row(prompt=[]),
    "prompt a list of strings": row(prompt=["1+1"]),
    "message without role": row(prompt=[{"content": "1+1"}]),
    "message without content": row(prompt=[{"role": "user"}]),
    "message with a list": row(prompt=[{"role": "user", "content": ["1+1"]}]),
    # answer
    "answer missing": without("answer"),
    "answer null": row(answer=None),
    "answer empty": row(answer=""),
    "answer blank": row(answer="  "),
    "answer true": row(answer=True),
    "answer a list of two": row(answer=["1", "2"]),
    "answer an object": row(answer={"value": 2}),
    "answer NaN": b'{"prompt": "1+1", "answer": NaN}',
    "answer infinite": b'{"prompt": "1+1", "answer": -Infinity}',
    # id, source
    "id empty": row(id=""),
    "id a list": row(id=[1]),
    "id true": row(id=True),
    "id a fraction": row(id=1.5),
    "source a number": row(source=3),
    # traces
    "traces a number": row(traces=5),
    "traces true": row(traces=True),
    "trace null": row(traces=[None]),
    "trace null beside another": row(traces=["2", None]),
    "trace of mixed ids": row(traces=[[1, "2"]]),
    "trace of negative ids": row(traces=[[1, -2]]),
    "trace of true": row(traces=[[True, False]]),
    "trace without parts": trace(),
    "trace of text and ids": trace(text="2", token_ids=[5]),
    "trace teacher a number": trace(text="2", teacher=3),
    "chat trace of two answers": row(traces=[[{"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}]]),
    "chat trace without answer": row(traces=[[{"role": "user", "content": "1"}]]),
    "log-probs of a text": trace(text="2", log_probs=[-1.0]),
    "log-probs too few": trace(token_ids=[5, 6, 7, 8], log_probs=[-1.0]),
    "log-probs too many": trace(token_ids=[5], log_probs=[-1.0, -1.0, -1.0]),
    "log-probs above 0": trace(token_ids=[5, 6], log_probs=[-1.0, 0.5]),
    "log-probs NaN": b'{"id": "x", "prompt": "1", "answer": "2", "traces": [{"token_ids": [5], "log_probs": [NaN]}]}',
    "log-probs infinite": b'{"id": "x", "prompt": "1", "answer": "2", "traces": [{"token_ids": [5], "log_probs": [-Infinity]}]}',
    "log-probs a string": trace(token_ids=[5], log_probs=["-1"]),
    "log-probs no list": trace(token_ids=[5], log_probs=-1.0),
}  # fmt: skip
