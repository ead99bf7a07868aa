"""`luffy doctor`: checks of a machine or a cluster before a long run.

Each check measures on every rank (`measure_*`, JSON values) and is judged once from the values of all ranks
(`judge_*`, lines of a table). Values travel through torch's key-value store and not through collectives, so that a
rank that hangs in one can still be named (`watch.py`).
"""
