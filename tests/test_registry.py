"""Functions chosen by name."""

import pytest

from luffy.config.parts import CreditFunction
from luffy.errors import UserError
from luffy.guidance import Gate
from luffy.registry import Registry


def twice(x):
    return 2 * x


def thrice():
    """Another function each time, of the same name and place."""

    def inner(x):
        return 3 * x

    return inner


def test_a_registered_name_a_path_and_what_is_neither():
    registry = Registry("shape")
    assert registry.register("twice")(twice) is twice
    assert registry["twice"].function is twice and list(registry) == ["twice"]
    assert registry[f"{__name__}:twice"].function is twice and registry["twice"](3) == 6
    with pytest.raises(UserError, match="unknown shape 'four'; known: twice, or module:function"):
        registry["four"]
    with pytest.raises(UserError, match="cannot import 'no_such_module'.*from the folder you are in"):
        registry["no_such_module:f"]
    with pytest.raises(UserError, match="has no 'four'"):
        registry[f"{__name__}:four"]
    assert registry.find("twice", "a.knob").function is twice
    with pytest.raises(UserError, match=r"^'a\.knob': unknown shape 'four'"):
        registry.find("four", "a.knob")


def test_a_name_is_given_once():
    registry = Registry("gate")
    registry.register("x")(thrice())
    registry.register("x")(thrice())  # its module was loaded again
    with pytest.raises(UserError, match="there is a gate 'x' already"):
        registry.register("x")(lambda: None)
    for kind in (Gate, CreditFunction):
        registry.register(kind.__name__)(kind(thrice()))
        registry.register(kind.__name__)(kind(thrice()))
        with pytest.raises(UserError, match="already"):
            registry.register(kind.__name__)(kind(lambda: None))
