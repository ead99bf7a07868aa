"""``luffy prepare model``: a model folder with a longer context and the paper's chat template.

LUFFY trains Qwen2.5-Math (context 4,096) on traces of up to 8,192 tokens, so appendix C.1 raises the rotary base from
10,000 to 40,000 and the window to 16,384. Weights are untouched: they are hard-linked where the file system allows.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import TemplateError

from luffy.cli import main
from luffy.cli_help import TrustRemoteCode
from luffy.data.prompts import PAPER_SYSTEM_PROMPT, QUESTION_LINE
from luffy.errors import UserError
from luffy.files import json_object, write_atomically
from luffy.hub import HUB_ID
from luffy.models.load import load_model_config, load_tokenizer
from luffy.types import THINK

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# For tokenizers without chat markers: the layout as appendix C.2 prints it.
PLAIN_TURNS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}"
    "{%- else %}{{- message.role | capitalize + ': ' + message.content + '\\n\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}"
)

# What the paper adds to a chat before the model's own template lays it out.
_ADD_PAPER_TURNS = (
    "{%- set paper = namespace(turns=[], asked=false) %}"
    "{%- if not messages or messages[0].role != 'system' %}"
    "{%- set paper.turns = [{'role': 'system', 'content': SYSTEM}] %}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' and not paper.asked %}"
    "{%- set paper.asked = true %}"
    "{%- if message.content is string and not message.content.startswith(LINE) %}"
    "{%- set paper.turns = paper.turns + [{'role': 'user', 'content': LINE + message.content}] %}"
    "{%- else %}{%- set paper.turns = paper.turns + [message] %}{%- endif %}"
    "{%- else %}{%- set paper.turns = paper.turns + [message] %}{%- endif %}"
    "{%- endfor %}"
    "{%- set messages = paper.turns %}"
)


def prepare_model(
    source: str,
    out: Path,
    rope_theta: float | None = 40000.0,
    max_position: int | None = 16384,
    chat_template: str | None = "paper",
    trust_remote_code: bool = False,
) -> list[str]:
    """Make ``out`` from the model folder ``source``; None leaves a thing as it is. Returns what changed, in words."""
    folder = _model_folder(source)
    _check_out(out)
    load_model_config(folder, trust_remote_code)  # an error names this folder, and nothing is written
    tokenizer = load_tokenizer(folder, trust_remote_code)
    config, changes = extended_config(_read_json(folder / "config.json"), rope_theta, max_position, folder)
    template = None if chat_template is None else _template(tokenizer, chat_template)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        building.chmod(0o755)
        _copy_files(folder, building)
        _write_json(building / "config.json", config)
        if max_position is not None:
            _raise_tokenizer_limit(building / "tokenizer_config.json", max_position)
        if template is not None:
            _write_template(building, template)
            changes.append(f"chat template: {chat_template}")
        _check_loads(building, rope_theta, max_position, trust_remote_code)
        os.rename(building, out)  # takes the place of an empty folder too
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return changes


# ---- config


def extended_config(
    config: Mapping[str, Any], rope_theta: float | None, max_position: int | None, where: Path
) -> tuple[dict[str, Any], list[str]]:
    """The config with the new rotary base and context, and a line for each change."""
    config, changes = dict(config), []
    if rope_theta is not None:
        before = _set_rope_theta(config, rope_theta, where)
        changes.append(f"rope_theta: {before} -> {rope_theta:g}")
    if max_position is not None:
        before = _set_max_position(config, max_position, where)
        changes.append(f"max_position_embeddings: {before} -> {max_position}")
        changes += _mend_window(config, max_position)
    return config, changes


def _set_rope_theta(config: dict[str, Any], theta: float, where: Path) -> Any:
    """transformers 5 keeps the base in ``rope_parameters``, older versions at the top: readers of both must agree."""
    if theta <= 1:
        raise UserError(f"--rope-theta {theta:g} is no rotary base; give a number above 1 (the paper: 40000)")
    before: Any = config.get("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, dict):
            continue
        _check_plain_rope(rope, name, where)
        before = rope.get("rope_theta", before)
        if name == "rope_parameters" or "rope_theta" in rope:
            config[name] = {**rope, "rope_theta": theta}
    if "rope_theta" in config or not isinstance(config.get("rope_parameters"), dict):
        config["rope_theta"] = theta
    return "the architecture's default" if before is None else f"{before:g}"


def _check_plain_rope(rope: Mapping[str, Any], name: str, where: Path) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.values()):
        kind = "different for each kind of layer"
    if kind != "default":
        raise UserError(
            f"{where}: its {name} is {kind!r} already, and a new base would be scaled again; "
            "give --rope-theta 0 to leave it"
        )


def _set_max_position(config: dict[str, Any], positions: int, where: Path) -> Any:
    before = config.get("max_position_embeddings")
    if isinstance(before, int) and positions < before:
        raise UserError(
            f"{where}: takes {before} positions already, more than --max-position {positions}; "
            "give --max-position 0 to leave it"
        )
    config["max_position_embeddings"] = positions
    return before


def _mend_window(config: dict[str, Any], positions: int) -> list[str]:
    """Qwen's files carry a sliding window that is switched off; some readers believe it all the same."""
    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        if isinstance(window, int):
            config["sliding_window"] = positions
        if "max_window_layers" in config and "num_hidden_layers" in config:
            config["max_window_layers"] = config["num_hidden_layers"]
        return []
    return [f"attention window of {window}: left as it is, the model was trained with it"] if window else []


