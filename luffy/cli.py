"""The command line: ``luffy train | sft | eval | report | ...``; ``luffy --help`` lists all.

A user's mistake is one line on standard error and exit code 2, without a traceback.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import webbrowser
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, Literal, NoReturn

import typer
import typer.core

from luffy._version import __version__
from luffy.cli_help import AnswerInThought, Columns, FullHelp, TrustRemoteCode
from luffy.config import Config, built_in_recipes, check_made_for, load_config, to_yaml
from luffy.config.recipes import check_prepared, inherited_for_rl
from luffy.distributed.follow import LAUNCHER_VARIABLE, follow_launcher
from luffy.errors import Interrupted, StopRequested, TrainingStopped, UserError
from luffy.prepare.prepare_cli import environment_in, named_columns, prepare_app
from luffy.repository import add_repository_commands
from luffy.schema import describe

LONGEST_ERROR = 4_000  # characters
PATIENCE_S = 30.0  # of a process whose error another one explains: the launcher ends it meanwhile


class KnobHelp(typer.core.TyperCommand):
    """A command whose --help ends with every knob that an override can set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        for place, arg in enumerate(args[: args.index("--")] if "--" in args else args):
            name, equals, value = arg.partition("=")
            if name.startswith("--") and name not in known:
                following = args[place + 1] if place + 1 < len(args) else ""
                following = "" if following.startswith("-") or "=" in following else following
                raise UserError(_not_an_option(name, value if equals else following, self.name))
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\nKnobs (section.key=value), with their defaults:\n")
        for doc in describe(Config):
            formatter.write(f"  {doc.path} = {doc.shown_default}  [{doc.kind}]\n      {doc.help}\n")


def _not_an_option(name: str, value: str, command: str | None) -> str:
    """Error for ``--steps 3`` that names the settings it may mean, with the value."""
    wanted = name.removeprefix("--").replace("-", "_")
    paths = [doc.path for doc in describe(Config)]
    meant = [path for path in paths if wanted in (path, path.replace(".", "_"), path.rpartition(".")[2])]
    if not meant:
        return f"{name} unknown option; settings are written section.key=value (luffy {command} --help lists them)"
    return f"{name}: unknown option; write " + " or ".join(f"{path}={value or '...'}" for path in meant)


