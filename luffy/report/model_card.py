"""The model card of a checkpoint: ``README.md`` of its model folder, as the hub shows it.

It is made from what the run folder holds, and names nothing of this machine: a path is given by its last part, and only
where it tells something.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

from luffy._version import __version__
from luffy.hub import hub_id
from luffy.report.changes import changes_of
from luffy.report.closest_recipe import PAPERS, about_recipe, closest_recipe
from luffy.report.runs import RunRecord, first_stage
from luffy.report.tables import evaluations
from luffy.report.text import legible, shorten

T = TypeVar("T")

CARD, CURVES = "README.md", "curves.png"
MARK = "<!-- Made by luffy, and made anew by `luffy push`. Remove this line to keep your own text. -->"
TRAINED_WITH = re.compile(rb"^<!-- Trained with: (\{.*\}) -->$", re.MULTILINE)
REWARD = "critic/rewards/mean"
LONGEST_VALUE = 120
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
    """What ``luffy eval`` measured on one benchmark; ``accuracy`` is avg@k. ``settings`` are those of sampling
    and reward."""

    name: str
    title: str
    items: int
    k: int
    accuracy: float
    pass_at_k: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class CardFacts:
    """What a card tells. ``run``: the record up to the checkpoint's ``step``; ``data``: the run's data.json;
    ``figure``: whether curves.png lies beside the card; ``known``: fields of the front matter that are known, also as
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
    """The whole text: front matter for the hub, then what people read."""
    from huggingface_hub import EvalResult, ModelCardData

    recipe, differences = closest_recipe(facts.run.config, facts.run.kind == "sft")
    rest = {key: facts.known[key] for key in ("license_name", "license_link", "language") if key in facts.known}
    matter = ModelCardData(
        base_model=facts.base,
        library_name=facts.library,
        license=facts.known.get("license"),
        pipeline_tag="text-generation",
        tags=["luffy", "sft" if recipe == "sft" else "reinforcement-learning", recipe.replace("_", "-")],
        datasets=facts.datasets or None,
        model_name=facts.name,
        eval_results=[EvalResult(**_result(b)) for b in facts.benchmarks] or None,
        **rest,
    )
    if not facts.benchmarks:
        matter.pop("model_name")  # it belongs to the results
    parts = [
        f"---\n{matter.to_yaml()}\n---\n{MARK}\n{_trained_with(facts.run)}",
        f"# {facts.name}",
        _training(facts, recipe, differences),
        _settings(facts.run),
        _changes(facts),
        _curves(facts),
        _evaluation(facts),
        f"Made with luffy {__version__}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _result(benchmark: BenchmarkFigure) -> dict[str, Any]:
    low, high = interval(benchmark.accuracy, benchmark.items)
    return {
        "task_type": "text-generation",
        "dataset_type": benchmark.name,
        "dataset_name": benchmark.title,
        "metric_type": "accuracy",
        "metric_name": f"avg@{benchmark.k}, percent",
        "metric_value": round(100 * benchmark.accuracy, 2),
        "metric_args": {"interval_95": [round(100 * low, 2), round(100 * high, 2)], "problems": benchmark.items},
    }


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


def _training(facts: CardFacts, recipe: str, differences: Mapping[str, Any]) -> str:
    about = about_recipe(recipe).rstrip(".")
    paper = f" ([arXiv {PAPERS[recipe]}](https://arxiv.org/abs/{PAPERS[recipe]}))" if recipe in PAPERS else ""
    apart = f", with {', '.join(_code(f'{k}={public(v)}') for k, v in differences.items())}" if differences else ""
    before = first_stage(facts.run)
    stage = f", after {before.steps} steps of `luffy {before.kind}`" if before else ""
    base = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else "a local model"
    planned = facts.run.planned_steps
    steps = f"{facts.step} of {planned}" if planned and planned != facts.step else str(facts.step)
    return "\n".join([
        f"- Base model: {base}{stage}",
        f"- Data: {_data(facts)}",
        f"- Method: {_text(about)}{paper}; recipe `{recipe}`{apart}",
        f"- Steps: {steps}",
    ])  # fmt: skip


def _data(facts: CardFacts) -> str:
    links = [f"[{name}](https://huggingface.co/datasets/{name})" for name in facts.datasets]
    names = links or [_code(public(path)) for path in paths_of(facts.run)]
    counts = facts.data.get("train", {})
    said = f"{counts['usable']:,} problems, {counts.get('with_traces', 0):,} with traces" if "usable" in counts else ""
    return ", ".join(filter(None, [*names, said])) or "not recorded"


def _settings(run: RunRecord) -> str:
    keys = [key for key in SETTINGS if run.config.get(key) is not None]
    if run.kind == "sft":
        keys = [key for key in keys if not key.startswith(NOT_OF_SFT)]
    rows = [[_code(key), _code(public(run.config[key]))] for key in keys]
    return f"## Settings\n\n{_table(['knob', 'value'], rows)}" if rows else ""


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
    written = json.dumps(values).replace("<", "\\u003c").replace(">", "\\u003e")
    return f"<!-- Trained with: {written} -->"


def trained_with_line(card: bytes) -> bytes | None:
    """The JSON of that line in a card; None where it has none."""
    found = TRAINED_WITH.search(card)
    return found[1] if found else None


def _changes(facts: CardFacts) -> str:
    """What the settings were before a resume changed them."""
    hidden = (*OF_THE_MACHINE, *(NOT_OF_SFT if facts.run.kind == "sft" else ()))
    rows = [
        [str(step), *(_code(public(value)) for value in (key, before, now))]
        for step, changes in changes_of(facts.run.folder, facts.step)
        for key, (before, now) in changes.items()
        if not key.startswith(hidden)
    ]
    return f"Changed when the run was resumed:\n\n{_table(['after step', 'knob', 'from', 'to'], rows)}" if rows else ""


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


def _curves(facts: CardFacts) -> str:
    if facts.figure:
        return f"## Curves\n\n![Training reward and held-out accuracy over steps]({CURVES})"
    run = facts.run
    columns = {name: dict(run.series(metric)) for metric, name in evaluations([run])}
    if run.kind == "train":
        columns["reward"] = dict(run.series(REWARD))
    steps = thinned(sorted({step for values in list(columns.values())[:1] for step in values}))
    if not steps:
        return ""
    rows = [[str(s), *(f"{v[s]:.3f}" if s in v else "" for v in columns.values())] for s in steps]
    return f"## Curves\n\n{_table(['step', *columns], rows)}"


def thinned(values: Sequence[T]) -> list[T]:
    """At most ``TABLE_ROWS`` of them, the first and the last among them."""
    if len(values) <= TABLE_ROWS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]


