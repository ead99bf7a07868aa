"""What the docs site needs beyond MkDocs: pages outside docs/, and formulas without scripts.

The site's files keep their paths from the root of the repository, so a relative link that works on GitHub works here.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s#]+)")
# Weights in the search. A match in a title weighs 1,000 times one in the text: the changelog comes after the guides.
SEARCH_WEIGHTS = {"CHANGELOG.md": 1e-5, "docs/results/": 1e-2, "studies/paper/": 1.0, "studies/": 1e-4}
NOT_SEARCHED = "docs/log.md"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def with_linked(pages: list[Path]) -> list[Path]:
    """``pages`` and every file of the repository that they link, and the linked pages link, and so on."""
    found = list(pages)
    for path in found:
        if path.suffix == ".md":
            targets = [(path.parent / target).resolve() for target in LINK.findall(path.read_text())]
            found += [t for t in dict.fromkeys(targets) if t.is_file() and t.is_relative_to(ROOT) and t not in found]
    return found


def address(path: str) -> str:
    """Where a file is on the site. ``docs/`` is its root; sources end in .txt, so that a browser shows them."""
    path = path.removeprefix("docs/")
    if path.endswith(".md"):
        folder = path.lower().removesuffix(".md").removesuffix("index").removesuffix("readme") or "overview"
        return "index.html" if path == "index.md" else f"{folder.rstrip('/')}/index.html"
    return path if path.endswith((".png", ".css", ".ipynb")) else f"{path}.txt"


def on_config(config: MkDocsConfig) -> None:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as GitHub makes them


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, docs/, and what it links; each with its path from the root of the repository."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    docs = [ROOT / "docs" / file.src_uri for file in files if file.src_dir == config.docs_dir]
    paths = [path for path in with_linked([*docs, *ROOT.glob("*.md")]) if path != Path(__file__)]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    ours = [File(name, str(ROOT), config.site_dir, True, dest_uri=address(name)) for name in names]
    return Files([*theme, *ours])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    page.meta["search"] = {"exclude": True} if path == NOT_SEARCHED else {"boost": search_weight(path)}
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return markdown


def search_weight(path: str) -> float:
    """Weight of a page in the search, by its path from the root of the repository; a guide has 1."""
    return next((weight for start, weight in SEARCH_WEIGHTS.items() if path.startswith(start)), 1.0)


def formula(match: re.Match[str]) -> str:
    """MathML, which browsers draw themselves; with the space behind a function's name that the converter leaves out."""
    display = "inline" if match[1] == "span" else "block"
    mathml = convert(html.unescape(match[2]).strip(), display=display)
    mathml = re.sub(r"<mi>(log|cos)</mi>", r'\g<0><mspace width="0.17em" />', mathml)
    return mathml if display == "inline" else f'<div class="formula">{mathml}</div>'


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    content = re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), content)  # as GitHub reads a cell
    return FORMULA.sub(formula, content)
