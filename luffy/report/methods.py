"""Methods: groups of runs that differ in their seed alone; their categories, colours and closest recipes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from luffy.config import Config, built_in_recipes, read_recipe
from luffy.config.knobs import Knobs
from luffy.config.legacy import PARTS
from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.report.text import legible
from luffy.run_folder.runs import RunRecord, first_stage, flat_config
from luffy.schema import build

OWN = ("seed", "name", "out", "made_for")  # what names a run rather than a method
SHOWN_DIFFERENCES = 3  # keys in a label

_SEED_FOLDER = re.compile(r"(?:seed|s)[-_]?\d+")
_SEED_SUFFIX = re.compile(r"(?P<label>.+?)[-_.](?:seed|s)[-_]?\d+")
_NUMBER = re.compile(r"(?:(?P<label>.+?)[-_.])?(?P<number>\d+)")
SHORTEST_PREFIX = 3  # letters that names must share to be called by them


@dataclass(frozen=True)
class Method:
    """``settings`` are the flat config without what names a run, and ``command``: train or sft. ``with_styles`` gives
    the number of its colour and dash."""

    label: str
    runs: tuple[RunRecord, ...]
    settings: Mapping[str, Any]
    style: int = 0

    @property
    def repeated_seeds(self) -> list[int]:
        counts = Counter(run.seed for run in self.runs if run.seed is not None)
        return [seed for seed, count in counts.items() if count > 1]


def group_runs(runs: Sequence[RunRecord]) -> list[Method]:
    """Methods in the order of their first run. Runs of equal settings are seeds of one method if their folders differ
    by the seed alone, or name no seed while their configs have different ones. A method's label is its path from the
    folder that all methods share."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        path = _seed_taken_off(run) or run.folder.resolve()
        groups.setdefault(_written([str(path), settings_of(run)]), []).append(run)
    merged = _merged(_merged(list(groups.values()), _numbered), _unnamed)
    paths = [_method_path(members) for members in merged]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    labels = [legible(_label(members, path, root)) for members, path in zip(merged, paths, strict=True)]
    methods = [Method(label, tuple(m), settings_of(m[0])) for label, m in zip(labels, merged, strict=True)]
    return _distinct(methods)


def _seed_taken_off(run: RunRecord) -> Path | None:
    """``luffy`` for a folder ``luffy/seed-0``, ``luffy-s0`` or ``luffy-seed0``; None for any other."""
    folder = run.folder.resolve()
    if _SEED_FOLDER.fullmatch(folder.name):
        return folder.parent
    match = _SEED_SUFFIX.fullmatch(folder.name)
    return folder.with_name(match["label"]) if match else None


def _number_taken_off(run: RunRecord) -> Path | None:
    """``luffy`` for ``luffy-0`` or ``luffy/0`` if 0 is the seed of its config."""
    folder = run.folder.resolve()
    match = _NUMBER.fullmatch(folder.name)
    if match is None or _seed_taken_off(run) is not None or run.seed != int(match["number"]):
        return None
    return folder.with_name(match["label"]) if match["label"] else folder.parent


def _numbered(members: Sequence[RunRecord]) -> str | None:
    """The folder without its number."""
    path = _number_taken_off(members[0])
    return None if path is None else str(path)


def _unnamed(members: Sequence[RunRecord]) -> str | None:
    """The folder above one that is named after no seed."""
    return None if len(members) > 1 or _seed_taken_off(members[0]) else str(members[0].folder.resolve().parent)


def _merged(
    groups: Sequence[list[RunRecord]], name: Callable[[Sequence[RunRecord]], str | None]
) -> list[list[RunRecord]]:
    """Join groups of the same name and settings if no seed occurs twice."""
    found: dict[str, list[RunRecord]] = {}
    for place, members in enumerate(groups):
        named = name(members)
        key = _written([place if named is None else named, settings_of(members[0])])
        seeds = [run.seed for run in (*found.get(key, ()), *members)]
        key = key if len(set(seeds)) == len(seeds) and None not in seeds else _written(place)
        found.setdefault(key, []).extend(members)
    return list(found.values())


def _method_path(members: Sequence[RunRecord]) -> Path:
    """The shared part of its folders without the seed; the folder itself for a single run that names no seed."""
    first = members[0]
    return _seed_taken_off(first) or (len(members) > 1 and _number_taken_off(first)) or first.folder.resolve()


def _label(members: Sequence[RunRecord], path: Path, root: str) -> str:
    label = str(path.relative_to(root))
    names = [run.folder.resolve().name for run in members]
    if len(members) == 1 or path.name not in names:
        return label
    shared = os.path.commonprefix(names).rstrip("-_. ")  # noqa: RUF071 - names, not paths
    return str(Path(label).with_name(shared)) if len(shared) >= SHORTEST_PREFIX else ", ".join([label, *names[1:]])


