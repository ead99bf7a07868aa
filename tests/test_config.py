import re
from pathlib import Path

import pytest
import yaml

from luffy.config import Config, built_in_recipes, check_made_for, load_config, to_yaml
from luffy.config.recipes import PACKAGE, parse_yaml
from luffy.errors import ConfigError, UserError
from luffy.push import _front_matter
from luffy.run_folder.runs import read_config
from luffy.schema import build, describe


def write_recipe(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_inherits_shows_what_differs_and_is_overridden(tmp_path):
    write_recipe(tmp_path, "base.yaml", "name: base\noptim: {lr: 1e-5, warmup: 5}\nreward: {weights: {math: 1.0}}\n")
    child = write_recipe(tmp_path, "deep/child.yaml", "base: ../base.yaml\nname: child\noptim: {lr: 3e-5}\n")
    cfg = load_config(child, ["optim.warmup=0.1", "rollout.n=4", "model.lora.rank=8", "reward.weights.format=0.5"])
    assert (cfg.name, cfg.optim.lr, cfg.optim.warmup, cfg.rollout.n) == ("child", 3e-5, 0.1, 4)
    assert cfg.model.lora.rank == 8 and cfg.reward.weights == {"math": 1.0, "format": 0.5}


def test_defaults_are_the_paper_s_choices():
    cfg = load_config(None)
    a = cfg.algorithm
    assert (a.advantage, a.normalize_std, a.loss_reduction) == ("grpo", False, "seq-mean-token-sum-norm")
    assert (a.remove_clip, a.off_policy_reshape.shown, a.entropy_coef, a.kl_coef) == (
        True,
        "p_div_p (gamma 0.1)",
        0.001,
        0.0,
    )
    assert (cfg.rollout.n, cfg.guidance.n_prefix, cfg.guidance.max_ratio) == (8, 1, 1.0)


def test_the_resolved_config_reads_back_to_the_same_object():
    cfg = load_config(None, ["optim.lr=2e-6", "data.train=[a.jsonl, b.jsonl]", "model.lora.target_modules=[q_proj]"])
    assert build(Config, yaml.safe_load(to_yaml(cfg))) == cfg


def test_off_is_a_word_also_where_yaml_reads_a_truth_value(tmp_path):
    recipe = write_recipe(tmp_path, "r.yaml", "algorithm: {mismatch_correction: off}\n")
    assert load_config(recipe).algorithm.mismatch_correction == "off"
    assert load_config(None, ["algorithm.mismatch_correction=off"]).algorithm.mismatch_correction == "off"
    with pytest.raises(ConfigError, match="must be one of off, truncated, masked; got True"):
        load_config(None, ["algorithm.mismatch_correction=on"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"unknown key 'optim\.lrr' \(did you mean 'optim\.lr'\?\)"),
        ("rolout.n=3", r"unknown key 'rolout' \(did you mean 'rollout'\?\)"),
        ("n_prefix=1", r"did you mean 'guidance\.n_prefix'"),
        ("data.xyzzy=1", "known here: .*data.bad_rows"),
        ("guidance.n_prefix=9", "'guidance.n_prefix' .9. exceeds 'rollout.n' .8."),
        ("optim.lr=fast", "'optim.lr' must be a number, got 'fast'"),
        ("optim.lr=.nan", "finite"),
        ("optim.lr=0", "'optim.lr' must be > 0"),
        ("rollout.n=2.5", "'rollout.n' must be a whole number"),
        ("rollout.n=true", "'rollout.n' must be a whole number"),
        ("rollout.n=", "must be a whole number, got None"),
        ("optim=3", "'optim' must be a mapping"),
        ("optim.betas=[0.9]", "two numbers"),
        ("algorithm.advantage=grpo_splt", "did you mean 'grpo_split'"),
        (
            "algorithm.off_policy_reshape=cube",
            "'algorithm.off_policy_reshape' must be one of no_reshape, .*; got 'cube'",
        ),
        ("guidance.min_ratio=0.9 guidance.max_ratio=0.5", "exceeds 'guidance.max_ratio'"),
        ("algorithm.advantage=grpo_split guidance.n_prefix=8", "no on-policy sample is left"),
        ("algorithm.trace_term=sft guidance.n_prefix=8", "no on-policy sample is left"),
        ("algorithm.trace_ratio=ppo algorithm.off_max_clip=2", "off_max_clip would change nothing"),
        ("algorithm.off_policy_reshape=exgrpo algorithm.teacher_probs=recorded", "set algorithm.teacher_probs=one"),
        ("algorithm.sft_reshape=chord", "'algorithm.sft_reshape' must be one of .*did you mean 'chord_phi'"),
        ("batch.tokens=100", "'batch.tokens' .100. cannot hold one sequence"),
        ("batch.mini_batch=200", "exceeds 'batch.problems'"),
        ("algorithm.max_accuracy=-1", "algorithm.max_accuracy"),
        ("name=../escape", "without '..'"),
        ("name=/abs", "relative"),
        ("no-equals-sign", "must look like section.key=value"),
        ("algorithm.on_policy_reshape=logp algorithm.remove_clip=false", "remove_clip=true"),
        ("data.eval=x data.eval_also.core=y", "eval_also.core"),
        ("algorithm.trace_term=sft rollout.temperature=0.7", "rollout.temperature=1"),
        ("optim.lr=[1", "not a YAML value"),
    ],
)
def test_a_wrong_key_or_value_names_itself_and_the_remedy(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, override.split(" "))
    assert "\n" not in str(caught.value)


