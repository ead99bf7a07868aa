"""Every command of studies/paper/README.md and docs/results/paper.md, in order, with a toy model and made-up rows.

What would take hours even so is made once for real and then copied: of trainings the recipe is read, of evaluations one
for each suite and set of options is run. So a command that names a folder which no command before it makes fails.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from builders import make_model
from prepare_support import byte_tokenizer
from typer.testing import CliRunner

from luffy.cli import app
from luffy.run_folder.recorder import read_json_lines

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS.parent / "studies" / "paper" / "README.md", DOCS / "results" / "paper.md")
PAGE = "".join(page.read_text(encoding="utf-8") for page in PAGES)
TRAINED = ("paper/on_policy", "paper/sft", "paper/sft_rl", "paper/luffy")  # the other recipes are only read
# In place of each program of the page: its words, one a line, and an empty line. A command's own output may go to a file.
RECORD = """
exec 3>&1
record() { printf '%s\\n' "$@" '' >&3; }
luffy() { record luffy "$@"; }
git() { record git "$@"; }
cp() { record cp "$@"; }
"""
SMALL = [
    "launch=local",
    "parallel.workers=1",
    "model.dtype=float32",
    "model.device=cpu",
    "model.gradient_checkpointing=false",
    "rollout.n=2",
    "rollout.max_tokens=64",
    "rollout.slots=8",
    "algorithm.reject_extreme=false",
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
QUICK = ["--limit", "1", "--max-tokens", "4", "--dtype", "float32", "--device", "cpu", "--workers", "1"]


@pytest.fixture
def commands(tmp_path):
    """The words of every command in the blocks of the page, as bash reads them: loops and braces are written out."""
    script = RECORD + "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
    folder = tmp_path / "shell"
    folder.mkdir()
    run = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=True)
    return [command.split("\n") for command in run.stdout.removesuffix("\n\n").split("\n\n")]


def luffy_output(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, (arguments, result.output)
    return result.output


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_sources(folder):
    """A base model, rows in OpenR1's layout (every third without a right trace), and the authors' benchmark files; the
    chat template that the page has."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    eos = tokenizer.eos_token_id
    make_model("qwen2", vocab_size=len(tokenizer), eos_token_id=eos).save_pretrained(folder / "base")
    write_parquet(folder / "openr1.parquet", [doubling_row(i) for i in range(1, 10)])
    write_parquet(folder / "extended.parquet", [doubling_row(i) for i in range(101, 107)])
    (folder / "conversation.jinja").write_text(re.search(r"```jinja\n(.*?)```", PAGE, re.DOTALL)[1])
    names = ("aime", "aime25", "amc", "math", "minerva", "olympiad_bench")
    write_parquet(
        folder / "LUFFY" / "data" / "valid.all.parquet",
        [benchmark_row(name, "1+1?", "2") for name in names for _ in "ab"],
    )
    choice = "Which?\n\nA. one\nB. two"
    write_parquet(folder / "LUFFY" / "data" / "valid.arc_c.parquet", [benchmark_row("arc_c", choice, "B")])


def doubling_row(i):
    return {
        "problem": f"What is {i}+{i}?", "answer": str(2 * i), "source": "made up", "uuid": str(i),
        "generations": [f"<think>\nadd\n</think>\nSo \\boxed{{{2 * i + (i % 3 == 0)}}}"] * 2,
        "correctness_math_verify": [i % 3 != 0] * 2, "question_type": "math-word-problem",
    }  # fmt: skip


def benchmark_row(source, question, answer):
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": question}]
    return {"data_source": source, "prompt": chat, "reward_model": {"style": "rule", "ground_truth": answer}}


