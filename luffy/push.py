"""``luffy push``: the model of a checkpoint, with its card, to the Hugging Face hub in one commit.

The card is written anew first, with the curves as a figure and the results of ``luffy eval``: a checkpoint is saved
before anybody can have evaluated it. A card without luffy's mark is somebody's own and stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from luffy.config import YAML_ERRORS, read_yaml
from luffy.errors import UserError
from luffy.evaluation.paper_figures import Figure, Panel, Series, draw
from luffy.evaluation.results import RESULT, read_result
from luffy.files import as_object, json_object, write_atomically
from luffy.hub import hub_fault
from luffy.report.changes import settings_at
from luffy.report.model_card import CARD, CURVES, MARK, REWARD, BenchmarkFigure, CardFacts, model_card, public
from luffy.report.recorder import EVAL_SAMPLES, SAMPLES
from luffy.report.runs import CONFIG, DATA, RunRecord, read_config, without_samples
from luffy.report.tables import evaluations
from luffy.train.checkpoint import BEST, MANIFEST, Checkpoint, CheckpointStore, files_below, is_card

logger = logging.getLogger(__name__)

EVALS = Path("evals")  # where luffy eval puts its results by default
EVALUATED_WITH = ("temperature", "top_p", "top_k", "max_tokens", "style", "seed", "reward")  # told in the card
KEPT = ("base_model", "datasets", "license", "license_name", "license_link", "language")  # of the card before
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@dataclass(frozen=True)
class PushedModel:
    """A model folder; ``checkpoint`` and ``run``: what it belongs to, None of a folder that luffy did not train;
    ``foreign``: files that were not saved with the checkpoint."""

    folder: Path
    checkpoint: Checkpoint | None = None
    run: Path | None = None
    foreign: tuple[str, ...] = ()


def find_model(folder: Path, which: str | None = None) -> PushedModel:
    """The model of a run folder (``which``: latest, the default; best; or a step), a checkpoint, or a model folder."""
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
    found = {checkpoint.step: checkpoint for checkpoint in CheckpointStore(run / "checkpoints", keep=1)}
    if not found:
        raise UserError(f"{run} has no checkpoint yet; train it first")
    steps = ", ".join(map(str, sorted(found)))
    if which == "latest":
        return found[max(found)]
    if which == "best":
        if not (run / BEST).is_file():
            raise UserError(
                f"{run} has no best step: nothing was evaluated; give --checkpoint latest or one of {steps}"
            )
        best = (run / BEST).read_bytes()
        which = str(json_object(best, run / BEST, f"give --checkpoint latest or one of {steps}", step=int)["step"])
    if not which.isdecimal() or int(which) not in found:
        raise UserError(f"--checkpoint {which}: {run} has checkpoints of the steps {steps}; or give latest or best")
    return found[int(which)]


# ---- the card


def write_card(model: PushedModel, name: str, given: Mapping[str, Any], evals: Sequence[Path]) -> bool:
    """Write the card of a trained model; returns whether it is luffy's. ``given``: fields of the front matter;
    ``evals``: folders of luffy eval, without any those of this model below ``evals/``."""
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
    benchmarks = [figure for folder in _evaluations(model.folder, evals) for figure in benchmark_figures(folder)]
    known = {**(_front_matter(before, path) if before else {}), **given, "name": name}
    figure = draw_curves(record, model.folder / CURVES)
    facts = CardFacts(record, step, _read_json(model.run / DATA), benchmarks, figure, known)
    write_atomically(path, model_card(facts))
    return True


def _front_matter(text: str, path: Path) -> dict[str, Any]:
    """What luffy's earlier card says of things that may not be known here: hub ids are told from folders where a run
    trained, so it decides also by naming none; and a license is known to people alone."""
    try:
        matter = read_yaml(text.split("---\n")[1], str(path)) if text.startswith("---\n") else None
    except YAML_ERRORS as error:
        raise UserError(f"{path}: its front matter is not YAML ({' '.join(str(error).split())}); mend it") from None
    if not isinstance(matter or {}, dict):
        raise UserError(f"{path}: its front matter has no names with values; mend it")
    said = {key: matter[key] for key in KEPT if key in matter} if matter else {}
    return {"base_model": None, "datasets": None, **said}


def _read_json(path: Path) -> dict[str, Any]:
    """Of counts by name, in objects by name."""
    remedy = "remove it, and the card does without"
    content = json_object(path.read_bytes(), path, remedy) if path.is_file() else {}
    for part, counts in content.items():
        names = as_object(counts, f"{path}: {part}", remedy)
        as_object(counts, f"{path}: {part}", remedy, **dict.fromkeys(names, int))
    return content


def _evaluations(model: Path, folders: Sequence[Path]) -> list[Path]:
    """The evaluations of this model among ``evals/``, where other things may lie; ``folders`` must all be of it."""
    found = list(folders) or [path.parent for path in sorted(EVALS.glob(f"*/{RESULT}"))]
    if not found:
        return []
    from luffy.evaluation.engines import model_identity

    identity = model_identity(str(model))
    if not folders:
        return [folder for folder in found if _is_evaluation_of(identity, folder)]
    others = [folder for folder in folders if _evaluated_model(folder) != identity]
    if others:
        raise UserError(f"--eval {others[0]} is the evaluation of another model than {model}")
    return found


def _is_evaluation_of(identity: str, folder: Path) -> bool:
    try:
        return _evaluated_model(folder) == identity
    except UserError as error:
        logger.warning("not in the card: %s", error)
        return False


def _evaluated_model(folder: Path) -> Any:
    return read_result(folder)["settings"].get("model_identity")


def benchmark_figures(folder: Path) -> list[BenchmarkFigure]:
    content = read_result(folder)
    settings = {key: value for key in EVALUATED_WITH if (value := content["settings"].get(key)) is not None}
    return [
        BenchmarkFigure(
            name=public(name),
            title=public(values["title"]),
            items=values["items"],
            k=values["k"],
            accuracy=values["accuracy"],
            pass_at_k=values["pass_at"][str(values["k"])],
            settings=settings,
        )
        for name, values in content["benchmarks"].items()
    ]


def draw_curves(run: RunRecord, path: Path) -> bool:
    """Training reward and held-out accuracies over steps; False where nothing can be drawn."""
    path.unlink(missing_ok=True)
    held_out = [_series(run, metric, name) for metric, name in evaluations([run])]
    reward = [_series(run, REWARD, "reward")] if run.kind == "train" else []
    panels = (
        Panel("Held-out accuracy", "step", "share of right answers", tuple(held_out), y_from_zero=True),
        Panel("Training reward", "step", "mean reward", tuple(reward)),
    )
    drawn = tuple(panel for panel in panels if any(series.x for series in panel.series))
    if not drawn or find_spec("matplotlib") is None:
        return False
    draw(Figure("curves", "", "", "", drawn), path, {})
    return True


def _series(run: RunRecord, metric: str, name: str) -> Series:
    points = run.series(metric)
    return Series(name, tuple(float(step) for step, _ in points), tuple(value for _, value in points))


# ---- the files


def files_to_push(model: PushedModel, training_state: bool = False, samples: bool = False) -> dict[str, Path]:
    """Files by their names in the repository. Of a checkpoint only what was saved with it goes, and its card."""
    if model.checkpoint is None:
        if training_state or samples:
            raise UserError(f"{model.folder} is a model alone: it has no training state and no samples to push")
        below = [path for path in files_below(model.folder) if not _hidden(path.relative_to(model.folder))]
        return {path.relative_to(model.folder).as_posix(): path for path in below}
    place = model.checkpoint.path
    saved = {path.relative_to(place).as_posix(): path for path in files_below(place)}
    saved = {name: path for name, path in saved.items() if name not in model.foreign}
    files = {name.removeprefix("model/"): path for name, path in saved.items() if name.startswith("model/")}
    if training_state:
        model.checkpoint.check_resumable()
        rest = {name: path for name, path in saved.items() if not name.startswith("model/") and not is_card(name)}
        files |= {f"training/{name}": path for name, path in rest.items()}
    if samples and model.run is not None:
        recorded = [model.run / name for name in (SAMPLES, EVAL_SAMPLES)]
        files |= {f"training/{path.name}": path for path in recorded if path.is_file()}
    return files


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def listing(files: Mapping[str, Path]) -> list[str]:
    """A line for each file, its size in bytes first, and one for all."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return [f"{size:>15,}  {name}" for name, size in sizes.items()] + [f"{sum(sizes.values()):>15,}  in all"]


# ---- the hub


def check_repo_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{repo!r} is no name of a repository; give OWNER/NAME ({reason})") from None


def check_hub() -> None:
    """A UserError where nobody is logged in, or the hub does not answer."""
    from huggingface_hub import constants, get_token

    if get_token() is None:
        raise UserError("no token for the hub: run `hf auth login` or set HF_TOKEN to one that may write")
    fault = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hub_fault()
    if fault is not None:
        raise UserError(f"nothing was pushed: {fault}")


def upload(
    repo: str, files: Mapping[str, Path], message: str, private: bool = False, revision: str | None = None
) -> str:
    """Upload files in one commit to a repository that is made where it is not there; returns the commit's address.

    Weights of an earlier model that are not overwritten are removed in the same commit: a single file would be loaded
    instead of the shards beside it.
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
