"""Run ``luffy`` in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import NamedTuple

import pytest

from luffy.cli import main


class Result(NamedTuple):
    """The exit code of a command and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def luffy(*args: object, stdin: str = "", **env: str | None) -> Result:
    """Run ``luffy ARGS`` without a GPU; ``env`` are environment variables, None deletes one."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["luffy", *map(str, args)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setattr("torch.cuda.is_available", lambda: False)
        for name, value in {"COLUMNS": "200", "LUFFY_DATA": None, **env}.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return Result(code, out.getvalue(), err.getvalue())
