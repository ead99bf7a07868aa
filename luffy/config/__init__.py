"""The configuration of a run: knobs, checks across them, and recipes.

A recipe is YAML with one section per dataclass of ``knobs``; ``base: [sizes/small, methods/luffy]`` begins with other
recipes, and ``section.key=value`` on the command line overrides all of them. See ``load_config``.
"""

from luffy.config.checks import Config
from luffy.config.knobs import (
    AlgorithmConfig,
    AsyncConfig,
    BatchConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    GuidanceConfig,
    LoraConfig,
    ModelConfig,
    OffPolicyGuidanceConfig,
    OptimConfig,
    ParallelConfig,
    RayConfig,
    RecordConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    SftStepsConfig,
    TeacherConfig,
    TrainConfig,
    VllmConfig,
)
from luffy.config.legacy import merge, set_at
from luffy.config.recipes import (
    BUILT_IN_RECIPES,
    PACKAGE,
    built_in_recipes,
    check_made_for,
    check_prepared,
    config_of,
    inherited_for_rl,
    load_config,
    parse_override,
    read_recipe,
    to_yaml,
)
from luffy.config.stages import Method, Stage, stages_of
from luffy.config.yaml_text import YAML_ERRORS, parse_yaml, read_yaml
from luffy.schema import build

__all__ = [
    "BUILT_IN_RECIPES",
    "PACKAGE",
    "YAML_ERRORS",
    "AlgorithmConfig",
    "AsyncConfig",
    "BatchConfig",
    "Config",
    "DataConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "GuidanceConfig",
    "LoraConfig",
    "Method",
    "ModelConfig",
    "OffPolicyGuidanceConfig",
    "OptimConfig",
    "ParallelConfig",
    "RayConfig",
    "RecordConfig",
    "ReplayConfig",
    "RewardConfig",
    "RolloutConfig",
    "SftStepsConfig",
    "Stage",
    "TeacherConfig",
    "TrainConfig",
    "VllmConfig",
    "build",
    "built_in_recipes",
    "check_made_for",
    "check_prepared",
    "config_of",
    "inherited_for_rl",
    "load_config",
    "merge",
    "parse_override",
    "parse_yaml",
    "read_recipe",
    "read_yaml",
    "set_at",
    "stages_of",
    "to_yaml",
]
