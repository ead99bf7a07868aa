"""``luffy prepare openr1``: from OpenR1-Math-220k to a training file whose every trace is verified.

Two streaming passes. The first measures and verifies each generation and writes its findings to
``verified.jsonl``; killed, it goes on from there. The second decides from those findings alone, so another split
or held-out part costs no new verification.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from luffy.cli import main
from luffy.cli_help import Style, Workers
from luffy.data import Encoder
from luffy.data.sources import RowError, RowSource, open_source
from luffy.errors import DataError
from luffy.files import whole_file, write_atomically
from luffy.models.load import load_tokenizer
from luffy.prepare.dataset_files import problem_schema, problem_writer
from luffy.prepare.journal import Journal, Record
from luffy.progress import progress
from luffy.rewards import build_verifier
from luffy.types import NO_LIMIT
from studies.paper.cards import card_markdown, make_card
from studies.paper.overlap import index_evaluation
from studies.paper.screen import Screener, read_problem, screen
from studies.paper.select import DROPPED, HELD_OUT, TRAIN, Choice, Selection, kept_traces, select

FILES = {TRAIN: "train.parquet", HELD_OUT: "held_out.parquet"}


@dataclass(frozen=True)
class ScreenOptions:
    """What the first pass depends on: changing any of it makes the findings worthless."""

    max_trace_tokens: int = 8192
    max_prompt_tokens: int = 1024
    style: str = "auto"
    decontaminate: tuple[str, ...] = ()
    ngram: int = 13
    trust_labels: bool = False


def prepare_openr1(
    source_path: str,
    tokenizer_path: str,
    out: Path,
    options: ScreenOptions,
    choice: Choice,
    workers: int = 2,
) -> dict[str, Any]:
    """Write ``train.parquet``, ``held_out.parquet`` (when asked for), ``contaminated.jsonl`` and the data card into
    ``out``; returns the card."""
    source = open_source(source_path)
    tokenizer = load_tokenizer(tokenizer_path)
    style = style_for(tokenizer, options.style)
    budgets: dict[str, Any] = {"max_prompt_tokens": options.max_prompt_tokens, "max_response_tokens": NO_LIMIT}
    encoder = Encoder(tokenizer, style, overlong_prompt="drop", **budgets)
    index, sets = index_evaluation(options.decontaminate, options.ngram)
    settings = {
        **asdict(options),
        "style": style,
        "decontaminate": [asdict(one) for one in sets],
        "source": source_path,
        "source_sha256": source.fingerprint,
        "tokenizer_sha256": tokenizer_fingerprint(tokenizer),
    }
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out / "verified.jsonl", _without_paths(settings), row=int, generations=int) as journal:
        if len(journal) < len(source):
            screener = Screener(encoder, index, options.max_trace_tokens, options.trust_labels)
            with (
                build_verifier("math", workers=workers) as verifier,
                progress("verified rows", len(source), len(journal)) as advance,
            ):
                screen(source, journal, screener, verifier, advance)
        selection = select(journal, choice)
        card = make_card(selection, {**settings, "tokenizer": tokenizer_path, **asdict(choice)})
        write_outputs(source, journal, selection, choice, out)
    write_atomically(out / "DATA_CARD.md", card_markdown(card))
    write_atomically(out / "card.json", json.dumps(card, indent=2) + "\n")
    return card


def style_for(tokenizer: Any, style: str) -> str:
    """``auto`` is the paper's prompt where the tokenizer has a chat template to put it in."""
    if style != "auto":
        return style
    return "paper" if getattr(tokenizer, "chat_template", None) else "plain"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Changes when token ids or the chat template would."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{core}\n{tokenizer.chat_template}".encode("utf-8", "surrogatepass")).hexdigest()


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The bytes decide, not where they lie: a moved file must not void hours of verification."""
    sets = [one["fingerprint"] for one in settings["decontaminate"]]
    return {**{name: value for name, value in settings.items() if name != "source"}, "decontaminate": sets}


def write_outputs(source: RowSource, journal: Journal, selection: Selection, choice: Choice, out: Path) -> None:
    """The chosen rows to parquet and the contaminated ones to a list; nothing appears before all of it is on disk."""
    if not selection.count(TRAIN):
        worst = ", ".join(f"{reason} {count}" for reason, count in selection.rows_dropped.most_common(3))
        raise DataError(f"{source.path}: no problem is left to train on; dropped: {worst}")
    schema = problem_schema({})
    with ExitStack() as stack:
        listing = stack.enter_context(whole_file(out / "contaminated.jsonl"))
        held = stack.enter_context(whole_file(out / FILES[HELD_OUT])) if selection.count(HELD_OUT) else None
        train = stack.enter_context(whole_file(out / FILES[TRAIN]))
        with ExitStack() as open_files:
            add_to = {TRAIN: open_files.enter_context(problem_writer(train, schema))}
            if held is not None:
                add_to[HELD_OUT] = open_files.enter_context(problem_writer(held, schema))
            contaminated = open_files.enter_context(listing.open("w", encoding="utf-8"))
            for place, record, row in _joined(source, journal, selection):
                if record.get("drop") == "contaminated":
                    contaminated.write(_listed(record, source, row))
                elif place != DROPPED:
                    add_to[place](_output_row(row, record, choice))
    if held is None:
        (out / FILES[HELD_OUT]).unlink(missing_ok=True)  # of an earlier choice: it would overlap train.parquet


def _joined(source: RowSource, journal: Journal, selection: Selection) -> Iterator[tuple[int, Record, dict[str, Any]]]:
    """Rows with their findings; all three streams are in the source's order. Unreadable rows are left out."""
    for place, record, row in zip(selection.places, journal, source.scan(), strict=True):
        if not isinstance(row, RowError):
            yield place, record, row


