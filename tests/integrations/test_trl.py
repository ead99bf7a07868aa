"""LuffyGRPOTrainer in the installed TRL, on a CPU: real steps, and on the same batch luffy's own update."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: make test-integrations")

from builders import make_model, make_tokenizer
from children import in_children
from datasets import Dataset
from transformers import HfArgumentParser, TrainerCallback
from trl import GRPOConfig

from luffy.config import PACKAGE, load_config
from luffy.errors import ConfigError, DataError
from luffy.integrations.trl import LuffyGRPOConfig, LuffyGRPOTrainer
from luffy.learn.optim import Optimizer
from luffy.learn.policy import Policy
from luffy.models.load import load_model
from luffy.types import Author, Sample
from studies.quickstart.task import row_of

BASE = str(PACKAGE / "quickstart/assets/base")
SHORT, LONG = row_of((47, 5, -3)), row_of((61, 7, 9, 5, -8, 7))
VARIANTS = {
    "luffy": {},
    "luffy_clip": {"remove_clip": False},
    "mixed": {"remove_clip": False, "off_policy_reshape": "no_reshape"},
}


def share_right(completions, traces, **_):
    """The share of a trace's pieces that the completion has in the same place: between 0 and 1, and 1 for the trace."""
    pairs = [(text.split(), trace[0].split()) for text, trace in zip(completions, traces, strict=True)]
    return [sum(a == b for a, b in zip(own, right, strict=False)) / len(right) for own, right in pairs]


def settings(tmp_path, **changes):
    values = {
        "output_dir": str(tmp_path), "num_generations": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_completion_length": 40, "temperature": 3.0, "max_steps": 1,
        "learning_rate": 0.003, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 7,
    }  # fmt: skip
    return LuffyGRPOConfig(**{**values, **changes})


def make_trainer(tmp_path, rows=(SHORT, LONG), reward=share_right, model=BASE, **changes):
    return LuffyGRPOTrainer(model, reward, settings(tmp_path, **changes), Dataset.from_list(list(rows)))


class Steps(TrainerCallback):
    """Weights before, and gradients at, every optimizer step."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_step_begin(self, args, state, control, model=None, **_):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def samples_of_trl(trainer):
    """What TRL trained on last, as luffy's trainer takes it."""
    samples = []
    for batch in trainer._buffered_inputs:
        for i, mask in enumerate(batch["completion_mask"].bool()):
            n = int(mask.sum())
            of_row = lambda name, n=n, i=i, batch=batch: batch[name][i, :n] if name in batch else None  # noqa: E731
            off = batch["off_policy"][i].expand(n)
            behavior = of_row("sampling_per_token_logps")
            samples.append(
                Sample(
                    tuple(batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()),
                    of_row("completion_ids"),
                    off.to(torch.int8) * Author.TEACHER,
                    torch.ones(n),
                    torch.zeros(n),
                    batch["advantages"][i].expand(n),
                    torch.zeros(n) if behavior is None else behavior.masked_fill(off, 0.0),
                    torch.full((n,), torch.nan),
                    old_log_probs=of_row("old_per_token_logps"),
                    ref_log_probs=of_row("ref_per_token_logps"),
                )  # fmt: skip
            )
    return samples


class RecordingOptimizer(Optimizer):
    def step(self, lr, grad_norm):
        self.recorded = {name: p.grad.clone() for name, p in self.parameters.items()}


def own_update_of_method(method, weights, samples, **algorithm):
    """Loss, gradients and metrics of luffy's own update, in micro-batches of another size than TRL's."""
    knobs = {f"algorithm.{name}": value for name, value in algorithm.items()}
    cfg = load_config(
        f"tiny/{method}", {"rollout.max_tokens": 40, "rollout.temperature": 3.0, "batch.tokens": 100, **knobs}
    )
    model = load_model(BASE)
    model.load_state_dict(weights, strict=False)
    policy = Policy(model, cfg)
    optimizer = RecordingOptimizer(model, cfg.optim)
    metrics = {name: metric.value for name, metric in policy.update(samples, 0.0, optimizer).items()}
    return metrics["actor/loss"], optimizer.recorded, metrics


