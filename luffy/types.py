"""The nouns: one frozen dataclass per stage of a step, in the order data flows.

    row of a file -> Problem (+ Trace)           text
                  -> Task (+ Demonstration)      token ids under the model's tokenizer
                  -> Episode                     one response to a task, finished or not; each token has an Author
                  -> Request -> Completion       what an engine takes and gives
                  -> Group                       all episodes of one task with their scores
                  -> Sample                      one response with its credit as per-token streams
                  -> MicroBatch                  samples packed end to end, no padding

Per-token streams are 1-D CPU tensors whose length is the number of RESPONSE tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # a verifier process imports this file too; importing torch takes seconds
    import torch
    from torch import Tensor

Finish = Literal["stop", "length", "trace", "environment"]

NO_LIMIT = 1 << 40  # tokens: a budget that nothing exceeds
THINK, END_THINK = "<think>", "</think>"


def opens_thought(prompt: str) -> bool:
    """Whether a prompt, as the model sees it, ends with ``<think>``: the response begins inside a thought."""
    return prompt.rstrip().endswith(THINK)


@dataclass(frozen=True)
class ToolCall:
    """One call that an assistant turn makes, e.g. ``ToolCall("add", {"a": 2, "b": 3})``."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One turn of a chat, e.g. ``Message("user", "What is 2+3?")``. ``name``: of the tool that a tool's turn comes
    from."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Trace:
    """A teacher's demonstration: text, token ids when they were recorded, or the messages after the prompt when it
    has several turns (the assistant's are the teacher's, all others an environment's).

    ``log_probs`` are the teacher's own, one per token id (they make no sense without ids).
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    teacher: str = "teacher"

    @property
    def answer_text(self) -> str | None:
        """Text that has the answer: of several turns the last assistant's; None: only token ids were recorded."""
        spoken = [message.content for message in self.messages or () if message.role == "assistant"]
        return spoken[-1] if spoken else self.text


@dataclass(frozen=True)
class Problem:
    """A row of a dataset. A ``str`` prompt gets the config's prompt style; a tuple of messages is a chat."""

    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    traces: tuple[Trace, ...] = ()
    source: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Demonstration:
    """A trace under the policy's tokenizer, EOS included. ``replies``: the (start, end) of each stretch of tokens that
    an environment wrote; every other token is the teacher's. ``calls``: number of its tool calls; None: not known."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    replies: tuple[tuple[int, int], ...] = ()
    calls: int | None = None

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The tokens behind the last reply: what a verifier judges."""
        return self.token_ids[self.replies[-1][1] :] if self.replies else self.token_ids

    @property
    def turns(self) -> list[tuple[int, ...]]:
        """The tokens of each turn of the teacher's."""
        edges = [0, *(place for reply in self.replies for place in reply), len(self.token_ids)]
        spans = zip(edges[::2], edges[1::2], strict=True)
        return [self.token_ids[start:end] for start, end in spans if start < end]