def settings_of(run: RunRecord) -> dict[str, Any]:
    """The settings that make a method. The run's own seed in a path (data drawn per seed) is left out."""
    kept = {key: _without_seed(value, run.seed) for key, value in run.config.items() if key not in OWN}
    return {"command": run.kind, **kept}


def _without_seed(value: Any, seed: int | None) -> Any:
    if not isinstance(value, str) or seed is None:
        return value
    return re.sub(rf"(?<![A-Za-z0-9])(seed[-_]?|s){seed}(?![0-9])", r"\1*", value)


def differing_keys(methods: Sequence[Method]) -> list[str]:
    """Keys that do not have one and the same value in all of them, in the order of the config."""
    keys = dict.fromkeys(key for method in methods for key in method.settings)
    return [key for key in keys if len({_written(m.settings.get(key)) for m in methods}) > 1]


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _distinct(methods: list[Method]) -> list[Method]:
    """Append the differing settings to labels that occur more than once."""
    counts = Counter(method.label for method in methods)
    twins = {label: [m for m in methods if m.label == label] for label, n in counts.items() if n > 1}
    seen: Counter[str] = Counter()
    result = []
    for method in methods:
        label = method.label
        if label in twins:
            label = f"{label}{_difference(method, differing_keys(twins[label]))}"
        seen[label] += 1
        result.append(replace(method, label=label if seen[label] == 1 else f"{label} #{seen[label]}"))
    return result


def _difference(method: Method, keys: Sequence[str]) -> str:
    shown = [f"{key.rsplit('.', 1)[-1]}={show_value(method.settings.get(key))}" for key in keys[:SHOWN_DIFFERENCES]]
    rest = [f"{len(keys) - len(shown)} more"] if len(keys) > len(shown) else []
    return f" ({', '.join([*shown, *rest])})" if shown else ""


def show_value(value: Any) -> str:
    """A setting as text."""
    return legible(value) if isinstance(value, str) else json.dumps(value, default=str)


# ---- categories

OWN_SAMPLES = "Own samples"
TRACES = "A trace in the group"
GATED = "Traces or hints on demand"
MIXED = "SFT, alone or beside RL"
TAUGHT = "A second model"
FAMILIES = (OWN_SAMPLES, TRACES, GATED, MIXED, TAUGHT)
SECOND_MODELS = (
    "rollout.offpolicy_guidance.model_path",
    "rollout.offpolicy_guidance.servers",
    "teacher.path",
    "teacher.servers",
)


def family_of(settings: Mapping[str, Any]) -> str:
    """The category of a method by its flat config (``Method.settings``)."""
    if any(settings.get(model) for model in SECOND_MODELS):
        return TAUGHT
    if settings.get("guidance.gate", "none") != "none":
        return GATED
    beside = settings.get("batch.expert_share") or settings.get("sft_steps.buffer")
    named = settings.get("algorithm.trace_term") == "sft" or settings.get("algorithm.credit") == "srft"
    if settings.get("command") == "sft" or named or beside:
        return MIXED
    return TRACES if settings.get("guidance.n_prefix") else OWN_SAMPLES


def families(methods: Sequence[Method]) -> dict[str, list[Method]]:
    """The methods of each category that has any, in the order of FAMILIES."""
    found = {family: [m for m in methods if family_of(m.settings) == family] for family in FAMILIES}
    return {family: members for family, members in found.items() if members}


# ---- colours and dashes: the same in reports, on the live page, in figures of evaluations and studies


# The style of a method is its index here. The first eight, which are compared most, have a colour of their own.
METHODS = (
    "luffy", "on_policy", "sft", "mixed", "sft_rl", "luffy_clip", "rl_sft_loss", "grpo",
    "rl_plus", "dapo", "hpt", "exgrpo", "prefix_rft", "srft", "trapo", "relift",
    "chord", "chord_phi", "ampo", "ghpo", "scaf", "uft", "opd", "opsd", "guided", "rloo",
    "gspo", "cispo", "maxrl", "prefix_rl", "rlsd", "iw_opd", "psft", "eaft", "iw_sft", "asft",
    "act_guide", "bepa",
)  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8498a", "#b07800", "#2f9bd6", "#4a4a4a", "#8a5a2b")
"""On light paper, as in ``components.css``; distinct for colour-blind readers too."""
DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "12 4")
"""Lengths of strokes and gaps; no two methods share both colour and dash."""


def line_of(style: int | None) -> dict[str, Any]:
    """Colour and dash of a style as arguments of Matplotlib; None is the model before training: black."""
    if style is None:
        return {"color": "#000000", "linestyle": "-"}
    dash = tuple(map(float, dash_of(style).split()))
    return {"color": COLOURS[style % len(COLOURS)], "linestyle": (0, dash) if dash else "-"}


def colour_of(run: RunRecord) -> str:
    """The colour of a run that is shown alone."""
    return str(line_of(with_styles(group_runs([run]))[0].style)["color"])