app = typer.Typer(
    name="luffy",
    cls=FullHelp,
    help="Reinforcement learning with verifiable rewards under off-policy guidance (LUFFY).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(prepare_app)
add_repository_commands(app)

Recipe = Annotated[str, typer.Argument(help="a recipe file, or the name of a built-in one such as tiny/luffy")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ..., override the recipe")]
Resume = Annotated[
    str, typer.Option(help="auto: resume from the newest valid checkpoint; never; or a checkpoint folder")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="validate the run, build one batch, measure the base, print the plan, exit")
]
Measure = Annotated[bool, typer.Option(help="with --dry-run: up to a minute of what the base does with some problems")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="with --dry-run: time and cost on h200, h100 or a100")]
GpuPrice = Annotated[float | None, typer.Option(min=0, help="with --dry-run: price of one GPU hour")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="print the resolved config and exit")]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="number of runs, one after the other: NAME/seed-0, NAME/seed-1, ...")
]
SystemPrompt = Annotated[
    str | None, typer.Option(help="system message (styles chat, paper); default: from its run or model card")
]
ModelOrRun = Annotated[
    str, typer.Argument(help="model folder, hub id, .gguf file, or run folder (best, else newest checkpoint)")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the table as JSON, and nothing else")]
ChangedData = Annotated[bool, typer.Option("--allow-changed-data", help="resume although the training data changed")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        typer.echo(f"luffy {__version__}")
        raise typer.Exit


@app.command("sft", cls=KnobHelp, help="Supervised fine-tuning on the traces of the same recipe.")
@app.command("train", cls=KnobHelp, help="Train with reinforcement learning: on-policy samples, traces, or both.")
def train(
    ctx: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    allow_changed_data: ChangedData = False,
    seeds: Seeds = None,
    gpu: GpuName = None,
    gpu_price: GpuPrice = None,
    measure: Measure = True,
) -> None:
    """Train, print what would be trained (--dry-run), or print the config."""
    method: Literal["rl", "sft"] = "sft" if ctx.info_name == "sft" else "rl"
    if method == "sft":
        _warn_of_rate(recipe, overrides or [])
    trainings = _seeded(recipe, overrides or [], seeds, resume)
    if (gpu or gpu_price is not None) and not dry_run:
        raise UserError("--gpu and --gpu-price estimate the cost of a run: add --dry-run")
    cfg = trainings[0][0]
    if print_config:
        typer.echo(to_yaml(cfg), nl=False)
        return
    check_made_for(cfg, method)
    check_prepared(cfg)
    if dry_run:
        from luffy.dry_run import dry_run as lines_of

        _echo(lines_of(cfg, method, len(trainings), measure, gpu, gpu_price))
    else:
        _launch(method, trainings, resume, allow_changed_data)


def _warn_of_rate(recipe: str, overrides: list[str]) -> None:
    source = inherited_for_rl(recipe, overrides, "optim.lr")
    if source is not None and int(os.environ.get("RANK", "0")) == 0:
        lr = load_config(recipe, overrides).optim.lr
        typer.echo(
            f"warning: optim.lr={lr:g} comes from {source}, which is meant for RL; SFT usually takes 10 to 50 times as "
            "much: set optim.lr",
            err=True,
        )


def _seeded(recipe: str, overrides: list[str], seeds: int | None, resume: str) -> list[tuple[Config, list[str]]]:
    """The config of each training that was asked for, and the command line that starts it alone."""
    cfg = load_config(recipe, overrides)
    if seeds is None:
        return [(cfg, sys.argv[1:])]
    if resume not in ("auto", "never"):
        raise UserError(f"--resume {resume} names one checkpoint, and --seeds asks for {seeds} trainings; drop one")
    own = [[f"seed={seed}", f"name={cfg.name}/seed-{seed}"] for seed in range(cfg.seed, cfg.seed + seeds)]
    rest = _without_option("--seeds", sys.argv[1:])
    return [(load_config(recipe, [*overrides, *knobs]), [*rest, *knobs]) for knobs in own]


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _without_option(name: str, args: list[str]) -> list[str]:
    if name in args:
        place = args.index(name)
        return args[:place] + args[place + 2 :]
    return [arg for arg in args if not arg.startswith(f"{name}=")]


def _launch(
    method: Literal["rl", "sft"], trainings: list[tuple[Config, list[str]]], resume: str, allow_changed_data: bool
) -> None:
    from luffy.distributed.launch import launch
    from luffy.trainer import Job

    jobs = [Job(cfg, method, resume, allow_changed_data) for cfg, _ in trainings]

    def instead() -> str:
        changes = any(job.again() != job for job in jobs)
        return f" (with --resume auto instead of {resume})" if changes else ""

    try:
        for job, (_, arguments) in zip(jobs, trainings, strict=True):
            launch(job, arguments)
    except TrainingStopped as stop:
        raise type(stop)(f"{stop}{instead()}") from stop
    except KeyboardInterrupt:
        _end(f"interrupted; run the same command again{instead()} to go on from the last checkpoint", 130)


@app.command(cls=KnobHelp)
def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8000,
    host: Annotated[str, typer.Option(help="address to listen on; the key is sent unencrypted")] = "127.0.0.1",
) -> None:
    """Start a vLLM server for the training of a recipe (rollout.engine=vllm, rollout.vllm.servers=[...])."""
    from luffy.train.build_engines import serve as start

    start(load_config(recipe, overrides or ()), host, port)


@app.command(cls=KnobHelp)
def doctor(
    settings: Annotated[list[str] | None, typer.Argument(help="a recipe, if any, and section.key=value ...")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds until a rank that hangs is reported")] = 60.0,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="omit host and user names, addresses and paths, for bug reports")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Check this machine or cluster before a long run, in about half a minute. Exit code 1 if a check fails.

    It looks at versions, devices, memory, disk and network, compares gradients and log-probs of a tiny model, and
    measures bandwidth. Give it the launch of the run: `luffy doctor launch=torchrun parallel.workers=8`.
    """
    given = settings or []
    recipe = given[0] if given and "=" not in given[0] else None
    from luffy.doctor.examination import Examination, examine

    cfg = load_config(recipe, given[recipe is not None :])
    examine(Examination(cfg, timeout, as_json, anonymous), sys.argv[1:])


@app.command(cls=KnobHelp)
def memory(
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe; without one, a table by model size and method")
    ] = None,
    overrides: Overrides = None,
    shape: Annotated[str | None, typer.Option(help="shape of the model, e.g. qwen2-7b; default: from its name")] = None,
    gpu: Annotated[str, typer.Option(help="compare with h200, h100 or a100")] = "h100",
) -> None:
    """Estimate the GPU memory of a run; nothing is downloaded."""
    from luffy.dry_run.memory_table import estimate_lines, table_lines

    if recipe is None:
        lines = table_lines(gpu)
    else:
        cfg = load_config(recipe, overrides or [])
        lines = estimate_lines(cfg, cfg.made_for, shape, gpu)
    _echo(lines)


@app.command()
def recipes() -> None:
    """List sizes and methods: `luffy train SIZE/METHOD` (`luffy sft SIZE/sft`), or in your own recipe
    `base: [sizes/SIZE, methods/METHOD]`."""
    known = built_in_recipes()
    sizes = [name for name in known if name.startswith("sizes/")]
    methods = [name for name in known if name.startswith("methods/")]
    composed = {f"{Path(size).name}/{Path(name).name}" for size in sizes for name in (*methods, "base")}
    others = [name for name in known if name not in {*sizes, *methods, *composed}]
    columns = get_terminal_size().columns if sys.stdout.isatty() else 1000  # a line each for scripts
    for title, names in (("sizes", sizes), ("methods", methods), ("others", others)):
        typer.echo(f"{title}:")
        shown = [name.removeprefix(f"{title}/") for name in names]
        indent = " " * (4 + max(map(len, shown)))
        for short, name in zip(shown, names, strict=True):
            first = f"  {short}".ljust(len(indent))
            typer.echo(fill(known[name], columns, initial_indent=first, subsequent_indent=indent))


@app.command()
def quickstart(
    seeds: Annotated[int | None, typer.Option(min=1, help="seeds per method; default: 1, with all methods 3")] = None,
    out: Annotated[
        Path | None, typer.Option(help="output folder; default: runs/quickstart, of tools runs/quickstart-tools")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="training steps instead of the recipe's")] = None,
    methods: Annotated[str | None, typer.Option(help="comma-separated names (see luffy recipes), or all")] = None,
    task: Annotated[str, typer.Option(help="chains (sums in the head) or tools (the same with a tool)")] = "chains",
    as_json: AsJson = False,
) -> None:
    """On-policy RL, SFT and LUFFY on a small reasoning task, compared: a few minutes on a laptop, no download.

    `--task tools` compares on-policy RL and LUFFY where a tool must be called over several turns. `--methods all`
    compares every method. Rerun the same command to resume.
    """
    from luffy.quickstart.run import find_task
    from luffy.quickstart.run import quickstart as run

    out = out or Path(find_task(task).out)
    run(out, seeds or (3 if methods == "all" else 1), steps, methods, as_json, task)


@app.command(cls=KnobHelp)
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    methods: Annotated[str, typer.Option(help="comma-separated names (see luffy recipes)")] = "luffy,on_policy,sft_rl",
    budget: Annotated[str, typer.Option(help="time in all, such as 90s, 6m or 2h")] = "1h",
    seeds: Annotated[int, typer.Option(min=1, help="seeds of each method and learning rate")] = 1,
    lrs: Annotated[
        str | None, typer.Option(help="comma-separated learning rates; default: the recipe's, and 3 times as much")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(min=8, help="problems of validation, and of the test; default: a tenth, at most 200")
    ] = None,
    patience: Annotated[float, typer.Option(min=1, help="seconds without a step that end an arm")] = 600.0,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="trainings side by side; default: as many as memory and cores allow")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="output folder; default: OUT/NAME-compare of the recipe")] = None,
    as_json: AsJson = False,
) -> None:
    """Train methods at learning rates on your model and data within a budget, and test which is best.

    Successive halving on validation problems that it takes out of the training data; the finalists are compared on
    test problems that decided nothing. Rerun the same command to resume. `luffy eval compare` compares evaluations.
    """
    from luffy.compare.arms import named_methods
    from luffy.compare.halving import Asked, as_json_text, compare_methods, rates_in, seconds_in
    from luffy.compare.outcome import markdown

    cfg = load_config(recipe, overrides or [])
    folder = out or cfg.folder.with_name(f"{cfg.folder.name}-compare")
    named = named_methods(methods)
    asked = Asked(cfg, named, rates_in(lrs), seeds, seconds_in(budget), folder, held_out, patience, at_once)
    outcome = compare_methods(asked, lambda line: typer.echo(line, err=True))
    typer.echo(as_json_text(outcome) if as_json else markdown(outcome, budget), nl=as_json)
    if all(row.test is None for row in outcome.rows):
        raise UserError("no arm reached the test; mend what the table names, and compare again with another --out")


@app.command()
def generate(
    ctx: typer.Context,
    model: ModelOrRun,
    prompt: Annotated[str | None, typer.Argument(help="the prompt; default: --file or standard input")] = None,
    file: Annotated[Path | None, typer.Option(help="file of prompts: one per line, or a data format of train")] = None,
    n: Annotated[int, typer.Option(min=1, help="samples per prompt")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest response; default: 256, or the rest of the context")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.6,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same responses")] = 0,
    style: Annotated[
        str | None,
        typer.Option(
            help="chat, paper, paper_simple or plain; auto: chat if the tokenizer has a template; default: as its run "
            "or model card says, else auto"
        ),
    ] = None,
    system_prompt: SystemPrompt = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON line per response, with token ids and log-probs")
    ] = False,
) -> None:
    """Sample from a model with the training engine."""
    from luffy.evaluation.trained_with import environment_of
    from luffy.generate import as_trained, generate_texts, read_prompts

    prompts = read_prompts(prompt, file, sys.stdin)
    model = _chosen_model(model)
    style, system_prompt, taken = as_trained(model, style, system_prompt)
    if taken:
        typer.echo(taken, err=True)
    own = {"model", "prompt", "file", "as_json"}
    options = {name: value for name, value in ctx.params.items() if name not in own}
    environment = environment_of(model)
    if environment is not None:
        typer.echo(f"environment {environment.name}, as in its run", err=True)
    options |= {"style": style, "system_prompt": system_prompt, "environment": environment}
    for row in generate_texts(model, prompts, **options):
        typer.echo(json.dumps(row, ensure_ascii=False) if as_json else row["response"])


def _chosen_model(path: str) -> str:
    """The model that a path stands for; which checkpoint of a run it is, is said."""
    from luffy.run_folder.checkpoint import model_of

    model, which = model_of(path)
    if which is not None:
        typer.echo(f"model      {model} ({which})", err=True)
    return model


RewardOf = Annotated[str | None, typer.Option(help="a recipe whose reward section replaces the other options")]


@app.command()
def verify(
    rows: Annotated[Path, typer.Argument(help='JSONL with "answer" and "response" in every line; - is standard input')],
    reward: Annotated[
        str, typer.Option(help="math, numeric, gsm8k, choice, format, a server's address, or module:function")
    ] = "math",
    out: Annotated[Path | None, typer.Option(help="output file; default: standard output")] = None,
    workers: Annotated[int, typer.Option(min=1, help="verifier processes")] = 2,
    timeout_s: Annotated[float, typer.Option(help="seconds until a verification is killed and scores 0")] = 8.0,
    answer_in_thought: AnswerInThought = False,
    reward_of: RewardOf = None,
) -> None:
    """Score responses from the shell: one JSON line per row, in order, with score and status."""
    from luffy.rewards import build_verifier
    from luffy.rewards.scores import score_file

    if reward_of is not None:
        built = load_config(reward_of).reward.verifier()
    else:
        built = build_verifier(reward, workers=workers, timeout_s=timeout_s, answer_in_thought=answer_in_thought)
    with built as verifier:
        summary = score_file(rows, out, verifier)
    typer.echo(str(summary), err=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders that hold runs below them")],
    out: Annotated[Path | None, typer.Option(help="output file; default: report.html in the runs' folder")] = None,
    analysis: Annotated[Path | None, typer.Option(help="folder of luffy analyze whose figures to include")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the table as JSON; write the page only with --out")
    ] = False,
) -> None:
    """Compare runs in one self-contained HTML file."""
    from luffy.report.html import report_json, write_report

    if as_json:
        typer.echo(json.dumps(report_json(runs), indent=1, ensure_ascii=False))
        if out is not None:
            write_report(runs, out, analysis=analysis)
        return
    typer.echo(f"report     {write_report(runs, out, analysis=analysis)}")


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or folders that hold runs below them")],
    host: Annotated[
        str, typer.Option(help="address to listen on; a public one needs the variable LUFFY_VIEW_TOKEN")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port")] = 8181,
    browser: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Watch runs in the browser: live curves, every recorded sample, differences in settings."""
    from luffy.view.server import ViewServer, serve, token_of_environment

    server = ViewServer(runs, host, port, token_of_environment())
    if browser:
        webbrowser.open(server.url)
    serve(server, typer.echo)


@app.command("push")
def push_model(
    folder: Annotated[Path, typer.Argument(help="a run folder, a checkpoint, or a model folder")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the hub, created if missing")],
    checkpoint: Annotated[str | None, typer.Option(help="for a run: latest (default), best, or a step")] = None,
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
    revision: Annotated[str | None, typer.Option(help="branch to commit to, created if missing")] = None,
    message: Annotated[str | None, typer.Option(help="commit message")] = None,
    evals: Annotated[
        list[Path] | None, typer.Option("--eval", help="results of luffy eval for the card; default: from evals/")
    ] = None,
    license: Annotated[str | None, typer.Option(help="for the card, e.g. apache-2.0")] = None,
    base_model: Annotated[str | None, typer.Option(help="hub id for the card, if the base was a folder")] = None,
    training_state: Annotated[
        bool, typer.Option("--training-state", help="also upload optimizer, counters and adapters")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="also upload the recorded samples")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="write the card and list the files; no upload")] = False,
) -> None:
    """Upload a trained model with its model card to the Hugging Face hub, in one commit."""
    from luffy.push import push

    card = {"license": license, "base_model": base_model}
    commit = {"message": message, "private": private, "revision": revision}
    lines = push(
        folder, repo, checkpoint=checkpoint, given={key: value for key, value in card.items() if value},
        evals=evals or (), training_state=training_state, samples=samples, dry_run=dry_run,
        **{key: value for key, value in commit.items() if value},
    )  # fmt: skip
    _echo(lines)


# ---- evaluation


class ModelOrCommand(FullHelp):
    """``luffy eval MODEL ...`` and ``luffy eval compare A B``: what is no command is a model's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["model", *args]
        return super().parse_args(ctx, args)


eval_app = typer.Typer(cls=ModelOrCommand, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    eval_app,
    name="eval",
    help="Evaluate a model: luffy eval MODEL --suite math6|ood|gsm8k|FILE (options: luffy eval model --help). "
    "A model folder that is called like a command is written with its path, e.g. ./compare.",
)


add_repository_commands(eval_app, "eval")

EvalStyle = Annotated[
    str | None,
    typer.Option(
        help="chat, paper, paper_simple or plain; auto: paper (paper_simple without a chat template) for the "
        "suites, chat (plain) for a FILE; default: as its run or model card says, else auto"
    ),
]
EvalReward = Annotated[
    str | None,
    typer.Option(
        help="default: math for math6, choice for ood, gsm8k for gsm8k; for a FILE as the model's run or model "
        "card says, else math"
    ),
]
ChatTemplate = Annotated[
    str | None, typer.Option(help="Jinja file that replaces the chat template (styles chat, paper)")
]


@eval_app.command("model")
def eval_model(
    ctx: typer.Context,
    model: ModelOrRun,
    suite: Annotated[str, typer.Option(help="math6, ood, gsm8k, aime_amc, or a dataset")],
    k: Annotated[
        int | None, typer.Option(min=1, help="samples per problem; default: 32 on AIME and AMC, else 1")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.6,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest response; default: 8192, or the rest of the context")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of responses and of the order of options")] = 0,
    style: EvalStyle = None,
    system_prompt: SystemPrompt = None,
    chat_template: ChatTemplate = None,
    date: Annotated[str | None, typer.Option(help="date for chat templates that print one; default: today")] = None,
    reward: EvalReward = None,
    reward_of: RewardOf = None,
    environment: Annotated[
        str | None, typer.Option(help="recipe with the environment that answers the model's turns; default: its run's")
    ] = None,
    answer_in_thought: AnswerInThought = False,
    shuffle: Annotated[bool, typer.Option(help="shuffle the options of multiple choice")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="first problems of each benchmark only")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the benchmarks; default: $LUFFY_DATA")] = None,
    columns: Columns = None,
    out: Annotated[Path | None, typer.Option(help="results folder; default: evals/MODEL-SUITE")] = None,
    engine: Annotated[str, typer.Option(help="native, vllm, or module:function that returns a LoadedModel")] = "native",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: as in the results folder, else bfloat16 on a GPU")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="concurrent responses; default: 64, on a GPU up to 1024")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="responses per save")] = 256,
    workers: Annotated[
        int | None, typer.Option(min=1, help="verifier processes; default: 2, with a GPU half of the cores, at most 8")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: avg@k, pass@k, lengths and truncation per benchmark. Resumable: rerun the same command."""
    from luffy.evaluation import results
    from luffy.evaluation.plan import default_out
    from luffy.evaluation.trained_with import evaluate
    from luffy.models.machine import pick_device

    given = {name: value for name, value in ctx.params.items() if value is not None and name != "as_json"}
    given |= {"model": _chosen_model(model), "device": pick_device(device), "columns": named_columns(columns or [])}
    given["out"] = out or default_out(given["model"], suite)
    if reward_of is not None:
        given["reward_settings"] = load_config(given.pop("reward_of")).reward
    if environment is not None:
        given["environment"] = environment_in(environment)
    show = results.as_json if as_json else results.as_markdown
    typer.echo(show(evaluate(given, lambda line: typer.echo(line, err=True))), nl=False)
    typer.echo(f"results    {given['out']}", err=True)


@eval_app.command("compare")
def eval_compare(
    folders: Annotated[list[Path], typer.Argument(help="folders that luffy eval wrote, the baseline first")],
    out: Annotated[Path | None, typer.Option(help="also write OUT.json and OUT.md")] = None,
    resamples: Annotated[int, typer.Option(min=1, help="of the paired bootstrap")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="of the paired bootstrap")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations: paired bootstrap with intervals and p-values, best and second best marked."""
    from luffy.evaluation.compare import as_markdown, compare, write_comparison

    comparison = compare(folders, resamples, seed)
    if out is not None:
        write_comparison(comparison, out)
    text = json.dumps(asdict(comparison), indent=2) + "\n" if as_json else as_markdown(comparison)
    typer.echo(text, nl=False)


def main(commands: typer.Typer = app) -> None:
    """Run the command line; a mistake of the user is one line on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if LAUNCHER_VARIABLE in os.environ:
        follow_launcher()
    try:
        commands()
    except UserError as error:
        _fail(str(error), 2)
    except StopRequested as stop:
        _end(str(stop), 130 if isinstance(stop, Interrupted) else 1)
    except (TrainingStopped, FloatingPointError) as error:
        _fail(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1)
    except RuntimeError as error:
        from luffy.distributed.world import lost_a_peer

        if lost_a_peer(error):
            time.sleep(PATIENCE_S)  # the other process or the launcher has said why; this is only what follows
        raise


def _fail(message: str, code: int) -> NoReturn:
    _end(f"error: {message}", code)


def _end(message: str, code: int) -> NoReturn:
    """Say why the command ends; what was asked for, as by Ctrl-C, is no error."""
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        time.sleep(PATIENCE_S)  # a mistake that every process finds is said by the first
    if len(message) > LONGEST_ERROR:  # it quotes a value of the user's
        message = f"{message[: LONGEST_ERROR // 2]} [...] {message[-LONGEST_ERROR // 2 :]}"
    print(f"luffy: {message}" + (f" (process {rank})" if rank else ""), file=sys.stderr)
    sys.exit(code)
