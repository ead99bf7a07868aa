"""The configuration of a run: knobs, checks across them, and recipes.

A recipe is YAML with one section per dataclass of ``knobs``; ``base: [sizes/small, methods/luffy]`` begins with other
recipes, and ``section.key=value`` on the command line overrides all of them. See ``load_config``.
"""

from luffy.config.checks import Config
from luffy.config.knobs import (
    AlgorithmConfig,
    BatchConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
)
from luffy.config.recipes import PACKAGE, built_in_recipes, check_made_for, load_config, read_recipe, to_yaml
from luffy.config.stages import Method, Stage, stages_of
from luffy.schema import build
from luffy.yaml_text import parse_yaml

__all__ = [
    "PACKAGE",
    "AlgorithmConfig",
    "BatchConfig",
    "Config",
    "DataConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "Method",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "Stage",
    "TeacherConfig",
    "build",
    "built_in_recipes",
    "check_made_for",
    "load_config",
    "parse_yaml",
    "read_recipe",
    "stages_of",
    "to_yaml",
]
