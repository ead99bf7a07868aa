"""Data flows one way, and imports follow it."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import luffy

ROOT = Path(luffy.__file__).parent
BASE = {
    "types", "errors", "files", "hub", "metrics", "plugins", "progress", "registry", "seeds", "web", "cli_help", "repository", "yaml_text", "_version",
}  # fmt: skip
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "files": {"errors"},
    "hub": set(),
    "cli_help": set(),
    "repository": {"errors"},
    "yaml_text": {"errors"},
    "plugins": {"errors"},
    "registry": {"errors", "plugins", "schema"},
    "_version": set(),
    "metrics": set(),
    "progress": set(),
    "seeds": set(),
    "web": {"errors"},
    "schema": {"errors"},
    "kernels": {"kernels"},
    "core": {"core", "kernels", "schema", *BASE},
    "data": {"data", *BASE, "schema"},
    "rewards": {"rewards", *BASE, "schema"},
    "guidance": {"guidance", "schema", *BASE},
    "environments": {"environments", "rewards", "data", "schema", *BASE},
    "config": {"config", "core", "environments", "guidance", "rewards", "schema", *BASE},
    "models": {"models", "core", "kernels", *BASE},
    "rollout": {"rollout", "models", "core", "kernels", *BASE},
    "conversations": {"config", "rollout", "data", "environments", "guidance", "schema", *BASE},
    "distributed": {"distributed", "rollout", "config", "models", "core", *BASE},
    "run_folder": {"run_folder", "distributed", "config", "guidance", "schema", *BASE},
    "learn": {"learn", "run_folder", "distributed", "rollout", "config", "schema", "models", "data", "core", *BASE},
    "step": {"step", "conversations", "learn", "run_folder", "distributed", "rollout", "config", "schema", "models", "guidance", "rewards", "data", "core", *BASE},
    "report": {"report", "run_folder", "config", "schema", "core", *BASE},
    "evaluation": {"evaluation", "conversations", "guidance", "report", "run_folder", "config", "rewards", "rollout", "models", "data", "core", *BASE},
    "train": {"train", "conversations", "step", "learn", "run_folder", "distributed", "rollout", "models", "guidance", "rewards", "data", "core", "config", "schema", *BASE},
    "trainer": {"train", "step", "run_folder", "report", "distributed", "models", "config", *BASE},
    "dry_run": {"dry_run", "conversations", "train", "step", "learn", "run_folder", "distributed", "rollout", "models", "guidance", "rewards", "data", "core", "config", *BASE},
    "doctor": {"doctor", "learn", "distributed", "rollout", "models", "config", *BASE},
    "view": {"view", "report", "run_folder", *BASE},
    "prepare": {"prepare", "conversations", "environments", "guidance", "config", "evaluation", "rollout", "models", "rewards", "data", *BASE},
    "integrations": {"integrations", "core", "data", "guidance", *BASE},
    "compare": {"compare", "dry_run", "models", "evaluation", "report", "step", "run_folder", "config", "schema", "data", *BASE},
    "quickstart": {"quickstart", "trainer", "run_folder", "report", "config", "schema", "data", "rewards", "evaluation", "rollout", "models", *BASE},
}  # fmt: skip


def test_the_page_on_architecture_names_every_part_below_what_it_imports():
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Layers")[2]
    base, _, layers = page.partition("`schema`")
    assert set(re.findall(r"`(\w+)`", base)) == BASE
    listed = re.findall(r"`(\w+)`", f"`schema`{layers.partition('.')[0]}")
    parts = [part for part in listed if part in MAY_IMPORT]
    assert sorted(parts) == sorted(set(MAY_IMPORT) - BASE)
    above = {part: set(parts[:i]) for i, part in enumerate(parts)}
    assert {part: MAY_IMPORT[part] - BASE - {part} - above[part] for part in parts} == {part: set() for part in parts}


@functools.cache
def import_statements():
    """Of every file its import statements, each with whether it stands in a function."""
    found = {}
    for path in ROOT.rglob("*.py"):
        found[path.relative_to(ROOT)] = list(statements_below(ast.parse(path.read_text())))
    return found


def statements_below(node, inside=False):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        elif not isinstance(child, ast.expr):
            yield from statements_below(child, inside or isinstance(child, ast.FunctionDef))


def packages(node):
    """The outermost packages that a statement imports."""
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return [name.split(".")[0] for name in names]


def parts_of(node):
    """Names of luffy's parts that a statement imports."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "luffy":
        parts = node.module.split(".")
        yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
        yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("luffy."))


def test_imports_follow_the_data_flow():
    wrong = [
        f"{path} imports luffy.{name}"
        for path, statements in import_statements().items()
        for node, _ in statements
        for name in parts_of(node)
        if (part := path.with_suffix("").parts[0]) in MAY_IMPORT and name not in MAY_IMPORT[part]
    ]
    assert wrong == []


def test_vllm_is_imported_in_two_files_and_only_when_an_engine_is_built():
    found = {}
    for path, statements in import_statements().items():
        inside = [inside for node, inside in statements if "vllm" in packages(node)]
        if inside:
            found[path.as_posix()] = all(inside)
    assert found == {"rollout/vllm/colocated.py": True, "rollout/vllm/transfer.py": True}


def test_every_part_has_its_layer():
    free = {"__init__", "__main__", "api", "cli", "generate", "push"}  # the top: may use everything
    parts = {
        p.stem if p.suffix == ".py" else p.name
        for p in ROOT.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert parts - free - set(MAY_IMPORT) == set()


def test_core_rewards_data_and_the_command_line_load_nothing_heavy():
    code = (
        "import sys, luffy.core.losses, luffy.core.logprobs, luffy.rewards.verifier, luffy.data;"
        "heavy = {'vllm', 'ray', 'wandb', 'peft', 'transformers.modeling_utils'} & set(sys.modules);"
        "import luffy.cli; print(sorted(heavy), 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "[] False\n", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("package", "file"),
    [("ray", "distributed/ray_launch.py"), ("trl", "integrations/trl.py"), ("verl", "integrations/verl.py")],
)
def test_a_large_package_is_imported_in_one_file_alone(package, file):
    users = [
        path.as_posix()
        for path, statements in import_statements().items()
        for node, _ in statements
        if package in packages(node)
    ]
    assert set(users) == {file}


def module_imports():
    """Of every module, the modules of luffy that it imports outside of functions; for type checking alone counts too."""
    found = {".".join(("luffy", *path.with_suffix("").parts)): nodes for path, nodes in import_statements().items()}
    found = {name.removesuffix(".__init__"): nodes for name, nodes in found.items()}
    return {name: set(imported_modules(nodes, found)) - {name} for name, nodes in found.items()}


def imported_modules(statements, known):
    for node, inside in statements:
        if inside:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in whole if node.module in known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def test_only_modules_that_build_a_run_and_the_top_import_more_than_twelve():
    top = {"luffy.api", "luffy.cli"}  # what scripts and the shell use
    building = {"luffy.train.build", "luffy.train.build_engines", "luffy.step.run_state"}
    many = {name for name, found in module_imports().items() if len(found) > 12}
    assert many - top == building


def test_no_module_imports_itself_by_way_of_others():
    imports = module_imports()
    assert {"luffy.rollout.native.native_engine", "luffy.rollout.engine"} <= imports[
        "luffy.rollout.overrides.speculative"
    ]
    reached = {name: reachable(imports, name) for name in imports}
    circles = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in reached if a in reached[a]}
    assert circles == set()


def reachable(imports, start):
    found, todo = set(), [start]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo += new
    return found
