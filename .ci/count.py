"""Count what a maintainer has to understand, before and after a change.

Usage: python .ci/count.py [ROOT]. ROOT is a checkout (default: this one); nothing of it is imported. Prints lines and
files of the installed package, function and class sizes, imports between modules, docstrings, words of the docs, and
helpers that tests define more than once.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
CLASS_LIMIT, IMPORT_LIMIT, NAME_LIMIT = 250, 12, 80  # lines, modules of luffy, characters
PUBLIC = ("core/", "guidance/", "rewards/", "rollout/engine.py", "api.py")  # every public function has a docstring here


def trees(folder: Path) -> dict[str, ast.Module]:
    """Parsed Python files below ``folder`` by relative path."""
    found = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in found}


def own_imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of luffy that a file imports, in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in whole}
    return {name for name in found if name.split(".")[0] == "luffy"}


def nodes(files: dict[str, ast.Module], kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in files.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def package(root: Path) -> Iterator[tuple[str, object]]:
    """Sizes of the installed package."""
    files = trees(root / "luffy")
    lines = {path: len((root / "luffy" / path).read_text(encoding="utf-8").splitlines()) for path in files}
    functions = [length(node) for _, node in nodes(files, FUNCTION)]
    yield "lines of the package", sum(lines.values())
    yield "files", len(files)
    room = Counter(str(Path(path).parent) for path in files)
    yield "most files in one folder", "{1} ({0})".format(*room.most_common(1)[0])
    yield "function lines, median / p95 / max", (median(functions), quantiles(functions, n=20)[-1], max(functions))
    large = [f"{path}:{node.name}" for path, node in nodes(files, ast.ClassDef) if length(node) > CLASS_LIMIT]
    yield f"classes over {CLASS_LIMIT} lines", large
    modules = {".".join(("luffy", *Path(path).with_suffix("").parts)).removesuffix(".__init__") for path in files}
    imports = {path: len(own_imports(tree, modules)) for path, tree in files.items()}
    yield f"modules with over {IMPORT_LIMIT} imports of luffy", {p: n for p, n in imports.items() if n > IMPORT_LIMIT}
    yield "modules with over 8", sum(n > 8 for n in imports.values())
    yield from docstrings(files)


def docstrings(files: dict[str, ast.Module]) -> Iterator[tuple[str, object]]:
    texts = [
        (path, node, ast.get_docstring(node)) for path, node in nodes(files, (*FUNCTION, ast.ClassDef, ast.Module))
    ]
    first = Counter(text.split()[0] for _, _, text in texts if text)
    yield 'docstrings that start with "Of"', first["Of"]
    yield 'docstrings that start with "What"', first["What"]
    functions = [(path, node, text) for path, node, text in texts if isinstance(node, FUNCTION)]
    yield "functions with a docstring", f"{sum(bool(text) for *_, text in functions) / len(functions):.1%}"
    bare = [
        f"{path}:{node.name}"
        for path in files
        if path.startswith(PUBLIC)
        for node in files[path].body
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    yield "public functions and classes of core, guidance, rewards, engine, api without one", bare


def docs(root: Path) -> Iterator[tuple[str, object]]:
    """Words of guides (all pages except the log and the results), results pages and README."""
    folder = root / "docs"
    results = sorted((folder / "results").rglob("*.md"))
    guides = [page for page in folder.rglob("*.md") if page not in results and page.name != "log.md"]
    yield "words of the guides with README", words([*guides, root / "README.md"])
    yield "results pages over 1,500 words", {page.name: n for page in results if (n := words([page])) > 1500}
    yield "lines of README", len((root / "README.md").read_text(encoding="utf-8").splitlines())
    glossary = folder / "glossary.md"
    lines = glossary.read_text(encoding="utf-8").splitlines() if glossary.exists() else []
    yield "entries of the glossary", sum(line.startswith(("- **", "| **")) for line in lines)


def tests(root: Path) -> Iterator[tuple[str, object]]:
    """Helpers defined in several test files, and long names of tests."""
    files = trees(root / "tests")
    defined = {(node.name, path) for path in files for node in files[path].body if isinstance(node, FUNCTION)}
    helpers = Counter(name for name, _ in defined if not name.startswith("test_"))
    again = {name: n for name, n in helpers.items() if n > 1}
    yield "helpers of tests defined in several files", f"{len(again)} names in {sum(again.values())} places"
    names = {name for name, _ in defined if name.startswith("test_")}
    yield f"names of tests over {NAME_LIMIT} characters", sum(len(name) > NAME_LIMIT for name in names)
    package = trees(root / "luffy")
    mirrored = {path.replace("test_", "") for path in files if Path(path).name.startswith("test_")}
    own = [path for path in package if not path.endswith(("__init__.py", "__main__.py", "_version.py"))]
    yield "modules without a test file of their name", sum(path not in mirrored for path in own)


def main(root: Path) -> None:
    for count in (package, docs, tests):
        for name, value in count(root):
            print(f"{name:<80} {value}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
