"""Measurements of `luffy bench rollout|update|step`, on random weights of a given shape or a given model."""
