"""The commands of docs/paper.md, word for word and in their order, with a toy model and made-up rows."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_support import byte_tokenizer
from tiny_models import tiny_model
from typer.testing import CliRunner

from luffy.cli import app
from luffy.report.recorder import read_json_lines

PAGE = (Path(__file__).parents[2] / "docs" / "paper.md").read_text(encoding="utf-8")
TRAINED = ("paper/sft", "paper/sft_rl", "paper/luffy")  # the other recipes are only read
EVALUATED = ("evals/paper-sft-math6", "evals/paper-luffy-math6", "evals/paper-luffy-ood")
SMALL = [
    "launch=local",
    "parallel.workers=1",
    "model.dtype=float32",
    "model.device=cpu",
    "model.gradient_checkpointing=false",
    "rollout.n=2",
    "rollout.max_tokens=64",
    "rollout.slots=8",
    "batch.problems=2",
    "batch.tokens=4096",
    "train.steps=1",
    "train.threads=1",
    "eval.every=0",
    "eval.max_tokens=4",
    "eval.limit=1",
    "reward.workers=1",
    "record.tensorboard=false",
]
QUICK = ["--k", "1", "--limit", "1", "--max-tokens", "4", "--dtype", "float32", "--device", "cpu", "--workers", "1"]


def commands():
    """Of all blocks of the page; a loop is written out."""
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        names, body = [""], []
        for line in block.splitlines():
            if line.startswith("for run in "):
                names, body = line.removeprefix("for run in ").removesuffix("; do").split(), []
            elif line == "done":
                yield from (shlex.split(inner.replace("$run", name)) for name in names for inner in body)
                names = [""]
            elif line.startswith("  "):
                body.append(line)
            else:
                yield shlex.split(line)


def luffy(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_sources(folder):
    """A base model, rows in OpenR1's layout (every third without a right trace), and the authors' benchmark files."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    eos = tokenizer.eos_token_id
    tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=eos).save_pretrained(folder / "base")
    rows = [
        {
            "problem": f"What is {i}+{i}?", "answer": str(2 * i), "source": "made up", "uuid": str(i),
            "generations": [f"<think>\nadd\n</think>\nSo \\boxed{{{2 * i + (i % 3 == 0)}}}"] * 2,
            "correctness_math_verify": [i % 3 != 0] * 2, "question_type": "math-word-problem",
        }
        for i in range(1, 10)
    ]  # fmt: skip
    write(folder / "openr1.parquet", rows)
    names = ("aime", "aime25", "amc", "math", "minerva", "olympiad_bench")
    write(folder / "LUFFY" / "data" / "valid.all.parquet", [bench(name, "1+1?", "2") for name in names for _ in "ab"])
    choice = "Which?\n\nA. one\nB. two"
    write(folder / "LUFFY" / "data" / "valid.arc_c.parquet", [bench("arc_c", choice, "B")])


def bench(source, question, answer):
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": question}]
    return {"data_source": source, "prompt": chat, "reward_model": {"style": "rule", "ground_truth": answer}}


def there(arguments):
    """Without the folders of runs that this test does not make."""
    return [a for a in arguments if not a.startswith(("runs/", "evals/")) or Path(a).is_dir()]


def carry_out(name, *rest):
    """One command of the page, as small as it goes."""
    if name == "git":
        return
    if name == "cp":
        shutil.copytree(*rest[1:])
        return
    command, what = rest[0], rest[1]
    if command in ("train", "sft"):
        mini = [] if command == "sft" else ["batch.mini_batch=1"]
        mini += [] if what == "paper/luffy" else ["reward.kind=gsm8k"]  # that needs no process which imports SymPy
        read_only = [] if what in TRAINED and not rest[2:] else ["--print-config"]
        luffy(*rest, *SMALL, *mini, *read_only)
    elif (command, what) == ("prepare", "model"):
        luffy("prepare", "model", "base", *rest[3:])
    elif (command, what) == ("prepare", "openr1"):
        luffy("prepare", "openr1", "openr1.parquet", "--workers", 1, *rest[2:])
    elif command == "eval" and what != "compare":
        if rest[-1] in EVALUATED:
            luffy(*rest, *QUICK)
    elif sum(Path(a).is_dir() for a in rest) > (command == "eval"):  # it takes two to compare
        luffy(*there(rest))


@pytest.mark.slow
def test_the_whole_road(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_sources(tmp_path)
    for words in commands():
        carry_out(*words)
    card = json.loads(Path("data/openr1/card.json").read_text())
    assert (card["rows"]["read"], card["rows"]["train"], card["rows"]["held_out"]) == (9, 6, 3)
    assert pq.read_table("data/openr1-easy/train.parquet").num_rows == 6
    assert pq.read_table("data/benchmarks/validation.parquet").num_rows == 6  # the repeated rows once
    assert pq.read_table("data/benchmarks/validation.parquet")["prompt"][0].as_py() == "1+1?"
    for run in ("paper-sft", "paper-sft-rl", "paper-luffy"):
        (*_, row) = read_json_lines(Path("runs", run, "metrics.jsonl"))
        assert row["step"] == 1 and "val-core/accuracy" in row
    columns = [len(json.loads(Path(folder, "result.json").read_text())["benchmarks"]) for folder in EVALUATED]
    assert columns == [6, 6, 1]
    assert Path("analysis/dynamics.png").is_file() and Path("figure6.html").is_file()


def test_an_empty_folder_is_told_what_to_prepare(tmp_path, monkeypatch, capsys):
    from luffy.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["luffy", "train", "paper/luffy"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    asked = [shlex.split(line) for line in said.splitlines()[1:]]
    on_page = list(commands())
    assert asked[0] in on_page and asked[1] in on_page and asked[2][-6:] in on_page
    assert "data/benchmarks/validation.parquet" in said and "held_out" not in said
