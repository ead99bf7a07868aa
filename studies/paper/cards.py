"""The data card: how many rows and traces went where, for people (Markdown) and programs (JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luffy.prepare.chat_report import QUANTILES, quantiles
from studies.paper.select import HELD_OUT, TRAIN, Selection

WHY_ROW = {
    "bad_row": "the row cannot be read",
    "no_answer": "no gold answer",
    "unverifiable": "a gold that no parser can compare (proof, several parts, prose)",
    "contaminated": "shares words with an evaluation item (contaminated.jsonl)",
    "prompt_too_long": "prompt over the token budget",
    "no_trace": "no generation at all",
    "too_long": "every candidate trace over the token budget",
    "not_confirmed": "no trace within the budget confirmed by Math-Verify",
    "over_split": "confirmed traces, but all longer than the split allows",
    "duplicate": "the question of a row already kept",
}
WHY_TRACE = {
    "problem_dropped": "its problem was dropped before, or as a duplicate",
    "empty": "empty text",
    "repeated": "same text as another trace of the problem",
    "cut_off": "thoughts that never end (no </think>)",
    "labelled_wrong": "labelled wrong by the dataset (--trust-labels)",
    "too_long": "over the token budget",
    "wrong": "verified: the answer is wrong",
    "no_answer": "verified: no answer found in it",
    "timeout": "verification ran out of time",
    "crashed": "verification process died",
    "error": "verification could not read the gold",
    "over_split": "longer than the split allows",
    "over_count": "beyond --max-traces-per-problem",
}


def make_card(selection: Selection, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every row and every trace is counted exactly once."""
    rows: dict[str, Any] = {
        "read": len(selection.places),
        "dropped": _ordered(selection.rows_dropped, WHY_ROW),
        "kept": selection.count(TRAIN) + selection.count(HELD_OUT),
        "train": selection.count(TRAIN),
        "held_out": selection.count(HELD_OUT),
    }
    traces: dict[str, Any] = {
        "read": selection.traces_read,
        "dropped": _ordered(selection.traces_dropped, WHY_TRACE),
        "kept": selection.traces_kept,
    }
    for part in (rows, traces):
        assert part["read"] == part["kept"] + sum(part["dropped"].values()), part
    tokens = {"prompt": quantiles(selection.prompt_tokens), "trace": quantiles(selection.trace_tokens)}
    return {"rows": rows, "traces": traces, "tokens": tokens, "settings": dict(settings)}


def _ordered(counts: Mapping[str, int], known: Mapping[str, str]) -> dict[str, int]:
    assert counts.keys() <= known.keys(), counts
    return {reason: counts[reason] for reason in known if counts.get(reason)}


def card_markdown(card: Mapping[str, Any]) -> str:
    rows, traces = card["rows"], card["traces"]
    return "\n".join([
        "# Data card", "",
        f"Made by `luffy prepare openr1` from `{card['settings']['source']}`.", "",
        f"- problems: {rows['read']:,} read, {rows['kept']:,} kept"
        f" ({rows['train']:,} in train.parquet, {rows['held_out']:,} in held_out.parquet)",
        f"- traces: {traces['read']:,} read, {traces['kept']:,} kept", "",
        *_table("Problems dropped", rows["dropped"], WHY_ROW),
        *_table("Traces dropped", traces["dropped"], WHY_TRACE),
        *_tokens(card["tokens"]),
        *_evaluation(card["settings"]),
        "## Settings", "",
        *(f"- {name}: `{value}`" for name, value in card["settings"].items() if name != "decontaminate"), "",
    ])  # fmt: skip


def _table(title: str, counts: Mapping[str, int], why: Mapping[str, str]) -> list[str]:
    head = [f"## {title}", "", "Each is counted under the first reason that applies.", ""]
    if not counts:
        return [*head[:2], "None.", ""]
    lines = [f"| {reason} | {why[reason]} | {count:,} |" for reason, count in counts.items()]
    return [*head, "| reason | meaning | number |", "|---|---|---:|", *lines, ""]


def _tokens(tokens: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = [
        f"| {what} | " + " | ".join(f"{values[name]:,}" for name in QUANTILES) + " |"
        for what, values in tokens.items()
        if values
    ]
    head = ["| | " + " | ".join(QUANTILES) + " |", "|---|---:|---:|---:|---:|"]
    return ["## Tokens (kept; traces with their EOS)", "", *head, *lines, ""]


def _evaluation(settings: Mapping[str, Any]) -> list[str]:
    """Which evaluation sets the data was kept clear of."""
    sets = settings["decontaminate"]
    if not sets:
        return ["## Decontamination", "", "None: no evaluation set was given (`--decontaminate`).", ""]
    lines = [f"- `{one['path']}`: {one['items']:,} items, {one['skipped']:,} unreadable rows" for one in sets]
    return [f"## Decontamination ({settings['ngram']} words in a row)", "", *lines, ""]
