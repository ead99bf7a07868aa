"""Estimators of the advantage of a response for ``algorithm.credit``, one file each; all are found by their file."""
