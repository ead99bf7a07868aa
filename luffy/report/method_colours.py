"""The colour and dash of a method: the same in every report, on the live page and in figures of ``luffy analyze``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from luffy.report.closest_recipe import SECOND_STAGE, closest_recipe
from luffy.report.methods import Method, Styled, by_beginning
from luffy.report.runs import first_stage

# The style of a method is its place here. The first eight, which are compared most, have a colour of their own.
METHODS = (
    "luffy", "on_policy", "sft", "mixed", "sft_rl", "luffy_clip", "rl_sft_loss", "grpo",
    "rl_plus", "dapo", "hpt", "exgrpo", "prefix_rft", "srft", "trapo", "relift",
    "chord", "chord_phi", "ampo", "ghpo", "scaf", "uft", "opd", "opsd", "guided",
)  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8498a", "#b07800", "#2f9bd6", "#4a4a4a", "#8a5a2b")
"""On light paper, as in ``components.css``; told apart by colour-blind readers too."""


def colour_of(recipe: str) -> str:
    """The colour of a built-in method on light paper."""
    return COLOURS[METHODS.index(recipe) % len(COLOURS)]


def usual_style(method: Method) -> int:
    """The style of the built-in method whose settings are closest."""
    name, _ = closest_recipe(method.settings, sft=method.settings.get("command") == "sft")
    if name == "on_policy" and first_stage(method.runs[0]) is not None:
        name = SECOND_STAGE
    return METHODS.index(name)


def free_style(taken: Collection[int]) -> int:
    """The lowest style whose colour no other method has; where all colours are in use, the lowest style."""
    used = {style % len(COLOURS) for style in taken}
    free = (style for style in range(len(COLOURS)) if style not in used)
    return next(free, next(style for style in range(len(taken) + 1) if style not in taken))


def with_styles(methods: Sequence[Method], known: Mapping[int, int] | None = None) -> list[Styled]:
    """In the order given, each method with a style of its own: the ``known`` one (by its place in ``methods``), else
    its usual one. Of methods that share a usual colour the first to begin has it, and the others have free ones."""
    places = {id(method): place for place, method in enumerate(methods)}
    styles = dict(known or {})
    new = [(places[id(m)], usual_style(m)) for m in by_beginning(methods) if places[id(m)] not in styles]
    late = []
    for place, usual in new:
        if _is_free(usual, styles.values(), len(methods)):
            styles[place] = usual
        else:
            late.append(place)
    for place in late:
        styles[place] = free_style(styles.values())
    return [(styles[place], method) for place, method in enumerate(methods)]


def _is_free(style: int, taken: Iterable[int], methods: int) -> bool:
    """Where there are more methods than colours, dashes have to do."""
    if methods > len(COLOURS):
        return style not in taken
    return style % len(COLOURS) not in {other % len(COLOURS) for other in taken}
