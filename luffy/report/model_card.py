"""The model card of a checkpoint: ``README.md`` of its model folder, as the hub shows it.

It is made from what the run folder holds, and names nothing of this machine: a path is given by its last part, and only
where it tells something.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from luffy._version import __version__
from luffy.files import json_object, write_atomically
from luffy.hub import hub_id
from luffy.report.methods import about_recipe, closest_recipe, colour_of, paper_of
from luffy.report.tables import evaluations
from luffy.report.text import legible, shorten
from luffy.run_folder.changes import changes_of, settings_at
from luffy.run_folder.layout import CARD, CURVES, DATA
from luffy.run_folder.runs import RunRecord, checkpoint_step, first_stage, read_config, without_samples

T = TypeVar("T")

MARK = "<!-- Made by luffy, and made anew by `luffy push`. Remove this line to keep your own text. -->"
TRAINED_WITH = re.compile(rb"^<!-- Trained with: (\{.*\}) -->$", re.MULTILINE)
REWARD = "critic/rewards/mean"
LONGEST_VALUE = 120
LINES = ("-", "--", ":", "-.")  # of held-out sets
TABLE_ROWS = 10
DEEPEST = 8  # trainings one after the other
LOCAL = re.compile(r"[/~]|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\")  # how a path begins that is of one machine
SETTINGS = (
    "seed", "optim.lr", "batch.problems", "batch.mini_batch", "rollout.n", "rollout.temperature", "rollout.max_tokens",
    "reward.kind", "algorithm.entropy_coef", "algorithm.kl_coef", "data.style", "data.system_prompt",
    "data.chat_template", "model.dtype", "model.lora.rank", "model.lora.alpha",
)  # fmt: skip
WEIGHTS = "reward.weights."
NOT_OF_SFT = ("rollout.n", "rollout.temperature", "reward.", "algorithm.")
OF_THE_MACHINE = ("launch", "parallel.", "plugins", "prepare.", "ray.", "record.", "reward.http.", "rollout.vllm.")


@dataclass(frozen=True)
class BenchmarkFigure:
    """Result of ``luffy eval`` on one benchmark; ``accuracy`` is avg@k, ``settings`` are of sampling and reward."""

    name: str
    title: str
    items: int
    k: int
    accuracy: float
    pass_at_k: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class CardFacts:
    """Facts of a card. ``run``: the record up to the checkpoint's ``step``; ``data``: the run's data.json;
    ``figure``: whether curves.png is next to the card; ``known``: fields of the front matter that are known, also as
    None."""

    run: RunRecord
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)
    benchmarks: Sequence[BenchmarkFigure] = ()
    figure: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)
    library: str = "transformers"

    @property
    def name(self) -> str:
        name = str(self.known.get("name") or self.run.name)
        return legible(Path(name).name if LOCAL.match(name) else name.replace("/", "-"))

    @property
    def base(self) -> str | None:
        """The hub id of the model that the first training began with, where it is known."""
        if "base_model" not in self.known:
            return base_model(self.run)
        given = self.known["base_model"]
        return str(given) if given else None

    @property
    def datasets(self) -> list[str]:
        if "datasets" not in self.known:
            return [found for path in paths_of(self.run) if (found := dataset_id(path))]
        given = self.known["datasets"] or []
        return [given] if isinstance(given, str) else list(given)


def model_card(facts: CardFacts) -> str:
    """Text of the card: front matter for the hub, then ``assets/model_card.md`` filled in."""
    run = facts.run
    recipe, differences = closest_recipe(run.config, run.kind == "sft")
    curves = _curves(run)
    first = next(iter(curves.values()), {})
    return _template().render(
        facts=facts,
        front_matter=_front_matter(facts, recipe),
        mark=MARK,
        trained_with=_trained_with(run),
        recipe=recipe,
        about=about_recipe(recipe).rstrip("."),
        paper=paper_of(recipe),
        differences=[f"{key}={public(value)}" for key, value in differences.items()],
        before=first_stage(run),
        data=_data(facts),
        settings=[(key, run.config[key]) for key in SETTINGS if run.config.get(key) is not None and _shown(run, key)],
        changes=list(_changes(facts)),
        curves=curves,
        curve_steps=thinned(sorted(first)),
        curves_file=CURVES,
        evaluated=[*_held_out(facts), *map(_benchmark_row, facts.benchmarks)],
        reward=reward_name(run.config),
        sampled=sorted({", ".join(f"{k} {_text(public(v))}" for k, v in b.settings.items()) for b in facts.benchmarks}),
        version=__version__,
    )


@cache
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).with_name("assets"))
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)
    environment.filters |= {"code": _code, "text": _text, "public": public}
    return environment.get_template("model_card.md")


def write_cards(checkpoint: Path) -> None:
    """Write the cards of a checkpoint in its run's folder: of the model, and of the adapters if there are any."""
    run, step = checkpoint.parent.parent, checkpoint_step(checkpoint) or 0
    record = without_samples(run, read_config(settings_at(run, step)), step, lines_of_table)
    facts = CardFacts(record, step, json_object((run / DATA).read_bytes(), run / DATA, ""))
    for folder, library in (("model", "transformers"), ("adapter", "peft")):
        if (checkpoint / folder).is_dir():
            write_atomically(checkpoint / folder / CARD, model_card(replace(facts, library=library)))