def test_an_override_replaces_a_mapping(tmp_path):
    recipe = write_recipe(tmp_path, "r.yaml", "reward: {weights: {math: 1.0}}\ndata: {eval_also: {ood: x}, eval: y}\n")
    assert load_config(recipe, ["reward.weights={}"]).reward.weights == {}
    assert load_config(recipe, ["data.eval=null", "data.eval_also={}"]).data.eval is None


def test_recipes_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no recipe 'nowhere.yaml'"):
        load_config("nowhere.yaml")
    write_recipe(tmp_path, "mine.yaml", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'mine.yaml'"):
        load_config("mine.yml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write_recipe(tmp_path, "bad.yaml", "a: [1"))
    with pytest.raises(ConfigError, match="brackets lie 1500 deep in each other, at most 200"):
        load_config(write_recipe(tmp_path, "deep.yaml", "a: " + "[" * 1500))
    with pytest.raises(ConfigError, match="brackets lie 201 deep"):
        load_config(write_recipe(tmp_path, "flat.yaml", "name: a\n"), ["data.train=" + "[{a: " * 100 + "["])
    flat = write_recipe(tmp_path, "flat.yaml", "data: {train: [" + "'}]', " * 300 + "a]}\n")
    assert len(load_config(flat).data.train) == 301  # many brackets, none of them deep
    with pytest.raises(ConfigError, match="mapping of sections"):
        load_config(write_recipe(tmp_path, "list.yaml", "- 1\n"))
    write_recipe(tmp_path, "a.yaml", "base: b.yaml\n")
    with pytest.raises(ConfigError, match="inherits itself"):
        load_config(write_recipe(tmp_path, "b.yaml", "base: a.yaml\n"))
    assert load_config(write_recipe(tmp_path, "empty.yaml", "")) == load_config(None, ["name=empty"])


def test_a_key_that_a_recipe_has_twice_is_refused(tmp_path):
    twice = write_recipe(tmp_path, "twice.yaml", "optim:\n  lr: 1e-4\ntrain: {steps: 3}\noptim:\n  warmup: 2\n")
    with pytest.raises(ConfigError, match=rf"{twice}: .*key 'optim' in line 4 is there already, in line 1; keep one"):
        load_config(twice)
    with pytest.raises(ConfigError, match="key 'lr' in line 2 is there already, in line 2"):
        load_config(write_recipe(tmp_path, "inside.yaml", "name: a\noptim: {lr: 1e-4, 'lr': 1e-5}\n"))
    with pytest.raises(ConfigError, match="override 'reward.weights=.*key 'math' in line 1"):
        load_config(None, ["reward.weights={math: 1, math: 2}"])


def test_a_key_that_a_merge_brings_may_be_named_again(tmp_path):
    inner = "optim:\n  <<: {lr: 1e-5, warmup: 1}\n  <<: {eps: 1e-7}\n  warmup: 2\n"
    cfg = load_config(write_recipe(tmp_path, "merged.yaml", inner))
    assert (cfg.optim.lr, cfg.optim.warmup, cfg.optim.eps) == (1e-5, 2, 1e-7)
    # the anchored mapping is merged before it is read itself
    chain = "{a: &a {x: 1}, m: {deep: &b {<<: *a, x: 2}}, c: {<<: *b, x: 3}}"
    assert parse_yaml(write_recipe(tmp_path, "chain.yaml", chain)) == {
        "a": {"x": 1},
        "m": {"deep": {"x": 2}},
        "c": {"x": 3},
    }


def merges(levels):
    """362 bytes at 7 levels; each has nine times the values of the one before."""
    lines = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, levels)]
    return "".join(["a0: &a0 {x: 1}\n", *lines])


def pairs(levels):
    lines = [f"a{i}: &a{i} !!pairs [{', '.join(f'k{k}: *a{i - 1}' for k in range(9))}]\n" for i in range(1, levels)]
    return "".join(["a0: &a0 !!pairs [x: 1]\n", *lines])


ENDLESS = {
    "merges": (merges(12), "merges .<<. bring more than 10,000 values"),
    "a wide merge": (f"a: &a {{{', '.join(f'k{i}: 1' for i in range(99))}}}\nb: {{<<: [{', '.join(['*a'] * 999)}]}}", "merges"),
    "a merge of itself": ("a: &a {<<: *a}", "recursion"),
    "pairs": (pairs(12), "more than 10,000 values; an alias"),
    "base 60": ("name: 1" + ":59" * 20_000, "the number in line 1 has more than 1,000 characters"),
    "base 60, tagged": ("name: !!int '1" + ":59" * 20_000 + "'", "the number in line 1 has more than 1,000 characters"),
    "a float to base 60": ("name: 1" + ":59" * 300 + ".0", "too large"),
    "a comment": ("#" + "x" * (1 << 20), "characters of YAML, at most 1,048,576 are read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_short_text_of_endless_values_is_refused(kind, tmp_path):
    text, message = ENDLESS[kind]
    recipe = write_recipe(tmp_path, "r.yaml", text)
    with pytest.raises(ConfigError, match=rf"{recipe}: .*{message}"):
        load_config(recipe)
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"data.columns={text}"])
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message):  # of a run that someone else made
        read_config(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=message):
        _front_matter(f"---\n{text}\n---\n", tmp_path / "README.md")


