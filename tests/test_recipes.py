"""Every recipe that ships loads with the values it always had, and passes a dry run on a small stand-in."""

import json
from pathlib import Path

import pytest
import yaml
from builders import write_rows
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from luffy.config import PACKAGE, Config, built_in_recipes, load_config, read_recipe
from luffy.config.legacy import merge
from luffy.config.recipes import BUILT_IN_RECIPES
from luffy.dry_run import dry_run, times
from luffy.errors import ConfigError
from luffy.schema import build, to_dict

# What every name stood for when a recipe was one file: its merged values.
RESOLVED = json.loads((Path(__file__).parent / "recipes_resolved.json").read_text().replace("package:", f"{PACKAGE}/"))
RECIPES = sorted(RESOLVED)
FILES = sorted(p.relative_to(BUILT_IN_RECIPES).with_suffix("").as_posix() for p in BUILT_IN_RECIPES.rglob("*.yaml"))
BASELINES = {"luffy", "luffy_clip", "mixed", "on_policy", "grpo", "dapo", "rl_sft_loss", "sft", "sft_rl"}
BASELINES |= {"exgrpo", "opd", "opsd"}
BASELINES |= {"relift", "chord", "chord_phi"}
BASELINES |= {"rl_plus", "srft", "prefix_rft", "uft"}
BASELINES |= {"hpt", "ghpo", "scaf", "ampo", "trapo", "rloo"}
BASELINES |= {"gspo", "cispo", "maxrl", "prefix_rl", "rlsd", "iw_opd", "psft", "eaft", "iw_sft", "asft"}
BASELINES |= {"act_guide", "bepa"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A small Qwen2 with a long window, a byte tokenizer with a chat template, eight problems, and 16 of each file of
    the quickstart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("stand-in")
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder / "model")
    shape = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = Qwen2Config(vocab_size=len(tokenizer) + 7, max_position_embeddings=16384, eos_token_id=256, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"id": str(i), "prompt": f"{i}+1?", "answer": str(i + 1), "traces": [f"#### {i + 1}"]} for i in range(8)]
    write_rows(folder / "data.jsonl", rows)
    for file in (PACKAGE / "quickstart" / "assets" / "data").glob("*.jsonl"):
        (folder / file.name).write_text("".join(file.read_text().splitlines(keepends=True)[:16]))
    return folder


def test_every_baseline_has_a_recipe_at_every_size():
    for size in ("tiny", "small", "smollm2", "paper"):
        assert {f"{size}/{name}" for name in BASELINES} <= set(built_in_recipes())


def test_all_runs_of_the_paper_validate_alike():
    """SFT takes longer traces than RL makes responses, but its curve is compared with theirs."""
    recipes = [load_config(name) for name in RECIPES if name.startswith("paper/")]
    assert len(recipes) > 20
    assert {(c.eval.max_tokens or c.rollout.max_tokens, c.eval.n, c.eval.temperature) for c in recipes} == {
        (8192, 1, 0.6)
    }
    assert load_config("paper/sft").rollout.max_tokens == 15360


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_name_stands_for_what_it_always_did(recipe):
    assert load_config(recipe) == build(Config, RESOLVED[recipe])


