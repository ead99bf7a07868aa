"""Problems of the package reasoning-gym as a file: ``reasoning_gym:countdown:size=2000:seed=1:max_numbers=4``.

The file is made once and kept in luffy's cache, so that rows are read, mixed and resumed like those of any other. A
process of its own makes it: some families seed numpy's global generator, others depend on Python's hash seed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from luffy.errors import DataError, UserError, how_to_install
from luffy.files import alone, cache_folder, complete_or_nothing
from luffy.yaml_text import YAML_ERRORS, read_yaml

PREFIX = "reasoning_gym:"
PACKAGE = "reasoning-gym"
HELD_OUT_SHARE = 0.2  # of all problems of a family, by the hash of the question
ANY_ANSWER = "(any that scores 1)"  # of families that know no answer, only how to judge one
MOST_MISSED = 1000  # entries in a row that are no new problem
SAY_EVERY_S = 10.0


def is_generated(path: str) -> bool:
    """Whether a data path names a family of reasoning-gym."""
    return path.startswith(PREFIX)


def problem_file(path: str, held_out: bool) -> str:
    """The file with the problems that ``path`` asks for, made if the cache does not have it. No problem is both held
    out and for training, whatever the seeds."""
    asked = {**_parsed(path), "held_out": held_out}
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{path} needs the package {PACKAGE}: {how_to_install('reasoning_gym')}") from None
    key = hashlib.sha256(json.dumps([version, asked], sort_keys=True).encode()).hexdigest()[:12]
    part = "test" if held_out else "train"
    folder = cache_folder() / "reasoning_gym"
    file = folder / f"{asked['family']}-{part}-{key}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / "lock"):
        if not file.exists():
            _make_in_a_process({**asked, "path": path, "file": str(file)})
    return str(file)


def _parsed(path: str) -> dict[str, Any]:
    """Family, size, seed, and the settings of the family."""
    family, *parts = re.split(r":(?=\w+=)", path.removeprefix(PREFIX))
    path = f"{path:.100}"  # for errors
    if not family.isidentifier():
        raise DataError(f"{path}: write {PREFIX}FAMILY:size=1000:seed=0:SETTING=VALUE; only the family must be there")
    settings: dict[str, Any] = {}
    for part in parts:
        name, _, text = part.partition("=")
        try:
            settings[name] = read_yaml(text, path)
        except YAML_ERRORS:
            raise DataError(f"{path}: {text!r:.100} is no YAML value of {name!r:.100}; put quotes around it") from None
    found = {"size": settings.pop("size", 1000), "seed": settings.pop("seed", 0)}
    for name, least in (("size", 1), ("seed", 0)):
        if type(found[name]) is not int or found[name] < least:
            raise DataError(f"{path}: {name} must be a whole number of at least {least}, got {found[name]!r:.100}")
    return {"family": family, **found, "config": settings}


def _make_in_a_process(asked: Mapping[str, Any]) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    code = f"import json, sys; from {__name__} import main; main(json.loads(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", code, json.dumps(asked)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        fault = done.stdout.strip() or f"the process that makes its problems ended with code {done.returncode}"
        raise DataError(f"{asked['path']}: {fault}")


# ---- in that process ---------------------------------------------------------------------------------


def main(asked: Mapping[str, Any]) -> None:
    """Write the file; an error for the user goes to standard output."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        with complete_or_nothing(Path(asked["file"])) as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(asked))
    except UserError as error:
        print(error, file=out)
        raise SystemExit(1) from None


def _rows(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows with different questions, in the order of the family's own indices."""
    size, seen, missed, said = asked["size"], set[bytes](), 0, 0.0
    for entry in _entries(asked):
        said = said or time.monotonic()
        digest = hashlib.sha256(" ".join(entry["question"].split()).encode()).digest()
        if digest in seen or (digest[0] < 256 * HELD_OUT_SHARE) != asked["held_out"]:
            missed += 1
            if missed == MOST_MISSED:
                raise DataError(f"found only {len(seen)} different problems; lower size, or widen the settings")
            continue
        missed = 0
        seen.add(digest)
        yield _row(asked, entry)
        if len(seen) == size:
            return
        if time.monotonic() > said + SAY_EVERY_S:
            said = time.monotonic()
            print(f"{asked['path']}: made {len(seen)} of {size} problems", file=sys.stderr, flush=True)


def _entries(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries without end. A family numbers its random generators by its seed plus the index, and may make all entries
    at once: so it is asked for blocks, and seeds lie far apart."""
    share = HELD_OUT_SHARE if asked["held_out"] else 1 - HELD_OUT_SHARE
    block = int(asked["size"] / share) + 16
    for start in count(Random(asked["seed"]).getrandbits(31), block):
        family = _opened(asked["family"], asked["config"], size=block, seed=start)
        yield from (family[index] for index in range(block))


def _opened(name: str, config: Mapping[str, Any], **size_and_seed: int) -> Any:
    """The family with these settings, as the package's own object."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = [family for family in DATASETS if family != "composite"]
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
        raise DataError(f"no family {name!r} in {PACKAGE}; the nearest of {len(known)}: {', '.join(close)}")
    names = [field.name for field in fields(DATASETS[name][1]) if field.name not in ("size", "seed")]
    for key in config:
        if key not in names:
            raise DataError(f"{name} has no setting {key!r}; it has {', '.join(names)}")
    try:
        return reasoning_gym.create_dataset(name, **config, **size_and_seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{name} refuses its settings: {error}") from None


def _row(asked: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    judged = {"family": asked["family"], "config": asked["config"], **entry}
    return {
        "prompt": entry["question"],
        "answer": ANY_ANSWER if entry["answer"] in (None, "") else str(entry["answer"]),
        "source": f"{PREFIX}{asked['family']}",
        "entry": json.dumps(_tagged(judged), ensure_ascii=False),
    }


def _tagged(value: Any) -> Any:
    """As JSON, with marks by which the reward finds what JSON lacks: tuples, and keys that are no texts."""
    if isinstance(value, tuple):
        return {"__tuple__": _tagged(list(value))}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {"__dict__": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    return {key: _tagged(item) for key, item in value.items()} if isinstance(value, dict) else value