def test_a_text_of_too_many_values_is_not_read_to_its_end(tmp_path):
    endless = "- 1\n" * 30_000 + "] no YAML"
    with pytest.raises(ConfigError, match="more than 10,000 values"):
        load_config(write_recipe(tmp_path, "r.yaml", endless))


def test_bases_that_name_each_other_many_times_are_read_once(tmp_path):
    write_recipe(tmp_path, "l0.yaml", "optim: {lr: 0.25, warmup: 3}\n")
    for level in range(1, 12):
        write_recipe(
            tmp_path, f"l{level}.yaml", f"base: [{', '.join([f'l{level - 1}.yaml'] * 9)}]\ntrain: {{steps: {level}}}\n"
        )
    cfg = load_config(tmp_path / "l11.yaml", ["optim.warmup=4"])
    assert (cfg.optim.lr, cfg.optim.warmup, cfg.train.steps, cfg.name) == (0.25, 4, 11, "l11")


def test_files_of_the_package_may_be_named_in_a_list(tmp_path):
    recipe = write_recipe(tmp_path, "r.yaml", "data: {train: ['package:a.jsonl', b.jsonl]}\n")
    expected = (str(PACKAGE / "a.jsonl"), "b.jsonl")
    assert load_config(recipe).data.train == expected
    assert load_config({"data": {"train": ("package:a.jsonl", "b.jsonl")}}).data.train == expected


def test_a_recipe_without_a_name_has_that_of_its_file(tmp_path):
    assert load_config(write_recipe(tmp_path, "mine.yaml", "base: tiny/luffy\n")).name == "mine"
    assert load_config(write_recipe(tmp_path, "mine.yaml", "base: tiny/luffy\nname: other\n")).name == "other"
    assert load_config("tiny/luffy").name == "tiny-luffy" and load_config("tiny/luffy", ["name=x"]).name == "x"


def test_a_missing_base_says_whose_it_is(tmp_path):
    with pytest.raises(ConfigError, match=rf"no recipe 'nothere', which a recipe in {tmp_path} names as its base"):
        load_config(write_recipe(tmp_path, "mine.yaml", "base: nothere\n"))


def test_every_built_in_recipe_says_what_it_is_for():
    known = built_in_recipes()
    assert {"tiny/luffy", "small/sft_rl", "paper/luffy_1.5b"} <= set(known)
    assert all(about.endswith(".") for about in known.values())  # whole sentences
    assert {"sizes/tiny", "methods/luffy", "tiny/base", "tiny/guided"} <= set(known)


