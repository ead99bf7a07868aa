"""LUFFY in TRL: a ``GRPOTrainer`` that puts verified traces into the group and trains on luffy's loss.

    from luffy.integrations.trl import LuffyGRPOConfig, LuffyGRPOTrainer

    trainer = LuffyGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=LuffyGRPOConfig(output_dir="out", num_generations=8),
        train_dataset=dataset,  # columns: prompt, trace, and what the reward function reads
    )
    trainer.train()

Everything else (generation, rewards, logging, checkpoints, several processes) is TRL's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from luffy.core.advantages import group_advantages
from luffy.core.losses import LossTerms, PolicyLoss, kl_penalty, policy_loss_terms
from luffy.core.reduce import Counts, keep, token_weights
from luffy.core.shaping import Shape
from luffy.data.encode import Encoder
from luffy.errors import ConfigError, DataError, how_to_install
from luffy.guidance.trace_choice import choose
from luffy.types import NO_LIMIT, Message, Problem, Trace

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError(f"luffy.integrations.trl needs TRL: {how_to_install('trl')}") from error

TRACE_COLUMNS = ("traces", "trace", "completion")
REDUCTIONS = {"dr_grpo": "seq-mean-token-sum-norm", "grpo": "seq-mean-token-mean", "dapo": "token-mean"}
# What TRL's own loss would do with these and luffy's does not: only the given value is accepted.
FIXED = {
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "delta": None,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_adaptive_entropy": False,
    "use_bias_correction_kl": False,
    "remove_unused_columns": False,
}


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class LuffyGRPOConfig(GRPOConfig):
    """TRL's ``GRPOConfig`` with the settings of the method. The defaults are LUFFY's; LUFFY with clip is
    ``remove_clip=False``, Mixed-Policy GRPO is that and ``off_policy_reshape="no_reshape"``.

    ``loss_type``, ``scale_rewards``, ``epsilon``, ``epsilon_high``, ``beta`` and ``entropy_coef`` keep their meaning;
    entropy and KL are summed over the tokens with the weights of the loss.
    """

    loss_type: str = _help("dr_grpo", f"denominator of the loss: {', '.join(REDUCTIONS)}")
    scale_rewards: str = _help("none", "divide advantages by the group's standard deviation: none or group")
    entropy_coef: float = _help(0.001, "weight of the entropy bonus")
    use_bias_correction_kl: bool = _help(False, "must be False: luffy's KL term is not weighted by the ratio")
    traces_per_group: int = _help(1, "how many of the num_generations samples of a prompt are traces")
    off_policy_reshape: str = _help(
        "p_div_p_0.1", "f(p) on trace tokens: p_div_p_<gamma>, no_reshape, or another shape"
    )
    remove_clip: bool = _help(True, "no clipping of the policy's own ratio; False: epsilon and epsilon_high hold")
    advantage: str = _help("grpo", "baseline of a group: all samples (grpo), or the policy's own alone (grpo_split)")
    min_trace_reward: float | None = _help(
        None, "a trace is used where its reward is at least this; None: the sum of the reward weights"
    )
    trace_column: str | None = _help(None, f"column with the traces; None: the first of {', '.join(TRACE_COLUMNS)}")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in FIXED.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"'{name}' ({getattr(self, name)!r}) is not part of luffy's loss; set it to {value!r}"
                )
        for name, known in (
            ("loss_type", tuple(REDUCTIONS)),
            ("scale_rewards", ("none", "group")),
            ("advantage", ("grpo", "grpo_split")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"'{name}' ({getattr(self, name)!r}) must be one of {', '.join(known)}")
        if not 0 <= self.traces_per_group < self.num_generations:
            raise ConfigError(
                f"'traces_per_group' ({self.traces_per_group}) must be 0 or more and less than 'num_generations' "
                f"({self.num_generations}): a group needs a sample of the policy's own"
            )
        self.policy_loss()  # an unknown shape is named here

    def policy_loss(self) -> PolicyLoss:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return PolicyLoss(1 - self.epsilon, 1 + high, self.remove_clip, off_shape=Shape(self.off_policy_reshape))


class LuffyGRPOTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` with traces in the group and luffy's loss; takes the same arguments.

    Rows of ``train_dataset`` may have traces in ``args.trace_column``: one or several, each a text or an assistant
    message. In training the first ``traces_per_group`` samples of a prompt are traces whose reward, by the same
    ``reward_funcs``, is at least ``min_trace_reward``; where there is none, the on-policy sample stays. Evaluation
    is TRL's own. ``trace_counts`` says what became of the places for traces so far: ``used``, ``wrong``,
    ``too_long`` (for ``max_completion_length``, end token included) and ``missing``; ``traces/*`` are their metrics.
    """

    _tag_names = ["trl", "grpo", "luffy"]  # noqa: RUF012 (TRL's own attribute)

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None, **more: Any):
        if not isinstance(args, LuffyGRPOConfig):
            raise ConfigError(f"args must be a LuffyGRPOConfig, got {type(args).__name__}")
        for name in ("rollout_func", "environment_factory", "tools"):
            if more.get(name):
                raise ConfigError(f"'{name}' makes its own samples, among which no trace can be put; leave it out")
        super().__init__(model, reward_funcs, args, train_dataset, **more)
        if self._is_vlm:
            raise ConfigError("models with images are not supported; pass a tokenizer, not a processor")
        if self.aux_loss_enabled:
            raise ConfigError("luffy's loss has no auxiliary loss of a mixture of experts; set router_aux_loss_coef=0")
        row = next(iter(train_dataset))
        self.trace_column = args.trace_column or next((name for name in TRACE_COLUMNS if name in row), "")
        if args.traces_per_group and self.trace_column not in row:
            named = args.trace_column or " or ".join(TRACE_COLUMNS)
            raise DataError(f"train_dataset has no column {named}; found {', '.join(row)}; set trace_column")
        self._encoder = self._trace_encoder(row["prompt"])
        self.trace_counts: Counter[str] = Counter()
        self._traces: dict[int, list[int]] = {}  # of the batch under way: row and token ids

    def _trace_encoder(self, prompt: Any) -> Encoder:
        encoder = Encoder(
            self._tokenizer,
            "plain" if isinstance(prompt, str) else "chat",
            max_prompt_tokens=NO_LIMIT,
            max_response_tokens=self.max_completion_length,
            eos_ids=self.eos_token_ids,
        )
        if encoder.eos_ids[0] not in self.eos_token_ids:
            end = self._tokenizer.convert_ids_to_tokens(encoder.eos_ids[0])
            raise ConfigError(
                f"the chat template ends a turn, and so a trace, with {end!r}, at which generation does not stop; "
                f"add its id ({encoder.eos_ids[0]}) to model.generation_config.eos_token_id"
            )
        return encoder

    # ---- traces in the group

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._traces = self._verified_traces(inputs)
        output = super()._generate_and_score_completions(inputs)
        off_policy = torch.zeros(len(inputs), dtype=torch.bool, device=self.accelerator.device)
        off_policy[list(self._traces)] = True
        self._traces = {}
        everywhere = self.accelerator.gather(off_policy)
        advantages = self._advantages(self._rewards, everywhere)
        self._logs["advantages"].clear()
        self._logs["advantages"].extend(advantages.tolist())
        first = self.accelerator.process_index * len(inputs)
        return {**output, "advantages": advantages[first : first + len(inputs)], "off_policy": off_policy}

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int) -> Any:
        """The policy's samples, and the traces in their places. vLLM makes all of a prompt's samples in one request,
        so there those in the places of traces are made and dropped."""
        own = [i for i in range(len(prompt_ids)) if i not in self._traces or self.use_vllm]
        own = own or list(range(len(prompt_ids)))
        of_own = {name: [values[i] for i in own] for name, values in fields.items()}  # such as token_type_ids
        made, log_probs = super()._generate_single_turn([prompt_ids[i] for i in own], images, of_own, num_generations)
        completions = {**dict(zip(own, made, strict=True)), **self._traces}
        if log_probs is not None:  # TRL gives a token without a log-prob the importance ratio 1
            unknown = {i: [None] * len(ids) for i, ids in self._traces.items()}
            by_row = {**dict(zip(own, log_probs, strict=True)), **unknown}
            log_probs = [by_row[i] for i in range(len(prompt_ids))]
        return [completions[i] for i in range(len(prompt_ids))], log_probs

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards

    def _verified_traces(self, inputs: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
        """Token ids of the traces that take part, by row: of the rows that are the first of their group, those with a
        trace that fits and that the reward functions call right."""
        first = self.accelerator.process_index * len(inputs)
        counts = Counter(used=0, wrong=0, too_long=0, missing=0)
        found: dict[int, list[int]] = {}
        for i, row in enumerate(inputs):
            group, place = divmod(first + i, self.num_generations)
            if place >= self.args.traces_per_group:
                continue
            problem = _problem(row, row.get(self.trace_column))
            task = self._encoder.encode(problem)
            if task is None or not task.demonstrations:
                counts["too_long" if problem.traces else "missing"] += 1
                continue
            key = f"{self.args.seed}:{self.state.global_step}:{group}"
            found[i] = list(choose(task.demonstrations, place + 1, "random", visit=0, key=key)[-1].token_ids)
        rewards = self._rewards_of_traces(inputs, found)
        least = self.args.min_trace_reward
        least = float(self.reward_weights.sum()) if least is None else least
        right = {i: ids for i, ids in found.items() if rewards[i] >= least}
        counts.update(used=len(right), wrong=len(found) - len(right))
        self._count(counts, least)
        return right

    def _rewards_of_traces(
        self, inputs: Sequence[Mapping[str, Any]], traces: Mapping[int, list[int]]
    ) -> dict[int, float]:
        """The weighted reward of each, NaN where no reward function applies. Rewards are gathered over processes, so
        each asks for as many as the one with the most, and an empty completion where it has no more."""
        here = torch.tensor([len(traces)], device=self.accelerator.device)
        most = int(self.accelerator.gather(here).max())
        if most == 0:
            return {}
        rows = [*traces, *[0] * (most - len(traces))]
        ids = [*traces.values(), *[[]] * (most - len(traces))]
        prompts = [inputs[i]["prompt"] for i in rows]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        is_chat = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
        scores = super()._calculate_rewards([inputs[i] for i in rows], prompts, completions, ids)
        self._pending_extra_logs.clear()  # what reward functions log belongs to the samples, which are scored later
        self._pending_metrics.clear()
        weighted = (scores * self.reward_weights.to(scores.device)).nansum(1)
        weighted[scores.isnan().all(1)] = torch.nan
        mine = weighted[self.accelerator.process_index * most :].tolist()
        return {i: mine[place] for place, i in enumerate(traces)}

    def _count(self, counts: Counter[str], least: float) -> None:
        names = list(counts)
        here = torch.tensor([[counts[name] for name in names]], device=self.accelerator.device)
        total = dict(zip(names, self.accelerator.gather(here).sum(0).tolist(), strict=True))
        self.trace_counts.update(total)
        for name, value in total.items():
            self._metrics["train"][f"traces/{name}"].append(value)
        if total["wrong"] and not self.trace_counts["used"]:
            warnings.warn(
                f"no trace had a reward of {least:g} or more so far, so none was used ({total['wrong']} wrong); "
                "see min_trace_reward",
                stacklevel=2,
            )

    def _advantages(self, rewards_per_func: Tensor, off_policy: Tensor) -> Tensor:
        """[B], over all processes. A sample that no reward function scored is in no baseline and has advantage 0."""
        scored = ~rewards_per_func.isnan().all(1)
        rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device)).nansum(1)
        groups = [i // self.num_generations if there else -1 for i, there in enumerate(scored.tolist())]
        in_baseline = ~off_policy if self.args.advantage == "grpo_split" else torch.ones_like(off_policy)
        advantages = group_advantages(
            rewards, groups, in_baseline | ~scored, use_std=self.args.scale_rewards == "group"
        )
        return advantages.masked_fill(~scored, 0.0)

    # ---- the loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if not self.model.training or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        mask = inputs["completion_mask"].bool()
        log_prob, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            mask.shape[1],
            compute_entropy=True,
        )
        old = inputs.get("old_per_token_logps", log_prob.detach())
        advantages = inputs["advantages"].unsqueeze(1) * inputs.get("importance_sampling_ratio", torch.ones_like(old))
        off_policy = inputs["off_policy"].unsqueeze(1) & mask
        terms = policy_loss_terms(old, log_prob, advantages, mask, off_policy, self.args.policy_loss())
        per_token = terms.loss - self.entropy_coef * keep(entropy, mask)
        if self.beta:
            kl = keep(kl_penalty(log_prob, inputs["ref_per_token_logps"], "k3"), mask)
            per_token = per_token + self.beta * kl
            self._log_mean("kl", kl, mask)
        self._log_terms(terms, entropy, mask, off_policy)
        return (per_token * self._token_weights(mask, inputs["num_items_in_batch"])).sum()

    def _token_weights(self, mask: Tensor, tokens: Tensor) -> Tensor:
        """[B, T]: the weights of the reduction over one optimizer step. ``tokens`` counts the whole generation batch,
        of which a step takes its share; gradients are averaged over processes, so each adds its part times their
        number."""
        processes, parts = self.accelerator.num_processes, self.args.steps_per_generation
        whole = Counts(int(tokens), len(mask) * processes * parts)
        reduction = REDUCTIONS[self.args.loss_type]
        weights = torch.stack(token_weights(list(mask), reduction, self.max_completion_length, whole))
        return weights * (processes * parts / self.current_gradient_accumulation_steps)

    def _log_terms(self, terms: LossTerms, entropy: Tensor, mask: Tensor, off_policy: Tensor) -> None:
        on_policy = mask & ~off_policy
        self._log_mean("entropy", entropy, mask)
        self._log_mean("actor/on_pg_loss", terms.on_loss, on_policy)
        self._log_mean("actor/off_pg_loss", terms.off_loss, off_policy)
        self._log_mean("actor/off_policy_prob", terms.prob, off_policy)
        self._log_mean("actor/off_ratio_mean", terms.off_ratio, off_policy)
        self._log_mean("actor/pg_clipfrac", terms.clipped, on_policy)

    def _log_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """The mean over the tokens of all processes; nothing where there are none."""
        parts = torch.stack([keep(values.detach().float(), mask).sum(), mask.sum().float()])
        total, count = self.accelerator.reduce(parts, reduction="sum").tolist()
        if count:
            self._metrics["train"][name].append(total / count)


def _problem(row: Mapping[str, Any], traces: Any) -> Problem:
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(Message(message["role"], _text(message["content"])) for message in prompt)
    return Problem(id="", prompt=prompt, answer="", traces=tuple(Trace(text) for text in _texts(traces)))


def _texts(traces: Any) -> list[str]:
    """The traces of a row: none, a text, an assistant message (in a list of its own, as TRL has completions), or
    several of either."""
    if not traces:
        return []
    if isinstance(traces, str):
        return [traces]
    if isinstance(traces, Mapping):
        if traces["role"] != "assistant":
            raise DataError(f"a trace is a message of role {traces['role']!r}; give the assistant's message alone")
        return [_text(traces["content"])]
    return [text for trace in traces for text in _texts(trace)]


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise DataError(f"the content of a message must be text, got {type(content).__name__}")
    return content
