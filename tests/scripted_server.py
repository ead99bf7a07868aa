"""What the servers of tests have in common. ``python SERVER FOLDER`` serves on loopback, in an interpreter of its own.

It writes its port to FOLDER/port and every request to FOLDER/requests.jsonl. FOLDER/script.json, a list, says what it
does instead of the usual with the next requests; what it did is taken off the list.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
lock = threading.Lock()


class ScriptedHandler(BaseHTTPRequestHandler):
    def read_json(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def next_action(self, usual, scripted=True, **said):
        """What to do with this request, which is noted with what it ``said``. ``scripted``: whether the script counts it."""
        with lock:
            script = FOLDER / "script.json"
            action = usual
            if scripted and script.exists():
                action, *rest = json.loads(script.read_text()) or [usual]
                replace(script, json.dumps(rest))
            with (FOLDER / "requests.jsonl").open("a") as log:
                log.write(json.dumps({"path": self.path, "action": action, **said}) + "\n")
        return action

    def reply(self, status, body, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def replace(path, text):
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def serve(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    replace(FOLDER / "port", str(server.server_port))
    server.serve_forever()