def test_yaml_cannot_run_code(tmp_path):
    with pytest.raises(ConfigError):
        load_config(write_recipe(tmp_path, "evil.yaml", "name: !!python/object/apply:os.system ['true']\n"))


def test_every_knob_is_documented():
    docs = list(describe(Config))
    assert len(docs) > 80
    assert [d.path for d in docs if not d.help] == []


def test_the_reference_page_is_generated_from_the_code():
    from pages import configuration_page

    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    assert page.read_text() == configuration_page(), "run `make docs`"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.success=0", "reward.failure=1"], r"'reward\.failure' \(1\.0\) exceeds 'reward\.success' \(0\.0\)"),
        (["algorithm.off_min_clip=2", "algorithm.off_max_clip=1"], r"'algorithm\.off_min_clip' \(2\.0\) exceeds"),
        (["algorithm.importance_clamp_min=11"], r"'algorithm\.importance_clamp_min' \(11\.0\) exceeds"),
        (["algorithm.credit=distill"], r"'algorithm\.credit' \(distill\) .*; set algorithm\.reject_extreme=false"),
        (["algorithm.credit=srft"], r"'algorithm\.credit' \(srft\) .*; set algorithm\.reject_extreme=false"),
        (["algorithm.mix={start: 0.5}"], r"'algorithm\.mix' .* \(group_baseline\) has no token; set .*trace_term=sft"),
        (
            [
                "algorithm.credit=distill",
                "algorithm.reject_extreme=false",
                "algorithm.kl_coef=1",
                "algorithm.kl_in=reward",
            ],
            r"subtracts the KL term \('algorithm\.kl_coef' 1\.0\) from the rewards, .*; set algorithm\.kl_in=loss",
        ),
        (["algorithm.off_policy_reshape={name: pow, gamma: 0.5}"], r"'algorithm\.off_policy_reshape\.gamma'.*; known"),
        (["algorithm.off_policy_reshape.gama=0.5"], r"did you mean 'algorithm\.off_policy_reshape\.gamma'"),
        (
            ["algorithm.credit.reward=0.5"],
            r"'algorithm\.credit\.reward': group_baseline has no settings \(distill has it",
        ),
        (["guidance.gate={name: micro_groups, sizes: [1]}"], r"'guidance\.gate\.sizes' has 1, .*give as many of each"),
        (["guidance.gate={name: hinted_group, fractions: [0]}"], r"'guidance\.gate\.fractions' must be above 0"),
        (["algorithm.credit=[srft]"], r"'algorithm\.credit' must be a name, or a mapping with a name and settings"),
        (
            ["guidance.shared=true", "guidance.min_ratio=0.2", "guidance.n_prefix=3"],
            r"'guidance\.shared' gives the 3 .* from 0\.2 to 1\.0; set guidance\.min_ratio=1\.0, another strategy",
        ),
        (["replay.share=0.5", "rollout.n=4", "guidance.n_prefix=3"], r"a group has 1 \(rollout\.n less guidance"),
        (
            ["rollout.offpolicy_guidance={model_path: m, rule: aligned, max_overrides: 2}"],
            r"'rollout\.offpolicy_guidance\.max_overrides' cannot be honoured by rule aligned",
        ),
        (
            ["rollout.offpolicy_guidance={model_path: m, rule: threshold}", "rollout.engine=vllm"],
            r"\(threshold\) needs the policy's whole distribution, .*; set its rule to mixture or aligned, or rollout\.engine=native",
        ),
        (["seed=18446744073709551616"], r"'seed' must be <= 9223372036854775807"),
        (
            ["model.lora={target_modules: '(q_proj'}"],
            r"'model\.lora\.target_modules' '\(q_proj' is no regular expression",
        ),
    ],
)
def test_settings_that_contradict_each_other_or_cannot_be_used(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("weights", "success", "remedy"),
    [
        ({"gsm8k": 0.8, "format": 0.1}, 1.0, r"scores 0\.9 .*none would have solved.*; set reward\.success=0\.9$"),
        ({"gsm8k": 0.7, "format": 0.1}, 0.8, r"; set reward\.success=0\.7999999999999999$"),  # as a response scores
        ({}, 1.5, r"scores 1\.0 \(math\), below 'reward\.success' \(1\.5\)"),
        ({"gsm8k": 1, "format": -1}, 1.5, r"scores 1\.0 .*; set reward\.success=1\.0$"),
        (
            {"gsm8k": 1, "format": 1},
            1.0,
            r"wrong answer in the right format scores 1\.0 .*set reward\.success=2\.0, or",
        ),
        ({"gsm8k": 1, "format": 0.5}, 0.5, r"scores 0\.5 .*set reward\.success=1\.5, or"),
    ],
)
def test_a_score_that_solves_a_problem_can_be_reached_and_not_by_the_format_alone(weights, success, remedy):
    with pytest.raises(ConfigError, match=remedy):
        load_config(None, {"reward.weights": weights, "reward.success": success})


