"""Commands whose code is in the repository next to the package: our measurements, and the road to the paper's tables.

In a checkout ``luffy bench rollout`` runs the module that the table names; an installed package names the command that
does it there.
"""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.core

from luffy.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "bench": ("benchmarks.speed", "Measure speed and memory: rollout, update, step."),
    "analyze": (
        "studies.paper.analysis",
        "Draw the paper's figures for your runs and evaluations, as PNG and CSV.",
    ),
    "eval golds": ("studies.paper.golds", "Check the verifier: each reference answer must be correct against itself."),
    "prepare openr1": ("studies.paper.openr1", "Turn OpenR1-Math-220k into a verified training file with a data card."),
    "prepare model": ("studies.paper.model", "Copy a model with a longer context and the paper's chat template."),
    "prepare benchmarks": ("studies.paper.benchmarks", "Collect the paper's benchmarks for luffy eval."),
}


class Forwarded(typer.core.TyperCommand):
    """A command that leaves all its arguments, --help among them, to another one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return []


def add_repository_commands(app: typer.Typer, group: str = "") -> None:
    """Add the commands of ``group`` to its ``app``: ``prepare model`` belongs to the group ``prepare``."""
    for command, (module, text) in COMMANDS.items():
        if command.rpartition(" ")[0] == group:
            app.command(command.rpartition(" ")[2], cls=Forwarded, help=text)(_runner(command, module))


def _runner(command: str, module: str) -> Any:
    def run(ctx: typer.Context) -> None:
        if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists():
            there = shlex.join(["python", "-m", module, *ctx.args])
            raise UserError(f"luffy {command} is in luffy's repository, not in the package; run there: {there}")
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        inner = typer.main.get_command(import_module(module).app)
        raise typer.Exit(inner.main(ctx.args, prog_name=f"luffy {command}", standalone_mode=False) or 0)

    return run
