"""The nouns: one frozen dataclass per stage of a step, in the order data flows.

    row of a file -> Problem (+ Trace)           text
                  -> Task (+ Demonstration)      token ids under the model's tokenizer
                  -> Request -> Completion       what an engine takes and gives
                  -> Rollout                     one response of a task, whoever wrote its tokens
                  -> Group                       all rollouts of one task with their rewards
                  -> Sample                      one response with its credit as per-token streams
                  -> MicroBatch                  samples packed end to end, no padding

Per-token streams are 1-D CPU tensors whose length is the number of RESPONSE tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # a verifier process imports this file too; importing torch takes seconds
    import torch
    from torch import Tensor

Finish = Literal["stop", "length", "trace"]

NO_LIMIT = 1 << 40  # tokens: a budget that nothing exceeds
THINK, END_THINK = "<think>", "</think>"


def opens_thought(prompt: str) -> bool:
    """Whether a prompt, as the model sees it, ends with ``<think>``: the response begins inside a thought."""
    return prompt.rstrip().endswith(THINK)


@dataclass(frozen=True)
class Message:
    """One turn of a chat prompt, e.g. ``Message("user", "What is 2+3?")``."""

    role: str
    content: str


@dataclass(frozen=True)
class Trace:
    """A teacher's demonstration: text, or token ids when they were recorded.

    ``log_probs`` are the teacher's own, one per token id (they make no sense without ids).
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    teacher: str = "teacher"


@dataclass(frozen=True)
class Problem:
    """A row of a dataset. A ``str`` prompt is a question and gets the prompt style of the config; a tuple of messages
    is a chat. The gold answer stays a string."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    traces: tuple[Trace, ...] = ()
    source: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Demonstration:
    """A trace under the policy's tokenizer, EOS included."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Task:
    """A problem as the model sees it. ``hint``: the level of the hint in its prompt; 0: none. ``in_thought``: its
    prompt ends with ``<think>``, so the response begins inside a thought."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    demonstrations: tuple[Demonstration, ...] = ()
    hint: int = 0
    in_thought: bool = False


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. ``temperature == 0`` is greedy; ``top_k == 0`` and ``top_p == 1`` are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_ids: tuple[int, ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Request:
    """One response to make. ``max_tokens`` of the sampling counts generated tokens only. The same seed gives
    the same tokens in any batch."""

    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    prefix_ids: tuple[int, ...] = ()

    @property
    def given_ids(self) -> tuple[int, ...]:
        """What the engine continues."""
        return self.prompt_ids + self.prefix_ids

    @property
    def start(self) -> int:
        """Where the first new token will stand."""
        return len(self.prompt_ids) + len(self.prefix_ids)


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine generated after the prefix; the EOS that ended it is the last token.

    With a second model: ``overrides`` are the tokens that it wrote, ``behavior_log_probs`` what the tokens were drawn
    with, ``guidance_log_probs`` those under the second model.
    """

    token_ids: Tensor  # [T] long
    log_probs: Tensor  # [T] float32, the policy's own at the sampling temperature; NaN where no engine knows it
    finish: Finish
    overrides: Tensor | None = None  # [T] bool
    behavior_log_probs: Tensor | None = None  # [T] float32
    guidance_log_probs: Tensor | None = None  # [T] float32
    versions: Tensor | None = None  # [T] long: of the policy that drew each token, where they are not all the same


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response to a task. A teacher wrote its first ``prefix`` tokens.

    ``behavior_log_probs`` are of whoever wrote the token: the engine's for its own tokens; the
    recorded teacher's for off-policy tokens, 0 (probability 1) where none was recorded.
    ``engine_log_probs`` are the policy's own as the engine saw them (NaN where it did not); they differ from
    the behaviour only where a second model had a say. ``overrides[t]`` is True where it put token t in.
    """

    task: Task
    token_ids: Tensor  # [T] long
    prefix: int
    behavior_log_probs: Tensor  # [T] float32
    engine_log_probs: Tensor  # [T] float32
    overrides: Tensor  # [T] bool
    finish: Finish
    prefix_ratio: float = 0.0
    policy_version: int = 0  # of the policy that drew the last token
    guidance_log_probs: Tensor | None = None  # [T] float32, NaN where the second model gave none
    token_versions: Tensor | None = None  # [T] long, where several versions drew it

    @cached_property
    def off_policy(self) -> Tensor:
        """[T] bool: where a teacher wrote the token."""
        import torch

        written = torch.zeros(self.token_ids.numel(), dtype=torch.bool)
        if self.prefix:  # most have none, and a step has thousands
            written[: self.prefix] = True
        return written

    @property
    def is_on_policy(self) -> bool:
        return self.prefix == 0

    @property
    def is_trace(self) -> bool:
        """Whether a teacher wrote every token."""
        return self.prefix == self.token_ids.numel()

    @property
    def is_own(self) -> bool:
        """Whether the policy wrote it alone: no token of a teacher, no hint in the prompt."""
        return self.is_on_policy and not self.task.hint

    @property
    def versions(self) -> Tensor:
        """[T] long: the version of the policy that made each token, -1 where a teacher wrote it."""
        import torch

        made_by = self.policy_version if self.token_versions is None else self.token_versions
        return torch.where(self.off_policy, -1, made_by)


@dataclass(frozen=True)
class Score:
    """A verifier's verdict. ``status`` is "ok", "no_answer" where there was nothing to compare, or why the verification
    failed: "timeout", "crashed", "error", "not_scored", "call_failed". ``reason`` says more of a failure.
    ``components``: of a weighted sum the score of each reward that gave one, before its weight."""

    value: float
    status: str = "ok"
    reason: str = field(default="", compare=False)
    components: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def is_verdict(self) -> bool:
        """Whether the verification did its work; the score says something about the response only then."""
        return self.status in ("ok", "no_answer")


@dataclass(frozen=True)
class Group:
    """All rollouts of one task with their scores, in the order they were planned."""

    task: Task
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    @property
    def has_traces_alone(self) -> bool:
        """Whether a teacher wrote every token of every rollout."""
        return all(rollout.is_trace for rollout in self.rollouts)


@dataclass(frozen=True, eq=False)
class Sample:
    """One response with its credit. The loss executes these streams and knows nothing else.

    ``rl_weights`` weigh each token's share of the policy-gradient term (with its entropy and KL), ``sft_weights`` its
    share of the SFT term. A token may count in both. A token of weight 0 is not in the term and not in its denominator;
    every other token counts as one token there, whatever its weight.
    """

    prompt_ids: tuple[int, ...]
    token_ids: Tensor  # [T] long
    off_policy: Tensor  # [T] bool
    rl_weights: Tensor  # [T] float32
    sft_weights: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    behavior_log_probs: Tensor  # [T] float32
    engine_log_probs: Tensor  # [T] float32
    old_log_probs: Tensor | None = None  # [T] float32; None: take the current ones
    ref_log_probs: Tensor | None = None  # [T] float32

    def __len__(self) -> int:
        return len(self.prompt_ids) + int(self.token_ids.numel())


@dataclass(frozen=True, eq=False)
class TokenView:
    """One sample's tokens as the update is about to see them: kept for the record, read by no loss."""

    log_probs: Tensor  # [T] float32, the policy's own
    gradient_weights: Tensor  # [T] float32, per unit of advantage (Objective.gradient_weights)