def _listed(record: Record, source: RowSource, row: dict[str, Any]) -> str:
    entry = {
        "row": source.name(record["row"]),
        "question": row["problem"],
        "evaluation_item": record["item"],
        "ngram": record["ngram"],
    }
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _output_row(row: dict[str, Any], record: Record, choice: Choice) -> Record:
    problem = read_problem(row, f"row {record['row']}")
    places, _ = kept_traces(record, choice)
    traces = [problem.traces[place] for place in places]
    return {
        "id": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "traces": [{"text": trace.text, "teacher": trace.teacher} for trace in traces],
        "source": problem.source,
    }


# ---- the command

DEFAULT_WORKERS = min(os.cpu_count() or 2, 16)
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    source: Annotated[
        str, typer.Argument(help="hub dataset, folder, or parquet file in the layout of OpenR1-Math-220k")
    ] = "open-r1/OpenR1-Math-220k/data",
    *,
    tokenizer: Annotated[str, typer.Option(help="folder or hub id of the tokenizer that counts tokens")],
    out: Annotated[Path, typer.Option(help="folder for the output; an interrupted run there is resumed")],
    max_trace_tokens: Annotated[int, typer.Option(min=1, help="longest trace, EOS included")] = 8192,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="longest rendered prompt")] = 1024,
    style: Style = "auto",
    split: Annotated[str, typer.Option(help="all; easy: traces within 2,048 tokens; hard: within 4,096")] = "all",
    decontaminate: Annotated[
        list[str] | None, typer.Option(help="evaluation file, folder or hub dataset to keep clear of; repeatable")
    ] = None,
    ngram: Annotated[int, typer.Option(min=1, help="words in a row that count as the same question")] = 13,
    held_out: Annotated[
        str,
        typer.Option(
            help="a fraction (0.1) or number (500) of problems to set apart; rest: those without a usable trace, "
            "written without traces (the paper's data for SFT+RL)"
        ),
    ] = "0",
    max_traces_per_problem: Annotated[int, typer.Option(min=0, help="0: all that are confirmed")] = 0,
    trust_labels: Annotated[
        bool, typer.Option("--trust-labels", help="do not verify what the dataset itself labels wrong")
    ] = False,
    workers: Workers = DEFAULT_WORKERS,
    seed: Annotated[int, typer.Option(min=0, help="seed of the choice for --held-out")] = 0,
) -> None:
    """OpenR1-Math-220k to a verified, de-duplicated, decontaminated training file and its data card.

    --split, --held-out, --seed and --max-traces-per-problem may change between runs into the same folder:
    verified traces are used again.
    """
    options = ScreenOptions(
        max_trace_tokens, max_prompt_tokens, style, tuple(decontaminate or ()), ngram, trust_labels
    )  # fmt: skip
    choice = Choice(split, max_traces_per_problem or None, held_out, seed)
    card = prepare_openr1(source, tokenizer, out, options, choice, workers)
    for part in ("rows", "traces"):
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in card[part]["dropped"].items()) or "none"
        typer.echo(f"{part:<9} read {card[part]['read']:,}, kept {card[part]['kept']:,}; dropped: {dropped}")
    typer.echo(f"written   {card['rows']['train']:,} train, {card['rows']['held_out']:,} held out: {out}")


if __name__ == "__main__":
    main(app)
