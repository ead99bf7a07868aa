"""Episodes of several turns: what is appended, who wrote it, how episodes end, and what a slow environment delays."""

import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from conversing import TEMPLATE, Own, ScriptedEngine, call_text, make_chat_tokenizer
from data.templates import TEMPLATES, make_model_tokenizer

from luffy.config import EnvironmentConfig, RewardConfig
from luffy.conversations import Conversations, conversations_of, played, without_failures
from luffy.data import Encoder
from luffy.environments.call_formats import format_of, read_turn
from luffy.environments.kinds import maker_for
from luffy.environments.protocol import Reply
from luffy.errors import ConfigError, DataError, UserError
from luffy.guidance.plan import Planner, given, unwritten, whole_turns, without_hint
from luffy.rewards import Verifier
from luffy.step.groups import environment_metrics, own_metrics, trace_scores
from luffy.step.memory import InFlight, problems_of, state_of
from luffy.step.play import Player
from luffy.types import Author, Group, Message, Problem, Sampling, Score, ToolCall, Trace

TOKENIZER = make_chat_tokenizer()
HANG = threading.Event()


class LastNumber(Verifier):
    """Scores 1 where the last number of a response is the answer."""

    def __init__(self, most_if_cut_off=None):
        super().__init__({}, {}, most_if_cut_off)

    def score(self, items):
        return [Score(float(re.findall(r"\d+", text or "0")[-1:] == [problem.answer])) for problem, text, *_ in items]


class Sums:
    """Adds, and remembers what it was asked."""

    opened, closed = 0, 0

    def __init__(self):
        type(self).opened += 1

    def reset(self, prompt, **row):
        self.asked = []
        if "observe" in prompt:
            return " (observed)"
        if "break" in prompt:
            raise ValueError("no such place \ud800")

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        self.asked.append((a, b))
        return a + b

    def hang(self) -> str:
        """Never answer."""
        HANG.wait()
        return ""

    def shout(self) -> str:
        """Answer at length."""
        return "!" * 300

    def close(self):
        type(self).closed += 1


class Scored(Sums):
    def get_reward(self):
        return float(len(self.asked)) / 2


def make_rules(environment=Sums, tokens=400, max_tokens=None, **settings):
    maker = maker_for(environment, {}, settings.get("max_reply_chars", 4000))
    encoder = Encoder(TOKENIZER, max_response_tokens=tokens, tools=maker.tools)
    cfg = EnvironmentConfig(name="sums", **settings)
    return Conversations(cfg, maker, 0.0, encoder, "hermes", max_tokens or 2 * tokens)


def make_problem(prompt="2+3+4=?", answer="9", traces=()):
    return Problem("p", prompt, answer, traces)


def play_turns(rules, write, problems, count=1, max_tokens=400, planned=None, most_if_cut_off=None):
    """The groups of some problems, played with an engine that follows a script."""
    tasks = [rules.encoder.encode(problem) for problem in problems]
    plan = planned or [
        tuple(unwritten(task, j, Sampling(max_tokens, eos_ids=(TOKENIZER.eos_token_id,))) for j in range(count))
        for task in tasks
    ]
    engine = ScriptedEngine(TOKENIZER, write)
    player = Player(engine, LastNumber(most_if_cut_off), TOKENIZER, 0, lambda done, total: None, conversations=rules)
    return player.play(plan), engine


def adds(text):
    """Call the tool for 2+3, then for its answer +4, then answer."""
    if "<tool_response>9" in text:
        return "It is 9."
    if "<tool_response>5" in text:
        return call_text("add", a=5, b=4)
    return "First: " + call_text("add", a=2, b=3)


def values_of(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def spelled(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_what_is_trained_is_what_was_drawn_and_replies_are_the_environments():
    rules = make_rules()
    (group,), engine = play_turns(rules, adds, [make_problem()])
    (episode,), (score,) = group.rollouts, group.scores
    assert episode.finish == "stop" and episode.outcome.end == "answer" and score.value == 1.0
    assert (episode.outcome.turns, episode.outcome.calls, episode.outcome.faults) == (3, 2, ())
    drawn = episode.token_ids[episode.authors == Author.POLICY]
    completions = [engine._complete(request).token_ids for request in engine.requests[:3]]
    assert drawn.tolist() == torch.cat(completions).tolist()
    replies = spelled(episode.token_ids[episode.authors == Author.ENVIRONMENT])
    between = "\n<|im_start|>user\n<tool_response>{}</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert replies == between.format(5) + between.format(9)
    assert episode.length == episode.drawn == len(drawn)
    assert spelled(episode.answer_ids) == "It is 9.<|im_end|>", "the verifier judges the last turn"
    # Each request is the one before it, with what was drawn and the reply behind it.
    for earlier, later in zip(engine.requests[:2], engine.requests[1:3], strict=True):
        assert later.given_ids[: len(earlier.given_ids)] == earlier.given_ids
        assert later.conversation == earlier.conversation
    whole = TOKENIZER.apply_chat_template(
        [
            {"role": "user", "content": "2+3+4=?"},
            {"role": "assistant", "content": "First: ", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 5, "b": 4}}}]},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": "It is 9."},
        ],
        tools=list(rules.maker.tools), tokenize=False,
    )  # fmt: skip
    assert spelled((*episode.task.prompt_ids, *episode.token_ids.tolist())) + "\n" == whole


def test_an_outcome_has_all_turns_and_replies_and_a_reward_for_each_turn():
    ((group,), _) = play_turns(make_rules(), adds, [make_problem()])
    outcome = group.rollouts[0].outcome
    assert outcome.messages == (
        Message("assistant", "First:", (ToolCall("add", {"a": 2, "b": 3}),)), Message("tool", "5", name="add"),
        Message("assistant", "", (ToolCall("add", {"a": 5, "b": 4}),)), Message("tool", "9", name="add"),
        Message("assistant", "It is 9."),
    )  # fmt: skip
    assert outcome.turn_rewards == (0.0, 0.0, 0.0), "a turn without a reward has 0"


