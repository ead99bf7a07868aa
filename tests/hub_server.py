"""A server on loopback that takes models as the Hugging Face hub does: repositories, branches, LFS files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

TOKEN = "hf_of_ann"
OWNER = "ann"


class HubServer:
    """``files[repo][branch]`` are what was committed, by name; ``commits`` the messages; ``repos`` what was asked for
    when they were made. Nothing but OWNER's repositories may be written."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
        self.repos: dict[str, dict[str, Any]] = {}
        self.commits: list[tuple[str, str, str]] = []
        self.stored: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                body = self.body()
                status, reply = hub.answer(self.command, unquote(urlsplit(self.path).path), self.headers, body)
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_HEAD = handle_any

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = b""
                while size := int(self.rfile.readline(), 16):
                    parts += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return parts

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, verb: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            return self.store(parts[1], body)
        if verb == "HEAD":
            return 200, {}
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if parts == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return self.validate(json.loads(body)["content"])
        if parts[0] == "verify":
            asked = json.loads(body)
            return (200 if len(self.stored[asked["oid"]]) == asked["size"] else 400), {}
        if parts[-2:] == ["objects", "batch"]:
            return self.batch(json.loads(body))
        repo, what, branch = "/".join(parts[2:4]), "".join(parts[4:5]), "/".join(parts[5:])
        return self.in_repo(repo, what, branch, body)

    def create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if not repo.startswith(f"{OWNER}/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        known = {"url": f"{self.url}/{repo}"}
        if repo in self.repos:
            return 409, known | {"error": "You already created this model repo"}
        self.repos[repo] = asked
        self.files[repo] = {"main": {".gitattributes": b""}}
        return 200, known

    def validate(self, content: str) -> tuple[int, Any]:
        try:
            ModelCard(content)
        except ValueError as error:
            return 400, {"errors": [{"message": str(error)}]}
        return 200, {"errors": [], "warnings": []}

    def batch(self, asked: dict[str, Any]) -> tuple[int, Any]:
        verify = {"href": f"{self.url}/verify"}
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}, "verify": verify}}
            for one in asked["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def store(self, oid: str, body: bytes) -> tuple[int, Any]:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "not what was announced"}
        self.stored[oid] = body
        return 200, {}

    def in_repo(self, repo: str, what: str, branch: str, body: bytes) -> tuple[int, Any]:
        branches = self.files.get(repo)
        if branches is None:
            return 404, {"error": "Repository not found"}
        if what == "branch":
            return (409, {"error": "exists"}) if branch in branches else self.begin(branches, branch)
        if what == "tree":
            return 200, [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in branches[branch].items()]
        if what == "preupload":
            return 200, {"files": [self.mode(one) for one in json.loads(body)["files"]]}
        assert what == "commit", what
        return self.commit(repo, branch, [json.loads(line) for line in body.splitlines()])

    def begin(self, branches: dict[str, dict[str, bytes]], branch: str) -> tuple[int, Any]:
        branches[branch] = dict(branches["main"])
        return 200, {}

    def mode(self, file: dict[str, Any]) -> dict[str, Any]:
        large = file["path"].endswith((".safetensors", ".png"))
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        there = self.files[repo][branch]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del there[value["path"]]
            elif line["key"] == "lfsFile":
                there[value["path"]] = self.stored[value["oid"]]
            else:
                there[value["path"]] = base64.b64decode(value["content"])
        self.commits.append((repo, branch, lines[0]["value"]["summary"]))
        oid = f"{len(self.commits):040x}"
        return 200, {"success": True, "commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}
