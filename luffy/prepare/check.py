"""``luffy prepare check``: report on a data file as a training run would read it."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luffy.data import Encoder, ProblemDataset, load_problems
from luffy.data.dataset import prompt_hash, repeated, shared
from luffy.data.prompts import resolve_style
from luffy.data.rows import ROW_KEY
from luffy.data.schemas import without_traces
from luffy.evaluation.accuracy import SUCCESS
from luffy.models.load import load_tokenizer
from luffy.prepare.chat_report import chat_lines, chat_report, quantiles
from luffy.rewards import build_verifier
from luffy.types import NO_LIMIT, Problem, Trace

SHOWN_DISAGREEMENTS = 5
SHOWN_CHARACTERS = 1500
SHOWN_ON_A_LINE = 200
SHOWN_TEACHERS = 20
RULE = "-" * 100
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal obeys them


@dataclass(frozen=True)
class CheckOptions:
    split: str = "train"
    tokenizer: str | None = None
    style: str = "auto"
    system_prompt: str | None = None
    max_prompt_tokens: int = 1024
    max_trace_tokens: int = 8192
    reward: str = "math"
    verify: int = 200
    examples: int = 3
    workers: int = 2
    columns: Mapping[str, str] | None = None
    answer_in_thought: bool = False
    eval: str | None = None
    turns: str = "last"


def check_file(path: str, options: CheckOptions) -> dict[str, Any]:
    """The report as data. Unusable data (no readable row, ids the tokenizer does not have) is a DataError."""
    read: dict[str, Any] = {"bad_rows": "skip", "require_answer": False, "columns": options.columns}
    problems = load_problems(path, options.split, turns=options.turns, **read)
    encoder = None if options.tokenizer is None else _encoder(options)
    contents, hashes = _contents(problems, encoder)
    report: dict[str, Any] = {
        "file": path,
        "schema": sorted(set(problems.schemas)),
        "rows": len(problems),
        "skipped": dict(problems.skipped),
        "skipped_examples": problems.messages,
        "turns_notices": problems.turns_notices,
        "chats": chat_report(problems.named_rows()),
        **contents,
        "repeated": _pairs(repeated(hashes), problems, problems),
    }
    if options.eval is not None:
        report["held_out"] = _held_out(problems, hashes, encoder, options.eval, options.columns)
    if encoder is not None:
        report |= {"style": str(encoder.style), "tokens": _token_report(problems, encoder, options)}
    report["verifier"] = _agreement(problems, encoder, options)
    report["examples"] = [_example(problems[place], encoder) for place in _spread(len(problems), options.examples)]
    return report


def _encoder(options: CheckOptions) -> Encoder:
    tokenizer = load_tokenizer(str(options.tokenizer))
    style = resolve_style(options.style, tokenizer)
    budgets: dict[str, Any] = {"max_prompt_tokens": NO_LIMIT, "max_response_tokens": NO_LIMIT}
    return Encoder(tokenizer, style, options.system_prompt, **budgets)


def _contents(problems: ProblemDataset, encoder: Encoder | None) -> tuple[dict[str, Any], array[int]]:
    """Counts of what the rows contain, and hashes of their prompts, in one pass over the file."""
    hashes = array("Q")
    counts: Counter[str] = Counter()
    teachers: Counter[str] = Counter()
    for problem in problems:
        hashes.append(_prompt_hash(problem, encoder))
        counts["without_answer"] += not problem.answer.strip()
        counts["chat_prompts"] += not isinstance(problem.prompt, str)
        counts["with_traces"] += bool(problem.traces)
        counts["traces"] += len(problem.traces)
        counts["traces_with_token_ids"] += sum(trace.token_ids is not None for trace in problem.traces)
        counts["traces_with_log_probs"] += sum(trace.log_probs is not None for trace in problem.traces)
        teachers.update(trace.teacher for trace in problem.traces)
    share = counts["with_traces"] / len(problems)
    return {**counts, "share_with_traces": share, "teachers": dict(teachers)}, hashes


def _held_out(
    problems: ProblemDataset,
    hashes: array[int],
    encoder: Encoder | None,
    path: str,
    columns: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Number of held-out problems that are in the file too."""
    mapped = without_traces(columns or {})
    held_out = load_problems(path, "test", bad_rows="skip", require_answer=False, columns=mapped)
    own = array("Q", (_prompt_hash(problem, encoder) for problem in held_out))
    return {"file": path, "rows": len(held_out), **_pairs(shared(own, hashes), held_out, problems)}


def _prompt_hash(problem: Problem, encoder: Encoder | None) -> int:
    return prompt_hash(problem.prompt) if encoder is None else encoder.prompt_hash(problem)


