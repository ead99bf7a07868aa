"""Teachers that write traces: an OpenAI-compatible server, or a model in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

from luffy.config import EnvironmentConfig
from luffy.conversations import Scoring, conversations_of, maker_of, tools_of
from luffy.data import Encoder
from luffy.data.prompts import resolve_style, with_system_prompt
from luffy.errors import DataError, UserError
from luffy.guidance.plan import unwritten
from luffy.prepare.endpoint import CUT_OFF, Endpoint, Refused, Reply
from luffy.prepare.endpoint_episodes import EndpointEpisode
from luffy.seeds import seed_of
from luffy.types import THINK, Episode, EpisodeOutcome, Message, Problem, Sampling, Score, Task
from luffy.web import Stopped

SAVED_AT_ONCE = 256  # samples of a model in this process
TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class TeacherResponse:
    """One response of a teacher, its text with the ``<think>`` that the prompt may have opened for it; token ids only
    where they are those of the tokenizer that will be trained."""

    text: str
    finished: bool
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    log_prob_status: str = "no_log_probs"
    messages: tuple[Message, ...] | None = None  # of several turns; the text is the last one's
    final: Callable[[Score], Score] = lambda verified: verified  # the score, from the verifier's


class Answer(NamedTuple):
    """Responses to one problem that the teacher did not refuse, and the reason of a refusal."""

    problem: Problem
    samples: list[TeacherResponse]
    refusal: str = ""

    @staticmethod
    def of(problem: Problem, samples: Sequence[TeacherResponse | str]) -> Answer:
        """Answer from samples, among which a string is a refusal."""
        made = [sample for sample in samples if not isinstance(sample, str)]
        return Answer(problem, made, next((sample for sample in samples if isinstance(sample, str)), ""))


class Teacher(Protocol):
    """Source of responses to problems."""

    def answer(self, problems: Iterable[Problem], n: int) -> Iterator[list[Answer]]:
        """Yield answers as they finish, in any order."""


# ---- a server


@dataclass
class EndpointTeacher:
    """Asks a server for ``concurrency`` samples at a time, each with a seed of its own. ``rules``: of episodes, if an
    environment answers its turns."""

    endpoint: Endpoint
    sampling: dict[str, Any]
    seed: int = 0
    concurrency: int = 16
    system_prompt: str | None = None
    tokenizer: Any = None
    encoder: Encoder | None = None
    rules: Scoring | None = None

    def answer(self, problems: Iterable[Problem], n: int) -> Iterator[list[Answer]]:
        """Yield answers as they finish; after a failure use the requests in flight, then raise it."""
        wanted = ((problem, place) for problem in problems for place in range(n))
        running: dict[Future[Reply | EpisodeOutcome], tuple[Problem, int]] = {}
        drawn: dict[str, dict[int, TeacherResponse | str]] = {}
        failure: Exception | None = None
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            while True:
                if failure is None:
                    for problem, place in islice(wanted, 2 * self.concurrency - len(running)):
                        running[pool.submit(self._ask, problem, place)] = (problem, place)
                if not running:
                    break
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                answered, error = self._collect(ended, running, drawn, n)
                failure = failure or error
                if answered:
                    yield answered
        finally:
            self.endpoint.abort()
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _collect(
        self,
        ended: Iterable[Future[Reply | EpisodeOutcome]],
        running: dict[Future[Reply | EpisodeOutcome], tuple[Problem, int]],
        drawn: dict[str, dict[int, TeacherResponse | str]],
        n: int,
    ) -> tuple[list[Answer], Exception | None]:
        answered: list[Answer] = []
        failure: Exception | None = None
        for future in ended:
            problem, place = running.pop(future)
            samples = drawn.setdefault(problem.id, {})
            try:
                samples[place] = self._drawn(problem, future.result())
            except (Refused, DataError) as error:
                samples[place] = str(error)
            except UserError as error:
                failure = failure or error
                self.endpoint.abort()
                continue
            except Stopped:
                continue
            if len(samples) == n:
                answered.append(Answer.of(problem, [samples[k] for k in range(n)]))
                del drawn[problem.id]
        return answered, failure

    def _ask(self, problem: Problem, place: int) -> Reply | EpisodeOutcome:
        seed = seed_of(f"{self.seed}:{problem.id}:{place}") & 0x7FFFFFFF  # servers take 32 bits
        sampling = {**self.sampling, "seed": seed}
        if (rules := self.rules) is None:
            return self.endpoint.sample(self._prompt(problem), sampling)
        tools = rules.maker.tools
        episode = EndpointEpisode(rules, lambda chat: self.endpoint.sample(chat, sampling, tools), self._chat)
        return episode.play(problem, seed)

    def _prompt(self, problem: Problem) -> str | tuple[Message, ...]:
        if self.endpoint.api == "completions":
            if self.encoder is not None:
                return self.encoder.render(problem)
            if not isinstance(problem.prompt, str):
                raise UserError(f"problem {problem.id}: a chat needs --tokenizer to become text for --api completions")
            return problem.prompt
        return self._chat(problem)

    def _chat(self, problem: Problem) -> tuple[Message, ...]:
        chat = problem.prompt if isinstance(problem.prompt, tuple) else (Message("user", problem.prompt),)
        return with_system_prompt(chat, self.system_prompt)

    def _drawn(self, problem: Problem, reply: Reply | EpisodeOutcome) -> TeacherResponse:
        if isinstance(reply, EpisodeOutcome):
            assert self.rules is not None
            return acted(self.rules, reply, reply.messages[-1].content if reply.messages else "")
        encoder = self.encoder if self.endpoint.api == "completions" else None  # else the server writes the prompt
        text = whole_response(reply.text, encoder is not None and encoder.in_thought(problem))
        return TeacherResponse(text, reply.finish not in CUT_OFF, *recorded_ids(reply, self.tokenizer))


def acted(rules: Scoring, outcome: EpisodeOutcome, text: str) -> TeacherResponse:
    """The response of an episode; ``text`` is its last turn."""
    finished = outcome.end in ("answer", "environment")
    return TeacherResponse(
        text, finished, messages=outcome.messages, final=lambda verified: rules.score(outcome, verified)
    )


def whole_response(text: str, in_thought: bool) -> str:
    """Response with the tag of the thought that its prompt opened."""
    return f"{THINK}\n{text}" if in_thought else text


def recorded_ids(reply: Reply, tokenizer: Any) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None, str]:
    """Token ids and log-probs of a reply, and what became of them. Without ids a log-prob belongs to nothing, so
    both are left out unless the tokenizer reads the ids that the server names as the text, or cuts the text as the
    server did. Without a tokenizer nobody could tell whose ids they are."""
    if reply.log_probs is None:
        return None, None, "no_log_probs"
    log_probs = tuple(min(value, 0.0) for value in reply.log_probs)  # rounding on the server may exceed 0
    if not all(map(math.isfinite, log_probs)):
        return None, None, "log_probs_not_finite"
    if tokenizer is None:
        return None, None, "log_probs_without_matching_ids"
    ids = _named_ids(reply)
    if ids is None:
        ids = _matched_ids(reply, tokenizer)
    elif not _same_text(tokenizer, ids, reply.text):
        ids = None
    if ids is None or len(ids) != len(log_probs):
        return None, None, "log_probs_without_matching_ids"
    return ids, log_probs, "log_probs_recorded"


def _named_ids(reply: Reply) -> tuple[int, ...] | None:
    if reply.token_ids is not None:
        return reply.token_ids
    tokens = reply.tokens or ()
    if tokens and all(token.startswith(TOKEN_ID) and token[len(TOKEN_ID) :].isdecimal() for token in tokens):
        return tuple(int(token.removeprefix(TOKEN_ID)) for token in tokens)
    return None


def _same_text(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    return max(ids) < len(tokenizer) and _decoded(tokenizer, ids, skip_special_tokens=True) == text


def _matched_ids(reply: Reply, tokenizer: Any) -> tuple[int, ...] | None:
    """The ids of the text, when they spell exactly the server's tokens; a last token may be the unwritten EOS."""
    tokens = list(reply.tokens or ())
    ids = list(tokenizer(reply.text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(tokens) == len(ids) + 1 and tokens[-1] in ("", tokenizer.eos_token) and tokenizer.eos_token_id is not None:
        tokens[-1] = tokenizer.eos_token
        ids.append(tokenizer.eos_token_id)
    spelled = [_decoded(tokenizer, [token]) for token in ids]
    return tuple(ids) if spelled == tokens else None


def _decoded(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, **options))


# ---- a model in this process


class LocalTeacher:
    """Samples with the training engine. Log-probs are those at the sampling temperature (greedy: at 1)."""

    def __init__(
        self,
        path: str,
        *,
        max_tokens: int,
        temperature: float,
        seed: int = 0,
        style: str = "auto",
        system_prompt: str | None = None,
        tokenizer: Any = None,
        dtype: str = "float32",
        device: str = "auto",
        trust_remote_code: bool = False,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        from luffy.evaluation.engines import load_native

        loaded = load_native(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        most = max_tokens if environment is None else environment.max_tokens or 2 * max_tokens
        room = loaded.context - most
        self._no_room = f"--max-tokens {max_tokens} leaves no room for the prompt in the context of {loaded.context}"
        if room < 1:
            raise UserError(self._no_room)
        style = resolve_style(style, loaded.tokenizer)
        limits: dict[str, Any] = {"max_prompt_tokens": room, "overlong_prompt": "drop"}
        self._encoder = Encoder(loaded.tokenizer, style, system_prompt, tools=tools_of(environment), **limits)
        self._loaded = replace(loaded, conversations=conversations_of(environment, self._encoder, most))
        self._sampling = Sampling(max_tokens, temperature, eos_ids=self._encoder.stops(loaded.eos_ids))
        self._seed = seed
        self._same_ids = tokenizer is not None and tokenizer.get_vocab() == loaded.tokenizer.get_vocab()

    def answer(self, problems: Iterable[Problem], n: int) -> Iterator[list[Answer]]:
        """Yield answers some hundred samples at a time, while the engine works on the next problems."""
        from luffy.evaluation.responses import finished_in_parts

        open_problems: dict[int, tuple[Problem, list[TeacherResponse | None]]] = {}
        numbers = count()
        answered: list[Answer] = []

        def begun() -> Iterator[Episode]:
            for problem in problems:
                task, refusal = self._task(problem)
                if task is None:
                    answered.append(Answer(problem, [], refusal))
                    continue
                open_problems[next(numbers)] = problem, [None] * n
                for place in range(n):
                    yield unwritten(task, seed_of(f"{self._seed}:{problem.id}:{place}"), self._sampling)

        for part in finished_in_parts(self._loaded, begun(), SAVED_AT_ONCE):
            for index, episode in part:
                number, place = divmod(index, n)
                problem, samples = open_problems[number]
                samples[place] = self._drawn(episode)
                drawn = [sample for sample in samples if sample is not None]
                if len(drawn) == n:
                    del open_problems[number]
                    answered.append(Answer(problem, drawn))
            if answered:
                yield answered
                answered = []
        if answered:
            yield answered

    def _task(self, problem: Problem) -> tuple[Task | None, str]:
        """The problem as the model sees it, or None and why not."""
        try:
            return self._encoder.encode(replace(problem, traces=())), self._no_room
        except DataError as error:
            return None, str(error)

    def _drawn(self, episode: Episode) -> TeacherResponse:
        text = str(self._loaded.tokenizer.decode(episode.answer_ids, skip_special_tokens=True))
        if self._loaded.conversations is not None and episode.outcome is not None:
            return acted(self._loaded.conversations, episode.outcome, text)
        text, finished = whole_response(text, episode.task.in_thought), episode.finish == "stop"
        if not self._same_ids:
            return TeacherResponse(text, finished, log_prob_status="log_probs_without_matching_ids")
        ids, log_probs = episode.token_ids.tolist(), episode.engine_log_probs.tolist()
        return TeacherResponse(text, finished, tuple(ids), tuple(log_probs), "log_probs_recorded")


# ---- from the command line


def endpoint_teacher(
    endpoint: Endpoint,
    sampling: dict[str, Any],
    seed: int,
    style: str,
    system_prompt: str | None,
    tokenizer_path: str | None,
    concurrency: int,
    trust_remote_code: bool = False,
    environment: EnvironmentConfig | None = None,
) -> tuple[Teacher, dict[str, Any]]:
    """Teacher that asks a server, and the settings its samples depend on (no key among them)."""
    settings = {"endpoint": endpoint.url, "model": endpoint.model, "api": endpoint.api, "log_probs": endpoint.log_probs}
    settings |= {"tokenizer": tokenizer_path, "sampling": sampling, "seed": seed, "style": style}
    settings |= {"system_prompt": system_prompt, **_played_in(environment)}
    tokenizer = _tokenizer(tokenizer_path, trust_remote_code)
    encoder = rules = None
    if endpoint.api == "completions" and tokenizer is not None:
        encoder = Encoder(tokenizer, resolve_style(style, tokenizer), system_prompt)
    elif style != "auto":
        raise UserError("--style is the server's own matter with --api chat; with completions it needs --tokenizer")
    if environment is not None:
        if endpoint.api != "chat":
            raise UserError("--environment plays chats: drop --api")
        endpoint = replace(endpoint, log_probs=False)  # traces of several turns have none
        rules = Scoring(environment, maker_of(environment), failure=0.0)
        concurrency = min(concurrency, environment.at_once)
    return EndpointTeacher(endpoint, sampling, seed, concurrency, system_prompt, tokenizer, encoder, rules), settings


def local_teacher(
    path: str,
    sampling: dict[str, Any],
    tokenizer_path: str | None,
    device: str,
    trust_remote_code: bool = False,
    environment: EnvironmentConfig | None = None,
    **options: Any,
) -> tuple[Teacher, dict[str, Any]]:
    """Teacher that samples from a model in this process, and the settings its samples depend on. ``options``: seed,
    style, system_prompt and dtype."""
    here = {"tokenizer": _tokenizer(tokenizer_path, trust_remote_code), "device": device}
    here |= {"trust_remote_code": trust_remote_code, "environment": environment}
    settings = {"local": path, "sampling": sampling, "tokenizer": tokenizer_path, **options, **_played_in(environment)}
    return LocalTeacher(path, **sampling, **options, **here), settings


def _played_in(environment: EnvironmentConfig | None) -> dict[str, Any]:
    return {} if environment is None else {"environment": asdict(environment)}


def _tokenizer(path: str | None, trust_remote_code: bool) -> Any:
    from luffy.models.load import load_tokenizer

    return None if path is None else load_tokenizer(path, trust_remote_code)
