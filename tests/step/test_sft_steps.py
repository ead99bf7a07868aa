"""ReLIFT: traces of failed problems are gathered until they make an SFT step, by an optimizer of its own."""

import pytest
import torch

from luffy.errors import ConfigError
from luffy.step.snapshot import SFT
from luffy.train.loop import Trainer


def sft_steps_config(make_config, **changes):
    settings = {
        "reward": {"kind": "loop_rewards:always_wrong"},
        "guidance": {"n_prefix": 0},
        "sft_steps": {"buffer": 3, "lr": 0.01, "grad_clip": 0.0},
    }
    return make_config(**(settings | changes))


def test_failed_problems_with_a_trace_make_an_sft_step(make_config):
    """The first Adam step is lr * g / (|g| + eps) with the gradient of the traces' mean negative log-likelihood. That
    is what is recorded, whatever factor the loss has."""
    with Trainer(sft_steps_config(make_config, algorithm={"sft_coef": 0.5})) as trainer:
        run, policy = trainer.run, trainer.run.policy
        before = {name: p.detach().clone() for name, p in policy.optimizer.parameters.items()}
        batch = trainer.step()
        failed = [g.task for g in batch.rejected.values() if g.task.demonstrations]
        assert len(batch.rejected) == 6 and len(failed) == 4  # every third problem has no trace
        (lesson,) = batch.lessons
        assert [s.token_ids.tolist() for s in lesson] == [list(t.demonstrations[0].token_ids) for t in failed[:3]]
        assert batch.metrics["method/sft_steps"].value == 1 and batch.metrics["method/sft_buffer"].value == 0
        assert [run.tasks[row].problem.id for row, _ in run.memory.lessons] == [failed[3].problem.id]
        after = {name: p.detach().clone() for name, p in policy.optimizer.parameters.items()}
        assert not policy.optimizer.adam.state and len(policy.sft_optimizer.adam.state) == len(after)

        for name, parameter in policy.optimizer.parameters.items():
            parameter.data.copy_(before[name])
        run.model.set_attn_implementation("sdpa")
        tokens = sum(s.token_ids.numel() for s in lesson)
        loss = 0.0
        for sample in lesson:
            ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids.tolist()]])
            log_probs = run.model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            loss = loss - log_probs[len(sample.prompt_ids) - 1 :].sum() / tokens
        loss.backward()
        assert batch.metrics["method/sft_step_loss"].value == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in policy.optimizer.parameters.items():
            expected = before[name] - 0.01 * parameter.grad / (parameter.grad.abs() + 1e-8)
            clear = parameter.grad.abs() > 1e-5  # where rounding does not decide the sign
            torch.testing.assert_close(after[name][clear], expected[clear], rtol=1e-4, atol=1e-5)


def test_what_is_left_over_waits_and_what_is_enough_for_several_steps_makes_them(make_config):
    with Trainer(sft_steps_config(make_config, sft_steps={"buffer": 5})) as trainer:
        waiting = 0
        for _ in range(3):
            batch = trainer.step()
            assert batch.metrics["method/sft_buffer"].value == waiting
            waiting += sum(bool(group.task.demonstrations) for group in batch.rejected.values())
            assert len(batch.lessons) == waiting // 5
            waiting %= 5
            assert len(trainer.run.memory.lessons) == waiting
        assert trainer.run.policy.sft_optimizer.cfg.lr == trainer.cfg.optim.lr
    with Trainer(sft_steps_config(make_config, name="small", sft_steps={"buffer": 1})) as trainer:
        assert trainer.step().metrics["method/sft_steps"].value == 4 and trainer.run.memory.lessons == []


def test_the_console_shows_how_many_traces_wait(make_config, capsys):
    with Trainer(sft_steps_config(make_config, sft_steps={"buffer": 30}, train={"steps": 2})) as trainer:
        trainer.train()
    first, second = (line for line in capsys.readouterr().err.splitlines() if " step " in line)
    assert "  sft buffer 0  " in first and "  sft buffer 4  " in second


def test_waiting_traces_are_left_out_where_traces_change(make_config):
    settings = {"sft_steps": {"buffer": 30}, "train": {"steps": 1, "save_every": 1}}
    settings["data"] = {"overlong_trace": "truncate"}
    with Trainer(sft_steps_config(make_config, **settings)) as trainer:
        trainer.train()
        assert len(trainer.run.memory.lessons) == 4
    settings |= {"sft_steps": {"buffer": 2}, "train": {"steps": 2, "save_every": 1}}
    for tokens, kept in ((20, 4), (11, 0)):  # traces have 12 with their end
        with Trainer(sft_steps_config(make_config, rollout={"max_tokens": tokens}, **settings)) as trainer:
            assert len(trainer.run.memory.lessons) == kept
            assert any("4 traces that waited for an SFT step" in notice for notice in trainer.notices) == (not kept)
    with Trainer(sft_steps_config(make_config, rollout={"max_tokens": 11}, **settings)) as trainer:
        trainer.train()


def test_solved_problems_leave_no_trace_and_rl_keeps_its_own_optimizer(make_config):
    with Trainer(sft_steps_config(make_config, reward={"kind": "loop_rewards:length_parity"})) as trainer:
        batch = trainer.step()
        every = [*batch.groups.values(), *batch.rejected.values()]
        failed = [g for g in every if g.task.demonstrations and not any(s.value for s in g.scores)]
        assert len(trainer.run.memory.lessons) + 3 * len(batch.lessons) == len(failed)
        assert trainer.run.policy.optimizer.adam.state
        assert "actor/sft_loss" not in batch.metrics or not batch.metrics["actor/sft_loss"].measured
        assert not [name for name, _ in trainer.run.policy.optimizer.tensors() if name.startswith(SFT)]


def test_a_bfloat16_policy_has_one_set_of_masters(make_config):
    with Trainer(sft_steps_config(make_config, model={"dtype": "bfloat16"})) as trainer:
        policy = trainer.run.policy
        assert policy.sft_optimizer.masters is policy.optimizer.masters
        before = {name: m.detach().clone() for name, m in policy.optimizer.masters.items()}
        trainer.step()
        for name, master in policy.optimizer.masters.items():
            assert not torch.equal(master, before[name])
            assert torch.equal(policy.optimizer.parameters[name], master.bfloat16())


def test_what_sft_steps_cannot_do_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"'async\.max_staleness' \(1\).*'sft_steps\.buffer' \(3\)"):
        sft_steps_config(make_config, **{"async": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match="set optim.offload=false"):
        sft_steps_config(make_config, optim={"offload": True})
    with pytest.raises(ConfigError, match="set rollout.temperature=1"):
        sft_steps_config(make_config, rollout={"temperature": 0.7})
