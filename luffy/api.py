"""For scripts and notebooks.

    from luffy import api


    @api.reward("short")
    def short(response, answer, problem):
        return float(answer in response) - 0.001 * len(response)


    cfg = api.load_config("tiny/luffy", {"train.steps": 20, "reward.kind": "short", "reward.success": 0.9})
    with api.Trainer(cfg) as trainer:
        for step, metrics in trainer.steps():
            print(step, metrics["critic/rewards/mean"])
        model = trainer.train()  # all steps are done: the folder of the trained model

    print(api.generate(str(model), "3+4=", max_tokens=32)[0]["response"])

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luffy.config import Config, built_in_recipes, load_config, to_yaml
    from luffy.core.shaping import compared_shape, shape, trace_weight
    from luffy.evaluation.results import Result
    from luffy.guidance.gate import FirstRound, SecondRound, gate_function
    from luffy.guidance.ratios import prefix_schedule
    from luffy.learn.credit import ScoredGroup, ScoredTokens, TokenCredit, credit_function, group_baseline, in_baseline
    from luffy.rewards.kinds import reward
    from luffy.rewards.verifier import build_verifier
    from luffy.rollout.engine import Engine
    from luffy.run_folder.trackers import tracker
    from luffy.schema import knob
    from luffy.train.build_engines import engine
    from luffy.trainer import Trainer, train_stages
    from luffy.types import Completion, Problem, Request

_HOMES = {
    "luffy.config": ("Config", "built_in_recipes", "load_config", "to_yaml"),
    "luffy.trainer": ("Trainer", "train_stages"),
    "luffy.rewards.kinds": ("reward",),
    "luffy.rewards.verifier": ("build_verifier",),
    "luffy.types": ("Completion", "Problem", "Request"),
    "luffy.core.shaping": ("compared_shape", "shape", "trace_weight"),
    "luffy.guidance.ratios": ("prefix_schedule",),
    "luffy.guidance.gate": ("FirstRound", "SecondRound", "gate_function"),
    "luffy.learn.credit": (
        "ScoredGroup",
        "ScoredTokens",
        "TokenCredit",
        "credit_function",
        "group_baseline",
        "in_baseline",
    ),
    "luffy.train.build_engines": ("engine",),
    "luffy.run_folder.trackers": ("tracker",),
    "luffy.schema": ("knob",),
    "luffy.rollout.engine": ("Engine",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Completion",
    "Config",
    "Engine",
    "FirstRound",
    "Problem",
    "Request",
    "ScoredGroup",
    "ScoredTokens",
    "SecondRound",
    "TokenCredit",
    "Trainer",
    "build_verifier",
    "built_in_recipes",
    "compared_shape",
    "credit_function",
    "engine",
    "evaluate",
    "gate_function",
    "generate",
    "group_baseline",
    "in_baseline",
    "knob",
    "load_config",
    "prefix_schedule",
    "reward",
    "shape",
    "to_yaml",
    "trace_weight",
    "tracker",
    "train_stages",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'luffy.api' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


def evaluate(model: str, suite: str, out: Path | str | None = None, **options: Any) -> Result:
    """Evaluate a model as ``luffy eval`` does: ``suite`` is math6, ood, gsm8k, aime_amc or a dataset.

    ``options`` are the command's: k, temperature, max_tokens, seed, reward, limit, style, device, ... Responses go to
    ``out`` (default: evals/MODEL-SUITE), from which an interrupted evaluation resumes. The ``benchmarks`` of the
    ``Result`` have avg@k, pass@k and lengths.
    """
    from luffy.evaluation.trained_with import evaluate as run
    from luffy.models.machine import pick_device
    from luffy.run_folder.checkpoint import model_of

    folders = {name: Path(value) for name, value in (("out", out), ("data", options.get("data"))) if value is not None}
    options |= {"model": model_of(model)[0], "suite": suite, "device": pick_device(options.get("device", "auto"))}
    return run({**options, **folders}, logging.getLogger(__name__).warning)


def generate(
    model: str,
    prompts: str | Sequence[str],
    *,
    n: int = 1,
    max_tokens: int | None = None,
    temperature: float = 0.6,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    style: str = "auto",
    system_prompt: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """``n`` responses to each prompt by the native engine, as ``luffy generate`` does.

    ``model`` is a Hugging Face folder, hub id or .gguf file. Each row has id (the prompt's index), sample, response,
    finish, token_ids and log_probs.
    """
    from luffy.generate import generate_texts
    from luffy.types import Problem

    texts = [prompts] if isinstance(prompts, str) else prompts
    problems = [Problem(id=str(i), prompt=text, answer="") for i, text in enumerate(texts)]
    rows = generate_texts(
        model, problems, n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        style=style, system_prompt=system_prompt, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    return list(rows)
