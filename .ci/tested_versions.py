"""Prints the package versions that luffy was tested with: ``python .ci/tested_versions.py constraints.txt ...``."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "pyarrow", "PyYAML",
    "typer", "rich", "Jinja2", "tensorboard", "math-verify", "antlr4-python3-runtime", "peft", "gguf", "ray",
)  # fmt: skip


def table_of(*constraints: str) -> str:
    """The lines ``name==version`` of PACKAGES in constraints files."""
    lines = (line.split(";")[0].strip() for text in constraints for line in text.splitlines())
    pinned = dict(line.lower().split("==", 1) for line in lines if "==" in line)
    return "".join(f"{name}=={pinned[name.lower()]}\n" for name in PACKAGES if name.lower() in pinned)


if __name__ == "__main__":
    sys.stdout.write(table_of(*(Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])))
