"""``luffy push``: upload the model of a checkpoint, with its card, to the Hugging Face hub in one commit.

The card is written again first, with a figure of the curves and the results of ``luffy eval``, which did not exist when
the checkpoint was saved. A card without luffy's mark is a custom one and stays as it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.errors import UserError
from luffy.evaluation.results import RESULT, read_result
from luffy.files import as_object, json_object, write_atomically
from luffy.hub import hub_fault
from luffy.report.model_card import MARK, BenchmarkFigure, CardFacts, draw_curves, model_card, public
from luffy.run_folder.changes import settings_at
from luffy.run_folder.checkpoint import MANIFEST, Checkpoint, checkpoints_of, files_below, is_card
from luffy.run_folder.layout import BEST, CARD, CONFIG, CURVES, DATA, EVAL_SAMPLES, SAMPLES
from luffy.run_folder.runs import read_config, without_samples
from luffy.yaml_text import YAML_ERRORS, read_yaml

logger = logging.getLogger(__name__)

EVALS = Path("evals")  # where luffy eval puts its results by default
EVALUATED_WITH = ("temperature", "top_p", "top_k", "max_tokens", "style", "seed", "reward")  # told in the card
KEPT = ("base_model", "datasets", "license", "license_name", "license_link", "language")  # of the card before
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def push(
    folder: Path,
    repo: str,
    *,
    checkpoint: str | None = None,
    given: Mapping[str, Any] | None = None,
    evals: Sequence[Path] = (),
    training_state: bool = False,
    samples: bool = False,
    dry_run: bool = False,
    **commit: Any,
) -> Iterator[str]:
    """Write the card, list the files and upload them; yields lines for the user. ``commit``: options of ``upload``."""
    check_repo_name(repo)
    model = find_model(folder, checkpoint)
    if not dry_run:
        check_hub()
    write_card(model, Path(repo).name, given or {}, evals)
    files = files_to_push(model, training_state, samples)
    yield from listing(files)
    if dry_run:
        yield f"nothing was uploaded; the card is {model.folder / CARD}"
        return
    step = "" if model.checkpoint is None else f", step {model.checkpoint.step}"
    yield f"pushed     {upload(repo, files, **{'message': f'Push with luffy{step}', **commit})}"


@dataclass(frozen=True)
class PushedModel:
    """A model folder, with the checkpoint and run that it belongs to if luffy trained it.

    ``foreign``: files in the checkpoint that were not saved with it.
    """

    folder: Path
    checkpoint: Checkpoint | None = None
    run: Path | None = None
    foreign: tuple[str, ...] = ()


def find_model(folder: Path, which: str | None = None) -> PushedModel:
    """Find the model in a run folder (``which``: latest, best or a step), a checkpoint or a model folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a run, a checkpoint or a model folder")
    folder = folder.resolve()
    if (folder / "checkpoints").is_dir():
        return _of_checkpoint(_choose(folder, which or "latest"))
    if which is not None:
        raise UserError(f"--checkpoint {which} chooses among those of a run, and {folder} is no run folder")
    for place in (folder, folder.parent):
        if (place / MANIFEST).is_file() and folder in (place, place / "model"):
            return _of_checkpoint(Checkpoint(place))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: neither checkpoints/, {MANIFEST} nor config.json is there")
    return PushedModel(folder)


def _of_checkpoint(checkpoint: Checkpoint) -> PushedModel:
    foreign, run = checkpoint.verify(), checkpoint.path.parent.parent
    return PushedModel(checkpoint.model, checkpoint, run if (run / CONFIG).is_file() else None, tuple(foreign))


def _choose(run: Path, which: str) -> Checkpoint:
    found = {str(step): checkpoint for step, checkpoint in checkpoints_of(run).items()}
    steps = ", ".join(sorted(found, key=int))
    if which == "latest":
        which = max(found, key=int)
    elif which == "best":
        remedy = f"give --checkpoint latest or one of {steps}"
        if not (run / BEST).is_file():
            raise UserError(f"{run} has no best step: nothing was evaluated; {remedy}")
        which = str(json_object((run / BEST).read_bytes(), run / BEST, remedy, step=int)["step"])
    if which not in found:
        raise UserError(f"--checkpoint {which}: {run} has checkpoints of the steps {steps}; or give latest or best")
    return found[which]


# ---- the card


def write_card(model: PushedModel, name: str, given: Mapping[str, Any], evals: Sequence[Path]) -> bool:
    """Write the card of a trained model; False if it has a custom one. ``given``: fields of the front matter."""
    path = model.folder / CARD
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    asked = [f"--{key.replace('_', '-')}" for key in given] + (["--eval"] if evals else [])
    if model.run is None or (before is not None and MARK not in before):
        if asked:
            why = f"{path} is your own" if before else "luffy has no record of its training, so it makes no card"
            raise UserError(f"{asked[0]} is for the card that luffy makes, but {why}; write it there")
        return False
    assert model.checkpoint is not None, "a run's model is in a checkpoint"
    step = model.checkpoint.step
    record = without_samples(model.run, read_config(settings_at(model.run, step)), step)
    benchmarks = [figure for result in _results(model.folder, evals) for figure in benchmark_figures(result)]
    known = {**(_front_matter(before, path) if before else {}), **given, "name": name}
    figure = draw_curves(record, model.folder / CURVES)
    facts = CardFacts(record, step, _counts(model.run / DATA), benchmarks, figure, known)
    write_atomically(path, model_card(facts))
    return True


