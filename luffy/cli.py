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
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from luffy._version import __version__
from luffy.bench.bench_cli import bench_app
from luffy.cli_help import AnswerInThought, Columns, FullHelp, TrustRemoteCode
from luffy.config import (
    Config,
    built_in_recipes,
    check_made_for,
    check_prepared,
    inherited_for_rl,
    load_config,
    to_yaml,
)
from luffy.distributed.follow import LAUNCHER_VARIABLE, follow_launcher
from luffy.errors import Interrupted, StopRequested, TrainingStopped, UserError
from luffy.prepare.prepare_cli import named_columns, prepare_app
from luffy.schema import describe

LONGEST_ERROR = 4_000  # characters
PATIENCE_S = 30.0  # of a process whose error another one explains: the launcher ends it meanwhile


def knob_reference() -> str:
    """Every knob of a recipe, one line each, for ``--help``."""
    docs = describe(Config)
    return "\n".join(f"  {doc.path} = {doc.shown_default}  [{doc.kind}]\n      {doc.help}" for doc in docs)


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
        formatter.write("\nKnobs (section.key=value), with their defaults:\n" + knob_reference() + "\n")


def _not_an_option(name: str, value: str, command: str | None) -> str:
    """What to write instead of ``--steps 3``: the knobs of that name, with the value."""
    wanted = name.removeprefix("--").replace("-", "_")
    paths = [doc.path for doc in describe(Config)]
    meant = [path for path in paths if wanted in (path, path.replace(".", "_"), path.rpartition(".")[2])]
    if not meant:
        return f"{name} is no option; knobs are written section.key=value (luffy {command} --help lists them)"
    return f"{name} is no option: write " + " or ".join(f"{path}={value or '...'}" for path in meant)


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
app.add_typer(bench_app)

Recipe = Annotated[str, typer.Argument(help="a recipe file, or the name of a built-in one such as tiny/luffy")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ..., laid over the recipe")]
Resume = Annotated[
    str, typer.Option(help="auto: go on from the newest whole checkpoint; never; or a checkpoint folder")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check all, build the first batch, print the plan, train nothing")
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="with --dry-run: time and cost on parallel.workers of h200, h100 or a100")
]
GpuPrice = Annotated[float | None, typer.Option(min=0, help="with --dry-run: what an hour of one GPU costs")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="print the resolved config and exit")]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="train so many times, one after the other: NAME/seed-0, NAME/seed-1, ... (see seed)"),
]
SystemPrompt = Annotated[
    str | None, typer.Option(help="system message (styles chat and paper); default: as its run or model card says")
]
ModelOrRun = Annotated[
    str,
    typer.Argument(help="Hugging Face folder, hub id, .gguf file, or a run folder: its best, else newest checkpoint"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the table as JSON, and nothing else")]
ChangedData = Annotated[bool, typer.Option("--allow-changed-data", help="resume although the training data changed")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        typer.echo(f"luffy {__version__}")
        raise typer.Exit


@app.command(cls=KnobHelp)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    allow_changed_data: ChangedData = False,
    seeds: Seeds = None,
    gpu: GpuName = None,
    gpu_price: GpuPrice = None,
) -> None:
    """Train with reinforcement learning: on-policy samples, guided ones, or both."""
    trainings = _seeded(recipe, overrides or [], seeds, resume)
    _train("rl", trainings, resume, dry_run, print_config, allow_changed_data, gpu, gpu_price)


@app.command(cls=KnobHelp)
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = "auto",
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    allow_changed_data: ChangedData = False,
    seeds: Seeds = None,
    gpu: GpuName = None,
    gpu_price: GpuPrice = None,
) -> None:
    """Supervised fine-tuning on the traces of the same recipe."""
    source = inherited_for_rl(recipe, overrides or [], "optim.lr")
    if source is not None and int(os.environ.get("RANK", "0")) == 0:
        lr = load_config(recipe, overrides or []).optim.lr
        typer.echo(
            f"warning: optim.lr={lr:g} comes from {source}, which is meant for RL; SFT usually takes 10 to 50 times as "
            "much: set optim.lr",
            err=True,
        )
    trainings = _seeded(recipe, overrides or [], seeds, resume)
    _train("sft", trainings, resume, dry_run, print_config, allow_changed_data, gpu, gpu_price)


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


def _without_option(name: str, args: list[str]) -> list[str]:
    if name in args:
        place = args.index(name)
        return args[:place] + args[place + 2 :]
    return [arg for arg in args if not arg.startswith(f"{name}=")]


def _train(
    method: Any,
    trainings: list[tuple[Config, list[str]]],
    resume: str,
    dry_run: bool,
    print_config: bool,
    allow_changed_data: bool,
    gpu: str | None,
    gpu_price: float | None,
) -> None:
    if (gpu or gpu_price is not None) and not dry_run:
        raise UserError("--gpu and --gpu-price say what a run would cost: add --dry-run")
    cfg = trainings[0][0]
    if print_config:
        typer.echo(to_yaml(cfg), nl=False)
        return
    check_made_for(cfg, method)
    check_prepared(cfg)
    if dry_run:
        from luffy.dry_run import Renting
        from luffy.dry_run import dry_run as lines_of

        for line in lines_of(cfg, method, len(trainings), Renting(gpu, gpu_price)):
            typer.echo(line)
        return
    from luffy.distributed.launch import launch
    from luffy.train.job import Job

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
    host: Annotated[
        str, typer.Option(help="address to listen on; beyond this machine the key travels unencrypted")
    ] = "127.0.0.1",
) -> None:
    """Start a vLLM server for the training of a recipe (rollout.engine=vllm, rollout.vllm.servers=[...])."""
    from luffy.train.serve import serve as start

    start(load_config(recipe, overrides or ()), host, port)


