"""The scorers of reasoning-gym as a reward. With the package: make test-reasoning-gym."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from trainings import train

from luffy.config import load_config
from luffy.config.knobs import RewardConfig
from luffy.data import load_problems
from luffy.errors import UserError
from luffy.evaluation.benchmarks import label_of, load_suite
from luffy.rewards import build_verifier
from luffy.rewards.reasoning_gym import answer_in
from luffy.run_folder.recorder import read_json_lines
from luffy.schema import build

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


def of_the_reward(test):
    """Each starts processes that import the package, for seconds."""
    return pytest.mark.slow(pytest.mark.skipif(not INSTALLED, reason="make test-reasoning-gym installs it")(test))


PAGE = Path(__file__).parents[2] / "docs" / "reasoning-gym.md"
SLOW = {"sokoban", "knight_swap", "futoshiki", "zebra_puzzles", "intermediate_integration", "sudoku", "puzzle24"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUFFY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def verifier():
    with build_verifier("reasoning_gym", workers=1) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("response", "marked", "tag", "box", "whole"),
    [
        ("so <answer> a b </answer>.", "a b", "a b", None, "so <answer> a b </answer>."),
        (r"so \boxed{c}", "c", None, "c", r"so \boxed{c}"),
        (r"<answer>a</answer> \boxed{c}", "c", "a", "c", r"<answer>a</answer> \boxed{c}"),
        (r"\boxed{c} <answer>a</answer>", "a", "a", "c", r"\boxed{c} <answer>a</answer>"),
        (r"<answer>\boxed{c}</answer>", "c", r"\boxed{c}", "c", r"<answer>\boxed{c}</answer>"),
        ("<answer>a</answer> <answer>b\nc</answer>", "b\nc", "b\nc", None, "<answer>a</answer> <answer>b\nc</answer>"),
        ("<answer>a", None, None, None, "<answer>a"),
        ("a</answer>", None, None, None, "a</answer>"),
        ("  ", None, None, None, None),
    ],
)
def test_where_the_answer_is_read(response, marked, tag, box, whole):
    assert [answer_in(response, read) for read in ("marked", "tag", "box", "whole")] == [marked, tag, box, whole]


@pytest.mark.skipif(INSTALLED, reason="the package is installed")
def test_without_the_package_the_reward_says_how_to_install_it():
    with pytest.raises(UserError, match=r"the reward reasoning_gym needs its package: pip install '\.\[reasoning_gym"):
        build_verifier("reasoning_gym", workers=1)


@of_the_reward
def test_the_familys_own_scorer_judges(verifier):
    # a gold answer, tuples in the entry, a setting that the scorer reads, and no gold answer at all
    families = ["spell_backward", "rearc", "decimal_arithmetic:max_num_decimal_places=4", "rubiks_cube"]
    spell, arc, decimal, cube = load_problems([f"reasoning_gym:{family}:size=1" for family in families])
    gold = verifier.score([(problem, f"<answer>{problem.answer}</answer>") for problem in (spell, arc, decimal)])
    assert [(score.value, score.status) for score in gold] == [(1.0, "ok")] * 3
    moves = json.loads(cube.meta["entry"])["metadata"]["example_correct_answer"]
    word = spell.answer
    texts = [(cube, f"<answer>{moves}</answer>"), (spell, f"<think><answer>{word}</answer></think> no"), (spell, "no")]
    assert [(score.value, score.status) for score in verifier.score(texts)] == [
        (1.0, "ok"), (0.0, "no_answer"), (0.0, "no_answer"),
    ]  # fmt: skip
    (partly,) = verifier.score([(spell, f"<answer>{word[:-1]}?</answer>")])
    assert 0 < partly.value < 1


@of_the_reward
def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_a_bad_entry_is_an_error(verifier):
    problem = load_problems("reasoning_gym:prime_factorization:size=1")[0]
    entry = json.loads(problem.meta["entry"])
    broken = replace(problem, meta={"entry": json.dumps({**entry, "answer": "two"})})
    without = replace(problem, meta={})
    answer = "<answer>two</answer>"
    scores = verifier.score([(problem, answer), (broken, answer), (without, answer)])
    assert [(score.value, score.status) for score in scores] == [(0.0, "ok"), (0.0, "error"), (0.0, "error")]
    assert "column 'entry'" in scores[2].reason


@of_the_reward
def test_settings_and_sums():
    problem = load_problems("reasoning_gym:spell_backward:size=1")[0]
    reward = build(RewardConfig, {"kind": {"name": "reasoning_gym", "read": "whole"}, "workers": 1})
    with reward.verifier() as whole:
        assert whole.may_score_early
        assert [s.value for s in whole.score([(problem, f"<think>x</think>\n{problem.answer}\n")])] == [1.0]
    with build_verifier(weights={"reasoning_gym": 1.0, "format": 0.5}, workers=1) as both:
        assert [s.value for s in both.score([(problem, f"<answer>{problem.answer}</answer>")])] == [1.0]


@of_the_reward
def test_a_suite_holds_the_held_out_problems():
    path = "reasoning_gym:spell_backward:size=7"
    suite = load_suite(path)
    assert [(b.name, b.reward, len(b.problems)) for b in suite.benchmarks] == [("spell_backward", "reasoning_gym", 7)]
    assert [p.prompt for p in suite.benchmarks[0].problems] == [p.prompt for p in load_problems(path, "test")]
    assert label_of(path) == "spell_backward" and label_of("data/my.jsonl") == "my"


@of_the_reward
def test_the_example_of_the_page_trains_and_resumes(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2048}))
    recipe = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    recipe = yaml.safe_load(recipe.replace("size=2000", "size=6").replace("size=1000", "size=6").replace("=200", "=4"))
    small = {
        "out": str(tmp_path), "name": "gym", "model.path": str(model), "model.device": "cpu", "data.style": "plain",
        "data.system_prompt": None, "rollout.n": 2, "rollout.max_tokens": 8, "batch.problems": 4,
        "batch.mini_batch": None, "reward.workers": 1, "record.samples_every": 1, "record.tensorboard": False,
        "train.threads": 1, "eval.every": 1,
    }  # fmt: skip
    for steps in (1, 2):  # the second resumes
        cfg = load_config(recipe, {**small, "train.steps": steps})
        train(cfg)
    rows = read_json_lines(cfg.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "critic/rewards/mean" in row] == [1, 2]
    assert all(row.get("batch/verifier_failures", 0) == 0 for row in rows)
    assert any(key.startswith("val-core/") for row in rows for key in row)


@pytest.mark.timeout(1800)  # a process for each family
@of_the_reward
def test_every_family_accepts_its_own_answers(verifier):
    from reasoning_gym.factory import DATASETS

    wrong = []
    for family in sorted(DATASETS.keys() - SLOW - {"composite"}):
        problems = list(load_problems(f"reasoning_gym:{family}:size=3"))
        known = [problem for problem in problems if json.loads(problem.meta["entry"])["answer"]]
        scores = verifier.score([(problem, f"<answer>{problem.answer}</answer>") for problem in known])
        if not all((score.value, score.status) == (1.0, "ok") for score in scores):
            wrong.append((family, scores))
    assert wrong == []