def _front_matter(text: str, path: Path) -> dict[str, Any]:
    """Fields to keep from luffy's earlier card: what people wrote, and hub ids as they were known where the run trained
    (None if it named none)."""
    matter = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        said = read_yaml(matter[1], str(path)) if matter else {}  # a stranger's card may hold a YAML bomb
    except YAML_ERRORS as error:
        raise UserError(f"{path}: its front matter is not YAML ({' '.join(str(error).split())}); fix it") from None
    if not isinstance(said, dict):
        raise UserError(f"{path}: its front matter has no names with values; fix it")
    return {"base_model": None, "datasets": None, **{key: said[key] for key in KEPT if key in said}}


def _counts(path: Path) -> dict[str, Any]:
    """Content of the run's data.json: objects of counts by name."""
    remedy = "remove it, and the card is made without it"
    content = json_object(path.read_bytes(), path, remedy) if path.is_file() else {}
    for part, counts in content.items():
        names = as_object(counts, f"{path}: {part}", remedy)
        as_object(counts, f"{path}: {part}", remedy, **dict.fromkeys(names, int))
    return content


def _results(model: Path, folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Results of luffy eval for this model: all of ``folders``, or those in ``evals/`` that belong to it."""
    found = list(folders) or [path.parent for path in sorted(EVALS.glob(f"*/{RESULT}"))]
    if not found:
        return
    from luffy.evaluation.engines import model_identity

    identity = model_identity(str(model))
    for folder in found:
        try:
            result = read_result(folder)
        except UserError as error:
            if folders:
                raise
            logger.warning("not in the card: %s", error)
            continue
        if result["settings"].get("model_identity") == identity:
            yield result
        elif folders:
            raise UserError(f"--eval {folder} is the evaluation of another model than {model}")


def benchmark_figures(result: Mapping[str, Any]) -> list[BenchmarkFigure]:
    """Figures of one result of luffy eval as the card shows them."""
    settings = {key: value for key in EVALUATED_WITH if (value := result["settings"].get(key)) is not None}
    return [
        BenchmarkFigure(
            public(name), public(v["title"]), v["items"], v["k"], v["accuracy"], v["pass_at"][str(v["k"])], settings
        )
        for name, v in result["benchmarks"].items()
    ]


# ---- the files


def files_to_push(model: PushedModel, training_state: bool = False, samples: bool = False) -> dict[str, Path]:
    """Files by their names in the repository; of a checkpoint only what was saved with it, and its card."""
    if model.checkpoint is None:
        if training_state or samples:
            raise UserError(f"{model.folder} is a model alone: it has no training state and no samples to push")
        return {name: path for name, path in _named(model.folder) if not any(p[0] == "." for p in Path(name).parts)}
    saved = {name: path for name, path in _named(model.checkpoint.path) if name not in model.foreign}
    files = {name.removeprefix("model/"): path for name, path in saved.items() if name.startswith("model/")}
    if training_state:
        model.checkpoint.check_resumable()
        rest = {name: path for name, path in saved.items() if not name.startswith("model/") and not is_card(name)}
        files |= {f"training/{name}": path for name, path in rest.items()}
    if samples and model.run is not None:
        recorded = [model.run / name for name in (SAMPLES, EVAL_SAMPLES)]
        files |= {f"training/{path.name}": path for path in recorded if path.is_file()}
    return files


def _named(folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in files_below(folder)]


def listing(files: Mapping[str, Path]) -> list[str]:
    """A line for each file, its size in bytes first, and one for all."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return [f"{size:>15,}  {name}" for name, size in sizes.items()] + [f"{sum(sizes.values()):>15,}  in all"]


# ---- the hub


def check_repo_name(repo: str) -> None:
    """Raise a UserError if the hub would not accept the name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{repo!r} is no name of a repository; give OWNER/NAME ({reason})") from None


def check_hub() -> None:
    """Raise a UserError without a token, or if the hub does not answer."""
    from huggingface_hub import constants, get_token

    if get_token() is None:
        raise UserError("no token for the hub: run `hf auth login` or set HF_TOKEN to one that may write")
    fault = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hub_fault()
    if fault is not None:
        raise UserError(f"nothing was pushed: {fault}")


def upload(
    repo: str, files: Mapping[str, Path], message: str, private: bool = False, revision: str | None = None
) -> str:
    """Upload files in one commit, creating the repository if needed; returns the address of the commit.

    Weights of an earlier model that are not overwritten are removed in the same commit: a single file would be loaded
    instead of the shards next to it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    with _said_in_one_line(repo):
        repo = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=revision)
        stale = [name for name in there if "/" not in name and name.endswith(WEIGHTS) and name not in files]
        operations: list[Any] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ]
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return str(commit.commit_url)


@contextmanager
def _said_in_one_line(repo: str) -> Iterator[None]:
    reasons = {
        401: "the hub does not accept the token: log in again with `hf auth login`, or set HF_TOKEN",
        403: f"the token may not write to {repo}: make one with write access, or choose a repository of yours",
        404: f"the hub knows no {repo}, or the token may not see it",
    }
    try:
        yield
    except Exception as error:  # of the HTTP library in use, which is not the same in every version
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the push to {repo} failed: {reasons.get(status or 0, said)}") from error
