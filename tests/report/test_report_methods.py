"""Which runs are seeds of one method, and what the method is called."""

from importlib.resources import files

from luffy.config import built_in_recipes, load_config
from luffy.report.methods import COLOURS, METHODS, differing_keys, group_runs, line_of, with_styles
from luffy.run_folder.runs import load_run
from luffy.schema import to_dict


def seeds_by_method(folders):
    return {m.label: [run.seed for run in m.runs] for m in group_runs([load_run(f) for f in folders])}


def test_seed_folders_and_seed_suffixes(write_run, make_metric_row):
    rows = [make_metric_row(1)]
    names = ["luffy/seed-0", "luffy/seed-1", "grpo-s0", "grpo-s1", "dapo_seed2", "dapo_seed3"]
    guided = {"grpo": 0, "luffy": 1, "dapo": 2}
    folders = [
        write_run(n, rows, {"guidance": {"n_prefix": next(v for k, v in guided.items() if n.startswith(k))}})
        for n in names
    ]
    assert seeds_by_method(folders) == {"luffy": [0, 1], "grpo": [0, 1], "dapo": [2, 3]}


def test_other_folders_go_by_their_config(write_run, make_metric_row):
    rows = [make_metric_row(1)]
    folders = [
        write_run(n, rows, c)
        for n, c in [("first", {"seed": 1}), ("second", {"seed": 2}), ("third", {"optim": {"lr": 0.1}})]
    ]
    assert seeds_by_method(folders) == {"first, second": [1, 2], "third": [0]}


def test_a_number_that_is_the_runs_own_seed(write_run, make_metric_row):
    rows = [make_metric_row(1)]
    folders = [write_run(f"luffy-{k}", rows, {"seed": k}) for k in (0, 1, 2)]
    folders += [write_run(f"sft/{k}", rows, {"seed": k, "optim": {"lr": 0.1}}) for k in (3, 4)]
    folders += [write_run(f"ablation-{k}", rows, {"seed": 0, "rollout": {"n": 4 + k}}) for k in (0, 1)]
    assert seeds_by_method(folders) == {"luffy": [0, 1, 2], "sft": [3, 4], "ablation-0": [0], "ablation-1": [0]}


def test_names_that_share_their_beginning(write_run, make_metric_row):
    folders = [write_run(f"luffy-{day}", [make_metric_row(1)], {"seed": k}) for k, day in enumerate(("mon", "tue"))]
    assert seeds_by_method(folders) == {"luffy": [0, 1]}


def test_equal_settings_and_seed_stay_apart(write_run, make_metric_row):
    folders = [write_run(n, [make_metric_row(1)], {"name": "same"}) for n in ("mine", "yours")]
    assert seeds_by_method(folders) == {"mine": [0], "yours": [0]}


def test_the_label_is_the_path_from_the_common_folder(write_run, make_metric_row):
    names = ("x/luffy/seed-0", "x/luffy/seed-1", "y/z/luffy/seed-0", "mine")
    folders = [write_run(n, [make_metric_row(1)]) for n in names]
    assert seeds_by_method(folders) == {"x/luffy": [0, 1], "y/z/luffy": [0], "mine": [0]}
    assert seeds_by_method(folders[2:3]) == {"luffy": [0]} and seeds_by_method(folders[3:]) == {"mine": [0]}


def test_colours_go_by_when_a_method_began(write_run, make_metric_row):
    begun = {"a/seed-0": 30.0, "b/seed-0": 20.0, "b/seed-1": 50.0, "c/seed-0": 10.0}
    folders = [write_run(n, [{**make_metric_row(1), "time": t}]) for n, t in begun.items()]
    methods = group_runs([load_run(f) for f in folders])
    assert [(m.style, m.label) for m in with_styles(methods)] == [(2, "a"), (1, "b"), (0, "c")]


def test_every_built_in_method_has_a_colour_and_the_style_sheet_has_the_same_ones():
    recipes = [name.removeprefix("methods/") for name in built_in_recipes() if name.startswith("methods/")]
    assert sorted(METHODS) == sorted(recipes)
    assert len({line_of(style)["color"] for style in range(len(COLOURS))}) == len(COLOURS)
    light = (files("luffy.report") / "assets" / "components.css").read_text().partition("}")[0]
    assert all(f"--m{i}: {colour};" in light for i, colour in enumerate(COLOURS))


