"""What a comparison leaves to look at: its table, the curves of all arms, a picture, and the winner's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from luffy.compare.arms import restored
from luffy.compare.outcome import Outcome, markdown
from luffy.compare.picture import picture
from luffy.compare.state import ArmState
from luffy.config import Config, to_yaml
from luffy.config.recipes import config_of
from luffy.files import complete_lines, write_atomically
from luffy.report.html import write_report
from luffy.report.methods import group_runs, with_styles
from luffy.run_folder.layout import METRICS
from luffy.run_folder.runs import find_runs, load_runs

TABLE, REPORT, PICTURE, WINNER = "compare.md", "compare.html", "compare.svg", "winner.yaml"


def write_pages(
    cfg: Config, outcome: Outcome, states: Mapping[str, ArmState], budget: str, folder: Path
) -> dict[str, Path]:
    """The files that were written, by what they are."""
    pages = {"table": folder / TABLE}
    shown = ""
    if any(any(complete_lines(path)) for path in (folder / "arms").glob(f"*/{METRICS}")):  # some arm made a step
        notes = "\n\n".join([*outcome.words, "The curves are of validation; the words are about the test."])
        pages["curves"] = write_report([folder / "arms"], folder / REPORT, f"luffy compare: {cfg.name}", notes)
        records, _ = load_runs(find_runs([folder / "arms"]))
        pages["picture"], shown = folder / PICTURE, f"\n![Validation accuracy by seconds]({PICTURE})\n"
        write_atomically(pages["picture"], picture(with_styles(group_runs(records)), states))
    write_atomically(folder / TABLE, markdown(outcome, budget) + shown)
    if outcome.winner is not None:
        best = outcome.winner.arms[0]
        winner = config_of(restored(cfg, best, f"{cfg.name}-{best.method.replace('_', '-')}"))
        pages["winner"] = folder / WINNER
        write_atomically(pages["winner"], to_yaml(winner))
    return pages
