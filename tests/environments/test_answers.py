"""What an environment hands back is text of a length that is known, and text that a tokenizer takes."""

import pytest

from luffy.environments.answers import LONGEST_ERROR, Faulty, as_reply, as_text, cut
from luffy.environments.protocol import Reply
from luffy.types import Message


@pytest.mark.parametrize(("most", "shown"), [(10, "0123456789"), (9, "012 [cut]"), (6, " [cut]"), (3, " [c"), (0, "")])
def test_an_answer_has_at_most_so_many_characters(most, shown):
    assert cut("0123456789", most) == (shown, () if most == 10 else ("cut_answer",))


def test_halves_of_characters_leave_every_text():
    assert Faulty("tool_raised", "\ud800!").text == "error: ?!" and as_text("\ud800") == "?"
    reply = as_reply(Reply((Message("user", "\ud800"),)))
    assert reply.messages == (Message("user", "?"),)


def test_other_texts_stay_as_they_are_and_errors_are_short():
    assert as_text(["ü", "数"]) == '["ü", "数"]'
    assert len(Faulty("tool_raised", "x" * 999).text) == LONGEST_ERROR