def test_a_method_has_its_colour_whatever_is_beside_it(write_run, make_metric_row):
    def run(recipe, name, begun, **changes):
        config = {**to_dict(load_config(f"methods/{recipe}")), "name": name, "seed": 0, **changes}
        return write_run(name, [{**make_metric_row(1), "time": begun}], config)

    def styles(*folders):
        return {m.label: m.style for m in with_styles(group_runs([load_run(f) for f in folders]))}

    on_policy, luffy = run("on_policy", "on-policy", 10.0), run("luffy", "luffy", 20.0)
    faster = run("luffy", "faster", 30.0, optim={"lr": 0.5})
    assert styles(luffy) == {"luffy": 0} and styles(on_policy) == {"on-policy": 1}
    assert styles(on_policy, luffy) == {"luffy": 0, "on-policy": 1}
    # the second of a kind takes a colour that no other method here has as its own
    assert styles(faster, on_policy, luffy) == {"luffy": 0, "on-policy": 1, "faster": 2}
    assert styles(faster) == {"faster": 0}


def test_named_folders_stay_apart_though_their_config_is_the_same(write_run, make_metric_row):
    folders = [write_run(n, [make_metric_row(1)]) for n in ("old/seed-0", "new/seed-0")]
    assert seeds_by_method(folders) == {"old": [0], "new": [0]}


def test_the_same_label_gets_the_differing_keys(write_run, make_metric_row):
    folders = [
        write_run(f"{p}/luffy/seed-0", [make_metric_row(1)], {"optim": {"lr": lr}})
        for p, lr in (("a", 0.1), ("b", 0.2))
    ]
    assert seeds_by_method(folders) == {"a/luffy": [0], "b/luffy": [0]}
    folders = [write_run(f"luffy/seed-{k}", [make_metric_row(1)], {"optim": {"lr": 0.1 + k}}) for k in (0, 1)]
    assert seeds_by_method(folders) == {"luffy (lr=0.1)": [0], "luffy (lr=1.1)": [1]}


def test_sft_and_rl_of_one_recipe_are_two_methods(write_run, make_metric_row):
    folders = [
        write_run("a", [make_metric_row(1)], {"name": "x"}),
        write_run("b", [{"step": 1, "actor/sft_loss": 1.0}], {"name": "x"}),
    ]
    assert seeds_by_method(folders) == {"a": [0], "b": [0]}


def test_a_path_with_the_runs_own_seed_is_no_difference(write_run, make_metric_row):
    folders = [
        write_run(f"m/seed-{k}", [make_metric_row(1)], {"data": {"train": f"data/seed-{k}/train.jsonl"}})
        for k in (1, 12)
    ]
    assert seeds_by_method(folders) == {"m": [1, 12]}


def test_a_key_that_an_older_version_did_not_write_is_no_difference(write_run, make_metric_row):
    folders = [
        write_run("m/seed-0", [make_metric_row(1)]),
        write_run("m/seed-1", [make_metric_row(1)], {"optim": {"lr": 1e-6}}),
    ]
    assert seeds_by_method(folders) == {"m": [0, 1]}


def test_differing_keys_and_repeated_seeds(write_run, make_metric_row):
    rows = [make_metric_row(1)]
    folders = [
        write_run("m-s0", rows, {"seed": 0}),
        write_run("m-seed0", rows, {"seed": 0}),
        write_run("n/seed-0", rows, {"rollout": {"n": 4}}),
    ]
    m, n = group_runs([load_run(f) for f in folders])
    assert differing_keys([m, n]) == ["rollout.n"]
    assert m.repeated_seeds == [0]
    assert n.repeated_seeds == []


def test_hidden_characters_in_a_name_are_written_out(write_run, make_metric_row):
    assert list(seeds_by_method([write_run("a\u202eb", [make_metric_row(1)], {"name": "a\u202eb"})])) == ["aU+202Eb"]
