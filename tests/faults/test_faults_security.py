"""Who gets in, what gets out: paths, servers, remote code, secrets, dependencies.

The live page's gate (host header, token, path escape, other sites) is proved in tests/view; here it meets raw bytes.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import random
import re
import socket
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from children import in_child
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trainings import train

import luffy
from luffy.cli import main
from luffy.config import Config, to_yaml
from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.data.sources import open_source
from luffy.errors import ConfigError, DataError
from luffy.run_folder.checkpoint import Checkpoint, DamagedCheckpoint, file_entry, manifest_text
from luffy.schema import build
from luffy.view.server import ViewServer

ROOT = Path(luffy.__file__).parent
REPOSITORY = ROOT.parent


# ---- paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["..", "../run", "a/../../run", "/etc", "/etc/run", "", ".", "./..", "a/..", "run\0", "\0", "//run"]
)
def test_a_run_name_stays_below_its_folder(name):
    with pytest.raises(ConfigError, match="'name' must be a relative folder name"):
        build(Config, {"name": name})


@pytest.mark.parametrize("name", ["run", "a/b", "..a", "a..b", "...", "run one", "läuft"])
def test_other_names_are_free(name):
    folder = build(Config, {"name": name, "out": "runs"}).folder
    assert Path(os.path.normpath(folder)).is_relative_to("runs")


@pytest.mark.parametrize(
    "path", ["org/name/..", "org/name/../../secrets", "org/name/a/../../../x", "org/../name/x", "org/.."]
)
def test_a_hub_path_stays_inside_its_dataset(monkeypatch, tmp_path, path):
    """A recipe of someone else's must not read beside the folder it names."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "hub" / "snapshot").mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    for folder in (tmp_path, tmp_path / "hub", tmp_path / "secrets"):
        (folder / "train.jsonl").write_text('{"prompt": "secret", "answer": "1"}\n')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path / "hub" / "snapshot"))
    monkeypatch.chdir(tmp_path / "hub" / "snapshot")
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "model/../../outside"])
def test_a_manifest_cannot_name_files_outside_its_checkpoint(tmp_path, name):
    (tmp_path / "outside").write_text("x")
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(manifest_text({name: file_entry(tmp_path / "outside")}))
    with pytest.raises(DamagedCheckpoint, match="lacks its file"):
        Checkpoint(folder).verify()


# ---- servers -----------------------------------------------------------------------------------------


def hostile_requests():
    """Raw requests that try paths, hosts, methods, sizes and plain noise."""
    dice = random.Random(0)
    good = b"Host: 127.0.0.1:PORT\r\n"
    targets = [b"/../../etc/passwd", b"/assets/%2e%2e%2f%2e%2e%2fetc/passwd", b"/assets/..\\..\\x", b"http://evil/", b"//evil/x",
               b"/\x00", b"/%00", b"/api/samples?run=../../x", b"/api/state?token=%0d%0aSet-Cookie:x=y", b"*", b"/" + b"a" * 70_000,
               b"/api/group?at=" + b"9" * 5000, b"/api/samples?search=" + b"%" * 900, b"/?" + b"&".join([b"a=b"] * 300)]  # fmt: skip
    for target in targets:
        yield b"GET " + target + b" HTTP/1.1\r\n" + good + b"\r\n"
    for headers in (b"", b"Host: evil\r\n", b"Host: 127.0.0.1:PORT\r\nHost: evil\r\n", good + b"X: " + b"a" * 70_000 + b"\r\n",
                    good + b"Sec-Fetch-Site: cross-site\r\n", good + b"X: y\r\n" * 300, good + b"Content-Length: -1\r\n", b" Host: x\r\n"):  # fmt: skip
        yield b"GET /api/state HTTP/1.1\r\n" + headers + b"\r\n"
    for method in (b"POST", b"CONNECT", b"TRACE", b"get", b"\xff", b""):
        yield method + b" / HTTP/1.1\r\n" + good + b"\r\n"
    for _ in range(100):
        yield dice.randbytes(dice.randint(0, 300)) + b"\r\n\r\n"


def test_the_live_page_outlives_raw_bytes_and_tells_nothing(make_config, tmp_path, capfd):
    cfg = make_config(train={"steps": 1})
    train(cfg)
    server = ViewServer([cfg.folder], port=0, token="a-token-of-some-length")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    port = str(server.server_port).encode()
    try:
        asked = 0
        for request in hostile_requests():
            reply = answer(server.server_port, request.replace(b"PORT", port))
            assert not reply.startswith(b"HTTP/1.1 200"), request[:80]
            assert b"root:" not in reply and b"p0" not in reply
            asked += 1
        known = (
            b"GET /api/state HTTP/1.1\r\nHost: 127.0.0.1:"
            + port
            + b"\r\nAuthorization: Bearer a-token-of-some-length\r\n\r\n"
        )
        assert answer(server.server_port, known).startswith(b"HTTP/1.1 200")
    finally:
        server.shutdown()
        server.server_close()
    assert "Traceback" not in capfd.readouterr().err
    print(f"\n{asked} raw requests")


