"""``luffy prepare check | traces``, and what the repository adds: ``openr1 | model | benchmarks``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luffy.cli_help import AnswerInThought, Columns, FullHelp, Style, TrustRemoteCode, Workers
from luffy.errors import UserError
from luffy.repository import add_repository_commands

if TYPE_CHECKING:
    from luffy.config import EnvironmentConfig

prepare_app = typer.Typer(
    name="prepare",
    cls=FullHelp,
    help="Make data, models and traces ready for training.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

add_repository_commands(prepare_app, "prepare")


def named_columns(columns: list[str]) -> dict[str, str] | None:
    """The column map that ``--column`` gives, as data.columns has it."""
    wrong = [column for column in columns if not all(column.partition("=")[::2])]
    if wrong:
        raise UserError(f"--column {wrong[0]}: write it as ours=theirs, e.g. --column prompt=question")
    return {ours: theirs for ours, _, theirs in (column.partition("=") for column in columns)} or None


@prepare_app.command()
def check(
    file: Annotated[str, typer.Argument(help="a data file, folder or hub dataset in any layout that train reads")],
    tokenizer: Annotated[str | None, typer.Option(help="folder or hub id; without it no tokens are counted")] = None,
    reward: Annotated[str, typer.Option(help="a reward of docs/rewards.md, an address, or module:function")] = "math",
    answer_in_thought: AnswerInThought = False,
    style: Style = "auto",
    system_prompt: Annotated[str | None, typer.Option(help="system message (styles chat and paper)")] = None,
    split: Annotated[str, typer.Option(help="split of a folder or hub dataset")] = "train",
    columns: Columns = None,
    held_out: Annotated[
        str | None, typer.Option("--eval", help="held-out data, as data.eval: how many of its problems are in FILE too")
    ] = None,
    turns: Annotated[
        str, typer.Option(help="assistant turns of a chat that are its trace, as data.turns: last or all")
    ] = "last",
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="budget to compare with")] = 1024,
    max_trace_tokens: Annotated[int, typer.Option(min=1, help="budget to compare with")] = 8192,
    verify: Annotated[int, typer.Option(min=0, help="how many problems' traces to verify; 0: none")] = 200,
    examples: Annotated[int, typer.Option(min=0, help="how many problems to show")] = 3,
    workers: Workers = 2,
    full: Annotated[bool, typer.Option("--full", help="show long prompts and traces whole")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the whole report as one JSON object")] = False,
) -> None:
    """Report on a data file: schema, lengths, traces, verifier agreement, rendered examples."""
    from luffy.prepare.check import CheckOptions, check_file, report_lines

    options = CheckOptions(
        split, tokenizer, style, system_prompt, max_prompt_tokens, max_trace_tokens, reward, verify, examples, workers,
        named_columns(columns or []), answer_in_thought, held_out, turns,
    )  # fmt: skip
    report = check_file(file, options)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2))
        return
    for line in report_lines(report, full):
        typer.echo(line)


MaxTokens = Annotated[int, typer.Option(min=1, help="longest response; of a server's episode, longest turn")]
KeepTraces = Annotated[bool, typer.Option("--keep-traces", help="keep the traces of FILE, before the new ones")]
PlayedIn = Annotated[str | None, typer.Option(help="recipe with the environment that answers the teacher's turns")]
TraceTokenizer = Annotated[
    str | None,
    typer.Option(help="of the model to be trained: token ids with log-probs where they are its own, else text"),
]


@prepare_app.command()
def traces(
    file: Annotated[str, typer.Argument(help="problems with answers, in any layout that train reads")],
    *,
    out: Annotated[Path, typer.Option(help="parquet file to write; OUT.progress.jsonl next to it lets a run resume")],
    columns: Columns = None,
    endpoint: Annotated[str | None, typer.Option(help="base address, such as http://localhost:8000/v1")] = None,
    model: Annotated[str | None, typer.Option(help="the model's name at the endpoint")] = None,
    local: Annotated[str | None, typer.Option(help="model folder or hub id to sample from in this process")] = None,
    api: Annotated[str, typer.Option(help="chat or completions (endpoint)")] = "chat",
    api_key_env: Annotated[str | None, typer.Option(help="environment variable that holds the API key")] = None,
    logprobs: Annotated[bool, typer.Option(help="ask the endpoint for log-probs")] = True,
    extra_body: Annotated[str, typer.Option(help='more request fields, such as {"return_token_ids": true}')] = "{}",
    tokenizer: TraceTokenizer = None,
    n: Annotated[int, typer.Option(min=1, help="samples per problem")] = 4,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 1.0,
    max_tokens: MaxTokens = 8192,
    style: Style = "auto",
    system_prompt: Annotated[str | None, typer.Option(help="system message, where the prompt has none")] = None,
    teacher: Annotated[str | None, typer.Option(help="name recorded in the traces; default: the model's")] = None,
    reward: Annotated[str, typer.Option(help="a reward of docs/rewards.md, an address, or module:function")] = "math",
    answer_in_thought: AnswerInThought = False,
    workers: Workers = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="requests under way (endpoint)")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="after 429, 5xx, a lost or malformed reply (endpoint)")] = 6,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for one response (endpoint)")] = 600,
    keep_wrong: Annotated[bool, typer.Option("--keep-wrong", help="keep finished but wrong samples too")] = False,
    keep_traces: KeepTraces = False,
    limit: Annotated[int, typer.Option(min=0, help="only the first problems; 0: all")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the samples")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16 (local)")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda (local)")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    environment: PlayedIn = None,
) -> None:
    """Verified traces from an OpenAI-compatible server or a local model."""
    from luffy.prepare.endpoint import Endpoint
    from luffy.prepare.teachers import endpoint_teacher, local_teacher
    from luffy.prepare.traces import prepare_traces

    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if (endpoint is None) == (local is None):
        raise UserError("give --endpoint with --model, or --local")
    played_in = environment_in(environment)
    if local is not None:
        asked, settings = local_teacher(
            local, sampling, tokenizer, device, trust_remote_code, played_in,
            seed=seed, style=style, system_prompt=system_prompt, dtype=dtype,
        )  # fmt: skip
    else:
        key = _api_key(api_key_env)
        asked, settings = endpoint_teacher(
            Endpoint(str(endpoint), model or "", api, key, logprobs, retries, timeout_s=timeout),
            sampling | _fields(extra_body), seed, style, system_prompt, tokenizer, concurrency, trust_remote_code,
            played_in,
        )  # fmt: skip
    card = prepare_traces(
        file, out, asked, teacher or model or Path(str(local)).name, settings,
        n=n, reward=reward, workers=workers, keep_wrong=keep_wrong, keep_traces=keep_traces,
        limit=limit or None, answer_in_thought=answer_in_thought, columns=named_columns(columns or []),
    )  # fmt: skip
    for name, count in card["counts"].items():
        typer.echo(f"{name.replace('_', ' '):<42} {count:,}")
    typer.echo(f"written  {out}")


def environment_in(recipe: str | None) -> EnvironmentConfig | None:
    """The environment of the recipe that ``--environment`` names, if any."""
    from luffy.config import load_config

    found = None if recipe is None else load_config(recipe).environment
    if recipe is not None and found is None:
        raise UserError(f"--environment {recipe}: the recipe has no environment; name one that has")
    return found


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"--api-key-env {variable}: the variable is not set")
    return key


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UserError(f"--extra-body: not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UserError("--extra-body: give a JSON object")
    return fields
