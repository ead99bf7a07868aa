"""``luffy prepare benchmarks``: the authors' evaluation files under the names that ``luffy eval`` looks for, and a file
to evaluate on while training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from luffy.cli import main
from luffy.data import load_problems
from luffy.errors import UserError
from luffy.evaluation.benchmarks import Benchmark, load_suite
from luffy.files import whole_file
from luffy.prepare.dataset_files import problem_schema, problem_writer

# What each is called in the folder `data` of github.com/ElliottYan/LUFFY.
SOURCES = {
    "math6.parquet": "valid.all.parquet",
    "arc_c.parquet": "valid.arc_c.parquet",
    "gpqa.parquet": "valid.gpqa.parquet",
    "mmlu_pro.parquet": "valid.mmlu_pro.parquet",
}
VALIDATION = "validation.parquet"


def prepare_benchmarks(source: Path, out: Path) -> tuple[list[Benchmark], list[str]]:
    """Copy what ``source`` has to ``out/benchmarks``, and write every problem of the six math benchmarks once to
    ``validation.parquet`` there, as a plain question. Returns the math benchmarks and the files that were not there."""
    if not (source / SOURCES["math6.parquet"]).is_file():
        raise UserError(f"{source}: has no {SOURCES['math6.parquet']}; give the folder data of the authors' repository")
    there = {name: source / theirs for name, theirs in SOURCES.items() if (source / theirs).is_file()}
    missing = [theirs for name, theirs in SOURCES.items() if name not in there]
    for path in there.values():
        load_problems(str(path))  # raises before anything is written if the file cannot be read
    folder = out / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in there.items():
        with whole_file(folder / name) as file:
            shutil.copyfile(path, file)
    suite = load_suite("math6", out)
    with whole_file(folder / VALIDATION) as file, problem_writer(file, problem_schema({})) as add:
        for benchmark in suite.benchmarks:
            for p in benchmark.problems:
                plain = {"id": p.id, "prompt": p.prompt, "answer": p.answer, "source": benchmark.name}
                add({**plain, "traces": []})
    return list(suite.benchmarks), missing


# ---- the command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    source: Annotated[Path, typer.Argument(help="the folder data of github.com/ElliottYan/LUFFY")],
    *,
    out: Annotated[Path, typer.Option(help="data folder; the files go to OUT/benchmarks")] = Path("data"),
) -> None:
    """The paper's benchmarks for luffy eval, and their math problems as a held-out set for training."""
    math, missing = prepare_benchmarks(source, out)
    for benchmark in math:
        typer.echo(f"{benchmark.title:<10} {len(benchmark.problems):,} problems")
    for name in missing:
        typer.echo(f"not there  {source / name}")
    typer.echo(f"written    {out / 'benchmarks'}; {VALIDATION} has {sum(len(b.problems) for b in math):,} problems")


if __name__ == "__main__":
    main(app)