def _pairs(found: list[tuple[int, int]], problems: ProblemDataset, others: ProblemDataset) -> dict[str, Any]:
    """Number of pairs, and the rows of the first one."""
    first = [f"{problems[place].meta[ROW_KEY]} = {others[same].meta[ROW_KEY]}" for place, same in found[:1]]
    return {"count": len(found), "first": first[0] if first else None}


def _token_report(problems: ProblemDataset, encoder: Encoder, options: CheckOptions) -> dict[str, Any]:
    prompts, traces, whole = [], [], []
    for task in encoder.encode_all(problems):
        assert task is not None, "nothing is too long without a limit"
        prompts.append(len(task.prompt_ids))
        for trace in task.demonstrations:
            traces.append(len(trace.token_ids) - sum(end - start for start, end in trace.replies))
            whole += [len(trace.token_ids)] if trace.replies else []
    return {
        "prompt": quantiles(prompts),
        "trace": quantiles(traces),
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_trace_tokens": options.max_trace_tokens,
        "prompts_over_budget": sum(length > options.max_prompt_tokens for length in prompts),
        "traces_over_budget": sum(length > options.max_trace_tokens for length in traces),
        "conversation": quantiles(whole),
        "conversations_over_budget": sum(length > options.max_trace_tokens for length in whole),
        "traces_open_thought": encoder.counts["traces_open_thought"],
    }


# ---- verifier


def _agreement(problems: ProblemDataset, encoder: Encoder | None, options: CheckOptions) -> dict[str, Any]:
    """Does the reward that will judge the run call its traces right? A trace it calls wrong teaches nothing."""
    items = list(_items(problems, encoder, options.verify))
    if not items:
        return {"reward": options.reward, "checked": 0}
    inside = options.answer_in_thought
    with build_verifier(options.reward, workers=options.workers, answer_in_thought=inside) as verifier:
        scores = verifier.score(items)
    wrong = [
        {"id": problem.id, "answer": problem.answer, "status": score.status, "end": text[-200:]}
        for (problem, text, *_), score in zip(items, scores, strict=True)
        if score.value < SUCCESS
    ]
    return {
        "reward": options.reward,
        "checked": len(items),
        "agree": len(items) - len(wrong),
        "share": (len(items) - len(wrong)) / len(items),
        "statuses": dict(Counter(score.status for score in scores)),
        "disagreements": wrong[:SHOWN_DISAGREEMENTS],
    }


def _items(problems: ProblemDataset, encoder: Encoder | None, most: int) -> Iterator[tuple[Problem, str, None, bool]]:
    """The first readable trace of problems all over the file."""
    for place in _spread(len(problems), most):
        problem = problems[place]
        texts = [_text(trace, encoder) for trace in problem.traces] if problem.answer.strip() else []
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            yield problem, text, None, encoder is not None and encoder.in_thought(problem)


def _text(trace: Trace, encoder: Encoder | None) -> str | None:
    if trace.token_ids is None:
        return trace.answer_text
    return None if encoder is None else encoder.tokenizer.decode(list(trace.token_ids), skip_special_tokens=True)


