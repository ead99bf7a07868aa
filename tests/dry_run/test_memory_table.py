"""``luffy memory``: an estimate before model and data are there."""

import re
from pathlib import Path

import pytest
from commands import luffy

from luffy.config import load_config
from luffy.dry_run.memory_table import COLUMNS, estimate_lines, estimate_memory, place_on, table_lines
from luffy.errors import UserError
from luffy.models.shapes import nearest_shape, shape_config

PAGE = Path(__file__).parents[2] / "docs" / "results" / "memory.md"
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2-7b"), ("Qwen/Qwen2.5-Math-1.5B", "qwen2-1.5b"),
        ("meta-llama/Llama-3.1-8B", "qwen2-7b"), ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen/Qwen3-0.6B", "qwen2-0.5b"), ("meta-llama/Llama-3.3-70B", "qwen2-72b"), ("org/model", None),
        ("org/model-400B", None), ("org/model-0B", None),
    ],
)  # fmt: skip
def test_the_shape_that_a_name_tells(name, shape):
    assert nearest_shape(name) == shape


def test_a_recipe_is_estimated_without_model_and_data():
    """7.616 billion weights: 2 bytes each, 12 of the optimizer, 4 of gradients, in GiB with 4 % above them."""
    cfg = load_config("small/luffy", ["model.path=no-such/model-7B", "data.train=no-such-file.jsonl"])
    model, step, memory = estimate_lines(cfg, "rl", None, "h100")
    assert "no-such/model-7B, taken as qwen2-7b: 7,616 M parameters, bfloat16; nothing was downloaded" in model
    assert "64 problems x 8 samples, prompts of 384 and responses of 512 tokens" in step
    parts = dict(re.findall(r"(weights|optimizer|gradients) ([\d.]+)", memory))
    each = 7615616512 * 1.04 / GIB
    assert {k: float(v) for k, v in parts.items()} == {
        "weights": pytest.approx(2 * each, abs=0.01),
        "optimizer": pytest.approx(12 * each, abs=0.01),
        "gradients": pytest.approx(4 * each, abs=0.01),
    }
    assert "an H100 has 79.2 GiB: TOO LITTLE" in memory
    with pytest.raises(
        UserError, match=r"'model.path' org/m: its name tells no size near .*; name a shape with --shape"
    ):
        estimate_lines(load_config("small/luffy", ["model.path=org/m"]), "rl", None, "h100")
    with pytest.raises(UserError, match="--shape 9b is unknown"):
        estimate_lines(cfg, "rl", "9b", "h100")


def test_a_folder_of_this_machine_has_its_own_shape(tmp_path):
    shape_config("tiny").save_pretrained(tmp_path)
    cfg = load_config("tiny/luffy", [f"model.path={tmp_path}"])
    assert estimate_memory(cfg, "rl", None, place_on("h100")).work.config.hidden_size == 64
    assert estimate_memory(cfg, "rl", "30m", place_on("h100")).work.config.hidden_size == 384


def test_a_second_model_on_a_server_takes_no_memory_here():
    def memory(*overrides):
        given = ["model.path=no-such/model-0.5B", *(f"rollout.offpolicy_guidance.{o}" for o in overrides)]
        return estimate_lines(load_config("small/luffy", given), "rl", None, "h100")[-1]

    assert "second model" in memory("model_path=no-such/model-7B")
    assert "second model" not in memory("servers=[http://a:1]")


def test_processes_share_the_requests():
    cfg = load_config("paper/luffy", ["parallel.workers=4"])
    found = estimate_memory(cfg, "rl", "tiny", place_on("h100"))
    assert len(found.requests) == cfg.batch.problems // 4 * (cfg.rollout.n - cfg.guidance.n_prefix)


def test_the_page_has_the_table_that_the_command_writes():
    written = PAGE.read_text().partition("<!-- luffy memory -->\n")[2].partition("\n<!-- end -->")[0].splitlines()
    size = "qwen2-0.5b"
    made = table_lines("h100", sizes=[size])
    others = [line for line in written if not line.startswith("| qwen2") or line.startswith(f"| {size}")]
    assert others == made and len(COLUMNS) == made[2].count("|") - 3


def test_the_command():
    said = luffy("memory", "paper/luffy", "--shape", "tiny")
    assert said.returncode == 0 and said.stdout.splitlines()[0].startswith(
        "model      models/Qwen2.5-Math-7B-16k, taken"
    )
    assert luffy("memory", "paper/luffy", "--gpu", "b9").stderr.startswith(
        "luffy: error: --gpu b9: the cost model knows"
    )
