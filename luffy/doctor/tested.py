"""Package versions that luffy was tested with, from a table that is installed with luffy.

`make docs` writes the table: ``python -m luffy.doctor.tested constraints.txt constraints-ray.txt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

TABLE = Path(__file__).with_name("tested.txt")
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "huggingface_hub", "safetensors", "numpy", "pyarrow", "PyYAML",
    "typer", "rich", "Jinja2", "tensorboard", "math-verify", "antlr4-python3-runtime", "peft", "gguf", "ray",
)  # fmt: skip
# Another version of these silently changes verdicts of the math reward.
EXACT = ("math-verify", "antlr4-python3-runtime")


def table_of(*constraints: str) -> str:
    """The lines ``name==version`` of PACKAGES in constraints files."""
    pinned = _versions("\n".join(constraints))
    return "".join(f"{name}=={pinned[name.lower()]}\n" for name in PACKAGES if name.lower() in pinned)


def tested_versions() -> dict[str, str]:
    """Tested version by package name, lower case."""
    return _versions(TABLE.read_text(encoding="utf-8"))


def _versions(text: str) -> dict[str, str]:
    pairs = (line.split(";")[0].strip().partition("==") for line in text.splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


if __name__ == "__main__":
    sys.stdout.write(table_of(*(Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])))
