"""``luffy eval``: one stream of responses, scored and saved as they finish; a killed evaluation resumes.

OUT/settings.json   what decides the responses
OUT/items.jsonl     one line per (benchmark, item, sample)
OUT/result.json     the figures; result.md shows them
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from luffy.errors import UserError
from luffy.evaluation import plan
from luffy.evaluation.background_work import BackgroundWork
from luffy.evaluation.benchmarks import load_suite
from luffy.evaluation.engines import LoadedModel, load_engine
from luffy.evaluation.responses import begun, conversations_for, encoder_for, finished_in_parts
from luffy.evaluation.results import (
    ITEMS,
    Result,
    Settings,
    alone_in,
    build_result,
    claim,
    model_label,
    read_items,
    recorded,
    warn_of_another_prompt,
    write_result,
)
from luffy.evaluation.scoring import CALL_FAILED, Response, key_of, score_again, scored
from luffy.rewards import Verifier
from luffy.run_folder.console import EvalView
from luffy.run_folder.recorder import JsonLinesWriter

PAPER_MAX_TOKENS = 8192

logger = logging.getLogger(__name__)


def run_evaluation(options: plan.Options) -> Result:
    """Run or resume an evaluation; errors in the data are found before the model is loaded."""
    given = options.reward_settings
    suite = load_suite(
        options.suite, options.data, k=options.k, reward=given.name if given else options.reward, seed=options.seed,
        shuffle=options.shuffle, limit=options.limit, columns=options.columns,
    )  # fmt: skip
    for name in suite.missing:
        logger.warning("not evaluated, because there is nothing to read: %s", name)
    for row in suite.left_out:
        logger.warning("a row is not evaluated: %s", row)
    rewards = {benchmark.reward for benchmark in suite.benchmarks}
    assert len(rewards) == 1, "a suite has one reward"
    out = options.out or plan.default_out(options.model, options.suite)
    reward = plan.reward_of(options, rewards.pop())
    with alone_in(out), reward.verifier() as verifier:
        options = plan.with_defaults(options, out)
        assert options.dtype is not None and options.slots is not None
        loaded = load_engine(
            options.engine, options.model, dtype=options.dtype, device=options.device, slots=options.slots,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        encoder = encoder_for(
            loaded, options.style, options.system_prompt, options.environment,
            paper=suite.is_builtin, chat_template=options.chat_template, date=options.date,
        )  # fmt: skip
        loaded = replace(loaded, eos_ids=encoder.stops(loaded.eos_ids))
        jobs = plan.planned_responses(suite, encoder)
        lengths = [len(job.task.prompt_ids) for job in jobs if job.sample == 0]
        default = recorded(out, "max_tokens", int) or PAPER_MAX_TOKENS
        max_tokens = plan.longest_response(options.max_tokens, default, loaded.context, lengths)
        settings = plan.settings_of(options, reward, suite, encoder, max_tokens, any(j.task.in_thought for j in jobs))
        claim(out, settings)
        warn_of_another_prompt(settings)
        score_again(jobs, verifier, settings, out)
        room = loaded.context - max(lengths)
        loaded = replace(loaded, conversations=conversations_for(options.environment, encoder, max_tokens, room))
        run_jobs(jobs, loaded, verifier, settings, out, options.chunk)
        rows = read_items(out)
        if failed := sum(row["status"] == CALL_FAILED for row in rows):
            logger.warning("%d responses have no score and count as wrong; the same command asks for it again", failed)
        result = build_result(suite, settings, rows)
        write_result(result, out)
    return result


def run_jobs(
    jobs: Sequence[plan.PlannedResponse],
    loaded: LoadedModel,
    verifier: Verifier,
    settings: Settings,
    out: Path,
    chunk: int,
) -> None:
    """Make the responses that are not there yet, and save them ``chunk`` at a time as they finish."""
    path = out / ITEMS
    done = set(map(key_of, read_items(out)))
    todo = [job for job in jobs if job.key not in done]
    view = EvalView(model_label(settings.model), len(jobs), len(jobs) - len(todo))
    items = JsonLinesWriter(path, keep_through_step=0)

    def save(responses: Sequence[Response]) -> None:
        rows, failure = scored(responses, loaded.tokenizer, verifier, settings, not done, loaded.conversations)
        items.write(rows)
        done.update(map(key_of, rows))
        view.saved(len(rows), sum(r["tokens"] for r in rows), sum(r["right"] for r in rows), rows[-1]["benchmark"])
        if failure is not None:
            raise UserError(failure)

    try:
        with BackgroundWork() as background:
            for part in finished_in_parts(loaded, begun(todo, loaded, settings), chunk, view.working):
                background.submit(save, [(todo[number], episode) for number, episode in part])
    finally:
        items.close()
        view.close()