def lines_of_table(lines: Sequence[bytes]) -> list[bytes]:
    """The lines of metrics.jsonl that a card without a figure needs: evaluations, and some steps. A checkpoint must not
    wait for thousands of others to be parsed."""
    return thinned([line for line in lines if b'/accuracy"' in line]) + thinned(lines)


def _evaluation(facts: CardFacts) -> str:
    sizes = facts.data.get("held_out", {})
    rows = []
    for metric, name in evaluations([facts.run]):
        step, value = facts.run.series(metric)[-1]
        set_name = metric.removeprefix("val-").removesuffix("/accuracy")
        n = sizes.get(set_name)
        if step == facts.step or step > 0:  # at step 0 it is the base's
            when = "during training" if step == facts.step else f"during training, at step {step:.0f}"
            rows.append([f"{_text(name)}, {when}", *_share(value, n), ""])
    for b in facts.benchmarks:
        title = _text(f"{b.title} (avg@{b.k})")
        rows.append([title, *_share(b.accuracy, b.items), f"{100 * b.pass_at_k:.1f}" if b.k > 1 else ""])
    if not rows:
        return ""
    notes = ["Right answers in percent; 95 % intervals over problems (Wilson)."]
    if len(rows) > len(facts.benchmarks) and (reward := reward_name(facts.run.config)):
        notes.append(f"During training: reward {_text(reward)}.")
    sampled = {", ".join(f"{k} {_text(public(v))}" for k, v in b.settings.items()) for b in facts.benchmarks}
    notes += [f"`luffy eval`: {settings}." for settings in sorted(sampled)]
    table = _table(["set", "problems", "right", "95 % interval", "pass@k"], rows)
    return f"## Evaluation\n\n{table}\n\n{' '.join(notes)}"


def reward_name(config: Mapping[str, Any]) -> str | None:
    """Of a flat config: the kind, or several with their weights, as a card may show them."""
    weights = {key: value for key, value in config.items() if key.startswith(WEIGHTS)}
    parts = [f"{value} {public(key.removeprefix(WEIGHTS))}" for key, value in weights.items()]
    return " + ".join(parts) or ((kind := config.get("reward.kind")) and public(kind))


def _share(value: float, n: int | None) -> list[str]:
    if not n:
        return ["", f"{100 * value:.1f}", ""]
    low, high = interval(value, n)
    return [f"{n:,}", f"{100 * value:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]


# ---- Markdown


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """On one line, with nothing in it that Markdown or a table would take for its own."""
    plain = " ".join(legible(text).split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)


def _code(text: str) -> str:
    plain = shorten(" ".join(legible(text).split()), LONGEST_VALUE).replace("`", "'")
    return f"`{plain.replace('|', '¦')}`"