def _front_matter(facts: CardFacts, recipe: str) -> str:
    """YAML that the hub reads; a model's name belongs to its results."""
    from huggingface_hub import ModelCardData

    known = {key: facts.known[key] for key in ("license_name", "license_link", "language") if key in facts.known}
    if facts.benchmarks:
        known |= {"model_name": facts.name, "eval_results": [_result(b) for b in facts.benchmarks]}
    matter = ModelCardData(
        base_model=facts.base,
        library_name=facts.library,
        license=facts.known.get("license"),
        pipeline_tag="text-generation",
        tags=["luffy", "sft" if facts.run.kind == "sft" else "reinforcement-learning", recipe.replace("_", "-")],
        datasets=facts.datasets or None,
        **known,
    )
    return str(matter.to_yaml())


def _result(benchmark: BenchmarkFigure) -> Any:
    from huggingface_hub import EvalResult

    low, high = interval(benchmark.accuracy, benchmark.items)
    return EvalResult(
        task_type="text-generation",
        dataset_type=benchmark.name,
        dataset_name=benchmark.title,
        metric_type="accuracy",
        metric_name=f"avg@{benchmark.k}, percent",
        metric_value=round(100 * benchmark.accuracy, 2),
        metric_args={"interval_95": [round(100 * low, 2), round(100 * high, 2)], "problems": benchmark.items},
    )


def interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share over ``n`` problems. With several samples a problem it is on the wide side."""
    z2 = NormalDist().inv_cdf(0.975) ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


# ---- where it comes from


def base_model(run: RunRecord) -> str | None:
    """The hub id of the model that a run, or the run before it, began with; None where it is a folder."""
    for _ in range(DEEPEST):
        path = str(run.config.get("model.path") or "")
        prepared = str(run.config.get(f"prepare.{path}", "")).split()
        if prepared[:3] == ["luffy", "prepare", "model"]:
            return hub_id(prepared[3])
        before = first_stage(run)
        if before is None:
            return hub_id(path)
        run = before
    return None


def paths_of(run: RunRecord) -> list[str]:
    paths = run.config.get("data.train") or []
    return [paths] if isinstance(paths, str) else [str(path) for path in paths]


def dataset_id(path: str) -> str | None:
    """The hub id of a dataset; of a file that ``luffy prepare openr1`` wrote, that of its source."""
    try:
        card = json.loads((Path(path).parent / "card.json").read_text(encoding="utf-8"))
        path = str(card["settings"]["source"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return hub_id(path, inside=True)


def _data(facts: CardFacts) -> list[str]:
    links = [f"[{name}](https://huggingface.co/datasets/{name})" for name in facts.datasets]
    names = links or [_code(public(path)) for path in paths_of(facts.run)]
    counts = facts.data.get("train", {})
    if "usable" not in counts:
        return names
    return [*names, f"{counts['usable']:,} problems, {counts.get('with_traces', 0):,} with traces"]


def _shown(run: RunRecord, key: str) -> bool:
    return run.kind != "sft" or not key.startswith(NOT_OF_SFT)


def _trained_with(run: RunRecord) -> str:
    """A line for programs, which `luffy eval` takes the prompt and the reward from. Rewards that are not built in are
    code or an address, which a card does not pass on."""
    prompt = {key: run.config.get(f"data.{key}") for key in ("style", "system_prompt")}
    values: dict[str, Any] = {"data": {key: value for key, value in prompt.items() if isinstance(value, str)}}
    keys = ("kind", "answer_in_thought", "success", "failure")
    reward = {key: run.config[f"reward.{key}"] for key in keys if f"reward.{key}" in run.config}
    weights = {key.removeprefix(WEIGHTS): v for key, v in run.config.items() if key.startswith(WEIGHTS)}
    shared = all(":" not in str(kind) and kind != "http" for kind in weights or [reward.get("kind")])
    if run.kind == "train" and shared and not run.config.get("plugins"):
        values["reward"] = {**reward, "weights": weights}
    return json.dumps(values).replace("<", "\\u003c").replace(">", "\\u003e")


def trained_with_line(card: bytes) -> bytes | None:
    """The JSON of that line in a card; None where it has none."""
    found = TRAINED_WITH.search(card)
    return found[1] if found else None


def _changes(facts: CardFacts) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Settings that a resume changed: step, and key with old and new value."""
    for step, changes in changes_of(facts.run.folder, facts.step):
        for key, (before, now) in changes.items():
            if not key.startswith(OF_THE_MACHINE) and _shown(facts.run, key):
                yield step, (key, before, now)