@app.command(cls=KnobHelp)
def doctor(
    settings: Annotated[
        list[str] | None, typer.Argument(help="a recipe, if any, and section.key=value ... as for luffy train")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="seconds a check may take; a rank that hangs is named after them")
    ] = 60.0,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="leave out host names, user names, addresses and paths, for bug reports")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the report as JSON, with all that was measured")
    ] = False,
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
    shape: Annotated[str | None, typer.Option(help="shape of the model, e.g. qwen2-7b; else told by its name")] = None,
    gpu: Annotated[str, typer.Option(help="compare with h200, h100 or a100")] = "h100",
) -> None:
    """How much GPU memory a run needs, before model and data are there: nothing is downloaded."""
    from luffy.dry_run.memory_table import estimate_lines, table_lines

    if recipe is None:
        lines = table_lines(gpu)
    else:
        cfg = load_config(recipe, overrides or [])
        lines = estimate_lines(cfg, cfg.made_for, shape, gpu)
    for line in lines:
        typer.echo(line)


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
    seeds: Annotated[
        int | None, typer.Option(min=1, help="repeat every method with so many seeds; default: 1, with all methods 3")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the runs, the summary and the report")] = Path("runs/quickstart"),
    steps: Annotated[int | None, typer.Option(min=1, help="training steps instead of the recipe's")] = None,
    methods: Annotated[
        str | None, typer.Option(help="methods by name with commas between them (luffy recipes lists them), or all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """On-policy RL, SFT and LUFFY on a small reasoning task, compared: a few minutes on a laptop, no download.

    `--methods all` compares every method. The same command goes on where a killed one was.
    """
    from luffy.quickstart.run import DEFAULT_METHODS
    from luffy.quickstart.run import quickstart as run

    run(out, seeds or (3 if methods == "all" else 1), steps, methods or DEFAULT_METHODS, as_json)


@app.command()
def generate(
    model: ModelOrRun,
    prompt: Annotated[str | None, typer.Argument(help="the prompt; without it, --file or standard input")] = None,
    file: Annotated[
        Path | None, typer.Option(help="read prompts from a file: one a line, or the data formats of train")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="samples per prompt")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest response; default: 256, or what the context leaves")
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
        bool, typer.Option("--json", help="one JSON line per response, with tokens and log-probs")
    ] = False,
) -> None:
    """Sample from a model with the training engine."""
    from luffy.generate import as_trained, generate_texts, read_prompts

    prompts = read_prompts(prompt, file, sys.stdin)
    model = _chosen_model(model)
    style, system_prompt, taken = as_trained(model, style, system_prompt)
    if taken:
        typer.echo(taken, err=True)
    rows = generate_texts(
        model, prompts, n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        style=style, system_prompt=system_prompt, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    for row in rows:
        typer.echo(json.dumps(row, ensure_ascii=False) if as_json else row["response"])


def _chosen_model(path: str) -> str:
    """The model that a path stands for; which checkpoint of a run it is, is said."""
    from luffy.train.checkpoint import model_of

    model, which = model_of(path)
    if which is not None:
        typer.echo(f"model      {model} ({which})", err=True)
    return model


RewardOf = Annotated[
    str | None, typer.Option(help="a recipe whose section reward says how to score, in place of the other options")
]


@app.command()
def verify(
    rows: Annotated[Path, typer.Argument(help='JSONL with "answer" and "response" in every line; - is standard input')],
    reward: Annotated[
        str, typer.Option(help="math, numeric, gsm8k, choice, format, a server's address, or module:function")
    ] = "math",
    out: Annotated[Path | None, typer.Option(help="where to write the scores; default: standard output")] = None,
    workers: Annotated[int, typer.Option(min=1, help="verifier processes")] = 2,
    timeout_s: Annotated[float, typer.Option(help="seconds after which a verification is killed and scores 0")] = 8.0,
    answer_in_thought: AnswerInThought = False,
    reward_of: RewardOf = None,
) -> None:
    """Score responses from the shell: one JSON line per row, in order, with score and status."""
    from luffy.rewards import build_verifier, score_file

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
    out: Annotated[
        Path | None, typer.Option(help="the file to write; default: report.html in the folder the runs share")
    ] = None,
    analysis: Annotated[Path | None, typer.Option(help="a folder that luffy analyze wrote: its figures go in")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the final table as JSON; the page is written only with --out")
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
        str, typer.Option(help="address to listen on; one that others can reach needs the variable LUFFY_VIEW_TOKEN")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8181,
    browser: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Watch runs in the browser: live curves, every recorded sample, differences in settings."""
    from luffy.view.access import token_of_environment
    from luffy.view.server import ViewServer, serve

    server = ViewServer(runs, host, port, token_of_environment())
    if browser:
        webbrowser.open(server.url)
    serve(server, typer.echo)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="a run folder, a checkpoint, or a model folder")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; made where it is not there")],
    checkpoint: Annotated[str | None, typer.Option(help="of a run: latest (default), best, or a step")] = None,
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
    revision: Annotated[str | None, typer.Option(help="branch to commit to, made where it is not there")] = None,
    message: Annotated[str | None, typer.Option(help="of the commit")] = None,
    evals: Annotated[
        list[Path] | None, typer.Option("--eval", help="results of luffy eval for the card; default: those in evals/")
    ] = None,
    license: Annotated[str | None, typer.Option(help="for the card, e.g. apache-2.0")] = None,
    base_model: Annotated[str | None, typer.Option(help="hub id for the card, where the base was a folder")] = None,
    training_state: Annotated[
        bool, typer.Option("--training-state", help="also optimizer, counters and adapters, under training/")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="also the recorded samples, under training/")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write the card, list files and sizes, upload nothing")
    ] = False,
) -> None:
    """Upload a trained model with its model card to the Hugging Face hub, in one commit."""
    from luffy.push import check_hub, check_repo_name, files_to_push, find_model, listing, upload, write_card

    check_repo_name(repo)
    model = find_model(folder, checkpoint)
    if not dry_run:
        check_hub()
    given = {"license": license, "base_model": base_model}
    write_card(model, Path(repo).name, {key: value for key, value in given.items() if value}, evals or [])
    files = files_to_push(model, training_state, samples)
    for line in listing(files):
        typer.echo(line)
    if dry_run:
        typer.echo(f"nothing was uploaded; the card is {model.folder / 'README.md'}")
        return
    step = "" if model.checkpoint is None else f", step {model.checkpoint.step}"
    typer.echo(f"pushed     {upload(repo, files, message or f'Push with luffy{step}', private, revision)}")


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


