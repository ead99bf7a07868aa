"""Files that would run code if anything unpickled, imported or rendered them without care."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", None],
}
# climbs from a string to the class of all classes, as an unguarded Jinja would let it
TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


class _Payload:
    """Unpickled, it touches a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def pickled(mark: Path) -> bytes:
    return pickle.dumps(_Payload(mark), protocol=2)


def script(mark: Path) -> str:
    """A module that touches the file when it is imported."""
    return f"import os\nos.mkdir({str(mark)!r})\n"


def poison_model_folder(folder: Path, mark: Path) -> None:
    """Pickles under every name some loader looks for, and code of its own for config, model and tokenizer."""
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", ".metadata", "consolidated.00.pth"):
        (folder / name).write_bytes(pickled(mark))
    (folder / "evil.py").write_text(script(mark))
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"auto_map": AUTO_MAP}))


def poisoned_table(mark: Path) -> pa.Table:
    """A column whose extension type is a pickle in the file's metadata: old pyarrow loaded it on reading."""
    rows = [{"id": f"p{i}", "prompt": "1+1", "answer": "2", "traces": ["2"]} for i in range(3)]
    table = pa.Table.from_pylist(rows)
    metadata = {"ARROW:extension:name": b"arrow.py_extension_type", "ARROW:extension:metadata": pickled(mark)}
    fields = [f.with_metadata(metadata) if f.name == "answer" else f for f in table.schema]
    return table.cast(pa.schema(fields, metadata={"pandas": pickled(mark), "huggingface": pickled(mark)}))


def write_poisoned(path: Path, mark: Path) -> None:
    table = poisoned_table(mark)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