class Family(NamedTuple):
    """Lengths of a prompt and of the responses to it, which lie behind it one after the other."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)

    def positions(self) -> Tensor:
        """[tokens]: every response goes on where the prompt ends."""
        import torch

        longest = torch.arange(self.prompt + max(self.responses, default=0))
        return torch.cat([longest[: self.prompt], *(longest[self.prompt : self.prompt + n] for n in self.responses)])


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples laid end to end: ``N`` tokens, of which ``R`` are response tokens. Those with the same prompt form a
    family: the prompt lies there once, however many responses follow it.

    ``predict_from[r]`` is the packed position whose hidden state predicts response token ``r``; the first
    tokens of a family's responses are all predicted from the last one of its prompt.
    ``rl_weights`` and ``sft_weights`` are the samples' own, already divided by the denominator of the
    whole mini-batch, so that a loss is always a plain weighted sum.
    """

    input_ids: Tensor  # [N] long
    position_ids: Tensor  # [N] long
    families: tuple[Family, ...]  # their tokens sum to N
    order: tuple[int, ...]  # which of the packed samples these are
    predict_from: Tensor  # [R] long
    targets: Tensor  # [R] long
    off_policy: Tensor  # [R] bool
    rl_weights: Tensor  # [R] float32
    sft_weights: Tensor  # [R] float32
    advantages: Tensor  # [R] float32
    behavior_log_probs: Tensor  # [R] float32
    engine_log_probs: Tensor  # [R] float32
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """Per sample, sums to R."""
        return tuple(response for family in self.families for response in family.responses)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Per sample, its prompt included: sums to N only where no prompt is shared."""
        return tuple(family.prompt + response for family in self.families for response in family.responses)

    def to(self, device: torch.device | str) -> MicroBatch:
        from torch import Tensor

        moved = {k: to_device(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return MicroBatch(**{**vars(self), **moved})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Without waiting: from ordinary memory a GPU takes more than 64 KiB only when it has done all it was given before,
    and the host waits for that."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
