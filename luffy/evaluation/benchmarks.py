"""Suites of benchmarks in the paper's column order (Table 1), or a custom dataset; multiple choice
questions have their options shuffled.

data folder/
  benchmarks/math6.parquet      AIME24, AIME25, AMC, MATH-500, Minerva, OlympiadBench by ``data_source``
  benchmarks/arc_c.parquet      and gpqa.parquet, mmlu_pro.parquet if they exist
  gsm8k/test.jsonl
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luffy.data import load_problems
from luffy.data.reasoning_gym import is_generated
from luffy.data.schemas import without_traces
from luffy.errors import DataError, UserError
from luffy.seeds import seed_of
from luffy.types import Message, Problem

DATA_VARIABLE = "LUFFY_DATA"
MANY, ONE = 32, 1  # samples per problem in the paper: small test sets take 32


@dataclass(frozen=True)
class Spec:
    """Location of a benchmark: the first of ``files`` that exists, rows of ``source`` (empty: all)."""

    name: str
    title: str
    files: tuple[str, ...]
    reward: str
    source: str = ""
    k: int = ONE


# How to make the files of a suite, for the error that says that they are not there.
GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
MAKE_BENCHMARKS = "make them: luffy prepare benchmarks LUFFY/data --out {folder} (studies/paper/README.md)"
HOW_TO_MAKE = {
    "math6": MAKE_BENCHMARKS,
    "ood": MAKE_BENCHMARKS,
    "gsm8k": f"fetch it: curl --create-dirs --output {{folder}}/gsm8k/test.jsonl {GSM8K_URL}",
}

_MATH6 = ("benchmarks/math6.parquet",)
SUITES: dict[str, tuple[Spec, ...]] = {
    "math6": (
        Spec("aime24", "AIME24", _MATH6, "math", "aime", MANY),
        Spec("aime25", "AIME25", _MATH6, "math", "aime25", MANY),
        Spec("amc", "AMC", _MATH6, "math", "amc", MANY),
        Spec("math500", "MATH-500", _MATH6, "math", "math"),
        Spec("minerva", "Minerva", _MATH6, "math", "minerva"),
        Spec("olympiad", "Olympiad", _MATH6, "math", "olympiad_bench"),
    ),
    "ood": (
        Spec("arc_c", "ARC-c", ("benchmarks/arc_c.parquet",), "choice"),
        Spec("gpqa", "GPQA*", ("benchmarks/gpqa.parquet", "benchmarks/gpqa_diamond.parquet"), "choice"),
        Spec("mmlu_pro", "MMLU-Pro", ("benchmarks/mmlu_pro.parquet",), "choice"),
    ),
    "gsm8k": (Spec("gsm8k", "GSM8K", ("gsm8k/test.jsonl",), "gsm8k"),),
}
SUITES["aime_amc"] = tuple(spec for spec in SUITES["math6"] if spec.name in ("aime24", "amc"))  # Figure 12


@dataclass(frozen=True)
class Benchmark:
    """``repeats`` is how many equal rows the file holds per problem; they are one problem here."""

    name: str
    title: str
    reward: str
    k: int
    problems: tuple[Problem, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Suite:
    """``missing`` names the benchmarks of the suite whose files are not there. ``left_out`` names every row that
    cannot be read, with the reason; such rows are not evaluated."""

    name: str
    benchmarks: tuple[Benchmark, ...]
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_builtin: bool = True


def load_suite(
    name: str,
    data: Path | None = None,
    *,
    k: int | None = None,
    reward: str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    limit: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Suite:
    """A suite by name, or the benchmark that a dataset file or folder makes; ``columns`` are those of a dataset."""
    if name in SUITES:
        if columns:
            raise UserError(f"--column names columns of a file, and {name} is a suite; drop it")
        suite = _builtin(name, data_folder(data, name))
    elif is_generated(name):
        suite = _from_file(name, reward or "reasoning_gym", columns or {}, split="test")
    elif Path(name).exists():
        suite = _from_file(str(Path(name)), reward or "math", columns or {})
    else:
        known = ", ".join(SUITES)
        raise UserError(f"--suite {name}: neither a suite ({known}) nor a file; check the name or the path")
    found: list[Benchmark] = []
    left_out: list[str] = []
    for b in suite.benchmarks:
        asked = replace(b, problems=b.problems[:limit], reward=reward or b.reward, k=k or b.k)
        is_choice = "choice" in (b.reward, *asked.reward.split())  # also as a part of a weighted sum
        found.append(_with_letters(asked, seed if shuffle else None, left_out) if is_choice else asked)
    readable = tuple(benchmark for benchmark in found if benchmark.problems)
    unreadable = tuple(f"{benchmark.title} (no row can be read)" for benchmark in found if not benchmark.problems)
    if not readable:
        raise DataError(f"--suite {name}: no row can be evaluated; the first: {left_out[0]}")
    return replace(suite, benchmarks=readable, missing=suite.missing + unreadable, left_out=tuple(left_out))


def data_folder(given: Path | None, suite: str) -> Path:
    named = given or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if named is None:
        how = HOW_TO_MAKE[suite].format(folder="FOLDER")
        raise UserError(f"no data folder: give --data FOLDER or set {DATA_VARIABLE}; if you have no data, {how}")
    if not named.is_dir():
        raise UserError(f"the data folder {named} does not exist; correct --data or {DATA_VARIABLE}")
    return named


def _builtin(name: str, folder: Path) -> Suite:
    found, missing = [], []
    for spec in SUITES[name]:
        file = next((folder / path for path in spec.files if (folder / path).is_file()), None)
        if file is None:
            missing.append(f"{spec.title} ({folder / spec.files[0]})")
        else:
            found.append(_read(spec, file))
    if not found:
        how = HOW_TO_MAKE[name].format(folder=folder)
        raise UserError(f"suite {name}: none of its files is there: {', '.join(missing)}; {how}")
    return Suite(name, tuple(found), tuple(missing))


def _read(spec: Spec, file: Path) -> Benchmark:
    rows = [p for p in load_problems(str(file)) if not spec.source or p.source == spec.source]
    if not rows:
        raise DataError(f"{file}: no row has data_source={spec.source!r}, which {spec.title} needs")
    problems: dict[tuple[str, str], Problem] = {}
    for row in rows:
        question = question_of(row)
        item = replace(row, id=f"{spec.name}:{len(problems)}", prompt=question, traces=())
        problems.setdefault((question, row.answer), item)
    repeats, rest = divmod(len(rows), len(problems))
    if rest:
        raise DataError(f"{file}: {len(rows)} rows of {spec.title} repeat {len(problems)} problems unevenly; fix it")
    return Benchmark(spec.name, spec.title, spec.reward, spec.k, tuple(problems.values()), repeats)


def question_of(problem: Problem) -> str:
    """The question alone. Benchmark files bring their own system message; here the prompt style decides."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    turns = [message.content for message in problem.prompt if message.role == "user"]
    if len(turns) != 1:
        raise DataError(f"problem {problem.id!r}: expected one user message, found {len(turns)}; fix the row")
    return turns[0]