@pytest.mark.parametrize("recipe", ["small/luffy", "paper/hpt"])  # made of a size and a method; a file
def test_spellings_of_a_name(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = load_config(recipe)
    for spelling in (f"{recipe}.yaml", BUILT_IN_RECIPES / f"{recipe}.yaml"):
        assert load_config(spelling) == expected
    mine = tmp_path / "mine.yaml"
    for base in (recipe, f"{recipe}.yaml", f"[{recipe}]"):
        mine.write_text(f"base: {base}\nname: {expected.name}\n")
        assert load_config(mine) == expected


def test_later_bases_win_and_the_recipe_itself_wins_over_all(tmp_path):
    (tmp_path / "lr.yaml").write_text("optim: {lr: 1.0e-3}\nbatch: {problems: 3}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: [sizes/tiny, methods/mixed, lr.yaml]\nbatch: {problems: 5}\n")
    cfg = load_config(mine)
    assert (cfg.name, cfg.optim.lr, cfg.batch.problems) == ("mine", 1e-3, 5)
    assert (cfg.data.style, cfg.algorithm.off_policy_reshape) == ("plain", "no_reshape")
    mine.write_text("base: [lr.yaml, small/luffy]\n")
    assert (load_config(mine).optim.lr, load_config(mine).batch.problems) == (3e-6, 64)
    for wrong in ("{a: 1}", "[1]", "[[tiny/luffy]]", "5"):
        mine.write_text(f"base: {wrong}\n")
        with pytest.raises(ConfigError, match="'base' must be a recipe or a list of recipes"):
            load_config(mine)


def test_two_bases_may_share_a_third_but_none_may_come_back(tmp_path):
    for name, text in {
        "top": "base: [left, right]",
        "left": "base: low",
        "right": "base: low",
        "low": "seed: 4",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(
            text.replace("left", "left.yaml").replace("right", "right.yaml").replace("low", "low.yaml")
        )
    assert load_config(tmp_path / "top.yaml").seed == 4
    (tmp_path / "low.yaml").write_text("base: [sizes/tiny, top.yaml]")
    with pytest.raises(ConfigError, match="inherits itself"):
        load_config(tmp_path / "top.yaml")


# Recipes that differ in model and data alone are the same on the stand-in, and a size with any method is like another.
TRIED = [r for r in RECIPES if not r.endswith(("b", "_hard", "_860")) and "smollm2" not in r]
LIKE_ANOTHER = {r for r in TRIED if r.startswith(("small/", "paper/"))} - {"small/luffy", "paper/luffy", *FILES}


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=pytest.mark.slow) if r in LIKE_ANOTHER else r for r in TRIED])
def test_loads_and_dry_runs(recipe, stand_in, monkeypatch):
    """The trial of the machine's speed is small. tiny/luffy is tried as it is, the others of its size on less data."""
    overrides = []
    if recipe != "tiny/luffy":
        monkeypatch.setattr(times, "PROBED_TOKENS", times.FEWEST_TOKENS)
        monkeypatch.setattr(times, "FEWEST_SLOTS", 4)
        monkeypatch.setattr(times, "NEW_TOKENS", 2)
    of_quickstart = recipe.startswith(("tiny/", "tools/"))
    left_by_sft = "runs/tiny-sft/checkpoints/latest/model"
    if not of_quickstart or load_config(recipe).model.path == left_by_sft:
        overrides = [f"model.path={stand_in / 'model'}"]
    if not of_quickstart:
        data = stand_in / "data.jsonl"
        overrides += [f"data.train={data}", f"data.eval={data}", "data.max_prompt_tokens=1024", "reward.kind=numeric"]
    elif recipe != "tiny/luffy":
        train = "train" if recipe.startswith("tiny/") else "tools"
        names = {"train": train, "eval": "heldout", "eval_also.ood": "ood"}
        overrides += [f"data.{key}={stand_in / name}.jsonl" for key, name in names.items()]
    if recipe == "tiny/guided":  # its second model is another run's
        overrides += [f"rollout.offpolicy_guidance.model_path={load_config(recipe).model.path}"]
    if recipe.endswith("opd") or recipe == "tiny/rlsd":  # its teacher too
        overrides += [f"teacher.path={load_config(recipe, overrides).model.path}"]
    if recipe.endswith("/sft_rl") and not recipe.startswith("paper/"):
        overrides += ["stages.sft.eval.hold_out=2"]
    cfg = load_config(recipe, overrides)
    lines = dry_run(cfg, cfg.made_for)
    assert lines[0].startswith(f"run        runs/{cfg.name}") and any("GiB at the peak" in line for line in lines)


