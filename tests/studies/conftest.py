from prepare_support import tokenizer_folder  # noqa: F401
from run_folders import make_metric_row, write_run  # noqa: F401
