"""Multiple choice, letters A to J.

In this order: the last ``\\boxed{B}``; the last "answer is (B)" / "answer: B"; the last ``**B**``; a last
line that is one letter. Naming two options is no answer. Outside boxes and brackets the letter must be a
capital, and a bare "A" or "I" must end its clause, because both are English words; so "B, I think" names one option.
"""

from __future__ import annotations

import re

from luffy.rewards.extract import boxed_answer, tail
from luffy.rewards.kinds import text_reward

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathsf|boldsymbol|bf|rm)(?![a-zA-Z])")
_MARKUP = str.maketrans("", "", "{}$*`\\ \t\n")
_WHOLE = re.compile(r"\(?([A-Ja-j])[.):]?\.?")
_WITH_TEXT = re.compile(r"\s*\(?([A-J])(?:\)|\.|:)\s*(.*)", re.DOTALL)
_OTHER_OPTION = re.compile(r"[,/]?\s*(?:and|or|&)?\s*\(?[A-J](?:[).:,]|\s*$)")

_ANSWER_IS = re.compile(r"(?i:\banswer)\W{0,8}?(?i:is\b|:)[\s:*$]*(?i:option\s+|choice\s+)?(?=([^\n]{0,200}))")
_BRACKETED = re.compile(r"\(([A-Ja-j])\)|\[([A-J])\]")
_BARE = re.compile(r"([A-J])(?![\w'-])")
_HEDGE = re.compile(r"\s*(?:,|/|&|\band\b|\bor\b)\s*\(?[A-J](?![\w'-])")
_SAID_OF_ANOTHER = re.compile(  # after a letter: what makes "I" a word, and "A" an option that is ruled out
    r"\s*(?:,|\band\b)\s*(?:I(?:['\u2019]|\s+(?:think|believe|guess|suppose|know|feel|hope|am|was|have|would|will|can|did|chose"
    r"|choose|pick|picked|checked|verified|used|found|got)\b)"
    r"|\(?A\)?\s+(?:is|was|cannot\s+be|can\s+be)\s+(?:wrong|not|incorrect|impossible|false|excluded|ruled)\b)"
)
_ENDS_CLAUSE = re.compile(r"\s*(?:[.,;:!)*$]|$)")
_BOLD = re.compile(r"\*\*\s*\(?([A-J])[.):]?\s*\*\*")
_LONE = re.compile(r"\W*([A-J])\W*")


@text_reward("choice")
def score(answer: str, response: str) -> tuple[float, str]:
    """Score 1 if the response names the gold's letter."""
    gold = letter_of(answer)
    if gold is None:
        raise ValueError(f"the gold {answer[:80]!r} is not a letter from A to J")
    found = find_choice(tail(response))
    if found is None:
        return 0.0, "no_answer"
    return float(found == gold), "ok"


def find_choice(text: str) -> str | None:
    """Letter that a response chooses, or None."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return letter_of(boxed)
    announced = [match[1] for match in _ANSWER_IS.finditer(text)]
    if announced:
        return _stated(announced[-1])
    bold = _BOLD.findall(text)
    if bold:
        return str(bold[-1])
    lines = text.strip().splitlines()
    lone = _LONE.fullmatch(lines[-1]) if lines else None
    return lone[1] if lone else None


def letter_of(content: str) -> str | None:
    """The letter of a short answer such as ``B``, ``(b)``, ``\\text{B}`` or ``B. Paris``."""
    content = _WRAPPER.sub("", content)
    whole = _WHOLE.fullmatch(content.translate(_MARKUP))
    if whole:
        return whole[1].upper()
    with_text = _WITH_TEXT.match(content.replace("{", "").replace("}", ""))
    if with_text is None or _OTHER_OPTION.match(with_text[2]):
        return None
    return with_text[1]


def _stated(said: str) -> str | None:
    said = _WRAPPER.sub("", said).replace("{", "").replace("}", "").replace("\\", "").lstrip("$* ")
    match = _BRACKETED.match(said) or _BARE.match(said)
    if match is None:
        return None
    rest = said[match.end() :]
    if _HEDGE.match(rest) and not _SAID_OF_ANOTHER.match(rest):
        return None
    letter = next(group for group in match.groups() if group)
    is_word = match.re is _BARE and letter in "AI" and not _ENDS_CLAUSE.match(rest)
    return None if is_word else letter.upper()
