"""Python code in a process of its own, with limits on time, memory, files and network.

Each piece of code runs in a fresh interpreter (-I, no environment, an empty working folder that is removed) with limits
on time, memory (not enforced by macOS), file size and open files, and it may start no process or thread. On Linux it is
in namespaces of its own (unshare): no network, and nothing that it started outlives it; on macOS sandbox-exec takes the
network away. No root is needed.

What it does NOT protect against: code can read every file that you can read, and write where you can write. It shares
the kernel. Root is not bound by the limit on processes. For code that you do not trust, run all of this in a container
or a virtual machine, as a user with nothing to lose.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from luffy.errors import UserError

# The sandboxed interpreter's program. It takes its limits before foreign code runs. The alarm ends it if the process
# that started it is gone; a handler, because the first process of a namespace ignores signals without one.
_LIMITS = """
import json, os, resource, signal, sys
with open("job.json") as file:
    job = json.load(file)
os.remove("job.json")
report = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for standard in (0, 1, 2):
    os.dup2(report if job["heard"] and standard else nowhere, standard)
signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
signal.alarm(job["seconds"])
for name, limit in job["limits"].items():
    kind = getattr(resource, name, None)
    if kind is not None:
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):
            if sys.platform == "linux":
                raise
space = {"__name__": "__main__"}
"""

# All texts run, then the word that says so, which was removed before.
_TESTED = """
for text in [job["code"], *job["tests"]]:
    exec(compile(text, "<response>", "exec"), space)
os.write(report, job["word"].encode())
"""

# What the code prints, the value of its last line, and an error in one line.
_SHOWN = """
import ast
def line_of(error):
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""
try:
    tree = ast.parse(job["code"], "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), space)
        if value is not None:
            print(repr(value))
    sys.stdout.flush()
except Exception as error:
    sys.stdout.flush()
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    message = f": {message[:500]}" if message else ""
    os.write(2, f"{type(error).__name__}{message}{line_of(error)}".encode("utf-8", "replace"))
    os._exit(1)
"""

READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Ran:
    """What a piece of code printed; ``fault``: why it did not come to its end."""

    text: str
    fault: Literal["", "timed_out", "raised", "cut"] = ""


@dataclass(frozen=True)
class Sandbox:
    """Runs code. ``prefix``: the command that takes the network away."""

    prefix: tuple[str, ...]
    time_s: float
    memory_mb: int

    def passes(self, code: str, tests: list[str]) -> bool:
        """Whether all tests pass. Raises OSError where the sandbox itself cannot start."""
        word = secrets.token_hex(16)
        with self._process(_TESTED, code=code, tests=tests, word=word, heard=False) as process:
            said, _ = self._said(process, len(word))
        return said == word.encode()

    def run(self, code: str, most_bytes: int = 1 << 20) -> Ran:
        """Run code as a notebook does: its output, errors too. Raises OSError where the sandbox cannot start."""
        with self._process(_SHOWN, code=code, heard=True) as process:
            said, ended = self._said(process, most_bytes + 1)
            code_of_exit = _exit_code(process) if ended and len(said) <= most_bytes else None
        text = said[:most_bytes].decode("utf-8", "replace").rstrip()
        if len(said) > most_bytes:
            return Ran(text, "cut")
        if code_of_exit is None:
            return Ran(f"{text}\nTimeoutError: no end within {self.time_s:g} s".lstrip(), "timed_out")
        if code_of_exit == 0:
            return Ran(text)
        return Ran(text or f"the process ended with status {code_of_exit}", "raised")

    @contextmanager
    def _process(self, program: str, **job: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The process of one job; it is gone at the end."""
        job |= {"limits": self._limits, "seconds": int(self.time_s) + 2}
        with tempfile.TemporaryDirectory(prefix="luffy-sandbox-", ignore_cleanup_errors=True) as folder:
            Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
            process = subprocess.Popen(
                [*self.prefix, sys.executable, "-I", "-c", _LIMITS + program],
                cwd=folder, env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                yield process
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    @property
    def _limits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": int(self.time_s) + 1,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": 1 << 20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": 0,
            "RLIMIT_CORE": 0,
        }

    def _said(self, process: subprocess.Popen[bytes], most: int) -> tuple[bytes, bool]:
        """What the process writes in time, so many bytes at most, and whether it closed its output."""
        assert process.stdout is not None
        deadline, said = time.monotonic() + self.time_s, b""
        while len(said) < most:
            ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return said, False
            part = os.read(process.stdout.fileno(), min(most - len(said), READ_BYTES))
            if not part:
                return said, True
            said += part
        return said, False


def make_sandbox(time_s: float, memory_mb: int, allow: tuple[str, ...] = ()) -> Sandbox:
    """A sandbox with every limit. A UserError if the system cannot give one; ``allow`` names those to go without."""
    prefix = without_network()
    missing = (["network"] if prefix is None else []) + (["memory"] if sys.platform == "darwin" else [])
    if refused := [name for name in missing if name not in allow]:
        raise UserError(
            f"the sandbox for Python code cannot limit {' and '.join(refused)} on this machine (it needs Linux with "
            f"unshare); run in a container and set arguments: {{allow: [{', '.join(refused)}]}}"
        )
    return Sandbox(prefix or (), time_s, memory_mb)


@functools.cache
def without_network() -> tuple[str, ...] | None:
    """The strictest command of those that work here; None where none does."""
    unshare = ("unshare", "--map-root-user", "--net")
    candidates = (
        (*unshare, "--pid", "--fork", "--kill-child", "--mount-proc"),
        (*unshare, "--pid", "--fork", "--kill-child"),
        unshare,
        ("sandbox-exec", "-p", "(version 1)(allow default)(deny network*)"),
    )
    for command in candidates:
        if shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return None


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that closed its output; None if it goes on all the same."""
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None
