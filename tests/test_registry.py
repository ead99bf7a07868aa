"""Functions chosen by name."""

import pytest

from luffy.errors import UserError
from luffy.registry import Registry


def twice(x):
    return 2 * x


def test_a_registered_name_a_path_and_what_is_neither():
    registry = Registry("shape")
    assert registry.register("twice")(twice) is twice
    assert registry["twice"] is twice and registry[f"{__name__}:twice"] is twice and list(registry) == ["twice"]
    with pytest.raises(UserError, match="unknown shape 'thrice'; known: twice, or module:function"):
        registry["thrice"]
    with pytest.raises(UserError, match="cannot import 'no_such_module'.*from the folder you are in"):
        registry["no_such_module:f"]
    with pytest.raises(UserError, match="has no 'thrice'"):
        registry[f"{__name__}:thrice"]


def test_a_name_is_given_once():
    registry = Registry("gate")
    registry.register("x")(twice)
    registry.register("x")(twice)  # its module was loaded again
    with pytest.raises(UserError, match="there is a gate 'x' already"):
        registry.register("x")(lambda: None)