@eval_app.command("model")
def eval_model(
    model: ModelOrRun,
    suite: Annotated[str, typer.Option(help="math6, ood, gsm8k, aime_amc, or a dataset in one of train's formats")],
    k: Annotated[
        int | None, typer.Option(min=1, help="samples per problem; default: 32 on AIME and AMC, 1 elsewhere")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.6,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest response; default: 8192, or what the context leaves")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="decides every response and the order of options")] = 0,
    style: Annotated[
        str | None,
        typer.Option(
            help="chat, paper, paper_simple or plain; auto: paper (paper_simple without a chat template) for the "
            "suites, chat (plain) for a FILE; default: as its run or model card says, else auto"
        ),
    ] = None,
    system_prompt: SystemPrompt = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file in place of the tokenizer's template (styles chat and paper)")
    ] = None,
    date: Annotated[
        str | None, typer.Option(help="the date that chat templates print which ask for it; default: today")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="default: math for math6, choice for ood, gsm8k for gsm8k; for a FILE as the model's run or model "
            "card says, else math"
        ),
    ] = None,
    reward_of: RewardOf = None,
    answer_in_thought: AnswerInThought = False,
    shuffle: Annotated[bool, typer.Option(help="shuffle the options of multiple choice by the seed")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first problems of each benchmark")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the benchmarks; default: $LUFFY_DATA")] = None,
    columns: Columns = None,
    out: Annotated[Path | None, typer.Option(help="results folder, resumed; default: evals/MODEL-SUITE")] = None,
    engine: Annotated[str, typer.Option(help="native, vllm, or module:function that returns a LoadedModel")] = "native",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; default: as the results folder has it, else bfloat16 on a GPU"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="responses generated at the same time; default: 64, on a GPU up to 1024")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="responses between two saves")] = 256,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="verifier processes; default: 2, beside a GPU half of the cores, at most 8"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: avg@k, pass@k, lengths and truncation per benchmark. Killed, it goes on where it was."""
    from luffy.evaluation import results
    from luffy.evaluation.runner import Options, default_out, run_evaluation
    from luffy.evaluation.trained_with import as_trained
    from luffy.train.setup import pick_device

    model = _chosen_model(model)
    out = out or default_out(model, suite)
    options = Options(
        model=model, suite=suite, out=out, data=data, k=k, temperature=temperature, top_p=top_p, top_k=top_k,
        max_tokens=max_tokens, seed=seed, style=style or "auto", system_prompt=system_prompt,
        chat_template=chat_template, date=date, reward=reward, answer_in_thought=answer_in_thought,
        shuffle=shuffle, limit=limit, engine=engine, dtype=dtype, device=pick_device(device), slots=slots,
        trust_remote_code=trust_remote_code, chunk=chunk, workers=workers, columns=named_columns(columns or []),
        reward_settings=load_config(reward_of).reward if reward_of else None,
    )  # fmt: skip
    chosen = {"style": style, "system_prompt": system_prompt, "reward": reward, "reward_settings": reward_of}
    options, taken = as_trained(options, [name for name, value in chosen.items() if value is not None])
    if taken:
        typer.echo(taken, err=True)
    show = results.as_json if as_json else results.as_markdown
    typer.echo(show(run_evaluation(options)), nl=False)
    typer.echo(f"results    {out}", err=True)


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
    text = json.dumps(comparison.as_json(), indent=2) + "\n" if as_json else as_markdown(comparison)
    typer.echo(text, nl=False)


