"""Replay of the policy's own successes: who enters and leaves, which are drawn, and what a run makes of them."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from builders import make_rollout, make_task

from luffy.config.knobs import ReplayConfig
from luffy.errors import ConfigError
from luffy.step.memory import Attempt, Replay, Success, least_entropy
from luffy.train.loop import Trainer
from luffy.types import Author, EpisodeOutcome


def success(*ids, step=0):
    tokens, nowhere = torch.tensor(ids, dtype=torch.int32), torch.zeros(len(ids), dtype=torch.bool)
    return Success(tokens, torch.full((len(ids),), -0.5), step, nowhere, tokens[:0])


def begun_replay(n=4, **settings):
    replay = Replay(ReplayConfig(share=0.5, **settings), n)
    replay.begun = True
    return replay


def test_it_begins_behind_the_step_that_solves_enough():
    replay = Replay(ReplayConfig(share=0.5, start=0.35), n=4)
    few = [Attempt(0, 4, (success(1),)), Attempt(1, 4, (success(2),)), Attempt(2, 4)]
    replay.remember(few)
    assert not replay.begun
    replay.remember([*few[:2], Attempt(2, 4, (success(3), success(4), success(5)))])  # 5 of 12
    assert replay.begun and len(replay) == 0
    replay.remember(few)
    assert {row: r.solved for row, r in replay.problems.items()} == {0: 1, 1: 1}


def test_a_problem_enters_with_some_solved_and_retires_with_all():
    replay = begun_replay()
    replay.remember([Attempt(0, 4), Attempt(1, 4, (success(1),)), Attempt(2, 4, tuple(success(i) for i in range(4)))])
    assert list(replay.problems) == [1] and replay.retired == {2}
    replay.remember([Attempt(1, 3, replayed=True), Attempt(2, 4, (success(9),))])  # of 3 fresh and 1 replayed
    assert replay.problems[1].solved == 1 and 2 not in replay.problems
    replay.remember([Attempt(1, 3, (success(1), success(7)), replayed=True)])
    assert [s.token_ids.item() for s in replay.problems[1].successes] == [1, 7] and replay.problems[1].solved == 3
    replay.remember([Attempt(1, 4)])  # from the data: all failed, and it stays as it was
    assert replay.problems[1].solved == 3
    replay.remember([Attempt(1, 3, (success(3), success(4), success(5)), replayed=True)])
    assert len(replay) == 0 and replay.retired == {1, 2}


def test_it_forgets_what_was_solved_longest_ago():
    replay = begun_replay(problems=2, responses=2)
    replay.remember([Attempt(row, 4, (success(row),)) for row in (5, 3)])
    replay.remember([Attempt(5, 4, (success(6), success(7)))])
    replay.remember([Attempt(8, 4, (success(8),))])
    assert list(replay.problems) == [5, 8]
    assert [s.token_ids.item() for s in replay.problems[5].successes] == [6, 7]


def test_buckets_are_drawn_by_the_normal_weight_of_their_count():
    replay = begun_replay(n=8)
    for k in (2, 4, 5):
        for copy in range(3):  # more problems in a bucket do not make it likelier
            responses = tuple(success(i) for i in range(k))
            replay.remember([Attempt(10 * k + copy, 8, responses)] if copy < k - 2 or k == 2 else [])
    weights = {2: math.exp(-2), 4: 1.0, 5: math.exp(-0.5)}
    drawn = Counter(replay.draw(1, str(seed))[0] // 10 for seed in range(5_000))
    for k, weight in weights.items():
        assert drawn[k] / 5_000 == pytest.approx(weight / sum(weights.values()), abs=0.02)
    every = replay.draw(100, "all")
    assert sorted(every) == sorted(replay.problems) and replay.draw(3, "a") == replay.draw(3, "a")


def test_the_response_of_least_mean_entropy_is_replayed():
    three = [success(1), success(2, 3, 4), success(5)]
    entropies = [torch.tensor([0.5]), torch.tensor([0.4, 0.4, 0.4]), torch.tensor([0.4])]
    assert least_entropy(three, entropies) is three[1]


def test_the_entropy_of_a_replayed_response_is_that_of_its_own_tokens():
    """A reply that the policy would not have guessed says nothing about the response."""
    talked = replace(success(1, 2, 3), replies=torch.tensor([False, True, False]))
    pair = [success(4), talked]
    assert least_entropy(pair, [torch.tensor([0.3]), torch.tensor([0.1, 9.0, 0.2])]) is talked
    assert least_entropy(pair, [torch.tensor([0.3]), torch.tensor([0.4, 0.0, 0.4])]) is pair[0]


def test_its_state_is_its_whole_state():
    replay = begun_replay()
    replay.remember([Attempt(7, 4, (success(1, 2, step=3), success(4, step=3))), Attempt(2, 4, (success(5, step=3),))])
    replay.remember([Attempt(9, 4, tuple(success(i) for i in range(4)))])
    other = Replay(replay.cfg, 4)
    other.load_state_dict(replay.state_dict())
    assert (other.begun, other.retired, list(other.problems)) == (True, {9}, [7, 2])
    for row, remembered in replay.problems.items():
        assert other.problems[row].solved == remembered.solved
        for a, b in zip(other.problems[row].successes, remembered.successes, strict=True):
            assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.log_probs, b.log_probs) and a.step == b.step
    empty = Replay(replay.cfg, 4)
    empty.load_state_dict({})
    empty.load_state_dict(Replay(replay.cfg, 4).state_dict())
    assert not empty.begun and len(empty) == 0


def test_for_a_gate_it_keeps_every_success_from_the_first_step_on():
    replay = Replay(ReplayConfig(share=0.0, responses=2), n=2)
    replay.remember([Attempt(0, 2, (success(1), success(2))), Attempt(1, 2), Attempt(2, 2, (success(3),))])
    replay.remember([Attempt(0, 2, (success(4), success(5)))])
    assert {row: [s.token_ids.item() for s in r.successes] for row, r in replay.problems.items()} == {0: [4, 5], 2: [3]}
    assert not replay.retired


def test_a_success_keeps_the_prompt_that_it_saw_and_what_the_environment_gave():
    replay, task = begun_replay(), make_task((5, 6))
    seen = make_rollout((7, 8), task=replace(task, prompt_ids=(5, 6, 9)), log_prob=-0.5)
    seen = replace(seen, outcome=EpisodeOutcome("environment", reward=0.75))
    known = (Success.of(seen, task, 3), Success.of(make_rollout((7, 8, 9), task=task), task, 4))
    replay.remember([Attempt(7, 4, known)])
    other = begun_replay()
    other.load_state_dict(replay.state_dict())
    one, two = (s.episode(task) for s in other.problems[7].successes)
    assert one.task.prompt_ids == (5, 6, 9) and one.outcome.reward == 0.75 and one.finish == "trace"
    assert one.authors.tolist() == [Author.REPLAY] * 2 and one.behavior_log_probs.tolist() == [-0.5] * 2
    assert two.task == task and two.outcome is None and two.token_ids.tolist() == [7, 8, 9]


def test_a_success_keeps_which_tokens_an_environment_wrote():
    replay, task, env = begun_replay(), make_task(), Author.ENVIRONMENT
    talked = replace(make_rollout(5, task=task), authors=torch.tensor([0, 0, env, env, 0], dtype=torch.int8))
    replay.remember([Attempt(7, 4, (Success.of(talked, task, 3), Success.of(make_rollout(3, task=task), task, 4)))])
    other = begun_replay()
    other.load_state_dict(replay.state_dict())
    own = Author.REPLAY
    for kept in (replay, other):
        one, two = (s.episode(task) for s in kept.problems[7].successes)
        assert one.authors.tolist() == [own, own, env, env, own] and one.trace.replies == ((2, 4),)
        assert two.authors.tolist() == [own] * 3 and two.trace.replies == ()


def replay_config(make_config, name="run", steps=5, **changes):
    settings = {
        "reward": {"kind": "loop_rewards:length_parity"},
        "guidance": {"n_prefix": 0},
        "replay": {"share": 0.5},
        "algorithm": {"off_policy_reshape": "exgrpo"},
        "train": {"steps": steps, "save_every": 2},
        "record": {"samples": 6, "samples_every": 1},
    }
    return make_config(name=name, **(settings | changes))


def test_a_replayed_response_is_an_earlier_one_with_its_log_probs(make_config):
    """A group of it and three fresh ones; their rewards make its advantage, the log-probs it was drawn with
    its q, and the update weighs its tokens by gamma r / (r + gamma)^2, r = p / q."""
    drawn, sizes, clips, compared = {}, [], [], 0
    with Trainer(replay_config(make_config)) as trainer:
        for step in range(4):
            batch = trainer.step()
            clips.append(not trainer.run.policy.objective.policy_loss.remove_clip)
            sizes.append({name: batch.metrics[f"method/replay_{name}"].value for name in ("share", "size", "age")})
            replayed = 0
            for i, group in (batch.groups | batch.rejected).items():
                assert len(group.rollouts) == 4
                for j, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
                    key = group.task.problem.id, tuple(rollout.token_ids.tolist())
                    if rollout.is_on_policy:
                        drawn.setdefault(key, (rollout.behavior_log_probs, step))
                        continue
                    replayed += 1
                    q, earlier = drawn[key]
                    assert j == 3 and score.value == 1.0 and rollout.off_policy.all() and earlier < step
                    assert torch.equal(rollout.behavior_log_probs, q)
                    if i in batch.samples:
                        sample, rewards = batch.samples[i][j], [s.value for s in group.scores]
                        assert sample.off_policy.all() and torch.equal(sample.behavior_log_probs, q)
                        assert sample.advantages.tolist() == pytest.approx([1 - sum(rewards) / 4] * len(q))
                        (view,) = trainer.run.policy.token_views([sample])
                        p, ratio = view.log_probs.exp(), (view.log_probs - q).exp()
                        weight = 0.1 * ratio / (ratio + 0.1) ** 2  # and (1 - p) from log p to its own logit
                        torch.testing.assert_close(view.gradient_weights, weight * (1 - p), rtol=1e-4, atol=1e-6)
                        compared += 1
            assert replayed == 6 * sizes[-1]["share"]
    assert [s["share"] for s in sizes] == [0, 0, 0.5, 0.5] and [s["size"] for s in sizes][:2] == [0, 0]
    assert sizes[2]["size"] > 0 and sizes[2]["age"] == 1.0 and sizes[3]["age"] >= 1.0
    assert compared > 0
    assert clips == [True, False, False, False]


def test_what_replay_cannot_do_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'replay\.share' \(0\.5\)"):
        replay_config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match=r"'replay\.share'.*raise rollout\.n"):
        replay_config(make_config, rollout={"n": 1})
