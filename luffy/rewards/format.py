"""The shape "think first, then solve": one ``<think>...</think>`` block, then a solution."""

from __future__ import annotations

from luffy.rewards.kinds import text_reward
from luffy.types import END_THINK, THINK


@text_reward("format", reads_thoughts=True, judges_answer=False)
def score(answer: str, response: str) -> tuple[float, str]:
    """The gold plays no part. A response has the shape or not, so there is always an answer."""
    return float(has_think_block(response)), "ok"


def has_think_block(response: str) -> bool:
    """Exactly one closing tag, thought before it and text after it; the opening tag stands at the very
    start, or is missing because the prompt already ended with it."""
    if response.count(END_THINK) != 1 or response.count(THINK) > 1:
        return False
    thought, solution = response.split(END_THINK)
    if THINK in solution:
        return False
    thought = thought.strip()
    if THINK in thought and not thought.startswith(THINK):
        return False
    return bool(thought.removeprefix(THINK).strip()) and bool(solution.strip())