@eval_app.command("golds")
def eval_golds(
    suites: Annotated[list[str] | None, typer.Argument(help="suites or files; default: math6 ood gsm8k")] = None,
    data: Annotated[Path | None, typer.Option(help="folder with the benchmarks; default: $LUFFY_DATA")] = None,
    reward: Annotated[str | None, typer.Option(help="another reward than the suite's own")] = None,
) -> None:
    """Judge the verifier: every gold must verify against itself in a box. Exit code 1 if one does not."""
    from luffy.evaluation.benchmarks import load_suite
    from luffy.evaluation.golds import check_golds

    failures = 0
    for suite in (load_suite(name, data, reward=reward) for name in suites or ("math6", "ood", "gsm8k")):
        for check in check_golds(suite):
            typer.echo(f"{check.title}: {check.checked - len(check.failed)} of {check.checked} ({check.reward})")
            for item, gold, verdict in check.failed:
                typer.echo(f"  FAILED {item}  {gold!r}  score {verdict.value:g}, {verdict.status}")
            for item, gold in check.text_only:
                typer.echo(f"  text only {item}  {gold!r}")
            failures += len(check.failed)
        for name in suite.missing:
            typer.echo(f"{name}: not checked, the file is missing")
        for row in suite.left_out:
            typer.echo(f"  FAILED {row}")
        failures += len(suite.left_out)
    if failures:
        raise typer.Exit(1)


@app.command()
def analyze(
    paths: Annotated[list[Path] | None, typer.Argument(help="folders of luffy train and luffy eval")] = None,
    out: Annotated[Path, typer.Option(help="where the figures go")] = Path("analysis"),
    data: Annotated[Path | None, typer.Option(help="dataset with traces: BLEU of responses against them")] = None,
    gamma: Annotated[list[float] | None, typer.Option(help="shaping curves; default: 0.01 0.1 0.5")] = None,
    k: Annotated[int, typer.Option(min=1, help="pass@k over temperatures")] = 8,
) -> None:
    """Figures 2, 3, 5 and 8 to 12 and Table 2 of the paper for your own runs and evaluations, as PNG and CSV."""
    from luffy.evaluation.analysis import analyse

    left_out: list[str] = []
    for figure in analyse(paths or [], out, data=data, gammas=gamma or [0.01, 0.1, 0.5], k=k, left_out=left_out):
        typer.echo(f"{out / (figure.name + '.png')}  {figure.title}")
    for remark in left_out:
        typer.echo(f"left out   {remark}", err=True)
    typer.echo(f"overview   {out / 'analysis.md'}")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if LAUNCHER_VARIABLE in os.environ:
        follow_launcher()
    try:
        app()
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
