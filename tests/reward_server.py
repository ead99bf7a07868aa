"""A reward's server (scripted_server.py). A response scores 1 where its number of characters is odd. Requests without
samples are not of the script."""

import json
import time

from scripted_server import FOLDER, ScriptedHandler, serve


class Handler(ScriptedHandler):
    def do_POST(self):
        samples, key = self.read_json()["samples"], self.headers.get("X-Key")
        action = self.next_action("score", scripted=bool(samples), key=key, samples=samples)
        if action == "hang":
            (FOLDER / "hangs").touch()
            time.sleep(600)
        if action == "drop":
            self.connection.close()
        elif action == "trickle":
            self.trickle(50)
        elif action == "slow headers":
            self.drip(b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\nX: ", b"x" * 20, b'\r\n\r\n{"scores": [1, 1]}')
        elif action == "slow error":
            self.drip(b"HTTP/1.1 503 Busy\r\nContent-Length: 20\r\n\r\n", b"x" * 20, b"")
        elif action == "much later":
            self.reply(429, b"not now", Retry_After="1e9")
        elif action == "nested":
            self.reply(200, b"[" * 100_000)
        elif isinstance(action, int):
            headers = {307: {"Location": "/elsewhere"}, 429: {"Retry_After": "0.01"}}.get(action, {})
            self.reply(action, f"not now, {key}".encode(), **headers)
        else:
            scores = [float(len(sample["response"]) % 2) for sample in samples]
            self.reply(200, json.dumps({"scores": scores} if action == "score" else action).encode())

    def drip(self, before, slow, after):
        self.close_connection = True
        self.wfile.write(before)
        for byte in slow:
            self.wfile.write(bytes([byte]))
            time.sleep(0.1)
        self.wfile.write(after)

    def trickle(self, count):
        self.send_response(200)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        for _ in range(count):
            self.wfile.write(b" ")
            time.sleep(0.1)


if __name__ == "__main__":
    serve(Handler)