@dataclass(frozen=True)
class Task:
    """A problem as the model sees it. ``in_thought``: its prompt ends with ``<think>``, so the response begins inside a
    thought. ``hint``: the level of the hint that a response is drawn with (0: none), ``hint_text`` its words in the
    prompt, ``plain_ids`` the prompt without them."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    demonstrations: tuple[Demonstration, ...] = ()
    hint: int = 0
    in_thought: bool = False
    hint_text: str = ""
    plain_ids: tuple[int, ...] | None = None


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
    """One response to make. ``sampling.max_tokens`` counts generated tokens only."""

    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    prefix_ids: tuple[int, ...] = ()
    conversation: int | None = None  # requests with the same number go on with one another's tokens
    # Texts that the response may repeat in part; they may make it faster and change no token.
    drafts: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

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
    """Tokens generated after the prefix; the EOS that ended them is the last.

    With a guide model: ``overrides`` marks its tokens; ``behavior_log_probs`` and ``guidance_log_probs`` are log-probs
    under the behaviour policy and the guide model.
    """

    token_ids: Tensor  # [T] long
    log_probs: Tensor  # [T] float32, the policy's own at the sampling temperature; NaN where no engine knows it
    finish: Finish
    overrides: Tensor | None = None  # [T] bool
    behavior_log_probs: Tensor | None = None  # [T] float32
    guidance_log_probs: Tensor | None = None  # [T] float32
    versions: Tensor | None = None  # [T] long: of the policy that drew each token, where they are not all the same


class Author(IntEnum):
    """Who wrote a token. Every mask that a loss needs is one comparison: see ``off_policy`` and ``is_drawn``."""

    POLICY = 0
    GUIDE = 1  # the model that overrides tokens
    ENVIRONMENT = 2  # in no loss and in no metric of responses
    TEACHER = 3
    REPLAY = 4  # the policy, in an earlier step or behind another prompt


def written_by(author: Author, count: int) -> Tensor:
    """[count] int8: the authors of tokens that one author wrote."""
    import torch

    return torch.full((count,), author, dtype=torch.int8)


def off_policy(authors: Tensor) -> Tensor:
    """[T] bool: the tokens of a trace, written by a teacher, or by the policy in an earlier step or behind a hint that
    the prompt does not show."""
    return authors >= Author.TEACHER


def is_drawn(authors: Tensor) -> Tensor:
    """[T] bool: the tokens that the engine drew, from the policy or the guide model."""
    return authors <= Author.GUIDE


def spans(mask: Tensor) -> list[tuple[int, int]]:
    """Start and end of each stretch of a mask."""
    flags = [0, *mask.int().tolist(), 0]
    edges = [place for place in range(len(flags) - 1) if flags[place] != flags[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class EpisodeOutcome:
    """What became of an episode with an environment. ``turn_rewards``: what each turn adds to the episode's reward, 0
    where the environment gave nothing. ``faults``: the environment's, by kind. ``end``:

        answer                   the last turn needs no reply
        environment              it said so
        turns, tokens, context   a limit
        bad_call                 with environment.on_bad_call=end
        raised, timed_out        a failure of the environment
        trace, differs           a whole trace; one that the environment answered otherwise than recorded
        under_way                the step's tokens are used up, and it goes on in the next step
    """

    end: str
    turns: int = 0
    calls: int = 0
    faults: tuple[str, ...] = ()
    reward: float | None = None  # the environment's own, of the whole episode
    turn_rewards: tuple[float, ...] = ()
    message: str = ""
    messages: tuple[Message, ...] = ()  # all turns and the replies to them, as texts and calls
    trace_left_out: bool = False  # the environment did not answer a trace as recorded, so the policy played anew
    observation: str = ""  # what the environment said first

    @property
    def is_failure(self) -> bool:
        return self.end in ("raised", "timed_out")


@dataclass(frozen=True, eq=False)
class Episode:
    """One response to a task, finished or not, whoever wrote its tokens.

    ``behavior_log_probs`` are of whoever wrote the token: the engine's for the tokens that it drew; the recorded
    teacher's for a trace, 0 (probability 1) if none was recorded. ``engine_log_probs`` are the policy's own as the
    engine saw them (NaN if it did not); they differ from the behaviour only under token overrides.
    """

    task: Task
    token_ids: Tensor  # [T] long
    authors: Tensor  # [T] int8, of Author
    behavior_log_probs: Tensor  # [T] float32
    engine_log_probs: Tensor  # [T] float32
    finish: Finish | None  # None: the engine has to continue it, with these:
    seed: int = 0
    sampling: Sampling | None = None  # max_tokens counts all tokens that the engine draws
    trace: Demonstration | None = None  # that it begins with
    prefix_ratio: float = 0.0
    policy_version: int = 0  # of the policy that drew the last token
    guidance_log_probs: Tensor | None = None  # [T] float32, NaN if the guide model gave none
    token_versions: Tensor | None = None  # [T] long, if several versions drew it
    outcome: EpisodeOutcome | None = None  # with an environment

    @property
    def request(self) -> Request | None:
        """A request for the rest of it; None if it is finished."""
        return None if self.finish is not None else self.request_for()

    def request_for(self, most: int = NO_LIMIT) -> Request:
        """A request for at most ``most`` tokens of the rest. Requires that it is not finished."""
        assert self.sampling is not None
        # At least one: a resumed run may have a lower rollout.max_tokens than the response has tokens.
        left = max(min(self.sampling.max_tokens - self.drawn, most), 1)
        sampling = self.sampling if left == self.sampling.max_tokens else replace(self.sampling, max_tokens=left)
        traces = tuple(demonstration.token_ids for demonstration in self.task.demonstrations)
        return Request(self.task.prompt_ids, self.seed, sampling, tuple(self.token_ids.tolist()), drafts=traces)

    @cached_property
    def off_policy(self) -> Tensor:
        """[T] bool: the tokens of a trace."""
        return off_policy(self.authors)

    @property
    def overrides(self) -> Tensor:
        """[T] bool: the tokens of the guide model."""
        return self.authors == Author.GUIDE

    @cached_property
    def prefix(self) -> int:
        """Number of tokens of a trace."""
        return int(self.off_policy.sum())

    @property
    def drawn(self) -> int:
        """Number of tokens that the engine drew."""
        return self.length - self.prefix

    @cached_property
    def length(self) -> int:
        """Number of tokens of the response, without those of an environment."""
        return self.token_ids.numel() - int((self.authors == Author.ENVIRONMENT).sum())

    @property
    def replies(self) -> Tensor | None:
        """[T] bool: the tokens of an environment; None if there is none."""
        return self.authors == Author.ENVIRONMENT if self.length < self.token_ids.numel() else None

    @property
    def answer_ids(self) -> Tensor:
        """The tokens behind an environment's last reply: what a verifier judges."""
        return self.token_ids if self.replies is None else self.token_ids[int(self.replies.nonzero()[-1]) + 1 :]

    @property
    def is_on_policy(self) -> bool:
        return self.prefix == 0

    @property
    def is_trace(self) -> bool:
        """Whether a trace is all of it."""
        return self.prefix == self.length

    @property
    def is_own(self) -> bool:
        """Whether the policy wrote it alone: no token of a trace, no hint in the prompt."""
        return self.is_on_policy and not self.task.hint

    @property
    def versions(self) -> Tensor:
        """[T] long: the version of the policy that drew each token, -1 if the engine did not draw it."""
        import torch

        made_by = self.policy_version if self.token_versions is None else self.token_versions
        return torch.where(is_drawn(self.authors), made_by, -1)