def public(value: Any) -> str:
    """A setting as a card may show it: of a path its last part, of a server's address nothing."""
    if isinstance(value, str) and hub_id(value) is None:
        if "://" in value:
            return "(an address)"
        is_path = LOCAL.match(value) or (len(value.split()) == 1 and any(mark in value for mark in "/\\"))
        return Path(value.replace("\\", "/")).name if is_path else value
    if isinstance(value, Mapping):
        return json.dumps({key: public(inner) for key, inner in value.items()}, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return ", ".join(map(public, value)) or "[]"
    return value if isinstance(value, str) else json.dumps(value)


# ---- what it reached


def _curves(run: RunRecord) -> dict[str, dict[int, float]]:
    """Values by step of each curve, held-out accuracies first."""
    curves = {name: dict(run.series(metric)) for metric, name in evaluations([run])}
    return {**curves, "reward": dict(run.series(REWARD))} if run.kind == "train" else curves


def draw_curves(run: RunRecord, path: Path) -> bool:
    """Draw held-out accuracies and training reward over steps; False without Matplotlib or without values."""
    path.unlink(missing_ok=True)
    curves = _curves(run)
    reward = {"reward": curves.pop("reward")} if run.kind == "train" else {}
    panels = {"held-out accuracy": curves, "mean training reward": reward}
    panels = {title: curves for title, curves in panels.items() if any(curves.values())}
    if not panels or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels) + 1, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    colour = colour_of(run)
    for ax, (title, curves) in zip(axes, panels.items(), strict=True):
        for name, points in curves.items():
            look = {"color": colour, "linestyle": LINES[len(ax.lines) % len(LINES)], "marker": "."}
            ax.plot(list(points), list(points.values()), label=name, **look)
        ax.set(title=title, xlabel="step")
        ax.legend(frameon=False)
    axes[0].set_ylim(bottom=0)
    figure.savefig(path, dpi=150)
    return True


def thinned(values: Sequence[T]) -> list[T]:
    """At most ``TABLE_ROWS`` of them, the first and the last among them."""
    if len(values) <= TABLE_ROWS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]


def lines_of_table(lines: Sequence[bytes]) -> list[bytes]:
    """The lines of metrics.jsonl that a card without a figure needs: evaluations, and some steps. A checkpoint must not
    wait for thousands of others to be parsed."""
    return thinned([line for line in lines if b'/accuracy"' in line]) + thinned(lines)


def _held_out(facts: CardFacts) -> Iterator[list[str]]:
    """Rows of the last evaluations during training; one at step 0 is the base model's."""
    sizes = facts.data.get("held_out", {})
    for metric, name in evaluations([facts.run]):
        step, value = facts.run.series(metric)[-1]
        if step == facts.step or step > 0:
            when = "during training" if step == facts.step else f"during training, at step {step:.0f}"
            size = sizes.get(metric.removeprefix("val-").removesuffix("/accuracy"))
            yield [f"{_text(name)}, {when}", *_share(value, size), ""]


def _benchmark_row(b: BenchmarkFigure) -> list[str]:
    title = _text(f"{b.title} (avg@{b.k})")
    return [title, *_share(b.accuracy, b.items), f"{100 * b.pass_at_k:.1f}" if b.k > 1 else ""]


def reward_name(config: Mapping[str, Any]) -> str | None:
    """Reward of a flat config, or several with their weights, as a card may show them."""
    weights = {key: value for key, value in config.items() if key.startswith(WEIGHTS)}
    parts = [f"{value} {public(key.removeprefix(WEIGHTS))}" for key, value in weights.items()]
    return " + ".join(parts) or ((kind := config.get("reward.kind")) and public(kind))


def _share(value: float, n: int | None) -> list[str]:
    if not n:
        return ["", f"{100 * value:.1f}", ""]
    low, high = interval(value, n)
    return [f"{n:,}", f"{100 * value:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]


# ---- Markdown


def _text(text: str) -> str:
    """Text on one line, escaped for Markdown and its tables."""
    plain = " ".join(legible(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)


def _code(text: str) -> str:
    plain = shorten(" ".join(legible(text).split()), LONGEST_VALUE).replace("`", "'")
    return f"`{plain.replace('|', '¦')}`"
