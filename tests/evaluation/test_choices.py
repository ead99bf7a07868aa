"""Options: read, shuffled by seed, relabelled; the gold goes where its option goes."""

import pytest

from luffy.errors import DataError
from luffy.evaluation.benchmarks import LETTERS, Choices, arranged, read_choices, shuffled
from luffy.types import Problem

QUESTION = "Which is a fruit?\n\nA) stone\nB) apple\nC) chair\nD) cloud\n"


def test_reading():
    choices = read_choices(QUESTION, "B", "row 1")
    assert choices == Choices("Which is a fruit?\n\n", ("stone", "apple", "chair", "cloud"), 1)
    assert choices.text() == QUESTION


@pytest.mark.parametrize("text", ["Q\nA. x\nB. y", "Q\n(A) x\n(B) y", "Q\nA: x\nB: y", "Q\n1) x\n2) y"])
def test_other_ways_to_write_options(text):
    gold = "2" if "2" in text else "B"
    assert read_choices(text, gold, "row") == Choices("Q\n", ("x", "y"), 1)


def test_an_option_over_several_lines_and_letters_in_the_question():
    text = "Take\nA) first\nB) second\nof the following:\nA) x\nmore of x\nB) y\nC) z"
    choices = read_choices(text, "C", "row")
    assert choices.options == ("x\nmore of x", "y", "z") and choices.gold == 2
    assert choices.stem.startswith("Take\nA) first")


def test_numbered_lines_inside_lettered_options_are_text():
    text = "Which route?\n\nA) 1. Br2, light\n2. NaOH\nB) 1. HCl\n2. Cl2/hv\n3. heat\nC) none\nD) 1. O3\n2. Zn"
    choices = read_choices(text, "C", "row")
    assert choices.options == ("1. Br2, light\n2. NaOH", "1. HCl\n2. Cl2/hv\n3. heat", "none", "1. O3\n2. Zn")
    assert choices.gold == 2 and choices.stem == "Which route?\n\n"


def test_numbered_steps_on_lines_of_their_own_inside_options():
    text = "Which route?\nA)\tfirst:\n1. Br2\n2. NaOH\nB) second:\n1. HCl\n2. Cl2/hv"
    choices = read_choices(text, "B", "row")
    assert choices.options == ("first:\n1. Br2\n2. NaOH", "second:\n1. HCl\n2. Cl2/hv") and choices.gold == 1


def test_a_letter_out_of_turn_inside_an_option_is_text():
    choices = read_choices("Which?\nA) yeast\nB) a germ:\nE. coli\nC) moss\nD) none", "C", "row")
    assert choices.options == ("yeast", "a germ:\nE. coli", "moss", "none") and choices.gold == 2


def test_numbered_options_of_a_question_with_a_single_lettered_line():
    choices = read_choices("Take\nA) the map.\nWhere?\n1) north\n2) south", "2", "row")
    assert choices.options == ("north", "south") and choices.gold == 1


@pytest.mark.parametrize("gold", ["E", "", "apple"])
def test_a_gold_that_is_no_option(gold):
    with pytest.raises(DataError, match=r"row 7: the gold .* is none of the options A, B, C, D"):
        read_choices(QUESTION, gold, "row 7")


def test_a_question_without_options():
    with pytest.raises(DataError, match="row 7: no options found"):
        read_choices("What is 2+2?", "A", "row 7")


def test_the_gold_follows_its_option_for_every_seed():
    choices = read_choices(QUESTION, "B", "row")
    orders = set()
    for seed in range(200):
        mixed = shuffled(choices, seed)
        assert mixed.options[mixed.gold] == "apple"
        assert sorted(mixed.options) == sorted(choices.options)
        orders.add(mixed.options)
    assert len(orders) == 24  # every order comes up


def test_a_shuffled_problem_is_reproducible_and_depends_on_seed_and_id():
    problem = Problem(id="p1", prompt=QUESTION, answer="B")
    first = arranged(problem, seed=0)
    assert first == arranged(problem, seed=0)
    assert f"{first.answer}) apple" in first.prompt
    answers = {arranged(problem, seed=seed).answer for seed in range(40)}
    assert answers == set(LETTERS[:4])
    by_id = {arranged(Problem(f"p{i}", QUESTION, "B"), 0).answer for i in range(40)}
    assert by_id == set(LETTERS[:4])


@pytest.mark.parametrize("last", ["all of the above", "None of these", "Both A and B", "A and C"])
def test_options_that_speak_of_others_by_place_stay_where_they_are(last):
    choices = read_choices(QUESTION.replace("cloud", last), "D", "row")
    assert all(shuffled(choices, seed) == choices for seed in range(20))


def test_a_word_such_as_above_alone_does_not_pin_the_options():
    assert read_choices(QUESTION.replace("cloud", "a cloud above sea level"), "D", "row").movable


def test_numbered_options_become_letters():
    problem = Problem(id="p", prompt="Q\n1) x\n2) y\n", answer="2")
    mixed = arranged(problem, seed=0)
    assert mixed.answer in "AB" and f"{mixed.answer}) y" in mixed.prompt
