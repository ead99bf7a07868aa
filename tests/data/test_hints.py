"""A hint behind the question, through the encoder and the chat template."""

from luffy.data import Encoder
from luffy.data.prompts import with_hint
from luffy.types import Message, Problem

HINT = "\nA solution: {solution}\nNow your own."


def test_a_hint_stands_behind_the_question_and_in_a_chat_behind_the_user(tokenizer):
    plain = with_hint(Problem("p", "What is 2+3?", "5"), HINT, r"\frac{10}{2}")
    assert plain.prompt == "What is 2+3?\nA solution: \\frac{10}{2}\nNow your own." and plain.answer == "5"
    chat = (Message("system", "Be brief."), Message("user", "2+3?"), Message("assistant", "Well:"))
    hinted = with_hint(Problem("p", chat, "5"), HINT, "5").prompt
    assert hinted == (chat[0], Message("user", "2+3?\nA solution: 5\nNow your own."), chat[2])
    encoder = Encoder(tokenizer, max_prompt_tokens=8)
    text = tokenizer.decode(encoder.prompt_ids(plain))
    assert text == "<bos>[user]What is 2+3?\nA solution: \\frac{10}{2}\nNow your own.[/][assistant]"


def test_prompt_ids_are_those_of_the_task(tokenizer):
    problem = Problem("p", "What is 2+3?", "5")
    for style in ("chat", "plain", "paper"):
        encoder = Encoder(tokenizer, style=style, max_prompt_tokens=4096)
        assert encoder.prompt_ids(problem) == encoder.encode(problem).prompt_ids