def test_a_request_has_room_for_the_longest_prompt_and_episode():
    rules = make_rules()
    letters = rules.encoder.max_prompt_tokens - len(rules.encoder.encode(make_problem("")).prompt_ids)
    _, engine = play_turns(rules, adds, [make_problem("2" * letters)], max_tokens=rules.most_tokens)
    assert max(request.start + request.sampling.max_tokens for request in engine.requests) == rules.longest


class Listening(ScriptedEngine):
    """Hears which conversations have ended."""

    def serve(self, source):
        super().serve(source)
        self.ended = source.ended()


def test_each_episode_is_a_conversation_of_its_own_and_its_end_is_told():
    rules, engine = make_rules(), Listening(TOKENIZER, adds)
    task = rules.encoder.encode(make_problem())
    episodes, heard = [unwritten(task, seed, Sampling(400)) for seed in range(3)], []
    ended = played(rules, engine, episodes, 7, lambda done, total: heard.append((done, total)))
    asked = {(request.seed, request.conversation) for request in engine.requests}
    assert len(engine.requests) == 9 and len(asked) == 3
    assert sorted(engine.ended) == sorted(number for _, number in asked) == [0, 1, 2]
    assert heard == [(1, 3), (2, 3), (3, 3)] and [episode.policy_version for episode in ended] == [7, 7, 7]


SAID = {  # a thought, then a call in the words of the template
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    "llama3.1": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]',
}


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1", "mistral", "hermes"])
def test_each_template_goes_on_from_what_the_model_saw_and_drew(name):
    tokenizer = make_model_tokenizer(name)
    maker = maker_for(Sums, {}, 4000)
    encoder = Encoder(tokenizer, max_response_tokens=400, tools=maker.tools, date="2026-01-31", max_prompt_tokens=4096)
    format = format_of(TEMPLATES[name])
    rules = Conversations(EnvironmentConfig(name="sums", max_turns=3), maker, 0.0, encoder, format, 2000)
    thought, call = "<think>\nadd\n</think>\n\n", SAID.get(name, SAID["qwen2.5"])
    task = encoder.encode(make_problem())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(encoder.eos_ids[0])  # what the script ends its turns with
    engine = ScriptedEngine(tokenizer, lambda text: thought + call)
    sampling = Sampling(400, eos_ids=encoder.eos_ids)
    player = Player(engine, LastNumber(), tokenizer, 0, lambda done, total: None, conversations=rules)
    ((episode,),) = (group.rollouts for group in player.play([(unwritten(task, 0, sampling),)]))
    assert (episode.outcome.turns, episode.outcome.calls, episode.outcome.end) == (3, 3, "turns")
    seen, reply = task.prompt_ids, encoder.reply_ids([Message("tool", "5", name="add")])
    for request in engine.requests[:3]:
        assert request.given_ids == seen
        drawn = tuple(engine._complete(request).token_ids.tolist())
        seen = (*seen, *drawn, *reply)
    whole = (*episode.task.prompt_ids, *episode.token_ids.tolist())
    assert (*whole, *reply) == seen and tokenizer.decode(whole).count(thought) == 3


def test_limits_end_an_episode_and_are_told_apart():
    again = lambda text: call_text("add", a=2, b=3)  # noqa: E731
    problem = [make_problem()]
    ends = {}
    for name, rules, tokens in (
        ("turns", make_rules(max_turns=3), 400),
        ("tokens", make_rules(), 150),
        ("context", make_rules(max_tokens=300), 290),
    ):
        ((group,), _) = play_turns(rules, again, problem, max_tokens=tokens)
        (episode,) = group.rollouts
        ends[name] = episode.outcome.end
        assert episode.finish == "length" and episode.drawn <= tokens
        assert episode.token_ids.numel() <= rules.most_tokens
        assert episode.authors[-1] == Author.POLICY, "a reply that nobody reads is not there"
    assert ends == {name: name for name in ends}


def test_an_episode_ends_where_its_limits_leave_no_token_for_another_turn():
    ((group,), _) = play_turns(make_rules(), adds, [make_problem()])
    authors = group.rollouts[0].authors.tolist()
    turn = authors.index(Author.ENVIRONMENT)
    reply = authors.index(Author.POLICY, turn) - turn
    for end, whole, own, length in (
        ("tokens", 800, turn, turn),
        ("tokens", 800, turn + 1, turn + reply + 1),
        ("context", turn + reply, 400, turn),
        ("tokens", turn + reply + 1, 400, turn + reply + 1),
    ):
        ((group,), _) = play_turns(make_rules(max_tokens=whole), adds, [make_problem()], max_tokens=own)
        (episode,) = group.rollouts
        assert (episode.outcome.end, episode.token_ids.numel()) == (end, length)


def test_an_episode_that_was_cut_off_fails_if_the_recipe_says_so():
    """Its last call spells the answer."""
    again = lambda text: call_text("add", a=2, b=9)  # noqa: E731
    for most, value in ((None, 1.0), (0.0, 0.0)):
        ((group,), _) = play_turns(make_rules(max_turns=3), again, [make_problem()], most_if_cut_off=most)
        assert [score.value for score in group.scores] == [value]


@pytest.mark.parametrize(
    ("said", "fault", "told"),
    [
        ("<tool_call>{nonsense</tool_call>", "unreadable_call", "error"),
        (call_text("multiply", a=1), "unknown_tool", "error: no tool 'multiply'"),
        (call_text("add", a=1), "wrong_arguments", "error: missing argument b"),
        (call_text("shout"), "cut_answer", "!!!"),
    ],
)
def test_a_bad_call_is_answered_or_ends_the_episode(said, fault, told):
    say = lambda text: "It is 9." if "<tool_response>" in text else said  # noqa: E731
    ((group,), _) = play_turns(make_rules(max_reply_chars=100), say, [make_problem()])
    (episode,) = group.rollouts
    assert episode.outcome.faults == (fault,) and episode.outcome.end == "answer" and group.scores[0].value == 1.0
    assert told in spelled(episode.token_ids[episode.authors == Author.ENVIRONMENT])
    first = episode.outcome.messages[0]
    assert first.tool_calls or first.content == said, "what cannot be read is kept as it was written"
    ((group,), _) = play_turns(make_rules(max_reply_chars=100, on_bad_call="end"), say, [make_problem()])
    (episode,) = group.rollouts
    assert episode.outcome.faults == (fault,) and episode.outcome.end == "bad_call" and group.scores[0].value == 0.0
    assert not (episode.authors == Author.ENVIRONMENT).any()


