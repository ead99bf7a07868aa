"""The base model that ships: small, with the habit it is said to have, and a tokenizer that loses nothing."""

import random
from pathlib import Path

import pytest
import torch

import luffy.quickstart
from luffy.data import Encoder, load_problems
from luffy.models.load import eos_ids, load_model, load_tokenizer
from luffy.rewards import build_verifier
from studies.quickstart import make_base, task

FOLDER = Path(luffy.quickstart.__file__).parent / "assets" / "base"


@pytest.fixture(scope="module")
def base() -> make_base.Base:
    model = load_model(FOLDER).eval()
    model.set_attn_implementation("sdpa")  # these tests run it as transformers does, without the trainer's layout
    return make_base.Base(model, load_tokenizer(FOLDER))


def test_small_enough_to_ship(base: make_base.Base) -> None:
    assert sum(p.numel() for p in base.model.parameters()) == 161_344
    assert (FOLDER / "model.safetensors").stat().st_size < 1_500_000
    assert all(parameter.isfinite().all() for parameter in base.model.parameters())


def test_tokenizer_is_one_id_per_character_and_loses_nothing(base: make_base.Base) -> None:
    text = task.prompt_of((47, 5, -3)) + task.solution_of((47, 5, -3))
    ids = base.tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert base.tokenizer.decode(ids) == text
    assert eos_ids(base.model, base.tokenizer) == (1,)
    assert base.tokenizer.pad_token_id == 0
    with pytest.raises(Exception, match="UNK"):
        base.tokenizer("47 plus 5")


@pytest.mark.parametrize("terms", [2, 8, 11])
def test_every_right_step_is_rare_but_within_reach(base: make_base.Base, terms: int) -> None:
    right = make_base.right_step_probabilities(base, terms)
    assert right.shape == (256, terms - 1)
    assert 0.03 < right.mean() < 0.07
    assert right.min() > 0.005
    assert right.max() < 0.25


@pytest.mark.parametrize("terms", [8, 11])
def test_the_habit_is_what_greedy_decoding_shows(base: make_base.Base, terms: int) -> None:
    rng = random.Random(4)
    chains = [task.draw_chain(rng, terms) for _ in range(32)]
    ids = base.encode([task.prompt_of(chain) for chain in chains])
    made = base.model.generate(ids, max_new_tokens=task.response_tokens(terms), do_sample=False)
    texts = base.tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    habit = [task.solution_of(chain, [True] * (terms - 1)) for chain in chains]
    assert sum(text == expected for text, expected in zip(texts, habit, strict=True)) >= 30
    assert not any(text.endswith(f"#### {sum(chain)}") for text, chain in zip(texts, chains, strict=True))


def test_rows_go_through_the_data_path_and_traces_earn_the_reward(base: make_base.Base, tmp_path: Path) -> None:
    files = task.write_dataset(tmp_path, seed=0, train=20, heldout=5, ood=5)
    encoder = Encoder(base.tokenizer, style="plain", max_response_tokens=task.response_tokens(8))
    tasks = [encoder.encode(problem) for problem in load_problems(str(files["train"]))]
    with build_verifier("gsm8k") as verifier:
        for encoded in tasks:
            assert encoded is not None
            assert len(encoded.prompt_ids) == task.prompt_tokens(8)
            (trace,) = encoded.demonstrations
            assert len(trace.token_ids) == task.response_tokens(8)
            assert trace.token_ids[-1] == 1
            right = encoded.problem.traces[0].text or ""
            wrong = right[:-2] + str(int(encoded.problem.answer) - 1)
            scores = verifier.score([(encoded.problem, right), (encoded.problem, wrong)])
            assert [score.value for score in scores] == [1.0, 0.0]


def test_the_same_seed_makes_the_same_weights() -> None:
    made = []
    for _ in range(2):
        fresh = make_base.make_base(width=16, layers=1, seed=3)
        make_base.pretrain(fresh, steps=20, rows=8, lr=1e-3, seed=3)
        made.append(fresh.model.state_dict())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