def Rollout(
    task: Task,
    token_ids: Tensor,
    prefix: int,
    behavior_log_probs: Tensor,
    engine_log_probs: Tensor,
    overrides: Tensor,
    finish: Finish,
    prefix_ratio: float = 0.0,
    policy_version: int = 0,
) -> Episode:
    """A finished episode that begins with ``prefix`` tokens of a trace; ``overrides`` [T] bool: of the guide model."""
    import torch

    authors = overrides.to(torch.int8)
    authors[:prefix] = Author.TEACHER
    logs = behavior_log_probs, engine_log_probs
    return Episode(task, token_ids, authors, *logs, finish, prefix_ratio=prefix_ratio, policy_version=policy_version)


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
    """All episodes (``rollouts``) of one task with their scores, in the order they were planned; without scores while
    an episode is not finished."""

    task: Task
    rollouts: tuple[Episode, ...]
    scores: tuple[Score, ...]

    @property
    def is_finished(self) -> bool:
        return len(self.scores) == len(self.rollouts)

    @property
    def has_traces_alone(self) -> bool:
        """Whether every episode is a whole trace."""
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
    authors: Tensor  # [T] int8, of Author
    rl_weights: Tensor  # [T] float32
    sft_weights: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    behavior_log_probs: Tensor  # [T] float32
    engine_log_probs: Tensor  # [T] float32
    old_log_probs: Tensor | None = None  # [T] float32; None: take the current ones
    ref_log_probs: Tensor | None = None  # [T] float32
    calls: int | None = field(default=None, kw_only=True)  # of a whole trace

    @property
    def off_policy(self) -> Tensor:
        """[T] bool: the tokens of a trace."""
        return off_policy(self.authors)

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
    authors: Tensor  # [R] int8, of Author
    rl_weights: Tensor  # [R] float32
    sft_weights: Tensor  # [R] float32
    advantages: Tensor  # [R] float32
    behavior_log_probs: Tensor  # [R] float32
    engine_log_probs: Tensor  # [R] float32
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None

    @cached_property
    def off_policy(self) -> Tensor:
        """[R] bool: the tokens of a trace."""
        return off_policy(self.authors)

    @cached_property
    def is_drawn(self) -> Tensor:
        """[R] bool: the tokens that the engine drew."""
        return is_drawn(self.authors)

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

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {k: to_device(v, device) for k, v in values.items() if isinstance(v, Tensor)}
        return MicroBatch(**{**values, **moved})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Without waiting: from ordinary memory a GPU takes more than 64 KiB only when it has done all it was given before,
    and the host waits for that."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