def _spread(count: int, wanted: int) -> list[int]:
    """Evenly over the file, always the same ones."""
    wanted = min(count, wanted)
    return [place * count // wanted for place in range(wanted)]


# ---- examples


def _example(problem: Problem, encoder: Encoder | None) -> dict[str, Any]:
    """Prompt and first trace as the model will see them, with special tokens if there is a tokenizer."""
    example: dict[str, Any] = {"id": problem.id, "answer": problem.answer, "traces": len(problem.traces)}
    if encoder is None:
        prompt = problem.prompt
        chat = prompt if isinstance(prompt, str) else "\n".join(f"[{turn.role}] {turn.content}" for turn in prompt)
        trace = problem.traces[0].answer_text if problem.traces else None
        return {**example, "prompt": chat, "trace": trace}
    task = encoder.encode(problem)
    assert task is not None, "nothing is too long without a limit"
    shown = None
    if task.demonstrations:
        ids = list(task.demonstrations[0].token_ids)
        shown = encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {**example, "prompt": encoder.render(problem), "trace": shown}


# ---- text


def report_lines(report: dict[str, Any], full: bool = False) -> Iterator[str]:
    """The report for people; long prompts and traces are shown from both ends unless ``full``."""
    yield f"file        {report['file']}"
    yield f"schema      {', '.join(report['schema'])}"
    yield f"problems    {report['rows']:,} usable, {sum(report['skipped'].values()):,} skipped"
    for message in report["skipped_examples"]:
        yield f"  skipped   {message}"
    if report["without_answer"]:
        taken = "luffy sft takes them, luffy train stops at them or, with data.bad_rows=skip, leaves them out"
        yield f"no answer   {report['without_answer']:,} problems: {taken}"
    yield from (f"warning     {line}" for line in report["turns_notices"])
    yield from map(_printable, chat_lines(report["chats"]))
    yield from _equal_prompt_lines(report)
    yield (
        f"traces      {report['traces']:,}; {100 * report['share_with_traces']:.1f}% of the problems have one; "
        f"{report['traces_with_log_probs']:,} with log-probs"
    )
    teachers = list(report["teachers"].items())
    yield from (f"  teacher   {_cut(name)}: {count:,}" for name, count in teachers[:SHOWN_TEACHERS])
    if len(teachers) > SHOWN_TEACHERS:
        yield f"  teacher   and {len(teachers) - SHOWN_TEACHERS:,} more: --json names them"
    yield from _token_lines(report)
    yield from _verifier_lines(report["verifier"])
    for number, example in enumerate(report["examples"], start=1):
        yield from _example_lines(number, example, "style" in report, full)


def _equal_prompt_lines(report: dict[str, Any]) -> Iterator[str]:
    if (repeats := report["repeated"])["count"]:
        said = f"{repeats['count']:,} of {report['rows']:,} problems repeat an earlier one"
        yield f"warning     {said}, first: {repeats['first']}"
    if held_out := report.get("held_out"):
        said = f"{held_out['count']:,} of {held_out['rows']:,} problems of {held_out['file']} are in this file too"
        yield f"warning     {said}, first: {held_out['first']}" if held_out["count"] else f"held out    {said}"


def _token_lines(report: dict[str, Any]) -> Iterator[str]:
    if "tokens" not in report:
        yield "tokens      not counted: give --tokenizer"
        return
    tokens = report["tokens"]
    for what in ("prompt", "trace"):
        figures = "  ".join(f"{name} {value:,}" for name, value in tokens[what].items()) or "none"
        over, budget = tokens[f"{what}s_over_budget"], tokens[f"max_{what}_tokens"]
        yield f"{what + ' tokens':<13} {figures}; {over:,} over {budget:,}"
    if tokens["conversation"]:
        figures = "  ".join(f"{name} {value:,}" for name, value in tokens["conversation"].items())
        limit = f"over {tokens['max_trace_tokens']:,}, the limit without an environment"
        yield f"with replies  {figures}; {tokens['conversations_over_budget']:,} {limit}"
    if opened := tokens["traces_open_thought"]:
        why = "which the prompt does not open: the policy learns to write it"
        yield f"thoughts    {opened:,} traces begin with <think>, {why}"


def _verifier_lines(verifier: dict[str, Any]) -> Iterator[str]:
    if not verifier["checked"]:
        why = "no trace with an answer, --verify 0, or traces of token ids without --tokenizer"
        yield f"verifier    nothing checked ({why})"
        return
    share, checked = 100 * verifier["share"], verifier["checked"]
    yield f"verifier    {verifier['reward']} agrees with {verifier['agree']} of {checked} traces ({share:.1f}%)"
    for one in verifier["disagreements"]:
        gold = _cut(repr(one["answer"]))
        yield f"  disagrees {_cut(one['id'])} ({one['status']}): gold {gold}, trace ends {one['end'][-80:]!r}"


def _example_lines(number: int, example: dict[str, Any], rendered: bool, full: bool) -> Iterator[str]:
    how = "as the model will see it" if rendered else "as the file has it (give --tokenizer to see it rendered)"
    gold = _cut(repr(example["answer"]))
    yield f"{RULE}\nexample {number}: {_cut(example['id'])}, {how}; gold {gold}"
    between = "" if rendered else "\n[first trace] "
    prompt = _elided(example["prompt"], full)
    yield f"{RULE}\n{prompt}" + (between + _elided(example["trace"], full) if example["trace"] else "")


def _cut(text: str) -> str:
    """A field of a line: its beginning, on one line."""
    text = text[: SHOWN_ON_A_LINE + 1]
    text = text if len(text) <= SHOWN_ON_A_LINE else f"{text[:SHOWN_ON_A_LINE]}..."
    return _printable(" ".join(text.split()))


def _printable(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _elided(text: str, full: bool) -> str:
    if full or len(text) <= SHOWN_CHARACTERS:
        return _printable(text)
    half = SHOWN_CHARACTERS // 2
    hidden = f"[... {len(text) - 2 * half:,} characters not shown ...]"
    return f"{_printable(text[:half])}\n{hidden}\n{_printable(text[-half:])}"