def assert_same_update(trainer, steps, loss, gradients):
    assert trainer.state.log_history[len(steps.gradients) - 1]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert gradients.keys() == steps.gradients[-1].keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(steps.gradients[-1][name], gradient, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("method", "loss_type", "reduction"),
    [
        ("luffy", "dr_grpo", "seq-mean-token-sum-norm"),
        ("luffy_clip", "grpo", "seq-mean-token-mean"),
        ("mixed", "dapo", "token-mean"),
    ],
)
def test_loss_and_gradients_are_those_of_luffys_own_trainer(tmp_path, method, loss_type, reduction):
    """The second step on the same samples: ratios differ from 1, some are clipped; two micro-batches a step."""
    changes = {"loss_type": loss_type, "num_iterations": 2, "max_steps": 2, "beta": 0.02, "entropy_coef": 0.01}
    trainer = make_trainer(tmp_path, **changes, **VARIANTS[method])
    trainer.add_callback(steps := Steps())
    trainer.train()
    samples = samples_of_trl(trainer)
    assert len(trainer._buffered_inputs) == 2 and len({s.token_ids.numel() for s in samples}) > 2
    assert len({len(s.prompt_ids) for s in samples}) == 2
    assert sum(bool(s.off_policy.all()) for s in samples) == 2
    loss, gradients, metrics = own_update_of_method(
        method, steps.weights[1], samples, loss_reduction=reduction, kl_coef=0.02, entropy_coef=0.01
    )
    assert (metrics["actor/pg_clipfrac"] > 0) == (method != "luffy")
    assert metrics["actor/kl_loss"] > 0
    assert_same_update(trainer, steps, loss, gradients)


def test_first_step_and_more_micro_batches(tmp_path):
    """One update a batch: nothing but the micro-batches differs, and the loss does not depend on them."""
    losses = []
    for size, parts in [(8, 1), (2, 4)]:
        trainer = make_trainer(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=parts)
        trainer.add_callback(steps := Steps())
        trainer.train()
        loss, gradients, _ = own_update_of_method(
            "luffy", steps.weights[0], samples_of_trl(trainer), entropy_coef=0.001
        )
        assert_same_update(trainer, steps, loss, gradients)
        losses.append(loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_generation_batch_of_two_steps(tmp_path):
    """With dr_grpo each optimizer step has the denominator of its own half."""
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=1, steps_per_generation=2, max_steps=2)
    trainer.add_callback(steps := Steps())
    trainer.train()
    loss, gradients, _ = own_update_of_method(
        "luffy", steps.weights[1], samples_of_trl(trainer)[4:], entropy_coef=0.001
    )
    assert_same_update(trainer, steps, loss, gradients)


class VllmStandIn:
    """Where TRL asks vLLM: the policy's samples with log-probs that are off by a little."""

    def __init__(self, trainer):
        self.trainer = trainer

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        assert len(prompts) % num_generations == 0 and prompts[0] == prompts[num_generations - 1]
        self.trainer.use_vllm, traces, self.trainer._traces = False, self.trainer._traces, {}
        ids, _ = self.trainer._generate_single_turn(prompts, images, {}, num_generations)
        self.trainer.use_vllm, self.trainer._traces = True, traces
        return prompts, ids, [[[-0.2 * (1 + t % 3)] for t in range(len(row))] for row in ids], None


def test_with_vllm_own_tokens_are_corrected_and_traces_are_not(tmp_path):
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    trainer = make_trainer(tmp_path, **mode)
    trainer.add_callback(steps := Steps())
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, VllmStandIn(trainer)
    trainer.train()
    ratios = torch.cat([b["importance_sampling_ratio"][b["off_policy"]].flatten() for b in trainer._buffered_inputs])
    assert ratios.numel() and (ratios == 1).all()
    correction = {"mismatch_correction": "truncated", "mismatch_cap": 2.0, "entropy_coef": 0.001}
    loss, gradients, _ = own_update_of_method("luffy", steps.weights[0], samples_of_trl(trainer), **correction)
    assert_same_update(trainer, steps, loss, gradients)


def of_prompt(trainer, prompt):
    """(advantage, is a trace, text with its end) of the samples of a prompt."""
    read = lambda ids, mask: trainer.processing_class.decode(ids[mask.bool()])  # noqa: E731
    return sorted(
        (round(float(batch["advantages"][i]), 5), bool(batch["off_policy"][i]), read(batch["completion_ids"][i], mask))
        for batch in trainer._buffered_inputs
        for i, mask in enumerate(batch["completion_mask"])
        if read(batch["prompt_ids"][i], batch["prompt_mask"][i]) == prompt
    )[::-1]


