"""Old names of keys and recipes, which recipes, command lines and saved configs of older runs may have.

``with_current_keys`` translates one recipe (or a saved config) before it is laid over others, and ``current_keys`` one
override, so that a later layer wins whichever name it uses. A key that became a setting of a part counts only if the
chosen part has that setting (``OldSetting``), as it did when every part read the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from luffy.core.shaping import SHAPES
from luffy.registry import OldSetting

# Keys that are now a setting of the part that another key names: {old: (key of the part, setting), ...}.
SETTINGS_OF_PARTS = {
    "algorithm.off_policy_reshape_weight": [("algorithm.off_policy_reshape", "weight")],
    "algorithm.off_policy_reshape_pow_exp": [("algorithm.off_policy_reshape", "pow_exp")],
    "algorithm.off_policy_reshape_gamma": [
        ("algorithm.off_policy_reshape", "gamma"), ("algorithm.sft_reshape", "gamma"),
    ],
    "algorithm.on_policy_reshape_weight": [("algorithm.on_policy_reshape", "weight")],
    "algorithm.on_policy_reshape_pow_exp": [("algorithm.on_policy_reshape", "pow_exp")],
    "algorithm.distill_reward": [("algorithm.credit", "reward")],
    "guidance.gate_solved": [("guidance.gate", "solved")],
    "guidance.gate_samples": [("guidance.gate", "samples")],
    "guidance.gate_shares": [("guidance.gate", "fractions")],
    "guidance.gate_sizes": [("guidance.gate", "sizes")],
    "guidance.gate_scores": [("guidance.gate", "scores")],
}  # fmt: skip
PARTS = (
    "algorithm.credit", "algorithm.advantage", "algorithm.off_policy_reshape", "algorithm.on_policy_reshape",
    "algorithm.on_policy_term", "algorithm.sft_reshape", "algorithm.sft_weight", "guidance.gate", "guidance.strategy",
    "guidance.trace_choice", "reward.kind", "rollout.engine",
)  # fmt: skip


class PartValues(dict[str, Any]):
    """What layers say about one part: its ``name`` and settings. Another name drops the settings of the one below."""

    def over(self, below: Any) -> PartValues:
        """This layer over a lower one."""
        if not isinstance(below, PartValues):
            return self
        kept = below
        if "name" in self and below.get("name", self["name"]) != self["name"]:
            kept = PartValues({key: value for key, value in below.items() if isinstance(value, OldSetting)})
        return PartValues({**kept, **self})


def current_keys(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values that a key and its value stand for; at most one of them for a key of today."""
    if key in SETTINGS_OF_PARTS:
        for part, setting in SETTINGS_OF_PARTS[key]:
            yield part, PartValues({setting: OldSetting(value)})
        return
    chosen = next((part for part in PARTS if key == part or key.startswith(f"{part}.")), None)
    if chosen is None:
        yield key, value
    elif key == chosen:
        yield key, _part_values(value)
    else:
        yield chosen, PartValues({key.removeprefix(f"{chosen}."): value})


def _part_values(value: Any) -> Any:
    if isinstance(value, str):
        return PartValues(SHAPES.spelled(value) or {"name": value})
    if isinstance(value, Mapping) and not isinstance(value, PartValues):
        spelled = SHAPES.spelled(value["name"]) if isinstance(value.get("name"), str) else None
        return PartValues({**value, **(spelled or {})})
    return value


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under the keys of today. Where one layer has both, the part's own settings win over old keys."""
    current = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for section in {path.partition(".")[0] for path in (*SETTINGS_OF_PARTS, *PARTS)}:
        found = current.get(section)
        if not isinstance(found, dict):
            continue
        translated = [pair for key, value in found.items() for pair in current_keys(f"{section}.{key}", value)]
        translated.sort(key=lambda pair: _is_old(pair[1]), reverse=True)
        current[section] = {}
        for key, value in translated:
            _put(current, key.split("."), value)
    return current


def _is_old(value: Any) -> bool:
    return isinstance(value, PartValues) and all(isinstance(setting, OldSetting) for setting in value.values())


def set_at(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Replace what stands at a dotted path, old or new: ``reward.weights={}`` empties the mapping of the recipe.
    Settings of a part are laid over those of the recipe."""
    for key, current in current_keys(".".join(keys), value):
        _put(values, key.split("."), current)


def _put(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = values = dict(inner) if isinstance(inner, Mapping) else {}
    values[keys[-1]] = value.over(values.get(keys[-1])) if isinstance(value, PartValues) else value


def merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` laid over ``base``, section by section; changes and returns ``base``."""
    for key, value in top.items():
        if isinstance(value, PartValues):
            base[key] = value.over(base.get(key))
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value
    return base
