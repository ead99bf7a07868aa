"""Environments: what answers the turns of an episode, tools above all."""