def right(completions, answer, **_):
    return [float(text.split("####")[-1].strip() == gold) for text, gold in zip(completions, answer, strict=True)]


def test_only_verified_traces_take_part_and_the_others_are_counted(tmp_path):
    rows = [
        SHORT,
        {**row_of((48, 5, -3)), "traces": ["+5=52 -3=49 #### 49"]},
        {**row_of((49, 5, -3)), "traces": ["+5=54 -3=51 #### 51 " * 4]},
        {**row_of((50, 5, -3)), "traces": []},
    ]
    trainer = make_trainer(tmp_path, rows, right, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    trainer.train()
    assert trainer.trace_counts == {"used": 1, "wrong": 1, "too_long": 1, "missing": 1}
    logged = trainer.state.log_history[0]
    assert [logged[f"traces/{name}"] for name in ("used", "wrong", "too_long", "missing")] == [1, 1, 1, 1]
    assert of_prompt(trainer, SHORT["prompt"])[0] == (0.75, True, SHORT["traces"][0] + "<eos>")
    assert [is_trace for row in rows[1:] for _, is_trace, _ in of_prompt(trainer, row["prompt"])] == [False] * 12


@pytest.mark.parametrize(
    ("changes", "trace", "own"),
    [
        ({}, 0.75, -0.25),
        ({"advantage": "grpo_split"}, 1.0, 0.0),
        ({"scale_rewards": "group"}, 1.5, -0.5),
        ({"traces_per_group": 2}, 0.5, -0.5),
    ],
)
def test_advantages_over_the_mixed_group(tmp_path, changes, trace, own):
    trainer = make_trainer(tmp_path, [SHORT], right, gradient_accumulation_steps=1, **changes)
    trainer.train()
    traces = changes.get("traces_per_group", 1)
    found = [(advantage, is_trace) for advantage, is_trace, _ in of_prompt(trainer, SHORT["prompt"])]
    expected = [(trace, True)] * traces + [(own, False)] * (4 - traces)
    assert [is_trace for _, is_trace in found] == [is_trace for _, is_trace in expected]
    assert [a for a, _ in found] == pytest.approx([a for a, _ in expected], abs=1e-4)
    assert sorted(trainer._logs["advantages"]) == pytest.approx(sorted(a for a, _ in expected), abs=1e-4)


def test_the_policy_learns_the_traces(tmp_path):
    trainer = make_trainer(tmp_path, reward=right, temperature=1.0, max_steps=5, learning_rate=5e-4)
    trainer.train()
    seen = [row["actor/off_policy_prob"] for row in trainer.state.log_history if "actor/off_policy_prob" in row]
    assert len(seen) == 5 and seen[-1] > seen[0] + 0.02


def unscored(completions, log_extra, log_metric, **_):
    log_extra("length", [len(text) for text in completions])
    log_metric("calls", 1.0)
    return [None for _ in completions]


def test_what_no_reward_function_scores_moves_nothing(tmp_path):
    trainer = make_trainer(
        tmp_path, reward=[right, unscored], reward_weights=[1.0, 0.5], min_trace_reward=1.0, log_completions=True
    )
    trainer.train()
    assert trainer.trace_counts["used"] == 2
    assert len(trainer._logs["extra"]["length"]) == 8  # the traces were scored once more, which is not on record
    alone = make_trainer(tmp_path, reward=unscored, entropy_coef=0.0)
    with pytest.warns(UserWarning, match="no trace had a reward of 1 or more"):
        alone.train()
    assert alone.trace_counts["wrong"] == 2 and alone.state.log_history[0]["grad_norm"] == 0


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"


def test_chats_with_a_completion_column(tmp_path):
    def ends_with_gold(completions, gold, **_):
        return [float(c[0]["content"].endswith(g)) for c, g in zip(completions, gold, strict=True)]

    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    said = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    rows = [
        {"prompt": said("user", "2+3="), "completion": said("assistant", "2+3=5"), "gold": "=5"},
        {"prompt": said("user", "20+30="), "completion": said("assistant", "20+30=50"), "gold": "=50"},
    ]
    args = settings(tmp_path, max_completion_length=12)
    model = make_model("llama", vocab_size=18, eos_token_id=1)
    model.generation_config.eos_token_id = 1
    data = Dataset.from_list(rows)
    trainer = LuffyGRPOTrainer(model, ends_with_gold, args, data, processing_class=tokenizer)
    trainer.train()
    assert trainer.trace_counts["used"] == 2
    assert of_prompt(trainer, "2+3=")[0][1:] == (True, "2+3=5<eos>")

    tokenizer.chat_template = TEMPLATE.replace("<eos>", "<unk>")  # a turn's end at which generation does not stop
    with pytest.raises(ConfigError, match="'<unk>', at which generation does not stop"):
        LuffyGRPOTrainer(model, ends_with_gold, args, data, processing_class=tokenizer)


def test_evaluation_has_no_traces(tmp_path):
    trainer = make_trainer(tmp_path, [SHORT], right, per_device_eval_batch_size=4)
    trainer.eval_dataset = Dataset.from_list([LONG])
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] < 1 and trainer.trace_counts == {}