class Road:
    """Carries out one command of the page after the other, as small as it goes."""

    def __init__(self):
        self.evaluated = {}  # by suite and names of options: the folder of the evaluation that was run

    def carry_out(self, name, *rest):
        if name == "luffy":
            command = rest[0] if rest[0] != "eval" or rest[1] != "compare" else "compare"
            getattr(self, command)(*rest)
        elif name == "cp":
            shutil.copytree(*rest[1:])

    def train(self, command, recipe, *rest):
        mini = [] if command == "sft" else ["batch.mini_batch=1"]
        mini += [] if recipe == "paper/luffy" else ["reward.kind=gsm8k"]  # that needs no process which imports SymPy
        if "--dry-run" in rest:
            assert "\ndisk       up to " in luffy_output(command, recipe, *rest, *SMALL, *mini)
        elif recipe in TRAINED and not rest:
            luffy_output(command, recipe, *SMALL, *mini)
        else:
            config = luffy_output(command, recipe, *rest, *SMALL, *mini, "--print-config")
            folder = Path("runs", yaml.safe_load(config)["name"])
            if not folder.exists():
                shutil.copytree("runs/paper-sft" if command == "sft" else "runs/paper-on-policy", folder, symlinks=True)
                (folder / "config.yaml").write_text(config)

    sft = train

    def prepare(self, _, what, *rest):
        if what == "model":
            luffy_output("prepare", "model", "base", *rest[1:])
        elif what == "openr1":
            source, options = ("openr1.parquet", rest) if rest[0].startswith("--") else ("extended.parquet", rest[1:])
            options = ["2" if word == "1000" else word for word in options]
            luffy_output("prepare", "openr1", source, "--workers", 1, *options)
        else:
            luffy_output("prepare", what, *rest)

    def eval(self, _, model, *rest):
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        out = Path(options.pop("--out"))
        assert not out.exists(), f"{out} is written twice"
        assert Path(model).is_dir() or model.count("/") == 1, f"{model} is no hub id, and no command makes it"
        like = (options["--suite"], *sorted(options))
        if like not in self.evaluated:
            here = model if Path(model).is_dir() else "models/Qwen2.5-Math-7B-16k"
            fewer = [] if "--k" in options else ["--k", "1"]
            luffy_output("eval", here, *rest, *QUICK, *fewer)
            self.evaluated[like] = out
            return
        shutil.copytree(self.evaluated[like], out)
        result = json.loads((out / "result.json").read_text())
        result["settings"] |= {"model": model, "model_identity": model}
        result["settings"] |= {"temperature": float(options.get("--temperature", 0.6))}
        (out / "result.json").write_text(json.dumps(result))

    def compare(self, *rest):
        luffy_output(*rest)

    def report(self, *rest):
        luffy_output(*rest)

    def generate(self, _, model, prompt, *rest):
        assert luffy_output("generate", model, prompt, *rest, "--dtype", "float32", "--max-tokens", "4")

    def analyze(self, *rest):
        out = Path(rest[rest.index("--out") + 1])
        assert not out.exists(), f"{out} is written twice"
        assert "left out" not in luffy_output(*rest)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 70 seconds of one core, more where others compute too
def test_the_whole_road(tmp_path, monkeypatch, commands):
    monkeypatch.chdir(tmp_path)
    make_sources(tmp_path)
    road = Road()
    for words in commands:
        road.carry_out(*words)
    card = json.loads(Path("data/openr1/card.json").read_text())
    assert (card["rows"]["read"], card["rows"]["train"], card["rows"]["held_out"]) == (9, 6, 3)
    assert pq.read_table("data/openr1-easy/train.parquet").num_rows == 6
    assert pq.read_table("data/benchmarks/validation.parquet").num_rows == 6  # the repeated rows once
    assert pq.read_table("data/benchmarks/validation.parquet")["prompt"][0].as_py() == "1+1?"
    for run in ("paper-on-policy", "paper-sft", "paper-sft-rl", "paper-luffy"):
        (*_, row) = read_json_lines(Path("runs", run, "metrics.jsonl"))
        assert row["step"] == 1 and "val-core/accuracy" in row
    shapes = [len(json.loads((out / "result.json").read_text())["benchmarks"]) for out in road.evaluated.values()]
    assert sorted(shapes) == [1, 1, 1, 1, 2, 6, 6, 6]  # ood and math6 with three kinds of prompts, BLEU, Figure 12
    for file in re.findall(r"`((?:analysis/)?figure[\w/]+\.(?:png|html))`", PAGE):
        assert Path(file).is_file(), f"{file} is on the page, and no command makes it"
    assert Path("analysis/table2/resources.png").is_file() and Path("analysis/bleu/bleu.png").is_file()


def test_an_empty_folder_is_told_what_to_prepare(tmp_path, monkeypatch, capsys, commands):
    from luffy.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["luffy", "train", "paper/luffy"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    asked = [shlex.split(line) for line in said.splitlines()[1:]]
    assert asked[0] in commands and asked[1] in commands and asked[2][-6:] in commands
    assert "data/benchmarks/validation.parquet" in said and "held_out" not in said
