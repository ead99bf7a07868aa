"""The docs site: built strictly, complete, the same text as on GitHub, and nothing fetched from elsewhere.

Needs the group ``docs`` of pyproject.toml and nothing of luffy: ``make test-docs``.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

import pytest

pytest.importorskip("mkdocs", reason="the docs site has an environment of its own: make test-docs")
pytest.importorskip("latex2mathml")
MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "site"))
import hooks  # noqa: E402

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in hooks.with_linked([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
    if path.suffix == ".md"
)
FORMULA = re.compile(r"\$\$.+?\$\$|(?<![\\$])\$(?!\s)[^$\n]+?(?<!\s)\$", re.DOTALL)
CODE = re.compile(r"^```.*?^```|`(?:[^`\n]|\n(?!\n))+`", re.MULTILINE | re.DOTALL)
HOST = "http://site/"


def build_site(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build_site(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def article(site: Path, page: str) -> str:
    """The page's own part, without the marks beside headings and without formulas."""
    text = (site / hooks.address(page)).read_text()
    text = text[text.index("<article") : text.index("</article>")]
    return re.sub(r'<a class="headerlink".*?</a>|<math.*?</math>', "", text, flags=re.DOTALL)


def as_on_github(page: str) -> str:
    """The page by the rules of CommonMark with tables, formulas taken out."""
    text = (ROOT / page).read_text()
    codes = CODE.findall(text)
    text = FORMULA.sub("", CODE.sub("\0", text))
    return MarkdownIt("commonmark").enable("table").render(re.sub("\0", lambda _: codes.pop(0), text))


def shown_text(page: str) -> str:
    return "".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def tags(page: str) -> Counter[str]:
    without_code = re.sub(r"<pre.*?</pre>", "<pre>", page, flags=re.DOTALL)
    return Counter(re.findall(r"<(h[1-6]|ul|ol|li|table|tr|td|pre|img|a|code|strong|em)\b", without_code))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_github_shows(site, page):
    ours, theirs = article(site, page), as_on_github(page)
    assert shown_text(ours) == shown_text(theirs)
    assert tags(ours) == tags(theirs)


def test_links_lead_to_files_and_anchors_of_the_site(site):
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    wrong, inside = [], 0
    for path, text in pages.items():
        here = urljoin(HOST, path.relative_to(site).as_posix())
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            address = urlparse(urljoin(here, html.unescape(link)))
            if address.netloc != "site":
                continue
            target = site / unquote(address.path).lstrip("/")
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and (not address.fragment or unquote(address.fragment) in anchors[target])
            inside += 1
            if not there and not address.fragment.startswith("__"):  # the theme's own
                wrong.append((str(path.relative_to(site)), link))
    assert wrong == [] and inside > 1000


def test_nothing_is_fetched_from_another_host(site):
    wanted = r'<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc="(https?:)?//|<link\b[^>]*\bhref="(https?:)?//'
    for page in site.rglob("*.html"):
        assert not re.search(wanted, page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style


def test_the_first_page_has_the_commands_and_the_figure(site):
    page = article(site, "docs/index.md")
    commands = re.findall(r"^make \w+", html.unescape(re.sub(r"<[^>]+>", "", page)), re.MULTILINE)
    assert commands == ["make quickstart", "make test"]
    assert 'src="images/quickstart.png"' in page and (site / "images" / "quickstart.png").is_file()


def test_formulas_are_mathml(site):
    pages = [ROOT / "docs" / "methods.md", *(ROOT / "docs" / "methods").glob("*.md")]
    for page in pages:
        text = (site / hooks.address(page.relative_to(ROOT).as_posix())).read_text()
        assert text.count("<math") == len(FORMULA.findall(CODE.sub("", page.read_text()))) > 0, page
        assert "<merror" not in text and "arithmatex" not in text


def test_search_knows_every_page_but_the_log_and_names_of_the_api(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in entries}
    searched = [page for page in PAGES if page != hooks.NOT_SEARCHED]
    assert {hooks.address(page).removesuffix("index.html") for page in searched} <= places
    assert not any(place.startswith("log/") for place in places)
    assert {"api/#load_config", "api/#trainer", "configuration/#optim"} <= places


def test_search_puts_guides_before_results_and_the_changelog(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    weights: dict[str, set[float]] = {}
    for entry in entries:
        weights.setdefault(entry["location"].partition("#")[0], set()).add(entry.get("boost", 1.0))
    assert all(len(found) == 1 for found in weights.values())
    weight = {page: found.pop() for page, found in weights.items()}
    # a title of the changelog weighs less than a word of a guide's text
    assert 1000 * weight["changelog/"] < weight["methods/"]
    assert weight["changelog/"] < weight["results/performance/"] < weight["performance/"] == weight["overview/"] == 1.0


SMALL = """
site_name: small
theme: {name: material, font: false}
plugins: []
hooks: [docs/site/hooks.py]
markdown_extensions: [toc: {permalink: true}]
"""
WRONG_LINKS = "[a](../NOTES.md) [b](../README.md#there) ![c](c.png)"


@pytest.mark.parametrize(
    ("text", "nav", "complaints"),
    [
        ("[a](../README.md#here)", "[docs/index.md, README.md]", []),
        (WRONG_LINKS, "[docs/index.md, README.md]", ["'../NOTES.md'", "'../README.md#there'", "'c.png'"]),
        ("text", "[docs/index.md]", ['not included in the "nav"']),
    ],
    ids=["right", "links", "navigation"],
)
def test_a_wrong_link_or_a_lost_page_ends_the_build(tmp_path, text, nav, complaints):
    checks = re.search(r"^validation:.*\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(f"{SMALL}{checks}nav: {nav}\n")
    (tmp_path / "docs" / "site").mkdir(parents=True)
    shutil.copy(hooks.__file__, tmp_path / "docs" / "site")
    (tmp_path / "docs" / "index.md").write_text(f"# First\n\n{text}\n")
    (tmp_path / "README.md").write_text("# Second\n\n## Here\n")
    done = build_site(tmp_path, tmp_path / "out")
    assert done.returncode == bool(complaints), done.stderr
    assert [complaint for complaint in complaints if complaint not in done.stderr] == []