def dash_of(style: int) -> str:
    """The dash of a style. Neighbouring methods differ in it, and so do methods that share a colour."""
    return DASHES[(style + style // len(COLOURS)) % len(DASHES)]


def usual_style(method: Method) -> int:
    """The style of the built-in method whose settings are closest."""
    name, _ = closest_recipe(method.settings, sft=method.settings.get("command") == "sft")
    if name == "on_policy" and (first_stage(method.runs[0]) is not None or len(method.runs[0].stage_names) > 1):
        name = SECOND_STAGE
    return METHODS.index(name)


def free_style(taken: Collection[int]) -> int:
    """The lowest style whose colour no other method has; if all colours are in use, the lowest style."""
    used = {style % len(COLOURS) for style in taken}
    free = (style for style in range(len(COLOURS)) if style not in used)
    return next(free, next(style for style in range(len(taken) + 1) if style not in taken))


def with_styles(methods: Sequence[Method], known: Mapping[int, int] | None = None) -> list[Method]:
    """In the order given, each method with a style of its own: the ``known`` one (by its index in ``methods``), else
    its usual one. If methods share a usual colour, the first to begin has it, and the others have free ones; if there
    are more methods than colours, they may share a colour and differ in their dash."""
    styles = dict(known or {})
    few = len(methods) <= len(COLOURS)

    def look(style: int) -> int:
        return style % len(COLOURS) if few else style

    new = [index for index in range(len(methods)) if index not in styles]
    new.sort(key=lambda index: min((run.first_time for run in methods[index].runs), default=0.0))
    for index in new:
        usual = usual_style(methods[index])
        if look(usual) not in map(look, styles.values()):
            styles[index] = usual
    for index in new:
        if index not in styles:
            styles[index] = free_style(styles.values())
    return [replace(method, style=styles[index]) for index, method in enumerate(methods)]


# ---- the built-in method that is closest


# The knobs that make a method; the others say how large a training is, or where it runs.
SECTIONS = ("algorithm.", "guidance.", "teacher.", "replay.", "sft_steps.", "rollout.offpolicy_guidance.")
KNOBS = ("batch.expert_share",)
OF_SFT = ("algorithm.sft_reshape", "algorithm.sft_weight", "algorithm.sft_anchor")  # what tells kinds of SFT apart
SECOND_STAGE = "sft_rl"  # on_policy in every setting, and SFT before it


def closest_recipe(config: Mapping[str, Any], sft: bool) -> tuple[str, dict[str, Any]]:
    """The name of the method recipe with the fewest settings that differ from a run's flat config, and the run's values
    of those settings. A run of ``luffy sft`` is the kind of SFT whose term is closest."""
    own = _over_defaults(config)
    apart = {name: _differences(own, settings, sft) for name, settings in _recipes(sft).items()}
    name = min(apart, key=lambda name: (len(apart[name]), sft and name != "sft"))
    return name, {} if sft else {key: value for key, value in apart[name].items() if key in config}


@cache
def about_recipe(name: str) -> str:
    """The description of a method recipe: its first line."""
    return built_in_recipes()[f"methods/{name}"]


def paper_of(name: str) -> str | None:
    """The arXiv number that the second line of a method recipe gives."""
    text = (BUILT_IN_RECIPES / "methods" / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.match(r"#.*\n# arXiv (\S+)\n", text)
    return found[1] if found else None


def _differences(own: Mapping[str, Any], settings: Mapping[str, Any], sft: bool) -> dict[str, Any]:
    keys = OF_SFT if sft else dict.fromkeys((*own, *settings))
    apart = {key: own.get(key) for key in keys if own.get(key) != settings.get(key)}
    other_parts = tuple(f"{key}." for key in apart if key in PARTS)  # its settings are no further difference
    return {key: value for key, value in apart.items() if not key.startswith(other_parts)}


@cache
def _recipes(sft: bool) -> dict[str, dict[str, Any]]:
    """The method settings of every method recipe of RL or SFT, flat. They are not built into a checked Config: some ask
    for a second model that only a size or a user names."""
    names = [name.removeprefix("methods/") for name in built_in_recipes() if name.startswith("methods/")]
    built = {name: build(Knobs, read_recipe(f"methods/{name}")) for name in names if name != SECOND_STAGE}
    wanted = {name: knobs for name, knobs in built.items() if (knobs.made_for == "sft") == sft}
    return {name: _over_defaults(flat_config(knobs)) for name, knobs in wanted.items()}


@cache
def _defaults() -> dict[str, Any]:
    return flat_config(Config())


def _over_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """The method settings of a flat config that need not say everything."""
    opened = {key.rpartition(".")[0] for key in given} - set(PARTS)  # sections that are None by default
    merged = {key: value for key, value in _defaults().items() if key not in opened} | dict(given)
    kept = {key: value for key, value in merged.items() if key.startswith(SECTIONS) or key in KNOBS}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}
