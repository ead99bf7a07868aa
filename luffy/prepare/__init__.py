"""Before a run: datasets, models and traces made ready, with every dropped row accounted for."""
