"""Help of the command line that shows every description whole, and options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

AnswerInThought = Annotated[
    bool, typer.Option("--answer-in-thought", help="read answers inside <think>...</think> too")
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="own column name, as in data.columns: --column prompt=question; repeatable"),
]
Workers = Annotated[int, typer.Option(min=1, help="verifier processes")]
Style = Annotated[str, typer.Option(help="prompt style: auto, chat, paper, paper_simple or plain")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run the model's Python code: read it first")
]


class FullHelp(typer.core.TyperGroup):
    """A group of commands whose --help wraps long descriptions instead of cutting them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        helps = {name: (command.help or "").split("\n\n")[0] for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in helps.items()])
