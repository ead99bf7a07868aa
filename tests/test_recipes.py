"""Every recipe that ships loads, says only what differs, and passes a dry run on a small stand-in."""

import json

import pytest
import yaml
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from luffy.config import BUILT_IN_RECIPES, load_config, to_yaml
from luffy.train.dry_run import dry_run

RECIPES = sorted(str(p.relative_to(BUILT_IN_RECIPES).with_suffix("")) for p in BUILT_IN_RECIPES.rglob("*.yaml"))
BASELINES = {"luffy", "luffy_clip", "mixed", "on_policy", "grpo", "dapo", "rl_sft_loss", "sft", "sft_rl"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A small Qwen2 with a long window, a byte tokenizer with a chat template, and eight problems."""
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
    config = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=16384, eos_token_id=256, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"id": str(i), "prompt": f"{i}+1?", "answer": str(i + 1), "traces": [f"#### {i + 1}"]} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_every_baseline_has_a_recipe_at_every_size():
    for size in ("tiny", "small", "paper"):
        assert {f"{size}/{name}" for name in BASELINES} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_loads_and_dry_runs(recipe, stand_in, monkeypatch):
    overrides = []
    if not recipe.startswith("tiny/") or recipe == "tiny/sft_rl":
        overrides = [f"model.path={stand_in / 'model'}"]
    if not recipe.startswith("tiny/"):
        data = stand_in / "data.jsonl"
        overrides += [f"data.train={data}", f"data.eval={data}", "data.max_prompt_tokens=1024", "reward.kind=numeric"]
    if recipe == "tiny/guided":  # its guidance model is another run's
        overrides += [f"rollout.offpolicy_guidance.model_path={load_config(recipe).model.path}"]
    cfg = load_config(recipe, overrides)
    lines = dry_run(cfg, "sft" if recipe.endswith("/sft") else "rl")
    assert lines[0].startswith(f"run        runs/{cfg.name}") and any("GiB at the peak" in line for line in lines)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not r.endswith("base")])
def test_a_recipe_shows_only_what_differs_from_its_base(recipe):
    own = yaml.safe_load((BUILT_IN_RECIPES / f"{recipe}.yaml").read_text())
    base = load_config(str(BUILT_IN_RECIPES / recipe.split("/")[0] / own.pop("base")))
    before, after = yaml.safe_load(to_yaml(base)), yaml.safe_load(to_yaml(load_config(recipe)))
    for section, entries in own.items():
        for key in entries if isinstance(entries, dict) else [None]:
            pick = lambda values: values[section] if key is None else values[section][key]  # noqa: B023, E731
            assert pick(before) != pick(after), f"{section}.{key} repeats its base"


def test_names_are_unique():
    names = [load_config(r).name for r in RECIPES]
    assert len(set(names)) == len(names)


def test_the_paper_settings():
    cfg = load_config("paper/luffy")
    assert (cfg.batch.problems, cfg.batch.mini_batch, cfg.rollout.n, cfg.guidance.n_prefix) == (128, 64, 8, 1)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.train.steps) == (1e-6, "constant", 500)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_tokens, cfg.rollout.temperature) == (1024, 8192, 1.0)
    assert (cfg.algorithm.off_policy_reshape, cfg.algorithm.entropy_coef, cfg.algorithm.kl_coef) == (
        "p_div_p_0.1",
        0.01,
        0.0,
    )
    sft = load_config("paper/sft")
    assert (sft.train.epochs, sft.batch.problems, sft.optim.lr, sft.optim.warmup) == (3, 64, 5e-5, 0.1)
    assert sft.data.max_prompt_tokens + sft.rollout.max_tokens == 16384
