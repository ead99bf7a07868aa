"""What models of the study are evaluated on, each time by a process of ``luffy eval``, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config import load_config
from studies.qwen.records import Row, scores


@dataclass(frozen=True)
class Evaluation:
    """``suite`` is a file of the data folder or a suite of ``luffy eval``; ``limit`` takes its first problems alone."""

    name: str
    suite: str
    k: int = 4  # samples a problem; below 10: a problem's right ones are kept as one digit
    temperature: float = 0.6
    max_tokens: int = 512
    limit: int | None = None

    def command(self, luffy: Sequence[str], model: Path, data: Path, out: Path) -> list[str]:
        """Prompts as in the trainings. A file is scored as in the trainings too, a suite by its own reward."""
        cfg = load_config("small/luffy")
        file = data / self.suite
        options = {
            "out": out, "k": self.k, "temperature": self.temperature, "max-tokens": self.max_tokens,
            "style": cfg.data.style, "system-prompt": cfg.data.system_prompt, "dtype": cfg.model.dtype,
        }  # fmt: skip
        options |= {"suite": file, "reward": cfg.reward.kind} if file.suffix else {"suite": self.suite, "data": data}
        if self.limit is not None:
            options["limit"] = self.limit
        return [
            *luffy,
            "eval",
            str(model),
            *(part for key, value in options.items() for part in (f"--{key}", str(value))),
        ]


SCREEN = Evaluation("screen", "train.parquet", k=8, temperature=1.0)
TEST = Evaluation("test", "test.jsonl")
SUITES = (Evaluation("math6", "math6", max_tokens=1024), Evaluation("ood", "ood"))
TEMPERATURES = tuple(Evaluation(f"t{t:g}", "test.jsonl", k=8, temperature=t, limit=250) for t in (0.2, 0.6, 1.0, 1.2))
GENERALISATION = (*SUITES, *TEMPERATURES)


def scores_of(folder: Path) -> Row:
    """The finished evaluations of a model: ``test``; ``suites`` by benchmark; ``temperatures``, the first test problems
    by the temperature of sampling."""
    found = {
        "test": scores(folder / TEST.name).get("test", {}),
        "suites": {name: made for suite in SUITES for name, made in scores(folder / suite.name).items()},
        "temperatures": {
            f"{each.temperature:g}": made for each in TEMPERATURES for made in scores(folder / each.name).values()
        },
    }
    return {key: made for key, made in found.items() if made}