@pytest.mark.parametrize(
    ("weights", "success"),
    [
        ({"gsm8k": 1, "format": 0.1}, 1.0),
        ({"gsm8k": 0.7, "format": 0.2, "choice": 0.1}, 1.0),
        ({"gsm8k": 1, "format": 1}, 2.0),
        ({"format": 1}, 1.0),  # the format is all that is asked for
        ({"mine:score": 0.1, "format": 1}, 1.0),  # what it returns is not known
    ],
)
def test_weights_whose_sum_says_who_solved_a_problem(weights, success):
    assert load_config(None, {"reward.weights": weights, "reward.success": success}).reward.weights == weights


OF_TEACHER_TOKENS = ["trace_ratio=ppo", "trace_advantage=constant", "trace_entropy_share=0.2", "prefix_alpha=0.1"]


@pytest.mark.parametrize("credit", ["group_baseline", "lone_trace_sft", "distill", "srft"])
@pytest.mark.parametrize("setting", OF_TEACHER_TOKENS)
def test_teacher_tokens_in_the_sft_term_have_no_settings_of_the_rl_term(setting, credit):
    overrides = [f"algorithm.{part}" for part in (setting, f"credit={credit}", "reject_extreme=false")]
    load_config(None, overrides)
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting.split('=')[0]} .* would change nothing; leave it out"):
        load_config(None, [*overrides, "algorithm.trace_term=sft"])


def test_a_credit_function_of_one_s_own_may_read_any_setting():
    settings = [f"algorithm.{setting}" for setting in OF_TEACHER_TOKENS]
    load_config(None, [*settings, "algorithm.trace_term=sft", "algorithm.credit=mine:credit"])


def test_a_kl_term_in_the_reward_of_distillation_needs_the_reward():
    overrides = ["algorithm.credit=distill", "teacher.path=self", "algorithm.kl_coef=1", "algorithm.kl_in=reward"]
    assert load_config(None, [*overrides, "algorithm.distill_reward=1"]).algorithm.kl_in == "reward"


def test_bounds_that_meet_are_fine():
    load_config(
        None, ["algorithm.off_min_clip=1", "algorithm.off_max_clip=1", "reward.success=0.5", "reward.failure=0.5"]
    )
    load_config(None, ["seed=9223372036854775807", "model.lora={target_modules: '.*proj'}"])


@pytest.mark.parametrize("shape", ["off_policy_reshape=trapo", "sft_reshape=exgrpo", "off_policy_reshape=mine:shape"])
def test_a_gamma_is_for_the_shapes_that_read_it(shape):
    cfg = load_config(None, [f"algorithm.{shape}", "algorithm.off_policy_reshape_gamma=0.5"])
    chosen = getattr(cfg.algorithm, shape.partition("=")[0])
    assert chosen.settings.gamma == 0.5


@pytest.mark.parametrize("others", [["guidance.strategy=random"], ["guidance.min_ratio=1"]])
def test_guided_samples_that_share_a_ratio(others):
    cfg = load_config(None, ["guidance.shared=true", "guidance.min_ratio=0.2", "guidance.n_prefix=3", *others])
    assert len(set(cfg.schedule(10).ratios(3, 0, "p"))) == 1


@pytest.mark.parametrize("source", ["trace_term=sft", "credit=lone_trace_sft", "credit=srft", "credit=mine:credit"])
def test_rl_is_mixed_with_the_sft_term_of_any_source(source):
    overrides = ["algorithm.mix={start: 0.5}", "algorithm.reject_extreme=false", f"algorithm.{source}"]
    assert load_config(None, overrides).algorithm.mix.start == 0.5


def test_distillation_with_a_reward_may_drop_groups_without_a_contrast():
    assert load_config(None, ["algorithm.credit=distill", "algorithm.distill_reward=1", "teacher.path=self"])