def two_processes(rank, port, folder):
    """One optimizer step by two processes; the gradients, and what each of them trained on."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    rows = [SHORT, {**LONG, "traces": ["#### 1"]}]
    trainer = make_trainer(folder, rows, right, per_device_train_batch_size=2)
    trainer.add_callback(steps := Steps())
    trainer.train()
    return steps.gradients[0], samples_of_trl(trainer), dict(trainer.trace_counts), steps.weights[0]


@pytest.mark.slow
def test_two_processes_make_one_update(tmp_path):
    """Each has half of the groups; one of them has no trace that could be used."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (gradients, mine, counts, weights), (others, yours, others_counts, _) = in_children(
        two_processes, [(rank, port, tmp_path) for rank in (0, 1)]
    )
    assert counts == others_counts == {"used": 1, "wrong": 1, "too_long": 0, "missing": 0}
    assert sorted(sum(bool(s.off_policy.all()) for s in samples) for samples in (mine, yours)) == [0, 1]
    strip = lambda values: {name.removeprefix("module."): value for name, value in values.items()}  # noqa: E731
    _, own, _ = own_update_of_method("luffy", strip(weights), mine + yours, entropy_coef=0.001)
    for name, gradient in own.items():
        torch.testing.assert_close(strip(gradients)[name], gradient, rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(strip(others)[name], gradient, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "bnpo"}, "'loss_type' ('bnpo') must be one of dr_grpo, grpo, dapo"),
        ({"scale_rewards": "batch"}, "'scale_rewards' ('batch') must be one of none, group"),
        ({"advantage": "own"}, "'advantage' ('own') must be one of grpo, grpo_split"),
        (
            {"importance_sampling_level": "sequence"},
            "'importance_sampling_level' ('sequence') is not part of luffy's loss",
        ),
        ({"traces_per_group": 4}, "'traces_per_group' (4) must be 0 or more and less than 'num_generations' (4)"),
        ({"off_policy_reshape": "p_div_p_0"}, "unknown shape 'p_div_p_0'"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        settings(tmp_path, **changes)
    assert message in str(error.value)


def test_arguments_that_cannot_work_are_named(tmp_path):
    data = Dataset.from_list([{"prompt": "1+1=?", "answer": "2"}])
    with pytest.raises(ConfigError, match="args must be a LuffyGRPOConfig, got GRPOConfig"):
        LuffyGRPOTrainer(BASE, right, GRPOConfig(str(tmp_path), bf16=False, use_cpu=True), data)
    with pytest.raises(ConfigError, match="'rollout_func' makes its own samples"):
        LuffyGRPOTrainer(BASE, right, settings(tmp_path), data, rollout_func=lambda prompts, trainer: {})
    with pytest.raises(DataError, match="no column traces or trace or completion; found prompt, answer"):
        LuffyGRPOTrainer(BASE, right, settings(tmp_path), data)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text().partition("## TRL")[2]
    (source,) = re.findall(r"```python\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    exec(compile(source, "<example>", "exec"), names)
    assert names["trainer"].trace_counts == {"used": 6, "wrong": 0, "too_long": 0, "missing": 0}


def test_the_config_comes_from_a_command_line(tmp_path):
    (cfg,) = HfArgumentParser(LuffyGRPOConfig).parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            "--bf16",
            "false",
            "--use_cpu",
            "--remove_clip",
            "false",
            "--min_trace_reward",
            "0.5",
        ]
    )
    assert (cfg.remove_clip, cfg.min_trace_reward, cfg.loss_type) == (False, 0.5, "dr_grpo")