def _from_file(path: str, reward: str, columns: Mapping[str, str], split: str = "train") -> Suite:
    rows = load_problems(path, split, schema="columns" if columns else "auto", columns=without_traces(columns))
    problems = tuple(replace(problem, traces=()) for problem in rows)
    name = label_of(path)
    return Suite(path, (Benchmark(name, name, reward, ONE, problems),), is_builtin=False)


def label_of(suite: str) -> str:
    """A suite by the name of its file, or of its family of problems."""
    if is_generated(suite):
        return suite.split(":")[1]
    return Path(suite).stem


def _with_letters(benchmark: Benchmark, seed: int | None, left_out: list[str]) -> Benchmark:
    """``benchmark`` with its options arranged. Rows whose options cannot be read are added to ``left_out``."""
    problems = []
    for problem in benchmark.problems:
        try:
            problems.append(arranged(problem, seed))
        except DataError as error:
            left_out.append(f"{benchmark.title}, {error}")
    return replace(benchmark, problems=tuple(problems))


# ---- multiple choice: the options in an order drawn from the seed
# The paper shuffles options against contamination (section 4). Labels become letters in any case, because some
# questions number theirs (22 of ARC-c's) and the `choice` reward reads letters.


LETTERS = "ABCDEFGHIJ"
NUMBERS = tuple(str(number) for number in range(1, 11))
_OPTION = re.compile(r"^[ \t]*\(?([A-J]|10|[1-9])[).:][ \t]+(?=\S)", re.MULTILINE)
# "Both A and B", "all of the above": such an option means something only where it stands.
_REFERS = re.compile(
    r"\b(?i:both|neither|either|options?|choices?|answers?)\b[^\n]{0,12}\b[A-J]\b|\b[A-J] (?:and|or) [A-J]\b"
)
_POSITIONAL = re.compile(r"\b(?:all|none|any|both|neither) of (?:the )?(?:above|these)\b|\bthe above\b", re.IGNORECASE)


