"""Problems of reasoning-gym as data. With the package: make test-reasoning-gym."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from luffy.data import load_problems
from luffy.data.reasoning_gym import ANY_ANSWER, _row, _tagged, is_generated
from luffy.data.sources import open_source
from luffy.errors import DataError, UserError
from luffy.rewards.reasoning_gym import _untagged

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


def with_package(test):
    """Each starts processes that import the package, for seconds."""
    return pytest.mark.slow(pytest.mark.skipif(not INSTALLED, reason="make test-reasoning-gym installs it")(test))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUFFY_CACHE", str(folder))
        yield folder


def questions(path, split="train"):
    return [problem.prompt for problem in load_problems(path, split)]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("size=10", "write reasoning_gym:FAMILY:size=1000:seed=0:SETTING=VALUE"),
        ("../x", "write reasoning_gym:FAMILY"),
        ("countdown:size", "write reasoning_gym:FAMILY"),
        ("countdown:size=0", "size must be a whole number of at least 1, got 0"),
        ("countdown:seed=one", "seed must be a whole number of at least 0, got 'one'"),
        ("countdown:size=" + "many" * 1000, "size must be a whole number of at least 1, got 'many"),
        ("countdown:" + "name" * 1000 + "=[4", "'[4' is no YAML value of 'name"),
        ("countdown:max_numbers=[4", "'[4' is no YAML value of 'max_numbers'"),
        # Both would take minutes to read.
        ("countdown:x=1" + ":59" * 200_000, "is no YAML value of 'x'"),
        (f"countdown:x=[&a {{k: 1}}, {{<<: [{', '.join(['*a'] * 20_000)}]}}]", "is no YAML value of 'x'"),
    ],
)
def test_a_query_that_says_nothing_is_refused_before_anything_is_made(query, said):
    with pytest.raises(DataError) as error:
        open_source(f"reasoning_gym:{query}")
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.skipif(INSTALLED, reason="the package is installed")
def test_without_the_package_the_error_says_how_to_install_it():
    with pytest.raises(UserError, match=r"reasoning_gym:countdown needs the package reasoning-gym: pip install '\.\[r"):
        open_source("reasoning_gym:countdown")


def test_entries_survive_json_with_tuples_and_keys_of_other_kinds():
    entry = {"a": (1, [2, (3,)]), "b": {0: "x", (1, 2): {"c": 0.1}}, "d": None}
    assert json.loads(json.dumps(_tagged(entry)), object_hook=_untagged) == entry
    assert is_generated("reasoning_gym:countdown") and not is_generated("countdown.jsonl")


@pytest.mark.parametrize(("answer", "shown"), [(None, ANY_ANSWER), ("", ANY_ANSWER), (0, "0"), ("7", "7")])
def test_an_answer_of_zero_is_one(answer, shown):
    assert _row({"family": "f", "config": {}}, {"question": "q", "answer": answer})["answer"] == shown


@with_package
def test_rows_by_index_are_problems_of_the_family_with_its_settings():
    source = open_source("reasoning_gym:spell_backward:size=12:seed=3:min_word_len=4:max_word_len=4")
    assert len(source) == 12 and [source[i] for i in (11, 0, 5)] == [list(source)[i] for i in (11, 0, 5)]
    for row in source:
        entry = json.loads(row["entry"])
        assert row["prompt"].startswith("Spell this word backward") and len(row["answer"]) == 4
        assert entry["config"] == {"min_word_len": 4, "max_word_len": 4}
        assert entry["metadata"]["word"][::-1] == row["answer"]


@with_package
def test_training_and_held_out_problems_share_no_question_whatever_the_seeds():
    """Few questions are possible, so other seeds meet the same ones."""
    path = "reasoning_gym:count_bits:size=60:min_n=1:max_n=400:seed="
    train = [set(questions(f"{path}{seed}")) for seed in (0, 1)]
    held_out = [set(questions(f"{path}{seed}", split)) for seed, split in ((0, "test"), (1, "validation"))]
    assert [len(part) for part in train + held_out] == [60] * 4
    assert train[0] != train[1] and train[0] & train[1] and held_out[0] & held_out[1]
    assert not (train[0] | train[1]) & (held_out[0] | held_out[1])


@with_package
def test_made_again_the_file_is_the_same_even_where_a_family_reads_the_hash_seed(cache):
    path = "reasoning_gym:isomorphic_strings:size=8"
    first = open_source(path)
    again = open_source(path)
    assert again.path == first.path
    Path(first.path).unlink()
    assert open_source(path).fingerprint == first.fingerprint


@with_package
def test_families_and_files_mix_and_ids_differ(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "2+3=?", "answer": "5"}\n')
    paths = [f"reasoning_gym:spell_backward:size=5{more}" for more in ("", ":seed=1", ":max_word_len=4")]
    before = np.random.get_state()[1].tolist()
    problems = load_problems([*paths, "reasoning_gym:pool_matrix:size=3", "reasoning_gym:rubiks_cube:size=2", str(own)])
    assert len({problem.id for problem in problems}) == len(problems) == 21
    assert problems[18].answer == "(any that scores 1)"  # the family only judges
    assert problems[20].source == "" and problems[0].source == "reasoning_gym:spell_backward"
    assert np.random.get_state()[1].tolist() == before  # pool_matrix seeds numpy


@with_package
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("countdwn", "reasoning_gym:countdwn: no family 'countdwn' in reasoning-gym; the nearest of 105: countdown, "),
        ("composite", "no family 'composite'"),
        ("countdown:min_number=3", "countdown has no setting 'min_number'; it has min_numbers, max_numbers, "),
        ("countdown:min_numbers=9", "countdown refuses its settings: max_numbers must be >= min_numbers"),
        ("coin_flip:size=900:max_trials=4", "different problems; lower size, or widen the settings"),
    ],
)
def test_what_the_package_refuses_is_an_error_of_one_line(query, said):
    with pytest.raises(DataError) as error:
        open_source(f"reasoning_gym:{query}")
    assert said in str(error.value) and "\n" not in str(error.value)