def test_an_environment_that_hangs_or_breaks_costs_its_own_episode_alone():
    def write(text):
        return call_text("hang") if "user\nhang" in text else adds(text)

    problems = [make_problem(), make_problem("hang"), make_problem("break")]
    groups, _ = play_turns(make_rules(timeout_s=0.3), write, problems, count=2)
    ends = [[episode.outcome.end for episode in group.rollouts] for group in groups]
    assert ends == [["answer"] * 2, ["timed_out"] * 2, ["raised"] * 2]
    assert [s.value for g in groups for s in g.scores] == [1, 1, 0, 0, 0, 0]
    assert groups[1].scores[0].reason == "the environment: no answer within 0.3 s (environment.timeout_s)"
    assert groups[1].scores[0].status == "environment_timed_out"
    assert "no such place ?" in groups[2].scores[0].reason, "no file takes half a character"


def test_an_episode_whose_environment_fails_scores_the_worst_value():
    ((group,), _) = play_turns(replace(make_rules(), failure=-1.0), adds, [make_problem("break")])
    assert [score.value for score in group.scores] == [-1.0]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"first": b"x"}, "OddAnswer: the answer is a bytes"),
        ({"answer": None}, "TypeError: reply must return a Reply, not NoneType"),
        ({"answer": Reply(("x",))}, "TypeError: the messages of a Reply must be Messages with text"),
        ({"answer": Reply((Message("user", None),))}, "TypeError: the messages of a Reply must be Messages with text"),
        ({"answer": Reply((Message(["user"], "x"),))}, "TypeError: the messages of a Reply must be Messages with text"),
        ({"answer": Reply((Message("tool", "x", name=5),))}, "TypeError: the messages of a Reply must be Messages"),
        ({"answer": Reply((Message("user", "x"),), faults="bad")}, "TypeError: the faults of a Reply must be a tuple"),
        ({"answer": Reply(reward=float("nan"))}, "ValueError: a reward must be a finite number or None, got 'nan'"),
        ({"total": "much"}, "ValueError: a reward must be a finite number or None, got 'much'"),
        ({"total": float("inf")}, "ValueError: a reward must be a finite number or None, got 'inf'"),
    ],
)
def test_an_environment_that_breaks_its_protocol_costs_its_own_episode_alone(said, why):
    ((group,), _) = play_turns(make_rules(type("Odd", (Own,), said)), lambda text: "go", [make_problem()])
    (outcome,) = (episode.outcome for episode in group.rollouts)
    assert (outcome.end, outcome.faults) == ("raised", ("raised",)) and outcome.message.startswith(why)
    assert outcome.reward is None and group.scores[0].value == 0.0


def test_rewards_and_texts_of_an_environment_become_plain_ones():
    one = Reply((Message("user", "\ud800"),), reward=torch.tensor(0.5))
    said = {"first": "\ud800", "answer": one, "total": torch.tensor(2.0)}
    ((group,), _) = play_turns(make_rules(type("Odd", (Own,), said), max_turns=2), lambda text: "go", [make_problem()])
    (episode,) = group.rollouts
    assert [type(value) for value in (group.scores[0].value, *episode.outcome.turn_rewards)] == [float] * 3
    assert "=??<|im_end|>" in spelled(episode.task.prompt_ids) and "user\n?<|im_end|>" in spelled(episode.token_ids)


@pytest.mark.parametrize(
    ("chosen", "counted"),
    [({"reward": "environment"}, 0.5), ({"reward": "verifier"}, 0.0), ({"reward": "sum", "weight": 3.0}, 1.5)],
)
def test_rewards_of_turns_count_as_in_the_reward_of_the_episode(chosen, counted):
    said = {"answer": Reply((Message("user", "on"),), reward=0.5), "total": 1.0}
    rules = make_rules(type("Odd", (Own,), said), max_turns=2, **chosen)
    ((group,), _) = play_turns(rules, lambda text: "9", [make_problem()])
    assert group.rollouts[0].outcome.turn_rewards == (counted, counted)
    own = {"environment": 1.0, "verifier": 0.0, "sum": 3.0}[chosen["reward"]]
    assert group.scores[0].value == own + (chosen["reward"] != "environment")


@pytest.mark.parametrize(("calls", "read"), [("auto", "hermes"), ("json", "json")])
def test_calls_are_read_as_the_template_or_the_recipe_says(calls, read):
    encoder = Encoder(TOKENIZER, max_response_tokens=400)
    rules = conversations_of(EnvironmentConfig(name="calculator", calls=calls), encoder, 400)
    turn = rules.turn(TOKENIZER.encode('{"name": "calculate", "arguments": {"expression": "2+3"}}'), False)
    assert rules.call_format == read and len(turn.calls) == (calls == "json")


def test_an_environment_may_end_an_episode_behind_a_call_that_cannot_be_read():
    for said, end, finish in (("<tool_call>{x</tool_call>", "environment", "environment"), ("go", "answer", "stop")):
        ((group,), _) = play_turns(make_rules(Own), lambda text, said=said: said, [make_problem()])
        assert (group.rollouts[0].outcome.end, group.rollouts[0].finish) == (end, finish)


def test_an_environment_may_end_an_episode_with_its_last_words():
    last = type("Last", (Own,), {"answer": Reply((Message("user", "bye"),), done=True)})
    ((group,), _) = play_turns(make_rules(last), lambda text: "go", [make_problem()])
    (episode,) = group.rollouts
    assert episode.outcome.turns == 1 and not (episode.authors == Author.ENVIRONMENT).any()


def test_each_episode_begins_with_its_seed():
    seen = []

    class Seeded(Sums):
        def reset(self, seed: int):
            super().reset("")
            seen.append(seed)

    play_turns(make_rules(Seeded), adds, [make_problem()], count=3)
    assert sorted(seen) == [0, 1, 2]


