"""Code runs with limits; tests/test_reward_examples.py has those on network and on what is left running."""

import sys

import pytest

from luffy.environments import sandbox as module
from luffy.environments.sandbox import Ran, Sandbox, make_sandbox, without_network
from luffy.errors import UserError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce the limit on memory")


@pytest.fixture(scope="module")
def box():
    return Sandbox(without_network() or (), time_s=30.0, memory_mb=256)


@pytest.mark.parametrize(
    ("code", "ran"),
    [
        ("print(2 + 3)", Ran("5")),
        ("x = 2\nx + 3", Ran("5")),
        ("print('a')\n'b'", Ran("a\n'b'")),
        ("None", Ran("")),
        ("", Ran("")),
        ("print('a')\n1 / 0", Ran("a\nZeroDivisionError: division by zero (line 2)", "raised")),
        ("def f():\n    return g\n\nf()", Ran("NameError: name 'g' is not defined (line 2)", "raised")),
        ("x = (", Ran("SyntaxError: '(' was never closed (line 1)", "raised")),
        ("raise SystemExit(0)", Ran("")),
        ("import os\nos._exit(3)", Ran("the process ended with status 3", "raised")),
        ("input()", Ran("EOFError: EOF when reading a line (line 1)", "raised")),
        ("print('ä')", Ran("ä")),
        ("import json, os\n(__name__, os.listdir('.'))", Ran("('__main__', [])")),
    ],
)
def test_code_shows_what_a_notebook_shows(box, code, ran):
    assert box.run(code) == ran


def test_code_that_goes_on_is_ended():
    quick = Sandbox(without_network() or (), time_s=1.0, memory_mb=256)
    for code in (
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
    ):
        assert quick.run(f"print('begun', flush=True)\n{code}") == Ran(
            "begun\nTimeoutError: no end within 1 s", "timed_out"
        )


def test_a_flood_is_cut(box):
    assert box.run("while True: print('x' * 99)", most_bytes=50) == Ran("x" * 50, "cut")


@LINUX
def test_memory_and_files_are_limited(box):
    assert box.run("len(bytearray(50 << 20))").fault == ""
    assert box.run("len(bytearray(500 << 20))") == Ran("MemoryError (line 1)", "raised")
    assert box.run("with open('big', 'wb') as file:\n    file.write(bytes(2 << 20))").fault == "raised"


def test_a_machine_that_cannot_isolate_is_refused(monkeypatch):
    monkeypatch.setattr(module, "without_network", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(
        UserError, match=r"cannot limit network on this machine .* set arguments: \{allow: \[network\]\}"
    ):
        make_sandbox(1.0, 64)
    assert make_sandbox(1.0, 64, allow=("network",)) == Sandbox((), 1.0, 64)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="cannot limit network and memory"):
        make_sandbox(1.0, 64)