@pytest.mark.parametrize("recipe", [f for f in FILES if not f.startswith("sizes/") and f != "methods/luffy"])
def test_a_recipe_shows_only_what_differs_from_its_base(recipe):
    own = yaml.safe_load((BUILT_IN_RECIPES / f"{recipe}.yaml").read_text()) or {}
    bases = own.pop("base", [])
    before = to_dict(Config())
    for base in [bases] if isinstance(bases, str) else bases:
        merge(before, {**read_recipe(base), "name": "base"})
    for path in leaves({key: value for key, value in own.items() if key != "stages"}):
        assert at(before, path) != at(own, path), f"{'.'.join(path)} repeats its base"


def leaves(values, path=()):
    """Paths of all values that are not sections."""
    for key, value in values.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]


def at(values, path):
    for key in path:
        values = {"name": values} if isinstance(values, str) else values  # a part without settings
        values = None if values is None else values.get(key)
    return values


def test_names_are_unique():
    names = [load_config(r).name for r in RECIPES]
    assert len(set(names)) == len(names)


def test_the_paper_settings():
    cfg = load_config("paper/luffy")
    assert (cfg.batch.problems, cfg.batch.mini_batch, cfg.rollout.n, cfg.guidance.n_prefix) == (128, 64, 8, 1)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.train.steps) == (1e-6, "constant", 500)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_tokens, cfg.rollout.temperature) == (1024, 8192, 1.0)
    assert cfg.algorithm.off_policy_reshape.shown == "p_div_p (gamma 0.1)"
    assert (cfg.algorithm.entropy_coef, cfg.algorithm.kl_coef) == (0.01, 0.0)
    sft = load_config("paper/sft")
    assert (sft.train.epochs, sft.batch.problems, sft.optim.lr, sft.optim.warmup) == (3, 64, 5e-5, 0.1)
    assert sft.optim.schedule == "linear"
    assert sft.data.max_prompt_tokens + sft.rollout.max_tokens == 16384


def test_the_command_lists_sizes_and_methods_one_line_each():
    from typer.testing import CliRunner

    from luffy.cli import app

    lines = CliRunner().invoke(app, ["recipes"]).output.splitlines()
    groups, name = {}, ""
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            groups[name := line[:-1]] = []
        else:
            groups[name].append(line.split()[0])
    assert groups["sizes"] == ["paper", "small", "smollm2", "tiny"] and set(groups["methods"]) == {*BASELINES, "guided"}
    models = ("1.5b", "instruct_7b", "llama_8b", "llama_8b_hard")
    rows = {f"paper/{method}_{model}" for method in ("luffy", "on_policy", "sft") for model in models}
    released = {f"paper/{method}_released" for method in ("luffy", "on_policy", "rl_sft_loss", "sft_rl")}
    tools = {f"tools/{name}" for name in ("chains", "luffy", "mixed", "on_policy", "sft")}
    assert set(groups["others"]) == rows - {"paper/sft_llama_8b_hard"} | {"paper/luffy_860"} | released | tools


def test_the_paper_runs_on_eight_gpus_and_is_evaluated():
    """All of them alike, so that the tables compare methods; SFT takes one trace a problem and no rollouts."""
    tables = ("luffy", "on_policy", "mixed", "rl_sft_loss", "sft")
    for name in (name for name in RECIPES if name.removeprefix("paper/").startswith(tables)):
        cfg = load_config(name)
        assert (cfg.launch, cfg.parallel.workers) == ("torchrun", 8)
        assert cfg.data.eval == "data/benchmarks/validation.parquet"
        sft = name.startswith("paper/sft") and name != "paper/sft_rl"
        assert cfg.eval.every == (500 if sft else 50) and cfg.batch.updates == (1 if sft else 2)
        steps = None if sft else 860 if name == "paper/luffy_860" else 500
        assert (cfg.train.steps, cfg.optim.lr) == (steps, 5e-5 if sft else 1e-6)
