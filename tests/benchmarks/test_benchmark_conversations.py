"""The benchmark of tools that take time plays real episodes and counts every token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conversing import save_chat_model

pytestmark = [pytest.mark.studies, pytest.mark.slow]
PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "conversations.py"


def test_every_turn_is_drawn_and_no_token_prefilled_twice(tmp_path):
    size = "--shape tiny --dtype float32 --episodes 6 --turns 3 --turn-tokens 5 --prompt-tokens 20 --highest-id 250"
    command = [sys.executable, PROGRAM, "--tokenizer", save_chat_model(tmp_path / "model"), *size.split()]
    command += ["--slowest", "0.05", "--repeats", "1", "--only", "luffy"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.split("ROW ")[1])
    assert row["tokens"] == 6 * 3 * 5
    # Each turn is given the prompt, the turns before it and a reply behind each.
    reply, rest = divmod(row["given"] - 6 * (3 * 20 + 3 * 5), 6 * 3)
    assert reply > 0 and rest == 0
    # A later turn prefills the last token of the one before, which was not fed back, and the reply.
    assert row["prefilled"] == 6 * (20 + 2 * (1 + reply))
