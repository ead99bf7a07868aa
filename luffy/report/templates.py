"""HTML of the report and the live page, from the Jinja templates in ``assets``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from luffy.report.methods import COLOURS, dash_of
from luffy.report.text import legible, number, shorten, show, show_seconds

ASSETS = Path(__file__).with_name("assets")
VIEW_ASSETS = ASSETS.parents[1] / "view" / "assets"
PHASES = ("plan", "rollout", "reward", "old_log_probs", "advantage", "record", "pack", "update", "eval", "save")


def macro(name: str, *args: Any, **kwargs: Any) -> Markup:
    """Fill in a macro of ``components.html``."""
    return Markup(getattr(_environment().get_template("components.html").module, name)(*args, **kwargs))


def page(name: str, **values: Any) -> Markup:
    """Fill in a whole template."""
    return Markup(_environment().get_template(name).render(**values))


def asset(name: str) -> Markup:
    """The text of a style sheet or script, to stand in a page as it is."""
    folder = ASSETS if (ASSETS / name).is_file() else VIEW_ASSETS
    return Markup((folder / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([ASSETS, VIEW_ASSETS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "show": show,
        "legible": legible,
        "text": lambda value, limit: show(shorten(str(value), limit)),
        "number": number,
        "seconds": show_seconds,
        "px": lambda value: f"{value:.1f}",
        "colour": lambda style: f"m{style % len(COLOURS)}",
        "dash": dash_of,
        "phase": lambda phase: f"ph ph-{phase}" if phase in PHASES else "ph",
    }
    return environment
