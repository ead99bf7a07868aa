"""Errors that are the user's to mend: the command line prints them on one line and exits with code 2."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input. The message says what was found, where, and what to change."""


class ConfigError(UserError):
    """A recipe or an override that cannot be honoured."""


class DataError(UserError):
    """A dataset or a row that cannot be used; names file, row, column and value."""


class TrainingStopped(RuntimeError):
    """A run that stopped itself; the message says why and what to look at."""


class StopRequested(TrainingStopped):
    """A run that somebody asked to end after its step."""


class Interrupted(StopRequested):
    """A run that Ctrl-C ended after its step: exit code 130."""


class AllStopped(TrainingStopped):
    """A stop that every process of a run comes to at the same place, from the same numbers."""


@contextmanager
def needing(who: str, extra: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Around the import of an optional package: without it an error says that ``who`` needs it, and what brings it."""
    try:
        yield
    except ImportError:
        raise kind(f"{who}; install it with: {how_to_install(extra)}") from None


def how_to_install(extra: str) -> str:
    """The command that brings an optional part of luffy."""
    return f"pip install '.[{extra}]' (in luffy's own folder)"