def answer(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(65536)
    return b""


def source_trees():
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def test_no_code_of_ours_opens_an_address_to_everybody_or_trusts_remote_code():
    """Also for what is still to come: a server that listens on all addresses by default would be found here."""
    open_to_all, trusting = set(), set()
    for name, tree in source_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
                open_to_all.add(name)
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                trusting |= {name} if isinstance(node.value, ast.Constant) and node.value.value is not False else set()
    assert (open_to_all, trusting) == (set(), set())


def test_remote_code_is_off_in_every_recipe():
    for recipe in BUILT_IN_RECIPES.rglob("*.yaml"):
        assert "trust_remote_code" not in recipe.read_text(), recipe
    assert build(Config, {}).model.trust_remote_code is False


# ---- secrets -----------------------------------------------------------------------------------------

SECRETS = {
    name: f"s3cret-{i}-do-not-write"
    for i, name in enumerate(
        ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "LUFFY_VIEW_TOKEN", "RAY_AUTH_TOKEN",
         "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "LUFFY_VLLM_KEY"]
    )
}  # fmt: skip


def run_with_secrets(commands, path):
    """All that the commands say goes to ``path``."""
    os.environ.update(SECRETS, WANDB_MODE="offline")
    with (
        path.open("w", buffering=1) as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        pytest.MonkeyPatch.context() as patch,
    ):
        for command in commands:
            patch.setattr(sys, "argv", ["luffy", *command])
            with contextlib.suppress(SystemExit):
                main()


def test_no_secret_of_the_environment_is_written(make_config, sums, tmp_path):
    """Train with every tracker, report, check the data: no file and no line of output holds one."""
    wandb = importlib.util.find_spec("wandb") is not None
    cfg = make_config(record={"tensorboard": True, "wandb": wandb}, data={"eval": str(sums)}, train={"steps": 2})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    commands = [
        ["train", str(recipe)],
        ["train", str(recipe), "--print-config"],
        ["train", str(recipe), "--dry-run"],
        ["report", str(cfg.folder), "--out", str(tmp_path / "report.html")],
        ["train", str(recipe), "optim.lr=-1"],
    ]
    in_child(run_with_secrets, commands, tmp_path / "output")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"output", "report.html", "config.yaml", "metrics.jsonl", "samples.jsonl"} <= {p.name for p in written}
    for path in written:
        assert b"s3cret" not in path.read_bytes(), path
    print(f"\n{len(written)} files searched for {len(SECRETS)} secrets")


def test_the_resolved_config_has_no_place_for_a_secret():
    """Keys come by environment variables alone (knobs end in _env): none could carry one into config.yaml or W&B."""
    names = re.findall(r"^ *(\w+):", to_yaml(build(Config, {})), re.M)
    suspicious = [
        n for n in names if re.search(r"key|secret|password|credential|auth|token$", n) and not n.endswith("_env")
    ]
    assert suspicious == []


# ---- dependencies ------------------------------------------------------------------------------------


def pins():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_every_pin_is_exact():
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!]+", line), line


def closure(names):
    """Everything the installed packages of these names need, by their own metadata."""
    found, todo = set(), [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        extras = {name} | {f"{name}[{extra}]" for extra in wanted.extras}
        if extras <= found:
            continue
        found |= extras
        try:
            requires = importlib.metadata.requires(wanted.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in requires:
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(needed.marker.evaluate(e) for e in environments):
                todo.append(needed)
    return {name for name in found if "[" not in name}


def declared():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


# Come with a GPU or with the interpreter, or are ourselves.
PLATFORM = re.compile(r"nvidia-.*|cuda-.*|setuptools|pip|luffy-rl")


@pytest.mark.faults
def test_every_dependency_of_the_package_is_pinned():
    missing = {name for name in closure(declared()) if name not in pins() and not PLATFORM.fullmatch(name)}
    assert missing == set()


FREE = re.compile(
    r"(?i)mit|bsd|apache|isc|psf|python software|mpl|mozilla|unlicense|zlib|hpnd|0bsd|cc0|public domain|cmu"
)


def license_of(name):
    metadata = importlib.metadata.metadata(name)
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    return " ".join([metadata.get("License-Expression") or "", *classifiers, (metadata.get("License") or "")[:200]])


@pytest.mark.faults
def test_every_dependency_may_be_used_freely():
    unknown = {}
    for name in closure(declared()):
        if name == "luffy-rl" or name.startswith(("nvidia-", "cuda-")):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if not FREE.search(license_of(name)):
                unknown[name] = license_of(name)[:80]
    assert unknown == {}