ALONE = ["rollout.n=1", "guidance.n_prefix=0"]
DISTILLED = ["algorithm.credit=distill", "algorithm.reject_extreme=false", "algorithm.entropy_coef=0"]


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (ALONE, r"'rollout.n' is 1, a group of one is all success or all failure by math.*reject_extreme=false"),
        (["rollout.n=1", "guidance.n_prefix=1"], "raise rollout.n"),
        ([*ALONE, "reward.weights={math: 1, format: -0.5}", "reward.success=0.5"], "raise rollout.n"),
        ([*ALONE, "reward.kind=my:own", "reward.failure=1"], "raise rollout.n"),
        ([*ALONE, "guidance.gate=trace_on_failure"], "raise rollout.n"),
        ([*ALONE, "guidance.gate=hinted_group"], "raise rollout.n"),
        ([*ALONE, "algorithm.credit=lone_trace_sft"], "raise rollout.n"),
        ([*DISTILLED, "teacher.path=self"], "set teacher.shown=solution"),
        ([*DISTILLED, "teacher.path=m", "teacher.shown=sibling", "rollout.n=1", "guidance.n_prefix=0"], "raise rollout.n"),
    ],
)  # fmt: skip
def test_what_could_never_learn_is_refused_for_rl(overrides, advice):
    cfg = load_config(None, overrides)
    with pytest.raises(ConfigError, match=advice):
        check_made_for(cfg, "rl")
    check_made_for(cfg, "sft")


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.n=2"],
        ["rollout.n=2", "guidance.n_prefix=2"],
        [*ALONE, "algorithm.reject_extreme=false"],
        [*ALONE, "reward.kind=my:own"],
        [*ALONE, "reward.weights={math: 1, format: 0.1}"],
        [*ALONE, "sft_steps.buffer=4"],
        [*ALONE, "guidance.gate=micro_groups"],
        [*ALONE, "guidance.gate=my:own"],
        [*ALONE, "guidance.gate=trace_alone", "algorithm.credit=lone_trace_sft"],
        [*ALONE, "batch.expert_share=0.5", "algorithm.credit=lone_trace_sft"],
        ["rollout.n=1", "guidance.n_prefix=1", "algorithm.credit=lone_trace_sft"],
        ["rollout.n=1", "guidance.n_prefix=1", "algorithm.credit=my:own"],
        [*ALONE, "algorithm.credit=srft", "algorithm.reject_extreme=false"],
        [*ALONE, *DISTILLED, "teacher.path=m"],
        [*DISTILLED, "teacher.path=self", "algorithm.distill_reward=1"],
        [*DISTILLED, "teacher.path=self", "algorithm.entropy_coef=0.001"],
    ],
)
def test_what_learns_with_few_samples_is_not_refused(overrides):
    check_made_for(load_config(None, overrides), "rl")


LONG_NUMBERS = {"hexadecimal": "0x" + "F" * 5000, "decimal": "9" * 6000, "in a list": "[1, 0x" + "F" * 5000 + "]"}


@pytest.mark.parametrize("kind", LONG_NUMBERS)
def test_a_number_of_6000_digits_is_one_line_in_every_knob(kind):
    """Python writes no int of more than 4,300 digits: the error that quotes it would be a traceback."""
    for path in (doc.path for doc in describe(Config)):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"{path}={LONG_NUMBERS[kind]}"])
        assert path in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
        if kind == "hexadecimal":
            with pytest.raises(ConfigError, match="digits"):
                load_config(None, {path: int(LONG_NUMBERS[kind], 16)})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**18 * 10**300, -(10**400), 10**900])
def test_a_number_that_no_machine_word_or_float_holds_is_refused(value):
    for doc in describe(Config):
        if doc.kind in ("int", "int | null") or (doc.kind in ("float", "float | null") and abs(value) > 10**309):
            with pytest.raises(ConfigError, match=re.escape(doc.path)):
                load_config(None, {doc.path: value})


def test_a_long_number_as_a_key_of_a_recipe_is_one_line(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"optim: {{lr: 1.0e-6}}\n? 0x{'F' * 5000}\n: 1\n")
    with pytest.raises(
        ConfigError, match=r"recipe\.yaml: not valid YAML: the number in line 2 has more than 1,000 characters"
    ):
        load_config(recipe)


def test_a_name_may_be_a_number_of_many_digits():
    assert load_config(None, ["name=20260131120000123456"]).name == "20260131120000123456"
