"""The built-in method that is closest to a run's settings, and the differences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from luffy.config import Config, built_in_recipes, read_recipe
from luffy.config.knobs import Knobs
from luffy.config.legacy import PARTS
from luffy.run_folder.runs import flat_config
from luffy.schema import build

# The knobs that make a method; the others say how large a training is, or where it runs.
SECTIONS = ("algorithm.", "guidance.", "teacher.", "replay.", "sft_steps.", "rollout.offpolicy_guidance.")
KNOBS = ("batch.expert_share",)
OF_SFT = ("algorithm.sft_reshape", "algorithm.sft_weight", "algorithm.sft_anchor")  # what tells kinds of SFT apart
SECOND_STAGE = "sft_rl"  # on_policy in every setting, and SFT before it
PAPERS = {  # arXiv numbers of the methods; docs/methods.md says what is taken from each
    "ampo": "2510.02227",
    "asft": "2509.23753",
    "chord": "2508.11408",
    "chord_phi": "2508.11408",
    "cispo": "2506.13585",
    "dapo": "2503.14476",
    "eaft": "2601.02151",
    "exgrpo": "2510.02245",
    "ghpo": "2507.10628",
    "grpo": "2402.03300",
    "gspo": "2507.18071",
    "hpt": "2509.04419",
    "iw_opd": "2606.22600",
    "iw_sft": "2507.12856",
    "luffy": "2504.14945",
    "luffy_clip": "2504.14945",
    "maxrl": "2602.02710",
    "mixed": "2504.14945",
    "on_policy": "2503.20783",
    "prefix_rft": "2507.01679",
    "prefix_rl": "2601.18795",
    "psft": "2508.17784",
    "relift": "2506.07527",
    "rl_plus": "2508.00222",
    "rloo": "2402.14740",
    "rlsd": "2604.03128",
    "rl_sft_loss": "2504.14945",
    "scaf": "2510.19807",
    "srft": "2506.19767",
    "trapo": "2512.17636",
    "uft": "2505.16984",
}


def closest_recipe(config: Mapping[str, Any], sft: bool) -> tuple[str, dict[str, Any]]:
    """The name of the method recipe with the fewest settings that differ from a run's flat config, and the run's values
    of those settings. A run of ``luffy sft`` is the kind of SFT whose term is closest."""
    if sft:
        terms = {name: _sft_term(settings) for name, settings in _recipes(sft=True).items()}
        own = _sft_term(_over_defaults(config))
        return min(terms, key=lambda name: (_apart(own, terms[name]), name != "sft")), {}
    apart = {name: _differences(config, settings) for name, settings in _recipes(sft=False).items()}
    name = min(apart, key=lambda name: len(apart[name]))
    return name, {key: value for key, value in apart[name].items() if key in config}


@cache
def about_recipe(name: str) -> str:
    """The description of a method recipe: its first line."""
    return built_in_recipes()[f"methods/{name}"]


def _sft_term(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in OF_SFT}


def _apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    return sum(ours.get(key) != theirs.get(key) for key in OF_SFT)


def _differences(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    own = _over_defaults(config)
    apart = {key: own.get(key) for key in dict.fromkeys((*own, *settings)) if own.get(key) != settings.get(key)}
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
    return {key: _plain(value) for key, value in merged.items() if _makes_a_method(key)}


def _makes_a_method(key: str) -> bool:
    return key.startswith(SECTIONS) or key in KNOBS


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
