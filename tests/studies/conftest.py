from prepare_support import tokenizer_folder  # noqa: F401