def test_a_mistake_of_the_recipe_ends_the_run():
    class Needs(Sums):
        def reset(self, budget: int):
            pass

    with pytest.raises(UserError, match="Needs.reset needs 'budget'"):
        play_turns(make_rules(Needs), adds, [make_problem()])


def test_a_first_text_that_makes_the_prompt_too_long_ends_run_or_episode():
    rules = make_rules(type("Long", (Own,), {"first": "!" * 1024}))
    with pytest.raises(DataError, match="the prompt has .* data.max_prompt_tokens=1024; .*overlong_prompt=drop"):
        play_turns(rules, lambda text: "go", [make_problem()])
    rules.encoder.overlong_prompt = "drop"
    ((group,), _) = play_turns(rules, lambda text: "go", [make_problem()])
    (episode,) = group.rollouts
    assert episode.outcome.faults == ("raised",) and "the prompt has" in group.scores[0].reason


def test_failures_are_left_out_as_configured():
    rules = make_rules(on_failure="leave_out", timeout_s=0.3)
    turns = iter([call_text("hang"), call_text("add", a=2, b=3)])
    one_hangs = lambda text: next(turns) if "<tool_response>" not in text else "9"  # noqa: E731
    ((group,), _) = play_turns(rules, one_hangs, [make_problem()], 2)
    left = without_failures(rules, group)
    assert [e.outcome.end for e in left.rollouts] == ["answer"] and len(left.scores) == 1 < len(group.rollouts)
    turned = Group(group.task, group.rollouts[::-1], group.scores[::-1])
    assert left.scores == without_failures(rules, turned).scores == (Score(1.0),)
    assert without_failures(make_rules(), group) is group, "it scores 0"
    ((group,), _) = play_turns(rules, lambda text: call_text("hang"), [make_problem()], 2)
    assert without_failures(rules, group) is group, "where all fail, all stay"


def test_a_slow_environment_delays_no_other_episode():
    order, release = [], threading.Event()

    class Slow(Sums):
        def wait(self, number: int) -> str:
            """Wait.

            Args:
                number: whose turn
            """
            if number == 0:
                release.wait(20)
            order.append(number)
            if len(order) == 9:
                release.set()
            return "done"

    def write(text):
        number = int(text.split("number ")[1][0])
        return "It is 9." if text.count("<tool_response>") == 3 else call_text("wait", number=number)

    groups, _ = play_turns(make_rules(Slow), write, [make_problem(f"number {i}") for i in range(4)])
    assert sorted(order[:9]) == [1, 1, 1, 2, 2, 2, 3, 3, 3], "three episodes ended meanwhile"
    assert [g.rollouts[0].outcome.turns for g in groups] == [4] * 4


def test_at_most_so_many_environments_are_open_and_all_are_closed():
    opened, ending, lock = [], threading.Event(), threading.Lock()

    class Counted(Sums):
        live = 0

        def reset(self, **row):
            with lock:
                Counted.live += 1
                opened.append(ending.is_set())  # later one that closes may overlap with the next
            self.asked = []
            time.sleep(0.005)

        def close(self):
            with lock:
                Counted.live -= 1

    def write(text):
        said = adds(text)
        if said.startswith("It is"):
            ending.set()
        return said

    play_turns(make_rules(Counted, at_once=3), write, [make_problem()], count=12)
    assert opened.count(False) == 3 and len(opened) == 12 and Counted.live == 0


@pytest.mark.parametrize(("at_once", "most"), [(3, 3), (4, 4), (64, 4)])
def test_the_engine_keeps_room_for_as_many_episodes_as_are_open(at_once, most):
    class Watched(ScriptedEngine):
        def serve(self, source):
            self.most = source.most
            super().serve(source)

    rules = make_rules(at_once=at_once)
    engine, task = Watched(TOKENIZER, adds), rules.encoder.encode(make_problem())
    assert len(played(rules, engine, [unwritten(task, seed, Sampling(400)) for seed in range(4)], 1)) == 4
    assert engine.most == most


