"""A hint in a prompt: text behind the question, such as a solution in a sentence."""

from __future__ import annotations

from dataclasses import replace

from luffy.types import Problem

SOLUTION = "{solution}"


def with_hint(problem: Problem, template: str, solution: str) -> Problem:
    """The problem with ``template`` right behind its question, ``{solution}`` in it replaced by ``solution``. In a chat
    it stands behind the last message of the user."""
    hint = template.replace(SOLUTION, solution)
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=problem.prompt + hint)
    chat = list(problem.prompt)
    last = max((i for i, message in enumerate(chat) if message.role == "user"), default=len(chat) - 1)
    chat[last] = replace(chat[last], content=chat[last].content + hint)
    return replace(problem, prompt=tuple(chat))
