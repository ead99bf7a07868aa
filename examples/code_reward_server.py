"""A reward for code: run a response against unit tests in a sandboxed process, and serve the verdicts over HTTP.

    python examples/code_reward_server.py --port 9000
    luffy train mine.yaml reward.kind=http://127.0.0.1:9000/

Every row needs a column ``tests``: Python text, or a list of such texts, that runs after the response's code and raises
where the code is wrong (``assert add(2, 3) == 5``). The code is the last fenced block of the response, or all of it. It
scores 1 where every test passes, else 0. Linux and macOS, no root.

Each response runs in luffy's sandbox (luffy/environments/sandbox.py): limits on time, memory, files and processes, and
no network. Where the network cannot be taken away the server does not start without --allow-network.

Whoever may send a request runs code here. Web pages may not: a request that a browser sends for another site, that goes
by a foreign host name, or that is not application/json is refused. On another address than loopback (in a container) it
needs a token:

    CODE_REWARD_TOKEN=$(openssl rand -hex 16) python examples/code_reward_server.py --host 0.0.0.0
    export JUDGE="Bearer THE_TOKEN"
    luffy train mine.yaml reward.kind=http://HOST:9000/ 'reward.http.header_env={Authorization: JUDGE}'

What it does NOT protect against: code can read every file that you can read, and write where you can write. It shares
the kernel. It runs in one interpreter with its tests, so code that is made to cheat can pass them. Root is not bound by
the limit on processes. For code that you do not trust run this server in a container or a virtual machine, as a user
with nothing to lose.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from luffy.environments.sandbox import Sandbox, without_network

LONGEST_REQUEST = 64 << 20
IDLE_S = 60.0  # a connection that sends nothing for so long is closed
TOKEN_VARIABLE = "CODE_REWARD_TOKEN"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def code_of(response: str) -> str:
    """The last fenced block, or the whole text."""
    blocks = FENCE.findall(response)
    return blocks[-1] if blocks else response


def score(sandbox: Sandbox, sample: dict[str, Any]) -> float | dict[str, str]:
    """What the HTTP reward takes for one sample: a number, or why there is none."""
    tests = sample.get("columns", {}).get("tests")
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        return {"error": "the row has no column 'tests' with Python text"}
    try:
        return float(sandbox.passes(code_of(sample["response"]), tests))
    except OSError as error:
        return {"error": f"the sandbox did not start: {error}"}


def refusal(headers: Message, port: int, token: str | None) -> tuple[int, str] | None:
    """Status and reason for a request that must not run anything; None for one that may. Without a token only names of
    loopback lead here: a foreign name that points to this machine (DNS rebinding) belongs to another site."""
    names = headers.get_all("Host", [])
    own = [f"{name}:{port}" for name in LOOPBACK_NAMES] + (list(LOOPBACK_NAMES) if port == 80 else [])
    if token is None and (len(names) != 1 or names[0] not in own):
        return 421, f"this server does not go by the name {str(names)[:80]}; use the address it printed"
    if headers.get("Sec-Fetch-Site", "none") != "none" or "Origin" in headers:
        return 403, "sent by a browser for a web page"
    given = headers.get("Authorization", "").encode()
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        return 401, f"needs the header Authorization: Bearer, with the token of {TOKEN_VARIABLE}"
    if headers.get_content_type() != "application/json" or "Content-Type" not in headers:
        return 415, "the request must be application/json"
    return None


def samples_in(headers: Message, body: Any) -> Any:
    """The samples of a request; a ValueError, KeyError, TypeError or RecursionError where it has none."""
    length = int(headers["Content-Length"])
    if not 0 <= length <= LONGEST_REQUEST:
        raise ValueError(f"Content-Length must be from 0 to {LONGEST_REQUEST}, found {length}")
    return json.loads(body.read(length))["samples"]


def make_server(host: str, port: int, sandbox: Sandbox, workers: int, token: str | None = None) -> ThreadingHTTPServer:
    """A server that runs at most ``workers`` responses at once, over all requests."""
    pool = ThreadPoolExecutor(workers)

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_POST(self) -> None:
            refused = refusal(self.headers, self.server.server_address[1], token)
            if refused is not None:
                self.reply(refused[0], {"error": refused[1]})
                return
            try:
                scores = list(pool.map(lambda sample: score(sandbox, sample), samples_in(self.headers, self.rfile)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self.reply(400, {"error": f"{type(error).__name__}: {error}"})
            else:
                self.reply(200, {"scores": scores})

        def reply(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # whoever asked has given up
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores code by unit tests, for luffy's HTTP reward.")
    parser.add_argument("--host", default="127.0.0.1", help=f"another than loopback needs {TOKEN_VARIABLE}")
    parser.add_argument("--port", type=int, default=9000, help="0: any that is free")
    parser.add_argument("--port-file", type=Path, help="where to write the port, for scripts")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="responses that run at once")
    parser.add_argument("--time-s", type=float, default=5.0, help="a response's code and tests end within this")
    parser.add_argument("--memory-mb", type=int, default=512, help="address space of each")
    parser.add_argument("--allow-network", action="store_true", help="also run where the network cannot be taken away")
    options = parser.parse_args()
    prefix = without_network()
    if prefix is None and not options.allow_network:
        sys.exit("neither unshare nor sandbox-exec works here, so code could use the network; give --allow-network")
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and options.host not in ("127.0.0.1", "localhost"):
        sys.exit(f"--host {options.host} can be reached by others: export {TOKEN_VARIABLE}=$(openssl rand -hex 16)")
    sandbox = Sandbox(prefix or (), options.time_s, options.memory_mb)
    server = make_server(options.host, options.port, sandbox, options.workers, token)
    if options.port_file:
        options.port_file.write_text(str(server.server_port))
    how = " ".join(prefix) if prefix else "no isolation of the network"
    print(f"serving on http://{options.host}:{server.server_port}/ ({how})", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
