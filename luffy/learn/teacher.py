"""Distillation teacher (section `teacher`): its weights, its prompt, its log-probs of on-policy tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luffy.config import Config, TeacherConfig
from luffy.data import Encoder
from luffy.data.prompts import with_hint
from luffy.errors import UserError
from luffy.learn.credit import uncredited
from luffy.learn.policy import Policy
from luffy.models.forward import causal_lm, max_positions
from luffy.models.load import DtypeName, check_fits, check_same_tokenizer, decode, load_model, load_tokenizer
from luffy.rollout.vllm.frozen_servers import ScoringServers
from luffy.rollout.vllm.http_client import VLLM_SLOTS, Server, key_from
from luffy.types import Group, Sample

LogProbs = Callable[[Sequence[Sample]], list[Tensor]]


class WeightAverage:
    """An exponential average of the policy's trained weights, in float32, sharded as they are.

    ``share`` is how far ``follow`` goes towards the policy's weights of now. The policy's own model scores with them:
    they take the place of its weights meanwhile, so that adapters need no second model.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self.policy, self.share = policy, share
        self._average = {name: p.detach().float().clone() for name, p in policy.optimizer.parameters.items()}

    @torch.no_grad()
    def follow(self) -> None:
        for name, parameter in self.policy.optimizer.parameters.items():
            self._average[name].mul_(1 - self.share).add_(parameter.detach().float(), alpha=self.share)

    def log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        with self._in_place():
            return self.policy.log_probs(samples)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        own = {name: p.detach().clone() for name, p in self.policy.optimizer.parameters.items()}
        self.policy.fill(self._average)
        try:
            yield
        finally:
            self.policy.fill(own)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint, named like the optimizer's."""
        return {f"{name}/teacher": average for name, average in self._average.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> bool:
        """Load the average; False if the tensors lack it, and it begins with the policy's current weights."""
        found = {name: tensors[f"{name}/teacher"] for name in self._average if f"{name}/teacher" in tensors}
        with torch.no_grad():
            for name, value in found.items():
                self._average[name].copy_(value)
        return len(found) == len(self._average)


@dataclass(frozen=True)
class TeacherPrompts:
    """What stands before a response when the teacher scores it: the prompt that the policy had, or the question with a
    hint that the policy did not see. ``solved`` judges a score."""

    knobs: TeacherConfig
    encoder: Encoder
    tokenizer: Any
    solved: Callable[[float], bool]

    def of(self, group: Group) -> list[tuple[int, ...] | None]:
        """A prompt for every response of the group; None where there is nothing to show."""
        if self.knobs.shown == "nothing":
            return [rollout.task.prompt_ids for rollout in group.rollouts]
        shown = self._solution(group) if self.knobs.shown == "solution" else self._siblings(group)
        prompts = {ids: self._hinted(group, ids) for ids in dict.fromkeys(shown) if ids is not None}
        return [None if ids is None else prompts[ids] for ids in shown]

    def _solution(self, group: Group) -> list[tuple[int, ...] | None]:
        traces = group.task.demonstrations
        return [traces[0].token_ids if traces else None] * len(group.rollouts)

    def _siblings(self, group: Group) -> list[tuple[int, ...] | None]:
        """For each response, the next correct one after it in the group, cyclically."""
        count = len(group.rollouts)
        right = [i for i, score in enumerate(group.scores) if self.solved(score.value)]
        chosen = [min((j for j in right if j != i), key=lambda j: (j - i) % count, default=None) for i in range(count)]
        return [None if j is None else tuple(group.rollouts[j].token_ids.tolist()) for j in chosen]

    def _hinted(self, group: Group, ids: tuple[int, ...]) -> tuple[int, ...]:
        (text,) = decode(self.tokenizer, [ids])
        return self.encoder.prompt_ids(with_hint(group.task.problem, self.knobs.hint_text, text))


@dataclass(frozen=True)
class Teacher:
    """``log_probs`` of samples by whoever computes them; ``longest``: tokens that it takes. ``average``: the
    weights, where they move."""

    log_probs: LogProbs
    prompts: TeacherPrompts
    longest: int
    average: WeightAverage | None = None

    def score(self, groups: Sequence[Group]) -> list[Tensor | None]:
        """Log-probs of the tokens of each response, [T], group after group; None where the teacher has nothing to be
        shown, or that and the response are longer than its context. All processes must call this."""
        samples = [sample for group in groups for sample in self._samples(group)]
        scores = iter(self.log_probs([sample for sample in samples if sample is not None]))
        return [None if sample is None else next(scores) for sample in samples]

    def _samples(self, group: Group) -> list[Sample | None]:
        prompts = zip(group.rollouts, self.prompts.of(group), strict=True)
        samples = [None if ids is None else replace(uncredited(rollout), prompt_ids=ids) for rollout, ids in prompts]
        return [None if s is None or len(s) > self.longest else s for s in samples]

    def follow(self) -> None:
        """Update the averaged weights after a step."""
        if self.average is not None:
            self.average.follow()


def build_teacher(
    cfg: Config, policy: Policy, tokenizer: Any, encoder: Encoder, device: str, warn: Callable[[str], None]
) -> Teacher:
    """The teacher that the config names. ``device``: where the policy computes."""
    prompts = TeacherPrompts(cfg.teacher, encoder, tokenizer, cfg.reward.solved)
    own_context = max_positions(causal_lm(policy.model).config)
    if cfg.teacher.servers:
        served = scoring_servers(cfg, tokenizer, warn)
        return Teacher(served.log_probs, prompts, served.longest)
    if cfg.teacher.average:
        average = WeightAverage(policy, cfg.teacher.average)
        return Teacher(average.log_probs, prompts, own_context, average)
    if cfg.teacher.is_self and cfg.model.lora is not None:
        return Teacher(lambda samples: policy.reference_log_probs(samples, None), prompts, own_context)
    model, dtype = load_teacher(cfg, tokenizer, "cpu" if policy.world.joined else device)
    scorer = policy.scorer_of(model.requires_grad_(False).eval(), dtype)
    return Teacher(lambda samples: policy.log_probs(samples, scorer), prompts, max_positions(model.config))


def load_teacher(cfg: Config, tokenizer: Any, device: str) -> tuple[PreTrainedModel, DtypeName]:
    """The model of ``teacher.path``, or the policy as it was at the start, and its dtype; a UserError where tokenizer,
    vocabulary or context do not fit the policy's."""
    path, dtype = cfg.teacher.path or "", cfg.teacher.dtype or cfg.model.dtype
    if cfg.teacher.is_self:
        return load_model(cfg.model.path, dtype, device, cfg.model.trust_remote_code), dtype
    check_tokenizer(cfg, tokenizer)
    model = load_model(path, dtype, device, cfg.model.trust_remote_code)
    check_fits(f"teacher.path={path}", model.config, tokenizer, cfg.longest)
    return model, dtype


def check_tokenizer(cfg: Config, tokenizer: Any) -> None:
    """The model of ``teacher.path`` means the same by every token id as the policy."""
    path = cfg.teacher.path or ""
    theirs = load_tokenizer(path, cfg.model.trust_remote_code)
    check_same_tokenizer(tokenizer, theirs, f"teacher (teacher.path={path})")


def scoring_servers(cfg: Config, tokenizer: Any, warn: Callable[[str], None]) -> ScoringServers:
    v = cfg.rollout.vllm
    key = key_from(v.api_key_env)
    servers = [Server(url, key, v.timeout_s, "teacher.servers") for url in cfg.teacher.servers]
    scoring = ScoringServers(servers, tokenizer, slots=cfg.rollout.slots or VLLM_SLOTS, warn=warn)
    if scoring.longest < cfg.longest:
        raise UserError(
            f"the servers of teacher.servers score {scoring.longest} tokens at most, but data.max_prompt_tokens + "
            f"rollout.max_tokens = {cfg.longest}; start them with a longer context"
        )
    return scoring