def _check_loads(folder: Path, rope_theta: float | None, max_position: int | None, trust_remote_code: bool) -> None:
    """What transformers reads back is what was meant: a key it ignores would change nothing, silently."""
    read = load_model_config(folder, trust_remote_code)
    rope = getattr(read, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(read, "rope_theta", None))
    if rope_theta is not None and theta != rope_theta:
        raise UserError(f"{read.model_type}: the architecture reads rope_theta={theta}, not {rope_theta:g}")
    if max_position is not None and read.max_position_embeddings != max_position:
        raise UserError(f"{read.model_type}: the architecture reads {read.max_position_embeddings} positions")


# ---- chat template


def _template(tokenizer: Any, wanted: str) -> str:
    if wanted == "paper":
        text = paper_template(tokenizer)
    else:
        file = Path(wanted)
        if not file.is_file():
            raise UserError(f"--chat-template {wanted}: neither 'paper' nor a file")
        text = file.read_text(encoding="utf-8")
    _probe(tokenizer, text, wanted)
    return text


def paper_template(tokenizer: Any) -> str:
    """The tokenizer's own template, given the paper's system prompt and question line where the chat has none, and
    the answer opened with ``<think>`` and a newline. Renders what the prompt style ``paper`` renders."""
    own = _own_template(tokenizer)
    end = _probe(tokenizer, own, "the tokenizer's own")
    think = "" if end.endswith(f"{THINK}\n") else "\n" if end.endswith(THINK) else f"{THINK}\n"
    opening = "{%- if add_generation_prompt %}{{- " + _jinja(think) + " }}{%- endif %}" if think else ""
    turns = _ADD_PAPER_TURNS.replace("SYSTEM", _jinja(PAPER_SYSTEM_PROMPT)).replace("LINE", _jinja(QUESTION_LINE))
    return turns + own + opening


def _own_template(tokenizer: Any) -> str:
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if own:
        return str(own)
    return CHATML if "<|im_start|>" in tokenizer.get_vocab() else PLAIN_TURNS


def _jinja(text: str) -> str:
    """The text as a Jinja string literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _probe(tokenizer: Any, template: str, name: str) -> str:
    """Render a question, so that a broken template is found here and not in the first step of a run."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    try:
        rendered: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, chat_template=template
        )
    except TemplateError as error:
        raise UserError(f"chat template {name}: cannot lay out a system and a user message ({error})") from error
    return rendered


def _write_template(folder: Path, template: str) -> None:
    """One place only: a second template in the tokenizer's config would be a question of who reads which."""
    path = folder / "tokenizer_config.json"
    settings = _read_json(path)
    settings.pop("chat_template", None)
    _write_json(path, settings)
    write_atomically(folder / "chat_template.jinja", template)


def _raise_tokenizer_limit(path: Path, positions: int) -> None:
    settings = _read_json(path)
    limit = settings.get("model_max_length")
    if isinstance(limit, int | float) and limit < positions:
        _write_json(path, {**settings, "model_max_length": positions})


# ---- files


def _model_folder(source: str) -> Path:
    folder = Path(source)
    if not folder.exists() and HUB_ID.fullmatch(source):
        folder = _fetched(source)
    if not folder.is_dir():
        raise UserError(f"{source}: no such model folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"{source}: has no config.json; give a model folder in Hugging Face format")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{source}: has no *.safetensors weights; convert them first (pickles are never copied)")
    return folder


def _fetched(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=[f"*{suffix}" for suffix in PICKLES]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{source}: no such folder, and not to be had from the hub ({reason})") from error


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; give a new folder")


def _copy_files(folder: Path, target: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix not in PICKLES:
            _link_or_copy(file, target / file.name)


def _link_or_copy(file: Path, target: Path) -> None:
    """Weights are gigabytes and never edited in place: a second name is enough, where the disk can have one."""
    if file.suffix == ".safetensors":
        try:
            os.link(file.resolve(), target)  # hub snapshots are symbolic links
            return
        except OSError:  # another file system, or one without hard links
            pass
    shutil.copyfile(file, target)


def _read_json(path: Path) -> dict[str, Any]:
    return json_object(path.read_bytes(), path, "get the model again")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# ---- the command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def command(
    source: Annotated[str, typer.Argument(help="model folder in Hugging Face format, or hub id")],
    *,
    out: Annotated[Path, typer.Option(help="new folder")],
    rope_theta: Annotated[float, typer.Option(min=0, help="rotary base; 0: leave it")] = 40000.0,
    max_position: Annotated[int, typer.Option(min=0, help="context in tokens; 0: leave it")] = 16384,
    chat_template: Annotated[str, typer.Option(help="paper, a Jinja file, or keep")] = "paper",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """A copy of a model with a longer context and the paper's chat template."""
    template = None if chat_template == "keep" else chat_template
    for line in prepare_model(source, out, rope_theta or None, max_position or None, template, trust_remote_code):
        typer.echo(line)
    typer.echo(f"model     {out}")


if __name__ == "__main__":
    main(app)
