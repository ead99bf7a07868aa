"""Which files a data path means: a file, those of a split in a folder, or a hub dataset's."""

from __future__ import annotations

import os
import re
from pathlib import Path

from luffy.data.reasoning_gym import is_generated, problem_file
from luffy.errors import DataError
from luffy.hub import HUB_PATH, hub_fault

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CSV_SUFFIX = ".csv"
FIRST_SUFFIXES = (*JSON_SUFFIXES, ".parquet", ".arrow")
DATA_SUFFIXES = (*FIRST_SUFFIXES, CSV_SUFFIX)
METADATA_FILES = {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json"}
SPLIT_WORDS = {
    "train": {"train", "training"},
    "test": {"test", "testing"},
    "validation": {"validation", "valid", "val", "dev"},
}


def files_of(path: str, split: str) -> list[str]:
    """The files of a split: of a folder, a hub dataset (``org/name`` or ``org/name/folder``) or a family of
    reasoning-gym, or the one file."""
    if is_generated(path):
        return [problem_file(path, held_out="train" not in _words(split))]
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        return [str(file) for file in _folder_files(Path(path), split)]
    if HUB_PATH.fullmatch(path) and ".." not in path.split("/") and not path.lower().endswith(DATA_SUFFIXES):
        return [str(file) for file in _folder_files(_hub_folder(path), split)]
    raise DataError(f"{path}: no such file or folder; check the path")


def _folder_files(folder: Path, split: str) -> list[Path]:
    """Files of the split in the folder itself, else in its subfolder for the split, ``data``, or the only one. Many
    datasets have tables next to them: CSV files count only if there is no data file of another type."""
    for suffixes in (FIRST_SUFFIXES, DATA_SUFFIXES):
        if _has_data(folder, suffixes):
            return _files_below(folder, split, suffixes)
    raise DataError(f"{folder}: no data file in this folder; known types: {', '.join(DATA_SUFFIXES)}")


def _files_below(folder: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    direct = sorted(file for file in folder.iterdir() if _is_data_file(file, suffixes))
    if direct:
        return _of_one_type(folder, _of_split(folder, direct, split))
    shown = (sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))
    subfolders = sorted(sub for sub in shown if _has_data(sub, suffixes))
    for wanted in (_words(split), {"data"}):
        chosen = [sub for sub in subfolders if sub.name.lower() in wanted]
        if chosen:
            return _files_below(chosen[0], split, suffixes)
    if len(subfolders) > 1 or any(subfolders[0].name.lower() in words for words in SPLIT_WORDS.values()):
        names = ", ".join(sub.name for sub in subfolders)
        raise DataError(
            f"{folder}: no file of split {split!r} here, only the subfolders {names}; name one, e.g. {subfolders[0]}"
        )
    return _files_below(subfolders[0], split, suffixes)


def _is_data_file(file: Path, suffixes: tuple[str, ...]) -> bool:
    ignored = file.name in METADATA_FILES or file.name.startswith((".", "_", "cache-"))
    return file.is_file() and file.suffix.lower() in suffixes and not ignored


def _has_data(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a data file lies in the folder or below it, hidden subfolders aside."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if _is_data_file(file, suffixes))
    return any(not any(part.startswith(".") for part in file.parts) for file in files)


def _words(split: str) -> set[str]:
    known = [words for words in SPLIT_WORDS.values() if split.lower() in words]
    return known[0] if known else {split.lower()}


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Files whose names carry the split; all of them when no name carries any."""
    tokens = {file: set(re.split(r"[-_.]", file.stem.lower())) for file in files}
    chosen = [file for file in files if tokens[file] & _words(split)]
    if chosen:
        return chosen
    others = [name for name, words in SPLIT_WORDS.items() if any(words & found for found in tokens.values())]
    if others:
        raise DataError(f"{folder}: no file of split {split!r}; the names say {', '.join(others)}; set data.split")
    return files


def _of_one_type(folder: Path, files: list[Path]) -> list[Path]:
    """The same rows are often there in two formats; reading both would double them unseen."""
    suffixes = sorted({file.suffix.lower() for file in files})
    if len(suffixes) > 1:
        raise DataError(f"{folder}: holds {' and '.join(suffixes)} files; name the files to read")
    return files


def _hub_folder(path: str) -> Path:
    """Local folder of a hub dataset, fetched when it is not in the hub's cache."""
    owner, name, *inner = path.split("/")
    repo = f"{owner}/{name}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DataError(
            f"{path}: no such file or folder; to fetch it as a hub dataset install huggingface_hub, "
            "or give a local path"
        ) from error
    prefix = "/".join([*inner, ""])
    patterns = [f"{prefix}*{suffix}" for suffix in DATA_SUFFIXES]
    fault = hub_fault()
    try:
        root = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = fault or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError(
            f"{path}: no such file or folder, and hub dataset {repo!r} cannot be fetched "
            f"({reason}); check the name, or give a local path"
        ) from error
    folder = root.joinpath(*inner)
    if not folder.is_dir():
        raise DataError(f"{path}: hub dataset {repo!r} has no data files under {'/'.join(inner)!r}; check the name")
    return folder
