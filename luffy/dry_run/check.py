"""Validate a run, build its first batch, and write what a step will do and need."""

from __future__ import annotations

from luffy.config import Config, stages_of
from luffy.dry_run.base_lines import base_lines
from luffy.dry_run.first_step import FirstStep, check_reward, first_traces, first_turns
from luffy.dry_run.lines import engine_line, need_lines, plan_line, update_line
from luffy.dry_run.models import check_other_models, model_shape, try_model
from luffy.dry_run.place import Place
from luffy.dry_run.work import estimate_of
from luffy.run_folder.trackers import check_trackers
from luffy.step.crediting import detach_notice
from luffy.step.tasks import build_encoder, equal_prompts, load_eval_tasks, repeated_problems
from luffy.train import setup
from luffy.train.build import build_planner, load_tasks, total_steps


def dry_run(
    cfg: Config,
    method: str,
    trainings: int = 1,
    measures: bool = False,
    gpu: str | None = None,
    price: float | None = None,
) -> list[str]:
    """Lines to print, of a run with stages for each of them; ``trainings`` like this one are made one after the other.
    Weights are loaded only if ``measures``: what the base does with the problems; for all else the model is built
    without memory to count its parameters. ``gpu`` and ``price``: as ``Place.of`` takes them."""
    stages = stages_of(cfg)
    lines = [] if stages else _lines(cfg, method, trainings, measures, gpu, price)
    for stage in stages:
        of_stage = _lines(stage.cfg, stage.method, trainings, measures and stage.number == 1, gpu, price)
        handed = stage.knobs.hand_on if stage.number < len(stages) else ""
        begins = "" if stage.number == 1 else "; its model is the checkpoint that the stage before hands on"
        ends = f"stage      {stage.number} of {len(stages)}, {stage.name}: {stage.ending}"
        ends += f", hands on the {handed} checkpoint" if handed else ""
        lines += [*([""] if lines else []), of_stage[0], ends + begins, *of_stage[1:]]
    return lines


def _lines(cfg: Config, method: str, trainings: int, measures: bool, gpu: str | None, price: float | None) -> list[str]:
    place = Place.of(cfg, gpu, price)
    setup.check_names(cfg, method)
    notices = check_trackers(cfg) + place.notices
    tokenizer = setup.load_policy_tokenizer(cfg.model)
    encoder = build_encoder(cfg, tokenizer)
    tasks, held_traces = load_tasks(cfg, method, encoder, encoder)
    eval_tasks = load_eval_tasks(cfg, encoder)
    model = model_shape(cfg)
    setup.check_context(cfg, model.config)
    try_model(model.config, cfg)
    notices += place.slow_dtypes(cfg, method)
    others = check_other_models(cfg, method, tokenizer)
    steps = total_steps(cfg, len(tasks))
    traces, plan = "not verified: no reward is needed", None
    if method == "rl" or eval_tasks:
        with cfg.reward.verifier(workers=1) as verifier:
            traces = check_reward(cfg, method, tasks, tokenizer, verifier)
            if method == "rl":
                planner = build_planner(cfg, steps, encoder.stops(()), tokenizer)
                plan = FirstStep(cfg, tasks, planner, verifier, tokenizer).plan()
    batch = [group[0].task for group in plan] if plan else first_traces(cfg, tasks)
    notices += tasks.problems.turns_notices
    notices += repeated_problems(cfg, len(tasks)) + equal_prompts(tasks, eval_tasks)
    notices += detach_notice(cfg) if method == "rl" else []
    found = estimate_of(cfg, method, model, others, batch, plan, place)
    several = "" if trainings == 1 else f", the first of {trainings} seeds"
    sizes = {name: len(items) for name, items in eval_tasks.items()} | {"traces": len(held_traces)}
    held_out = ", ".join(f"{name} {size}" for name, size in sizes.items() if size) or "none"
    lines = [
        f"run        {cfg.folder}  ({method}, {steps} steps, seed {cfg.seed}{several})",
        f"model      {cfg.model.path}  {model.parameters / 1e6:,.2f} M parameters, {cfg.model.dtype}",
        f"data       {', '.join(f'{k} {v}' for k, v in tasks.report.items())}; held out {held_out}",
        f"traces     {traces}",
        f"engine     {engine_line(cfg, method, model.config, place.on_gpu)}",
        f"step       {plan_line(cfg, batch, plan)}",
        f"update     {update_line(cfg, method, steps)}",
        *need_lines(found, method, steps, trainings, price),
    ]
    if measures:  # last: its memory and time disturb nothing
        lines += base_lines(cfg, method, tasks, model.parameters, place)
    lines += [f"warning    {notice}" for notice in notices]
    return [
        *lines,
        "first prompt, as the model sees it:",
        encoder.render(batch[0].problem),
        *first_turns(batch, tokenizer),
    ]
