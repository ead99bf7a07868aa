"""Conversations of some turns, behind each the same reply, for engines that serve them."""

from __future__ import annotations

import torch

from luffy.types import Request, Sampling

REPLY = (7, 8, 9)


class Talks:
    """Conversations of some turns: behind each turn the same reply. ``slow``: those whose replies come only when
    nothing else is left to do."""

    def __init__(self, prompts, turns=3, tokens=4, slow=(), longest=64):
        self.prompts, self.turns, self.tokens, self.slow = prompts, turns, tokens, set(slow)
        self.most, self.longest = len(prompts), longest
        self.history = {i: tuple(prompt) for i, prompt in enumerate(prompts)}
        self.drawn = {i: [] for i in self.history}
        self.ready, self.late, self.asked, self.over, self.log = list(self.history), [], [], [], []

    def take(self, wait):
        if len(self.over) == self.most:
            return None
        if wait and not self.ready:
            self.ready, self.late = self.late, []
            assert self.ready, "the engine waits, and nobody has anything to say"
        ready, self.ready = self.ready, []
        self.asked += ready
        return [self.request(i) for i in ready]

    def request(self, i):
        history = self.history[i]
        return Request(self.prompts[i], i, Sampling(self.tokens), history[len(self.prompts[i]) :], conversation=i)

    def finish(self, number, completion):
        i = self.asked[number]
        self.log.append(i)
        self.drawn[i].append(completion)
        self.history[i] += tuple(completion.token_ids.tolist())
        if len(self.drawn[i]) == self.turns:
            self.over.append(i)
        else:
            self.history[i] += REPLY
            (self.late if i in self.slow else self.ready).append(i)

    def ended(self):
        return list(self.over)


def assert_drawn_alone(engine, talks):
    """Each turn is what `generate` draws behind the same tokens."""
    for i, turns in talks.drawn.items():
        given = ()
        for turn in turns:
            (alone,) = engine.generate([Request(talks.prompts[i], i, Sampling(talks.tokens), given)])
            assert alone.token_ids.tolist() == turn.token_ids.tolist()
            torch.testing.assert_close(alone.log_probs, turn.log_probs, rtol=1e-4, atol=1e-4)
            given += (*turn.token_ids.tolist(), *REPLY)
