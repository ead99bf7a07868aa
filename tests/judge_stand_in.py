"""An OpenAI-compatible server for tests, in an interpreter of its own: ``python judge_stand_in.py FOLDER``.

It finds a response right where it has an odd number of characters. FOLDER/script.json, a list, says what it does
instead with the next requests: a number is a status, a text is what it says, "slow" takes too long, an object is the
whole answer. What it was asked is in FOLDER/requests.jsonl, its port in FOLDER/port.
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


def replace(path, text):
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            script = FOLDER / "script.json"
            action, *rest = (json.loads(script.read_text()) if script.exists() else []) or [None]
            replace(script, json.dumps(rest))
            with (FOLDER / "requests.jsonl").open("a") as log:
                said = {"path": self.path, "authorization": self.headers.get("Authorization"), "body": body}
                log.write(json.dumps(said) + "\n")
        if action == "slow":
            time.sleep(600)
        response = body["messages"][-1]["content"].partition("<response>\n")[2].rpartition("\n</response>")[0]
        words = f"Let me see.\nVERDICT: {'CORRECT' if len(response) % 2 else 'WRONG'}\n"
        self.reply(action, action if isinstance(action, str) else words)

    def reply(self, action, words):
        choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": "stop"}
        answer = action if isinstance(action, dict) else {"object": "chat.completion", "choices": [choice]}
        status = action if isinstance(action, int) else 200
        body = json.dumps({"error": {"message": "not now"}} if status != 200 else answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    replace(FOLDER / "port", str(server.server_port))
    server.serve_forever()