def test_environments_are_closed_when_the_run_is_stopped():
    Sums.opened = Sums.closed = 0

    def stop(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_turns(make_rules(), stop, [make_problem()], count=3)
    assert Sums.closed == Sums.opened == 3


def test_a_run_waits_for_its_environments_to_close():
    class Slow(Sums):
        opened, closed = 0, 0

        def close(self):
            time.sleep(0.05)
            super().close()

    play_turns(make_rules(Slow), adds, [make_problem()], count=2)
    assert Slow.closed == Slow.opened == 2


def test_an_observation_stands_behind_the_question():
    ((group,), _) = play_turns(make_rules(), adds, [make_problem("2+3+4 observe")])
    (episode,) = group.rollouts
    assert "2+3+4 observe (observed)<|im_end|>" in spelled(episode.task.prompt_ids)


@pytest.mark.parametrize(
    ("how", "value"), [("verifier", 1.0), ("environment", 1.0), ("sum", 1.0 + 0.5 * 1.0), ("auto", 1.0)]
)
def test_the_verifiers_reward_and_the_environments(how, value):
    ((group,), _) = play_turns(make_rules(Scored, reward=how, weight=0.5), adds, [make_problem()])
    assert group.scores[0].value == value
    assert group.rollouts[0].outcome.reward == (None if how == "verifier" else 1.0)
    if how == "sum":
        assert group.scores[0].components == {"verifier": 1.0, "environment": 1.0}
    wrong = lambda text: call_text("add", a=1, b=1) if "<tool_response>" not in text else "It is 7."  # noqa: E731
    ((group,), _) = play_turns(make_rules(Scored, reward=how, weight=0.5), wrong, [make_problem()])
    assert group.scores[0].value == {"verifier": 0.0, "environment": 0.5, "sum": 0.25, "auto": 0.5}[how]


@pytest.mark.parametrize("how", ["environment", "sum"])
def test_an_environment_without_a_reward_cannot_give_one(how):
    cfg = EnvironmentConfig(name="calculator", reward=how)
    with pytest.raises(ConfigError, match=f"'environment.reward' is {how}, but calculator gives no reward"):
        conversations_of(cfg, Encoder(TOKENIZER, max_response_tokens=9), 18)


class Costs(Sums):
    def get_reward(self):
        return -0.5


def test_the_sum_of_an_episode_that_was_cut_off_is_what_fails():
    """As in an evaluation; each part alone may be anything."""
    again = lambda text: call_text("add", a=2, b=9)  # noqa: E731
    for most, value in ((None, 0.5), (0.0, 0.0), (-1.0, -1.0)):
        rules = make_rules(Costs, reward="sum", max_turns=3)
        ((group,), _) = play_turns(rules, again, [make_problem()], most_if_cut_off=most)
        assert [score.value for score in group.scores] == [value]


# --- a teacher's trajectories ---

CALLS = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": 5, "b": 4}))


def make_trace(first_reply="5"):
    return Trace(
        messages=(
            Message("assistant", "", (CALLS[0],)), Message("tool", first_reply, name="add"),
            Message("assistant", "", (CALLS[1],)), Message("tool", "9", name="add"), Message("assistant", "So 9."),
        )
    )  # fmt: skip


def guided(rules, trace, ratio, prompt="2+3+4=?"):
    """An episode that begins with a share of a trace."""
    task = rules.encoder.encode(make_problem(prompt, traces=(trace,)))
    (demonstration,) = task.demonstrations
    prefix = whole_turns(demonstration, int(ratio * len(demonstration.token_ids)))
    begun = given(task, demonstration, prefix)
    sampling = Sampling(400, eos_ids=(TOKENIZER.eos_token_id,))
    is_whole = prefix == len(demonstration.token_ids)
    return replace(begun, finish="trace" if is_whole else None, seed=3, sampling=sampling), demonstration


def test_a_trace_is_the_teachers_and_its_tool_results_the_environments():
    episode, demonstration = guided(make_rules(), make_trace(), 1.0)
    assert [spelled(episode.token_ids[slice(*span)]) for span in demonstration.replies] == [
        f"\n<|im_start|>user\n<tool_response>{total}</tool_response><|im_end|>\n<|im_start|>assistant\n"
        for total in (5, 9)
    ]
    assert ((episode.authors == Author.ENVIRONMENT).nonzero().flatten().tolist()) == [
        i for start, end in demonstration.replies for i in range(start, end)
    ]
    assert episode.is_trace and episode.prefix == episode.length < episode.token_ids.numel()
    calls = [call_text(call.name, **call.arguments) + "<|im_end|>" for call in CALLS]
    assert [spelled(turn) for turn in demonstration.turns] == [*calls, "So 9.<|im_end|>"]
    assert demonstration.answer_ids == demonstration.turns[-1]


@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_after_a_prefix_of_turns_the_policy_goes_on_in_the_live_environment(ratio):
    rules = make_rules()
    episode, demonstration = guided(rules, make_trace(), ratio)
    ((group,), engine) = play_turns(rules, adds, [make_problem()], planned=[(episode,)])
    (played,) = group.rollouts
    assert not played.outcome.trace_left_out and played.outcome.end == "answer" and group.scores[0].value == 1.0
    end = demonstration.replies[0 if ratio == 0.5 else 1]
    assert played.token_ids[: end[1]].tolist() == list(demonstration.token_ids[: end[1]])
    assert played.prefix == end[0] - (0 if ratio == 0.5 else demonstration.replies[0][1] - demonstration.replies[0][0])
    assert len(engine.requests) == (2 if ratio == 0.5 else 1)
    assert all(request.drafts == (demonstration.token_ids,) for request in engine.requests)
    assert played.outcome.calls == len(engine.requests) - 1, "those of the teacher are not the policy's"
    assert [message.role for message in played.outcome.messages] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (played.authors == Author.POLICY).sum() == played.drawn > 0


def test_the_policys_limit_does_not_count_the_teachers_tokens():
    rules = make_rules()
    episode, _ = guided(rules, make_trace(), 0.5)
    own = len(TOKENIZER(call_text("add", a=5, b=4) + "It is 9.")["input_ids"]) + 2  # with the ends of two turns
    for tokens, end in ((own, "answer"), (own - 1, "tokens")):
        plan = [(replace(episode, sampling=replace(episode.sampling, max_tokens=tokens)),)]
        ((group,), _) = play_turns(rules, adds, [make_problem()], planned=plan)
        assert group.rollouts[0].outcome.end == end


def test_a_teachers_unreadable_call_does_not_end_an_episode():
    rules = make_rules(on_bad_call="end")
    said = "<tool_call>{x</tool_call>"
    told = maker_for(Sums).make().reply(read_turn(said)).messages[0].content
    messages = (Message("assistant", said), Message("tool", told), Message("assistant", "So 9."))
    episode, _ = guided(rules, Trace(messages=messages), 0.9)
    ((group,), _) = play_turns(rules, lambda text: "It is 9.", [make_problem()], planned=[(episode,)])
    assert group.rollouts[0].outcome.end == "answer" and group.scores[0].value == 1.0
    assert group.rollouts[0].outcome.faults == (), "it is not the policy's"


def test_a_trace_that_the_environment_answers_otherwise_is_left_out():
    rules = make_rules()
    episode, _ = guided(rules, make_trace(first_reply="6"), 0.9)
    Sums.opened = Sums.closed = 0
    ((group,), _) = play_turns(rules, adds, [make_problem()], planned=[(episode,)])
    (played,) = group.rollouts
    assert played.outcome.trace_left_out and played.is_on_policy and group.scores[0].value == 1.0
    assert Sums.closed == Sums.opened == 2
    metrics = values_of(environment_metrics([group]))
    assert metrics["environment/traces_left_out"] == 1
    assert played.sampling.max_tokens == 400 + episode.length, "the policy may draw what the teacher's turns took"
    assert played.seed == episode.seed


def test_a_trace_that_goes_on_where_the_environment_ends_is_left_out():
    last = type("Last", (Own,), {"answer": Reply((Message("user", "bye"),), done=True)})
    messages = Message("assistant", "a"), Message("user", "bye"), Message("assistant", "b")
    rules = make_rules(last)
    episode, _ = guided(rules, Trace(messages=messages), 0.9)
    ((group,), engine) = play_turns(rules, lambda text: "go", [], planned=[(episode,)])
    (played,) = group.rollouts
    assert played.outcome.trace_left_out and played.is_on_policy and played.outcome.turns == len(engine.requests) == 1


def test_a_whole_trace_that_is_left_out_took_nothing_of_the_limit():
    rules = make_rules(Scored)
    episode, _ = guided(rules, make_trace(first_reply="6"), 1.0)
    ((group,), _) = play_turns(rules, adds, [make_problem()], planned=[(episode,)])
    (played,) = group.rollouts
    assert played.outcome.trace_left_out and played.is_on_policy and played.sampling.max_tokens == 400


def test_what_an_environment_says_first_is_in_an_episode_once_and_not_in_its_group():
    rules = make_rules()
    episode, _ = guided(rules, make_trace(first_reply="6"), 0.9, "observe 2+3+4=?")
    ((group,), _) = play_turns(rules, adds, [], planned=[(episode,)])
    (played,) = group.rollouts
    assert played.outcome.trace_left_out and group.task == episode.task
    assert spelled(played.task.prompt_ids).count("(observed)") == 1


def test_a_task_without_traces_has_no_scores_of_traces():
    rules = make_rules(Scored)
    assert trace_scores(rules.encoder.encode(make_problem()), LastNumber(), TOKENIZER, rules) == []


def test_a_whole_trace_is_played_where_the_environment_scores_it():
    rules = make_rules(Scored)
    episode, _ = guided(rules, make_trace(), 1.0)
    ((group,), engine) = play_turns(rules, adds, [make_problem()], planned=[(episode,)])
    (played,) = group.rollouts
    assert played.finish == "trace" and played.outcome.reward == 1.0 and group.scores[0].value == 1.0
    assert not engine.requests
    rules = make_rules()
    episode, _ = guided(rules, make_trace(), 1.0)
    ((group,), _) = play_turns(rules, adds, [make_problem()], planned=[(episode,)])
    assert group.rollouts[0].outcome is None and group.scores[0].value == 1.0, "the verifier reads its last turn"


def test_metrics_count_turns_calls_ends_and_faults():
    say = lambda text: "It is 9." if "<tool_response>" in text else call_text("multiply")  # noqa: E731
    groups, _ = play_turns(make_rules(), say, [make_problem()], count=2)
    found = values_of(environment_metrics(groups))
    assert found["environment/turns"] == 2 and found["environment/calls"] == 1 and found["environment/called"] == 1
    assert found["environment/end/answer"] == 1 and found["environment/fault/unknown_tool"] == 2
    assert found["environment/reply_tokens"] > 0
    assert environment_metrics([Group(groups[0].task, (), ())]) == {}
    assert Score(0.0).value == 0


def test_metrics_are_of_the_episodes_that_the_policy_ended():
    rules = make_rules(Scored)
    twice = call_text("add", a=2, b=3) + call_text("add", a=5, b=5)
    say = lambda text: "It is 9." if "<tool_response>" in text else twice  # noqa: E731
    whole, _ = guided(rules, make_trace(), 1.0)
    own = unwritten(whole.task, 0, whole.sampling)
    hanging = replace(own, task=rules.encoder.encode(make_problem("break")))
    groups, _ = play_turns(rules, say, [], planned=[(own, whole), (hanging,)])
    found = values_of(environment_metrics(groups))
    replies = int((groups[0].rollouts[0].authors == Author.ENVIRONMENT).sum())
    names = ("turns", "calls", "called", "reply_tokens", "reward", "end/answer", "end/raised", "fault/raised")
    assert [found.pop(f"environment/{name}") for name in names] == [1, 1, 0.5, replies / 2, 1, 0.5, 0.5, 1]
    assert found == {"environment/traces_left_out": 0}


def test_the_length_of_a_response_is_the_policys():
    groups, _ = play_turns(make_rules(), adds, [make_problem(), make_problem("break")])
    found = values_of(own_metrics(groups, RewardConfig()))
    assert found["response_length/max"] == groups[0].rollouts[0].drawn < groups[0].rollouts[0].token_ids.numel()
    assert found["response_length/clip_ratio"] == 0, "one that the environment ended was not cut off"


def test_episodes_have_the_version_of_their_policy():
    rules = make_rules()
    whole, _ = guided(rules, make_trace(), 1.0)
    plan = [(whole, unwritten(whole.task, 0, whole.sampling))]
    engine = ScriptedEngine(TOKENIZER, adds)
    player = Player(engine, LastNumber(), TOKENIZER, 5, lambda done, total: None, conversations=rules)
    assert [episode.policy_version for episode in player.play(plan)[0].rollouts] == [5, 5]


def test_a_verifier_reads_the_last_turn_alone(monkeypatch):
    read = []

    def score(self, items):
        read.extend(text for _, text, *_ in items)
        return [Score(1.0) for _ in items]

    monkeypatch.setattr(LastNumber, "score", score)
    rules = make_rules()
    play_turns(rules, adds, [make_problem()])
    trace_scores(rules.encoder.encode(make_problem(traces=(make_trace(),))), LastNumber(), TOKENIZER, rules)
    assert read == ["It is 9.", "So 9."]


def test_traces_are_scored_by_their_environment():
    rules = make_rules(Scored)
    task = rules.encoder.encode(make_problem(traces=(make_trace(), make_trace(first_reply="6"))))
    right, other = trace_scores(task, LastNumber(), TOKENIZER, rules)
    assert right.value == 1.0
    assert other.value == 0.5, "the environment answered otherwise than recorded, and the play ended there"
    by_verifier = trace_scores(task, LastNumber(), TOKENIZER, make_rules())
    assert [score.value for score in by_verifier] == [1.0, 1.0]


def test_a_trace_of_one_turn_is_scored_by_its_environment():
    rules = make_rules(Scored)
    task = rules.encoder.encode(make_problem(traces=(Trace(text=call_text("add", a=2, b=3)),)))
    (score,) = trace_scores(task, LastNumber(), TOKENIZER, rules)
    assert score.value == 0.5


def test_a_part_of_a_single_turn_is_gone_on_with():
    """The environment sees the whole turn, the teacher's part of it and the policy's."""
    rules = make_rules()
    task = rules.encoder.encode(make_problem(traces=(Trace(text=call_text("add", a=2, b=3)),)))
    (trace,) = task.demonstrations
    begun = replace(
        given(task, trace, 15), finish=None, seed=3, sampling=Sampling(400, eos_ids=(TOKENIZER.eos_token_id,))
    )
    left = TOKENIZER.decode(trace.token_ids[15:-1], skip_special_tokens=False)
    say = lambda text: "It is 9." if "<tool_response>5" in text else left  # noqa: E731
    ((group,), _) = play_turns(rules, say, [make_problem()], planned=[(begun,)])
    (episode,) = group.rollouts
    assert episode.outcome.calls == 1 and episode.outcome.faults == () and group.scores[0].value == 1.0
    assert episode.prefix == 15


def test_a_prefix_of_several_turns_ends_behind_a_whole_one():
    episode, demonstration = guided(make_rules(), make_trace(), 1.0)
    from luffy.guidance import Planner

    planner = Planner(1, 1, Sampling(400), None, "random", 0)
    first = demonstration.replies[0][0]
    assert planner.planned(episode.task, demonstration, first + 20, 1).token_ids.numel() == first
    assert planner.planned(episode.task, demonstration, first, 1).token_ids.numel() == first
    assert planner.planned(episode.task, demonstration, first - 1, 1).token_ids.numel() == 0
    two = planner.planned(episode.task, demonstration, demonstration.replies[1][0], 1)
    assert two.sampling.max_tokens == 400 - two.length > 400 - two.token_ids.numel(), "a reply takes nothing of it"
    whole = planner.planned(episode.task, demonstration, len(demonstration.token_ids), 7)
    assert (whole.finish, whole.seed, whole.sampling) == ("trace", 7, Sampling(400)), "if it is left out, it is drawn"
    anywhere = replace(planner, ends_prefix=lambda token: False)
    assert anywhere.prefix_length(demonstration, 0.5) == first, "a turn's end is a place, whatever tokens are"


def test_replies_stay_the_environments_in_a_response_without_its_hint():
    ((group,), _) = play_turns(make_rules(), adds, [make_problem()])
    (episode,) = group.rollouts
    hinted = replace(episode, task=replace(episode.task, hint=1, plain_ids=(1, 2)))
    expected = {Author.POLICY: Author.REPLAY, Author.ENVIRONMENT: Author.ENVIRONMENT}
    plain = without_hint(hinted)
    assert plain.authors.tolist() == [expected[author] for author in episode.authors.tolist()]
    assert plain.length == episode.length and plain.is_trace and plain.task.prompt_ids == (1, 2)


def test_a_call_inside_a_thought_that_the_template_opened_is_none():
    rules = make_rules()
    encoder = Encoder(
        TOKENIZER, chat_template=TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
        max_response_tokens=400, tools=rules.maker.tools,
    )  # fmt: skip
    rules = replace(rules, encoder=encoder)
    said = f"I might {call_text('add', a=1, b=1)} or not.</think>"
    say = lambda text: said + ("It is 9." if "<tool_response>" in text else call_text("add", a=2, b=3))  # noqa: E731
    ((group,), _) = play_turns(rules, say, [make_problem()])
    (episode,) = group.rollouts
    assert episode.task.in_thought and episode.outcome.calls == 1 and episode.outcome.turns == 2
    assert "<tool_response>5" in spelled(episode.token_ids)


def test_an_environment_that_is_made_too_late_is_closed():
    made, may_go = threading.Event(), threading.Event()

    class Late(Sums):
        def __init__(self):
            super().__init__()
            may_go.wait(20)

        def close(self):
            made.set()

    ((group,), _) = play_turns(make_rules(Late, timeout_s=0.1), adds, [make_problem()])
    assert group.rollouts[0].outcome.end == "timed_out" and not made.is_set()
    may_go.set()
    assert made.wait(20)


class Continuing(ScriptedEngine):
    """Goes on within a turn."""

    def __init__(self, tokenizer, write):
        begin = "<|im_start|>assistant\n"

        def rest(text):
            before, _, said = text.rpartition(begin)
            return write(before + begin)[len(said) :]

        super().__init__(tokenizer, rest)


def played_in_parts(rules, write, episode, budget):
    """What becomes of an episode that gets so many tokens a step, and how many steps it takes."""
    task, planner = episode.task, Planner(1, 1, Sampling(400), None, "first", 0)
    for step in range(1, 1000):
        (episode,) = played(rules, Continuing(TOKENIZER, write), [episode], step, budget=budget)
        if episode.finish is not None:
            return episode, step
        assert episode.outcome.end == "under_way" and episode.drawn == budget * step
        (kept,) = problems_of(state_of([InFlight.of(0, 0, 0, [episode])]))
        (episode,) = kept.episodes(task, planner)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("budget", [1, 7, 30, 61, 62, 63, 400])
@pytest.mark.parametrize("environment", [Sums, Scored])
def test_an_episode_in_parts_is_the_one_that_was_never_cut(budget, environment):
    rules = make_rules(environment, max_reply_chars=100)

    def write(text):
        return call_text("shout") if "<tool_response>" not in text else adds(text.replace("!" * 100, "5"))

    start = unwritten(rules.encoder.encode(make_problem("observe")), 3, Sampling(400))
    (whole,) = played(rules, Continuing(TOKENIZER, write), [start], 1)
    opened, closed = environment.opened, environment.closed
    part, steps = played_in_parts(rules, write, start, budget)
    assert (part.token_ids.tolist(), part.authors.tolist()) == (whole.token_ids.tolist(), whole.authors.tolist())
    assert torch.equal(part.engine_log_probs, whole.engine_log_probs)
    assert (part.outcome, part.finish, part.task) == (whole.outcome, whole.finish, whole.task)
    assert part.outcome.faults == ("cut_answer",) and part.outcome.turns == 4
    drawn = part.authors == Author.POLICY
    expected = torch.arange(int(drawn.sum())) // budget + 1
    assert torch.equal(part.versions[drawn], expected) and (part.versions[~drawn] == -1).all()
    assert environment.opened - opened == environment.closed - closed == steps == -(-whole.drawn // budget)
    assert (budget < 400) == (steps > 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_an_episode_in_parts_that_begins_with_a_trace(ratio):
    rules = make_rules(Scored)
    start, _ = guided(rules, make_trace(), ratio)
    (whole,) = played(rules, Continuing(TOKENIZER, adds), [start], 1)
    part, steps = played_in_parts(rules, adds, start, 11)
    assert (part.token_ids.tolist(), part.authors.tolist()) == (whole.token_ids.tolist(), whole.authors.tolist())
    assert part.outcome == whole.outcome and part.finish == whole.finish and part.prefix == whole.prefix > 0
    assert (part.outcome.turns, part.outcome.calls) == ((0, 0) if ratio == 1 else (2, 1)), "the policy's own"
    assert steps == (1 if ratio == 1 else -(-whole.drawn // 11))


def test_an_episode_whose_environment_answers_otherwise_than_before_is_drawn_anew():
    class Forgetful(Sums):
        answers = iter(range(100))

        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one
                b: the other
            """
            return next(self.answers)

    rules = make_rules(Forgetful)
    write = lambda text: "Done." if "<tool_response>" in text else call_text("add", a=2, b=3)  # noqa: E731
    start = unwritten(rules.encoder.encode(make_problem()), 3, Sampling(400))
    engine = Continuing(TOKENIZER, write)
    first = len(TOKENIZER(call_text("add", a=2, b=3))["input_ids"]) + 1
    (cut,) = played(rules, engine, [start], 1, budget=first + 2)
    assert cut.finish is None and spelled(cut.token_ids).endswith("assistant\nDo")
    (anew,) = played(rules, engine, [replace(cut, task=start.task)], 2, budget=first + 2)
    assert anew.finish is None and anew.drawn == first + 2 and anew.outcome.faults == ("differs",)
    assert "<tool_response>2<" in spelled(anew.token_ids) and (anew.versions[anew.authors == Author.POLICY] == 2).all()
    (ended,) = played(rules, engine, [replace(anew, task=start.task)], 3)
    assert ended.outcome.faults == ("differs", "differs") and ended.outcome.end == "answer"
    assert ended.outcome.turns == 2 and ended.outcome.calls == 1


def test_an_episode_whose_environment_says_something_else_first_is_drawn_anew():
    class Talkative(Sums):
        said = iter(["one", "two", "two", "two"])

        def reset(self, prompt, **row):
            self.asked = []
            return f" ({next(self.said)})"

    rules = make_rules(Talkative)
    start = unwritten(rules.encoder.encode(make_problem()), 3, Sampling(400))
    engine = Continuing(TOKENIZER, lambda text: "It is 9.")
    (cut,) = played(rules, engine, [start], 1, budget=5)
    (anew,) = played(rules, engine, [replace(cut, task=start.task)], 2, budget=5)
    assert anew.finish is None and anew.outcome.faults == ("differs",) and anew.outcome.observation == " (two)"
    (ended,) = played(rules, engine, [replace(anew, task=start.task)], 3, budget=5)
    assert ended.finish == "stop" and ended.versions.tolist() == [2] * 5 + [3] * 4


@pytest.mark.parametrize("environment", [Sums, type("Odd", (Sums,), {"first": iter(range(9))})])
def test_a_trace_that_was_left_out_in_one_part_is_so_in_all(environment):
    """Also where the environment is at odds with what the policy did afterwards."""

    class Wrong(environment):
        def reset(self, prompt, **row):
            super().reset(prompt, **row)
            return f" ({next(self.first)})" if hasattr(self, "first") else None

    rules = make_rules(Wrong)
    start, _ = guided(rules, make_trace(first_reply="6"), 1.0)
    (cut,) = played(rules, Continuing(TOKENIZER, adds), [start], 1, budget=5)
    assert cut.finish is None and cut.outcome.trace_left_out and cut.trace is None
    (ended,) = played(rules, Continuing(TOKENIZER, adds), [replace(cut, task=start.task)], 2)
    assert ended.outcome.trace_left_out and ended.outcome.end == "answer"
    assert ended.outcome.faults == ("differs",) * hasattr(environment, "first")


def test_an_episode_that_ended_in_an_earlier_step_keeps_what_its_environment_said():
    """It waits for another one of its group."""
    rules = make_rules(Scored)
    task = rules.encoder.encode(make_problem("observe"))
    start = unwritten(task, 3, Sampling(400))
    (ended,) = played(rules, Continuing(TOKENIZER, adds), [start], 1)
    waited = replace(ended, task=task)  # as it comes from memory
    ((group,), engine) = play_turns(rules, adds, [], planned=[(waited, replace(start, seed=4))])
    first, second = group.rollouts
    assert first.task == ended.task == second.task != task == group.task
    assert first.outcome == ended.outcome and {request.seed for request in engine.requests} == {4}
    assert [score.value for score in group.scores] == [1.0, 1.0]


def test_an_episode_that_is_drawn_anew_begins_with_its_trace_again():
    class Second(Sums):
        def add(self, a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: one
                b: the other
            """
            return a + b if (a, b) == (2, 3) else type(self).opened

    rules = make_rules(Second)
    start, _ = guided(rules, make_trace(), 0.5)
    write = lambda text: "Done." if text.count("<tool_response>") > 1 else call_text("add", a=5, b=4)  # noqa: E731
    turn = len(TOKENIZER(call_text("add", a=5, b=4))["input_ids"]) + 1
    (cut,) = played(rules, Continuing(TOKENIZER, write), [start], 1, budget=turn + 2)
    assert cut.finish is None and spelled(cut.token_ids).endswith("assistant\nDo")
    (ended,) = played(rules, Continuing(TOKENIZER, write), [replace(cut, task=start.task)], 2)
    assert ended.outcome.faults == ("differs",) and ended.outcome.end == "answer"
    assert ended.prefix == start.prefix > 0 and (ended.versions[ended.authors == Author.POLICY] == 2).all()
