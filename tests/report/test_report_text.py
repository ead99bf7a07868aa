"""Hostile and broken text is shown inert."""

import pytest

from luffy.report.text import aligned, legible, number, shorten, shorten_middle, show, show_seconds


def test_markup_and_hidden_characters_are_inert():
    assert show("<b>&\"'") == "&lt;b&gt;&amp;&#34;&#39;"
    shown = show("a\u202eb\x00\ud800\u200b\u2028\nc\td")
    assert "\u202e" not in shown
    for name in ("U+202E", "U+0000", "U+D800", "U+200B", "U+2028"):
        assert name in shown
    assert "\nc\td" in shown
    shown.encode("utf-8")


def test_ordinary_scripts_are_left_alone():
    assert (
        show("\u0645\u0631\u062d\u0628\u0627 \u4f60\u597d \u00e9")
        == "\u0645\u0631\u062d\u0628\u0627 \u4f60\u597d \u00e9"
    )
    assert legible("x\u202ey") == "xU+202Ey"


@pytest.mark.parametrize(
    ("tokens", "response", "parts"),
    [
        (["a", " b", "<eos>"], "a b", [("a", False), (" b", False), ("<eos>", True)]),
        (["the", "cat"], "the cat", [("the", False), (" cat", False)]),  # decoded alone, a token lost its space
        (
            ["caf", "\ufffd", "\ufffd", "!"],
            "caf\u00e9!",
            [("caf", False), ("", False), ("\u00e9", False), ("!", False)],
        ),
        (["x", "\ufffd", "\ufffd"], "x\u00e9", [("x", False), ("", False), ("\u00e9", False)]),
        (["no", "match"], "something else", [("no", False), ("match", False)]),
        ([], "", []),
    ],
)
def test_tokens_are_brought_together_with_the_response(tokens, response, parts):
    assert aligned(tokens, response) == parts


def test_numbers():
    assert number(0.9474) == "0.947"
    assert number(-0.0001) == "0.000"
    assert number(-0.5) == "\u22120.500"
    assert number(12345.6) == "12,346"


def test_seconds_keep_three_digits():
    assert [show_seconds(v) for v in (0.0123, 1.5, 61.04, 105.4)] == ["0.012", "1.50", "61.0", "105"]


def test_shortening():
    assert shorten("abc", 3) == "abc"
    assert shorten("abcdef", 4) == "abc\u2026"
    assert shorten_middle("luffy (lr=0.0003)", 11) == "luffy\u20260003)"
    assert len(shorten_middle("x" * 50, 16)) == 16
