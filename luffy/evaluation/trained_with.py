"""How a model was trained: the reward, the prompt style and the system prompt of its run, or of its model card. An
evaluation takes them where no option says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from luffy.config import DataConfig, EnvironmentConfig, RewardConfig, build, parse_yaml
from luffy.errors import ConfigError, UserError
from luffy.evaluation.benchmarks import SUITES
from luffy.evaluation.plan import Options
from luffy.evaluation.runner import Result, run_evaluation
from luffy.files import json_object
from luffy.plugins import load_plugins
from luffy.report.model_card import trained_with_line
from luffy.rewards.kinds import built_in
from luffy.run_folder.changes import settings_at
from luffy.run_folder.layout import CARD
from luffy.run_folder.runs import checkpoint_step

LARGEST_CARD = 1 << 20  # bytes
PROMPT = ("style", "system_prompt")


@dataclass(frozen=True)
class Training:
    """Known settings of a model's training; ``values``: sections of its config, read from ``source``."""

    source: str
    values: Mapping[str, Any]
    is_run: bool

    def prompt(self) -> dict[str, str | None]:
        """``style`` and ``system_prompt``, as far as known."""
        section = self._section("data")
        known = build(DataConfig, {key: section[key] for key in PROMPT if key in section}, "data")
        return {key: getattr(known, key) for key in PROMPT if key in section}

    def reward(self) -> RewardConfig | None:
        """None where it is not known. A model card may name built-in rewards alone: it may be anybody's, and a function
        is code."""
        section = self._section("reward")
        if not section:
            return None
        reward = build(RewardConfig, section, "reward")
        own = [kind for kind in reward.weight_of if kind not in built_in()]
        if own and not self.is_run:
            raise ConfigError(f"{self.source} names the reward {own[0][:80]!r}, which is not built in")
        plugins = self.values.get("plugins")
        if own and isinstance(plugins, list):
            try:
                load_plugins(list(map(str, plugins)))
            except UserError as error:
                raise UserError(f"the reward of {self.source} cannot be used: {error}; give --reward") from None
        return reward

    def environment(self) -> EnvironmentConfig | None:
        """None where there is none, and for a model card: it may be anybody's, and an environment is code."""
        section = self._section("environment") if self.is_run else {}
        return build(EnvironmentConfig, section, "environment") if section else None

    def _section(self, name: str) -> dict[str, Any]:
        section = self.values.get(name)
        return section if isinstance(section, dict) else {}


def training_of(model: str) -> Training | None:
    """Training of a model as its run folder, else its card, records it; None for other models."""
    folder = Path(model).resolve()
    checkpoint = folder.parent
    of_run = folder.name == "model" and checkpoint.parent.name == "checkpoints"
    step = checkpoint_step(checkpoint) if of_run else None
    if step is not None:
        settings = settings_at(checkpoint.parent.parent, step)
        values = parse_yaml(settings) if settings.is_file() else None
        if isinstance(values, dict):
            return Training(f"the run {checkpoint.parent.parent}", values, is_run=True)
    card = folder / CARD
    line = trained_with_line(card.read_bytes()[:LARGEST_CARD]) if card.is_file() else None
    if line is None:
        return None
    return Training(f"the model card {card}", json_object(line, card, "remove that line"), is_run=False)


def environment_of(model: str) -> EnvironmentConfig | None:
    """The environment that a run's model was trained in; None for other models."""
    training = training_of(model)
    return None if training is None else training.environment()


def evaluate(given: Mapping[str, Any], say: Callable[[str], object]) -> Result:
    """Evaluate with the given options, and with prompt and reward of the model's training unless they are given; a line
    for ``say`` tells what was taken from it."""
    options, taken = as_trained(Options(**given), given)
    if taken:
        say(taken)
    return run_evaluation(options)


def as_trained(options: Options, given: Collection[str]) -> tuple[Options, str | None]:
    """The options with what its training says instead of defaults, and a line that says so (None: nothing was taken).
    ``given``: names of the options that the user chose, which stay. A suite has a reward of its own."""
    try:
        training = training_of(options.model)
        prompt = {} if training is None else prompt_as_trained(training, given)
        scored = not {"reward", "reward_settings"} & set(given) and options.suite not in SUITES
        reward = training.reward() if training is not None and scored else None
        environment = options.environment or (None if training is None else training.environment())
    except ConfigError as error:  # another tool's file, or another version's
        return options, f"not as trained: {error}"
    if training is None:
        return options, None
    taken = {} if reward is None else {"reward": reward.name}
    taken |= {} if environment is None else {"environment": environment.name}
    taken |= {name.replace("_", " "): repr(value) for name, value in prompt.items()}
    if reward is not None:
        reward = replace(reward, answer_in_thought=reward.answer_in_thought or options.answer_in_thought)
    rewarded = reward or options.reward_settings
    changed = replace(options, **prompt, reward_settings=rewarded, environment=environment)
    return changed, said_of(taken, training)


def prompt_as_trained(training: Training, given: Collection[str]) -> dict[str, Any]:
    """The style and system prompt to take. With a style that the user chose nothing is taken: it may have no place for
    a system prompt."""
    if "style" in given:
        return {}
    return {name: value for name, value in training.prompt().items() if value is not None and name not in given}


def said_of(taken: Mapping[str, str], training: Training) -> str | None:
    """Line on what was taken from a training; None if nothing was."""
    if not taken:
        return None
    said = ", ".join(f"{name} {value if len(value) <= 80 else value[:77] + '...'}" for name, value in taken.items())
    options = ", ".join(f"--{name.replace(' ', '-')}" for name in taken)
    return f"as trained {said}; from {training.source} (choose others with {options})"
