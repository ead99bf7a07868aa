"""Carries out commands of luffy's command line in this process, which is a fresh one: ``python commands.py CALLS.json``.

A call is ``{"args": [...], "env": {...}}``; printed is ``[[exit code, standard output, standard error], ...]``.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from luffy.cli import main


def carry_out(call):
    sys.argv = ["luffy", *call["args"]]
    for name, value in call.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return [code, out.getvalue(), err.getvalue()]


if __name__ == "__main__":
    print(json.dumps([carry_out(call) for call in json.loads(Path(sys.argv[1]).read_text())]))
