from luffy.api import SecondRound, gate_function


def nothing_right(first):
    return not any(first.solved(score.value) for score in first.group.scores)


@gate_function("half_then_whole", uses_traces=True, rounds=2, when=nothing_right)
def half_then_whole(first):
    trace = first.trace()
    if trace is None:
        return None
    keep = tuple(range(len(first.group.rollouts) - 1))
    half = len(trace.token_ids) // 2 if first.round == 1 else None  # None: all of it
    return SecondRound(keep, (first.sample(0, trace, half),))
