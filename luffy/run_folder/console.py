"""The terminal view of a run or an evaluation: a live bar on a terminal, plain lines in a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from luffy.progress import lasting, say

NEWS_EVERY_S = 20.0  # without a bar, until the first step is done
FIELDS = (
    ("reward", "critic/rewards/mean", "{:.3f}"),
    ("trace", "batch/off_solved", "{:.2f}"),
    ("sft loss", "actor/sft_loss", "{:.3f}"),
    ("entropy", "actor/entropy_loss", "{:.3f}"),
    ("held-out", "val-core/accuracy", "{:.3f}"),
    ("held-out loss", "val-traces/loss", "{:.3f}"),
    ("length", "response_length/mean", "{:.0f}"),
    ("sft buffer", "method/sft_buffer", "{:.0f}"),
    ("trained tok/s", "perf/throughput", "{:,.0f}"),
)


def summary_line(values: Mapping[str, float], eta_s: float) -> str:
    """``reward 0.125  trace 1.00  entropy 0.482  length 61  trained tok/s 8,211  eta 3m12s``"""
    hidden = {"sft loss"} if "critic/rewards/mean" in values else {"entropy"}
    if not values.get("batch/avg_prefix_ratio"):
        hidden.add("trace")  # there was none in the batch
    parts = [
        f"{label} {form.format(values[key])}" for label, key, form in FIELDS if key in values and label not in hidden
    ]
    if was_idle(values):
        parts.append(f"no update, {values['batch/rejected']:.0f} groups without a signal")
    return "  ".join([*parts, f"eta {clock(eta_s)}"])


def was_idle(values: Mapping[str, float]) -> bool:
    """Whether the step made no update."""
    skipped = "train/skipped_updates" in values
    updated = "actor/grad_norm" in values or "method/sft_steps" in values
    return not updated and not skipped and values.get("batch/rejected", 0) > 0


def clock(seconds: float) -> str:
    whole = max(round(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


class Pulse:
    """Prints now and then, from a thread, what a run is doing when there is no live bar."""

    def __init__(self, say: Callable[[str], None], doing: Callable[[], str]) -> None:
        self._say, self._doing, self._started = say, doing, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="progress", daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        while not self._ended.wait(NEWS_EVERY_S):
            self._say(f"{self._doing()}, {clock(time.monotonic() - self._started)}")

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def setting_up(name: str, console: Console | None, speaks: bool = True) -> Iterator[Callable[[str], None]]:
    """Shows what is done before the first step: a live line on a terminal, a plain one now and then in a file. Gives
    the function that takes what is being done."""
    console = console or Console(file=lasting(sys.stderr))
    doing = ["setting up"]
    if not speaks:
        yield lambda text: None
    elif console.is_terminal:
        with console.status(Text(f"{name}  {doing[0]}")) as status:
            yield lambda text: status.update(Text(f"{name}  {text}"))
    else:
        pulse = Pulse(lambda text: say(console, text), lambda: f"{name}  {doing[0]}")
        try:
            yield lambda text: doing.__setitem__(0, text)
        finally:
            pulse.end()


class StepProgress(Progress):
    """A bar with the figures of the last step below it, where a narrow terminal has room for them."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")


class RunView:
    """Shows steps as they end, and what the run is doing in between."""

    def __init__(self, name: str, total: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(file=lasting(sys.stderr))
        self.name, self.total, self.first = name, total, done
        self.started = time.monotonic()
        self._progress: StepProgress | None = None
        self._phase = self._doing = "starting"
        self._pulse: Pulse | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.fields[name]}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("[dim]{task.fields[phase]}"),
            )  # fmt: skip
            self._progress = StepProgress(*columns, console=self.console)
            self._task = self._progress.add_task("", total=total, completed=done, name=name, phase="starting")
            self._progress.start()
        elif not self.console.quiet:
            self._pulse = Pulse(self.say, lambda: f"{name}  step {done + 1}/{total}  {self._doing}")

    def phase(self, text: str) -> None:
        self._phase = self._doing = text
        if self._progress is not None:
            self._progress.update(self._task, phase=text)

    def count(self, done: int, total: int) -> None:
        """How far the current phase is, e.g. ``rollout 57/112``."""
        self._doing = f"{self._phase} {done}/{total}"
        if self._progress is not None:
            self._progress.update(self._task, phase=self._doing)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        spent = time.monotonic() - self.started
        eta = spent / max(step - self.first, 1) * (self.total - step)
        line = summary_line(values, eta)
        if self._progress is not None:
            self._progress.figures = line
            self._progress.update(self._task, completed=step)
        else:
            self._end_pulse()
            self.say(f"{self.name}  step {step}/{self.total}  {line}")

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Show an evaluation before the first step, or one deferred to a resume."""
        found = [
            f"{label} {form.format(values[key])}" for label, key, form in FIELDS if key in values and "val-" in key
        ]
        self.say("  ".join([f"{self.name}  step {step}/{self.total}", *found]))

    def say(self, text: str) -> None:
        say(self.console, text)

    def warn(self, text: str) -> None:
        say(self.console, f"warning: {text}", style="yellow")

    def _end_pulse(self) -> None:
        """Stop the lines in between: the first step shows how long one takes."""
        if self._pulse is not None:
            self._pulse.end()
            self._pulse = None

    def close(self) -> None:
        self._end_pulse()
        if self._progress is not None:
            self._progress.stop()


class EvalView:
    """``working`` counts responses of this run that are finished, ``saved`` adds those that are scored and on the disk,
    from another thread."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.console = Console(file=lasting(sys.stderr))
        self.total, self.first, self.done = total, done, done
        self.tokens = 0
        self.started = time.monotonic()
        self._bar: Progress | None = None
        if done:
            say(self.console, f"{done} of {total} responses were already there; resuming with the rest")
        if self.console.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(name, total=total, completed=done, figures="")
            self._bar.start()

    def working(self, finished: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.first + finished)

    def saved(self, responses: int, tokens: int, right: int, where: str) -> None:
        self.done += responses
        self.tokens += tokens
        spent = max(time.monotonic() - self.started, 1e-9)
        figures = f"{where}  right {right}/{responses}  {self.tokens / spent:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, figures=figures)
            return
        eta = spent / max(self.done - self.first, 1) * (self.total - self.done)
        share = 100 * self.done // self.total
        say(self.console, f"{self.done}/{self.total} responses ({share}%)  {figures}  eta {clock(eta)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
