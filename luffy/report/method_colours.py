"""The colour of a method: the same in reports, on the live page, in figures of evaluations and studies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from luffy.report.closest_recipe import SECOND_STAGE, closest_recipe
from luffy.report.methods import Method, Styled, group_runs
from luffy.run_folder.runs import RunRecord, first_stage

# The style of a method is its index here. The first eight, which are compared most, have a colour of their own.
METHODS = (
    "luffy", "on_policy", "sft", "mixed", "sft_rl", "luffy_clip", "rl_sft_loss", "grpo",
    "rl_plus", "dapo", "hpt", "exgrpo", "prefix_rft", "srft", "trapo", "relift",
    "chord", "chord_phi", "ampo", "ghpo", "scaf", "uft", "opd", "opsd", "guided", "rloo",
    "gspo", "cispo", "maxrl", "prefix_rl", "rlsd", "iw_opd", "psft", "eaft", "iw_sft", "asft",
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
    return str(line_of(with_styles(group_runs([run]))[0][0])["color"])


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


def with_styles(methods: Sequence[Method], known: Mapping[int, int] | None = None) -> list[Styled]:
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
    return [(styles[index], method) for index, method in enumerate(methods)]
