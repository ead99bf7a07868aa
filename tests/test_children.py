"""Children are fresh interpreters, end in time, and never outlive the process that started them."""

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import ChildFailed, in_child
from processes import is_running

TESTS = Path(__file__).parent
SCRIPT = """
import os, sys, time
import children
hangs, left = children.Child("time"), children.Child("time")
children.LIMIT_S = 1.0
hangs.start(time.sleep, 100)
children.LIMIT_S = 200.0
left.start(time.sleep, 100)
try:
    hangs.result()
except children.ChildFailed as failure:
    print(failure, left.process.pid, sep="\\n", flush=True)
os._exit(1)
"""


def test_a_job_that_hangs_ends_with_a_stack_and_nothing_outlives_the_tests():
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=250)
    said, pid = done.stdout.splitlines()
    assert said == "the child ended with exit code 1"
    assert "Timeout (0:00:01)!" in done.stderr and "_answer" in done.stderr
    for _ in range(1200):
        if not is_running(int(pid)):
            break
        time.sleep(0.1)
    assert not is_running(int(pid))


@pytest.mark.slow
def test_a_child_has_the_place_of_the_test_and_nothing_of_its_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUFFY_A_VARIABLE", "a value")
    assert in_child(os.getcwd) == str(tmp_path.resolve())
    assert in_child(os.getenv, "LUFFY_A_VARIABLE") == "a value"
    assert in_child(os.getpid) not in (os.getpid(), os.getppid())
    monkeypatch.delenv("LUFFY_A_VARIABLE")
    assert in_child(os.getenv, "LUFFY_A_VARIABLE") is None
    with pytest.raises(ChildFailed, match="ValueError: invalid literal for int"):
        in_child(int, "x")
    assert in_child(int, "1") == 1


# Without one of these words there is nothing to find: most files need not be parsed.
WORDS = re.compile("fork|Process|Pool|get_context|set_start_method")


def forks_in(tree):
    """Lines that copy a process: os.fork and its kin, or multiprocessing without a context that says spawn."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in ("fork", "forkpty"):
            yield node.lineno
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            said = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            plain = (
                isinstance(owner, ast.Name) and owner.id in ("multiprocessing", "mp") and called in ("Process", "Pool")
            )
            pool = called == "ProcessPoolExecutor" and "mp_context" not in [keyword.arg for keyword in node.keywords]
            if plain or pool or (called in ("get_context", "set_start_method") and said not in (["spawn"], [])):
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("os.fork()", True),
        ("from os import fork\nfork()", True),
        ("multiprocessing.get_context('fork')", True),
        ("multiprocessing.Process(target=f)", True),
        ("ProcessPoolExecutor(2)", True),
        ("multiprocessing.get_context('spawn').Process(target=f)", False),
        ("torch.random.fork_rng()", False),
    ],
)
def test_the_search_for_forks_finds_them(code, found):
    assert bool(list(forks_in(ast.parse(code)))) == found
    assert WORDS.search(code) or not found


def test_nothing_forks():
    """On ARM the copy of a process that has used torch hangs or crashes, on macOS too."""
    root = TESTS.parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for folder in ("luffy", "tests", "examples", "benchmarks", "studies")
        for path in (root / folder).rglob("*.py")
        if WORDS.search(text := path.read_text())
        for line in forks_in(ast.parse(text))
    ]
    assert found == []
