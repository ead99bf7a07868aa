"""Tools are described by hints and docstrings; arguments are fitted to them without loss, or refused."""

from typing import Any, Literal

import pytest

from luffy.environments.answers import Faulty
from luffy.environments.tool_schemas import checked, schemas_of, tool_names
from luffy.errors import UserError


class Wide:
    limit = 3

    @property
    def shown(self):
        raise AssertionError("a property is no tool")

    def take(
        self, number: float, whole: int, yes: bool, few: Literal["a", "b"], many: list[int],
        pair: tuple[int, str], table: dict[str, float], maybe: int | None = None, mixed: int | list[str] = 0, any: Any = 0,
        either: int | list[str] | None = None,
    ) -> str:  # fmt: skip
        """Take all.

        Args:
            number: A number.
            whole: A whole one.
            yes: A switch.
            few: One of few.
            many: Many.
            pair: Two.
            table: A table.
            maybe: One or none.
            mixed: Either.
            any: Any.
            either: Either, or none.
        """
        return ""

    @staticmethod
    def also(x: int) -> int:
        """Also.

        Args:
            x: A number.
        """
        return x

    @classmethod
    def back(cls, x: int) -> int:
        """Back.

        Args:
            x: A number.
        """
        return x


GOOD = {"number": 1, "whole": 2.0, "yes": True, "few": "a", "many": [1, 2.0], "pair": [1, "x"], "table": {"k": 1}}


def test_tools_are_public_methods_in_alphabetical_order():
    assert tool_names(Wide) == tool_names(Wide()) == ["also", "back", "take"]
    schemas = schemas_of(Wide)
    assert (
        schemas["also"]["function"]["parameters"]
        == schemas["back"]["function"]["parameters"]
        == {
            "type": "object",
            "properties": {"x": {"type": "integer", "description": "A number."}},
            "required": ["x"],
        }
    )


def test_numbers_are_fitted_without_loss():
    given = {**GOOD, "maybe": None, "either": None, "mixed": ["x"], "any": {"y": []}}
    found = checked(given, schemas_of(Wide)["take"])
    assert found["either"] is None and checked({**GOOD, "number": 2**53}, schemas_of(Wide)["take"])["number"] == 2.0**53
    assert found["number"] == 1.0 and isinstance(found["number"], float)
    assert found["whole"] == 2 and isinstance(found["whole"], int)
    assert found["many"] == [1, 2] and found["table"] == {"k": 1.0} and isinstance(found["table"]["k"], float)
    assert (
        found["pair"] == [1, "x"] and found["maybe"] is None and found["mixed"] == ["x"] and found["any"] == {"y": []}
    )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"number": "1"}, "number must be a number"),
        ({"number": True}, "number must be a number"),
        ({"number": 2**53 + 1}, "number must be a number"),
        ({"whole": 2.5}, "whole must be a whole number"),
        ({"whole": True}, "whole must be a whole number"),
        ({"whole": None}, "whole must be a whole number"),
        ({"yes": 1}, "yes must be true or false"),
        ({"few": "c"}, "few must be one of a, b"),
        ({"many": [1, "x"]}, r"many\[1\] must be a whole number"),
        ({"pair": [1]}, "pair must have 2 items"),
        ({"table": {"k": "x"}}, "table.k must be a number"),
        ({"mixed": "x"}, "mixed has a type that it cannot have"),
        ({"x" * 99: 1}, f"no argument {'x' * 40}; arguments: number, "),
    ],
)
def test_wrong_types_are_refused(wrong, why):
    with pytest.raises(Faulty, match=why) as fault:
        checked({**GOOD, **wrong}, schemas_of(Wide)["take"])
    assert fault.value.kind == "wrong_arguments"


def undescribed():
    class Bare:
        def go(self, x: int):
            return x

    class Hintless:
        def go(self, x):
            """Go.

            Args:
                x: A number.
            """

    class Unnamed:
        def go(self, *x: int):
            """Go."""

    class Placed:
        def go(self, x: int, /):
            """Go.

            Args:
                x: A number.
            """

    class Silent:
        def go(self, x: int):
            """Go."""

    class Strange:
        def go(self, x: "Nowhere"):  # noqa: F821
            """Go.

            Args:
                x: A thing.
            """

    return Bare, Hintless, Unnamed, Placed, Silent, Strange


@pytest.mark.parametrize("cls", undescribed(), ids=lambda cls: cls.__name__)
def test_what_cannot_be_described_is_the_users_error(cls):
    with pytest.raises(UserError, match=rf"{cls.__name__}\.go .*begin (its|the) name with _") as error:
        schemas_of(cls)
    assert "\n" not in str(error.value)
