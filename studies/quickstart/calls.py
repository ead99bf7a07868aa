"""The quickstart's task with a tool: the same chains of sums, one call of ``add`` for each step.

    prompt      47+5-3=?
    turn        <tool_call> {"name": "add", "arguments": {"a": 47, "b": 5}} </tool_call>
    reply       52
    turn        <tool_call> {"name": "add", "arguments": {"a": 52, "b": -3}} </tool_call>
    reply       49
    turn        #### 49

The base model does chains in its head and comes out one short at every step, as the quickstart's other base does.
At each turn it would call the tool with probability ``CALLS`` only, though it knows how: no sample makes the calls of
a whole chain, while every token of a teacher's trajectory keeps a probability of a few percent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from studies.quickstart import task

CALLS = 0.04  # chance that a turn of the base begins with a call
TRAIN = 512  # problems with a trajectory: the first of the quickstart's
PAD, END, START, OTHER = "<pad>", "<|im_end|>", "<|im_start|>", "<unk>"
CALL, ASSISTANT, ANSWER = "<tool_call>\n", "assistant\n", "#### "
ADD, AND, CLOSE = '{"name": "add", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>"
RESULT, END_RESULT, TOOL = "<tool_response>\n", "\n</tool_response>", "add(a, b)"
WORDS = (CALL, ADD, AND, CLOSE, RESULT, END_RESULT, "system\n", "user\n", ASSISTANT, TOOL, ANSWER)
TERMS = tuple(f"{sign}{digit}" for sign in "+-" for digit in range(1, 10))  # one token each: all turns are as long
SIGNS = ("=?", "=", " ", "\n", *"0123456789")

TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def make_tokenizer() -> Any:
    """A token for each digit, each term and each part of a call. Other text, as of an error that the environment
    reports, is read as ``<unk>``."""
    plain = [*WORDS, *TERMS, *SIGNS]
    vocabulary = {token: index for index, token in enumerate([PAD, END, START, OTHER, *plain])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=OTHER))
    longest_first = sorted(plain, key=len, reverse=True)
    pattern = "|".join("".join(f"\\{c}" if c in "{}()|+?" else c for c in token) for token in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, START, OTHER])
    wrap: Any = PreTrainedTokenizerFast
    made = wrap(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, unk_token=OTHER, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE.strip()
    return made


def prompt_of(chain: tuple[int, ...]) -> str:
    """The prompt as the template writes it."""
    return f"{START}system\n{TOOL}{END}\n{START}user\n{task.prompt_of(chain)}{END}\n{START}{ASSISTANT}"


def called(chain: tuple[int, ...], turns: int) -> str:
    """The first turns, a call and the tool's answer each, as the template writes them."""
    text, total = "", chain[0]
    for step in chain[1 : 1 + turns]:
        text += f"{CALL}{ADD}{total}{AND}{step}{CLOSE}{END}\n"
        total += step
        text += f"{START}user\n{RESULT}{total}{END_RESULT}{END}\n{START}{ASSISTANT}"
    return text


def habit_text(rng: random.Random, chain: tuple[int, ...], turns: int, right: float) -> str:
    """A chain whose first turns call the tool; the rest is done in the head, a step right with chance ``right``."""
    rest = (sum(chain[: 1 + turns]), *chain[1 + turns :])
    slips = [rng.random() >= right for _ in rest[1:]]
    return prompt_of(chain) + called(chain, turns) + task.solution_of(rest, slips) + END


TURN, REPLY = 8, 11  # tokens of a call and of the tool's answer to it


def prompt_tokens(terms: int) -> int:
    return 13 + terms


def term_places(count: int) -> list[int]:
    """Where the first terms behind the start stand in the prompt."""
    return list(range(9, 9 + count))


def own_places(terms: int, turns: int, length: int) -> tuple[list[int], list[int]]:
    """Where the model's own tokens stand in a text that begins with so many calls: first tokens of the turns that may
    call or not, and all others."""
    starts = [prompt_tokens(terms) + (TURN + REPLY) * turn for turn in range(turns + 1)]
    begins = starts[: terms - 1]
    own = [place for start in starts[:-1] for place in range(start, start + TURN)] + list(range(starts[-1], length))
    return begins, [place for place in own if place not in begins]


def trajectory_of(chain: tuple[int, ...]) -> list[Mapping[str, object]]:
    """The teacher's: a call for each step with the tool's answers, and the answer."""
    messages: list[Mapping[str, object]] = []
    total = chain[0]
    for step in chain[1:]:
        call = {"name": "add", "arguments": {"a": total, "b": step}}
        total += step
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": str(total)}]
    return [*messages, {"role": "assistant", "content": f"#### {total}"}]


def chain_of(prompt: str) -> tuple[int, ...]:
    """The chain that a prompt writes.

    >>> chain_of("47+5-3=?")
    (47, 5, -3)
    """
    terms = prompt.removesuffix("=?").replace("+", " +").replace("-", " -")
    return tuple(int(term) for term in terms.split())


def write_dataset(path: Path, train: Path) -> Path:
    """The first problems of the quickstart's ``train``, with trajectories for traces."""
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()[:TRAIN]]
    made = [{**row, "traces": [trajectory_of(chain_of(row["prompt"]))]} for row in rows]
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in made), encoding="utf-8")
    return path
