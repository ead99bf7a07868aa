"""The credit of a step: the log-probs that it needs before the update, then the samples of the groups."""

from __future__ import annotations

from dataclasses import replace

from luffy.config import Config
from luffy.learn.credit import ScoredTokens, credit, credit_metrics, needs_of, uncredited
from luffy.metrics import Sum
from luffy.step.run_state import Run, StepBatch
from luffy.types import Sample


def give_credit(run: Run, batch: StepBatch) -> None:
    """Log-probs before the update, then the samples of this rank's groups; the metrics become those of all ranks."""
    if run.prefetcher is None:
        with batch.watch("sleep"):
            run.engine.sleep()
    with batch.watch("old_log_probs"):
        tokens = score_tokens(run, batch)
    with batch.watch("advantage"):
        settings = (run.cfg.algorithm, batch.step, run.total_steps)
        samples = credit(list(batch.groups.values()), tokens, *settings)
    batch.samples = dict(zip(batch.groups, samples, strict=True))
    metrics = credit_metrics(samples, tokens, *settings) | {"batch/rejected": Sum(len(batch.rejected))}
    batch.metrics = run.world.merge(batch.metrics | metrics)


def needed_log_probs(cfg: Config, problems: int) -> tuple[range, bool]:
    """For which groups of a step the policy's log-probs before the update are computed, and whether those of the
    reference are, for a KL term or the weights of an SFT term. The policy's: for all groups where the KL in the reward
    or the credit function asks for them, else for those after the first mini-batch, in which old is current. Gradients
    through importance weights (``importance_detach: false``) would flow in the first mini-batch alone, so then all have
    old log-probs."""
    a = cfg.algorithm
    need_ref = a.kl_coef > 0 or a.sft_weight.part.needs_reference
    mini_batches = max(1, min(cfg.batch.updates, problems))
    if (need_ref and a.kl_in == "reward") or needs_of(a) or (mini_batches > 1 and not a.importance_detach):
        return range(problems), need_ref
    return range(problems // mini_batches, problems), need_ref


def detach_notice(cfg: Config) -> list[str]:
    """A line when ``algorithm.importance_detach=false`` has no effect, else none."""
    if cfg.algorithm.importance_detach:
        return []
    if cfg.rollout.overrides is None and not cfg.may_be_stale:
        why = "there are no importance weights without token overrides or async.max_staleness"
    elif cfg.batch.updates > 1:
        why = (
            f"with {cfg.batch.updates} mini-batches a step the weights are those of the policy before the step, which "
            f"have no gradient; set batch.mini_batch={cfg.batch.problems} for one mini-batch"
        )
    elif needed_log_probs(cfg, cfg.batch.problems)[0]:
        why = "the credit function and a KL in the reward take the weights of the policy before the step"
    else:
        return []
    return [f"algorithm.importance_detach=false does nothing: {why}"]


def score_tokens(run: Run, batch: StepBatch) -> list[list[ScoredTokens]]:
    """Log-probs before the update: those of ``needed_log_probs``, and the teacher's where the credit function needs
    them."""
    need_old, need_ref = needed_log_probs(run.cfg, batch.size)
    groups = list(batch.groups.values())
    positions = [position for position, group in batch.groups.items() for _ in group.rollouts]
    count = len(positions)
    flat = [uncredited(r) for group in groups for r in group.rollouts] if need_old or need_ref else []
    later = [i for i, position in enumerate(positions) if position in need_old]
    found = dict(zip(later, run.policy.score([flat[i] for i in later]), strict=True)) if need_old else {}
    old = [found.get(i, (None, None)) for i in range(count)]
    ref = run.policy.reference_log_probs(flat, run.reference) if need_ref else [None] * count
    taught = [None] * count if run.teacher is None else run.teacher.score(groups)
    tokens = iter([ScoredTokens(o, r, entropy, t) for (o, entropy), r, t in zip(old, ref, taught, strict=True)])
    return [[next(tokens) for _ in group.rollouts] for group in groups]


def score_traces(run: Run, batch: StepBatch) -> None:
    """SFT: log-probs of the traces before the update, after the first mini-batch, and under the reference, where the
    SFT term reads them."""
    a, updates = run.cfg.algorithm, max(1, min(run.cfg.batch.updates, batch.size))
    compares = a.sft_reshape.part.compared and updates > 1
    if not (compares or a.sft_weight.part.needs_reference):
        return
    with batch.watch("old_log_probs"):
        if compares:
            later = {i: of for i, of in batch.samples.items() if i >= batch.size // updates}
            scores = iter(run.policy.log_probs([s for of in later.values() for s in of]))
            batch.samples |= {i: [replace(s, old_log_probs=next(scores)) for s in of] for i, of in later.items()}
        scored = iter(with_reference(run, [s for of in batch.samples.values() for s in of]))
        batch.samples = {i: [next(scored) for _ in of] for i, of in batch.samples.items()}


def with_reference(run: Run, traces: list[Sample]) -> list[Sample]:
    """Traces of an SFT step with log-probs under the reference, if the SFT term weighs them by these."""
    if not run.cfg.algorithm.sft_weight.part.needs_reference:
        return traces
    scores = run.policy.reference_log_probs(traces, run.reference)
    return [replace(trace, ref_log_probs=ref) for trace, ref in zip(traces, scores, strict=True)]
