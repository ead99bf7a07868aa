"""Environments that need no code of a user's own: ``environment: {name: calculator}``."""

from __future__ import annotations

from dataclasses import dataclass

from luffy.environments.arithmetic import evaluate, shown
from luffy.environments.kinds import environment
from luffy.environments.passages import read_passages
from luffy.environments.sandbox import make_sandbox
from luffy.errors import ConfigError
from luffy.schema import knob


@environment("chain")
class Chain:
    """The quickstart's: sums of several small numbers, which a tiny model cannot do in its head."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b


@environment("calculator")
class Calculator:
    """Exact arithmetic."""

    def calculate(self, expression: str) -> str:
        """Compute the exact value of an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, e.g. (12 + 3) * 4 / 7.
        """
        return shown(evaluate(expression))


@dataclass(frozen=True)
class PythonSettings:
    """Settings of the environment ``python``."""

    time_s: float = knob(5.0, "seconds that one piece of code may take", gt=0)
    memory_mb: int = knob(512, "address space of its process", ge=32)
    allow: tuple[str, ...] = knob((), "limits to go without where the system has none: network, memory")

    def check(self, where: str) -> None:
        """The limits that may be missing have names."""
        unknown = [name for name in self.allow if name not in ("network", "memory")]
        if unknown:
            raise ConfigError(f"'{where}.allow' may name network and memory; got {unknown[0]!r}")


@environment("python", settings=PythonSettings)
class PythonTool:
    """Python code in a sandbox, each piece in a process of its own."""

    def __init__(self, settings: PythonSettings) -> None:
        self._sandbox = make_sandbox(settings.time_s, settings.memory_mb, settings.allow)

    def run(self, code: str) -> str:
        """Run Python code and see what it prints. Nothing is kept from one call to the next.

        Args:
            code: The code; the value of its last line is shown too.
        """
        return self._sandbox.run(code).text


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the environment ``search``."""

    file: str = knob("", "a JSONL file with the passages", required=True)
    column: str = knob("text", "its column with the text")
    top: int = knob(3, "passages in an answer", ge=1)


@environment("search", settings=SearchSettings)
class Search:
    """The best passages of a user's own file for a query."""

    def __init__(self, settings: SearchSettings) -> None:
        self._passages, self._top = read_passages(settings.file, settings.column), settings.top

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: The words to look for.
        """
        found = self._passages.find(query, self._top)
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(found, start=1)) or "nothing found"
