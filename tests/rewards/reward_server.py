"""A reward's server for tests, in an interpreter of its own: ``python reward_server.py FOLDER``.

It writes its port to FOLDER/port and every request to FOLDER/requests.jsonl. A response scores 1 where its number of
characters is odd. FOLDER/script.json, a list, says what it does instead with the next requests that have samples; what
it did is taken off the list.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
lock = threading.Lock()


def next_of_script():
    script = FOLDER / "script.json"
    if not script.exists():
        return "score"
    action, *rest = json.loads(script.read_text()) or ["score"]
    replace(script, json.dumps(rest))
    return action


def replace(path, text):
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        with lock:
            action = next_of_script() if samples else "score"
            with (FOLDER / "requests.jsonl").open("a") as log:
                said = {"path": self.path, "key": self.headers.get("X-Key"), "samples": samples, "action": action}
                log.write(json.dumps(said) + "\n")
        self.act(action, samples)

    def act(self, action, samples):
        scores = [float(len(sample["response"]) % 2) for sample in samples]
        if action == "hang":
            (FOLDER / "hangs").touch()
            time.sleep(600)
        if action == "drop":
            self.connection.close()
        elif action == "trickle":
            self.reply(200, b" " * 50, pause_s=0.1)
        elif isinstance(action, int):
            self.reply(action, f"not now, {self.headers.get('X-Key')}".encode())
        else:
            self.reply(200, json.dumps({"scores": scores} if action == "score" else action).encode())

    def reply(self, status, body, pause_s=0.0):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 307:
            self.send_header("Location", "/elsewhere")
        if status == 429:
            self.send_header("Retry-After", "0.01")
        self.end_headers()
        for place in range(len(body)) if pause_s else ():
            self.wfile.write(body[place : place + 1])
            time.sleep(pause_s)
        if not pause_s:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    replace(FOLDER / "port", str(server.server_port))
    server.serve_forever()
