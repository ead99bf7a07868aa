"""Names of the files in a run folder."""

CONFIG, DATA = "config.yaml", "data.json"
METRICS, SAMPLES, EVAL_SAMPLES = "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"
EVALUATED = "evaluated.json"  # held-out accuracy by step, of the evaluations on record
STAGES = "stages.json"  # of a run with stages: the finished ones, and how the current one ends
SAVED = "saved.json"  # the step of the newest checkpoint
BEST = "best.json"  # the best step by held-out accuracy
WANDB = "wandb.json"  # the id of the run at W&B
CARD, CURVES = "README.md", "curves.png"  # of a model folder
