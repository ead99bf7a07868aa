"""Fixtures that write run folders."""

from run_folders import make_metric_row, make_sample_row, write_run  # noqa: F401
