"""An OpenAI-compatible server (scripted_server.py) that finds a response right where it has an odd number of characters.

In its script a number is a status, a text is what it says, "slow" takes too long, an object is the whole answer.
"""

import json
import time

from scripted_server import ScriptedHandler, serve


class Handler(ScriptedHandler):
    def do_POST(self):
        body = self.read_json()
        action = self.next_action(None, authorization=self.headers.get("Authorization"), body=body)
        if action == "slow":
            time.sleep(600)
        response = body["messages"][-1]["content"].partition("<response>\n")[2].rpartition("\n</response>")[0]
        words = f"Let me see.\nVERDICT: {'CORRECT' if len(response) % 2 else 'WRONG'}\n"
        self.answer(action, action if isinstance(action, str) else words)

    def answer(self, action, words):
        choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": "stop"}
        answer = action if isinstance(action, dict) else {"object": "chat.completion", "choices": [choice]}
        status = action if isinstance(action, int) else 200
        self.reply(status, json.dumps({"error": {"message": "not now"}} if status != 200 else answer).encode())


if __name__ == "__main__":
    serve(Handler)
