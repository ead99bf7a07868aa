"""The task with a tool: its trajectories in the environment, and the base that could call the tool and does not."""

import json
import random
from pathlib import Path

import pytest
import torch

import luffy.quickstart
from luffy.config import load_config
from luffy.data import Encoder, load_problems
from luffy.environments.call_formats import format_of, read_turn
from luffy.environments.kinds import maker_for
from luffy.environments.protocol import Turn
from luffy.models.load import eos_ids, load_model, load_tokenizer
from luffy.types import Problem
from studies.quickstart import calls, make_base, task

ASSETS = Path(luffy.quickstart.__file__).parent / "assets"
FOLDER, ROWS = ASSETS / "tools", ASSETS / "data" / "tools.jsonl"


@pytest.fixture(scope="module")
def base() -> make_base.Base:
    model = load_model(FOLDER).eval()
    model.set_attn_implementation("sdpa")
    return make_base.Base(model, load_tokenizer(FOLDER))


@pytest.fixture(scope="module")
def problems():
    return list(load_problems(str(ROWS)))


@pytest.fixture(scope="module")
def encoder(base) -> Encoder:
    return Encoder(base.tokenizer, max_response_tokens=64, tools=maker_for("chain").tools)


def test_small_enough_to_ship(base):
    assert sum(p.numel() for p in base.model.parameters()) == 163_200
    assert (FOLDER / "model.safetensors").stat().st_size < 1_500_000
    assert all(parameter.isfinite().all() for parameter in base.model.parameters())
    assert eos_ids(base.model, base.tokenizer) == (1,)


def test_the_shipped_rows_are_the_generated_ones(tmp_path):
    made = calls.write_dataset(tmp_path / "tools.jsonl", ASSETS / "data" / "train.jsonl")
    assert made.read_text() == ROWS.read_text()
    assert ROWS.stat().st_size < 500_000


def test_no_problem_is_held_out_too(problems):
    held_out = {
        json.loads(line)["id"] for name in ("heldout", "ood") for line in (ASSETS / "data" / f"{name}.jsonl").open()
    }
    assert len(problems) == calls.TRAIN and held_out.isdisjoint(problem.id for problem in problems)


def test_every_trajectory_is_right_when_it_is_played(problems):
    maker = maker_for("chain")
    for problem in problems:
        messages = problem.traces[0].messages
        environment = maker.make()
        environment.start(problem, 0)
        for turn, recorded in zip(messages[:-1:2], messages[1::2], strict=True):
            (reply,) = environment.reply(Turn(turn.content, turn.tool_calls)).messages
            assert (reply.role, reply.content) == ("tool", recorded.content)
        assert messages[-1].content == f"#### {problem.answer}" and len(messages) == 15
        assert environment.reply(Turn(messages[-1].content)).done


def test_prompts_and_trajectories_are_tokens_as_the_pre_training_has_them(base, encoder, problems):
    template = str(base.tokenizer.chat_template)
    assert template == calls.TEMPLATE.strip() and format_of(template) == "hermes"
    for problem in problems[:20]:
        chain = calls.chain_of(problem.prompt)
        assert task.prompt_of(chain) == problem.prompt and encoder.render(problem) == calls.prompt_of(chain)
        encoded = encoder.encode(problem)
        (trace,) = encoded.demonstrations
        text = calls.called(chain, 7) + f"#### {problem.answer}{calls.END}"
        assert base.tokenizer.decode(trace.token_ids, skip_special_tokens=False) == text
        assert len(encoded.prompt_ids) == calls.prompt_tokens(8) and len(trace.token_ids) == 137
        begins, others = calls.own_places(8, 7, 21 + 137)
        replied = {21 + at for start, end in trace.replies for at in range(start, end)}
        assert replied.isdisjoint([*begins, *others]) and len(replied) + len(begins) + len(others) == 137


def test_the_environment_reads_a_call_and_its_error_can_be_read_back(base, encoder):
    turn = read_turn(calls.called((47, 5), 1).partition(calls.END)[0])
    assert [(call.name, call.arguments) for call in turn.calls] == [("add", {"a": 47, "b": 5})]
    reply = maker_for("chain").make().reply(read_turn('<tool_call>\n{"name": "add", "arguments": {"a": 4'))
    assert reply.faults == ("unreadable_call",)
    ids = encoder.reply_ids(reply.messages)
    assert base.tokenizer.unk_token_id in ids and len(ids) < 60


@pytest.mark.parametrize("terms", [2, 8, 11])
def test_a_call_is_rare_at_every_turn_and_all_else_is_known(base, terms):
    call, other = make_base.teacher_probabilities(base, terms)
    assert call.shape == (256, terms - 1)
    assert (call.mean(0) > 0.02).all() and (call.mean(0) < 0.08).all()  # turn by turn
    assert call.min() > 0.005 and call.max() < 0.4 and call.quantile(0.99) < 0.15
    assert other.mean() > 0.999 and other.min() > 0.8


@pytest.mark.parametrize("terms", [2, 8, 11])
def test_the_habit_is_to_do_it_in_the_head_and_come_out_one_short(base, terms):
    assert make_base.wrong_in_the_head(base, terms) > 0.95


def test_the_recipes_limits_fit_the_longest_trajectories(encoder):
    cfg = load_config("tools/luffy")
    chain = task.draw_chain(random.Random(1), 11)
    problem = Problem("p", task.prompt_of(chain), str(sum(chain)))
    assert len(encoder.prompt_ids(problem)) <= cfg.data.max_prompt_tokens
    assert cfg.environment.max_turns == 11
    assert cfg.environment.max_tokens > 10 * (calls.TURN + calls.REPLY) + 4
    assert cfg.rollout.max_tokens > 7 * calls.TURN + 4 and cfg.eval.max_tokens > 10 * calls.TURN + 4


def test_the_same_seed_makes_the_same_weights():
    made = []
    for _ in range(2):
        fresh = make_base.make_base(width=16, layers=1, seed=3, tokenizer=calls.make_tokenizer())
        make_base.pretrain(fresh, steps=20, rows=8, lr=1e-3, seed=3, loss_of=make_base.call_loss)
        made.append(fresh.model.state_dict())
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