@dataclass(frozen=True)
class Choices:
    """``stem`` is the question before the first option; ``gold`` an index into ``options``."""

    stem: str
    options: tuple[str, ...]
    gold: int

    @property
    def movable(self) -> bool:
        """Whether no option speaks of another by its place."""
        return not any(_REFERS.search(option) or _POSITIONAL.search(option) for option in self.options)

    def text(self) -> str:
        lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, self.options, strict=False)]
        return self.stem.rstrip() + "\n\n" + "\n".join(lines) + "\n"


def read_choices(question: str, answer: str, where: str) -> Choices:
    """The options are the last run of lines labelled A, B, C ..., up to the end of the question.

    Only a question without such a run may number its options 1, 2, 3 ...: an option's own text can contain lines
    such as "2. HCl".
    """
    labels = list(_OPTION.finditer(question))
    run = _last_run(labels, LETTERS)
    if len(run) < 2:
        run = _last_run(labels, NUMBERS)
    if len(run) < 2:
        raise DataError(f"{where}: no options found in the question; write them as lines 'A) ...', 'B) ...'")
    ends = [match.start() for match in run[1:]] + [len(question)]
    options = tuple(question[match.end() : end].strip() for match, end in zip(run, ends, strict=True))
    names = [match[1] for match in run]
    gold = answer.strip().strip("()").upper()
    if gold not in names:
        raise DataError(f"{where}: the gold {answer!r} is none of the options {', '.join(names)}; fix the row")
    return Choices(question[: run[0].start()], options, names.index(gold))


def _last_run(labels: list[re.Match[str]], names: Sequence[str]) -> list[re.Match[str]]:
    """Labels from the last ``names[0]`` on, as long as each is the next one of ``names``."""
    labels = [match for match in labels if match[1] in names]
    starts = [place for place, match in enumerate(labels) if match[1] == names[0]]
    run: list[re.Match[str]] = []
    for match in labels[starts[-1] :] if starts else []:
        if len(run) < len(names) and match[1] == names[len(run)]:
            run.append(match)
    return run


def shuffled(choices: Choices, seed: int) -> Choices:
    """Options in an order that depends on the seed alone; the gold moves with its option."""
    if not choices.movable:
        return choices
    order = list(range(len(choices.options)))
    random.Random(seed).shuffle(order)
    options = tuple(choices.options[place] for place in order)
    return replace(choices, options=options, gold=order.index(choices.gold))


def arranged(problem: Problem, seed: int | None) -> Problem:
    """The problem with letters as labels and its options in an order drawn from the seed (None: as they are)."""
    choices = read_choices(question_of(problem), problem.answer, f"problem {problem.id!r}")
    if seed is not None:
        choices = shuffled(choices, seed_of(f"options:{seed}:{problem.id}"))
    prompt: str | tuple[Message, ...] = choices.text()
    if not isinstance(problem.prompt, str):
        turns = problem.prompt
        prompt = tuple(replace(turn, content=choices.text()) if turn.role == "user" else turn for turn in turns)
    return replace(problem, prompt=prompt, answer=LETTERS[choices.gold])
