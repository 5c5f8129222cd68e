"""The documentation as a site: each page has its place; it is built without warnings or network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.doc_references import BLOCK, LINK

ROOT = Path(__file__).resolve().parents[2]
FIRST_PAGE = "index.md"  # README.md


class Settings(yaml.SafeLoader):
    """``mkdocs.yml`` without the Python object that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> list[str]:
    def pages(entry: Any) -> Iterator[str]:
        for below in entry if isinstance(entry, list) else entry.values():
            if isinstance(below, str):
                yield below
            else:
                yield from pages(below)

    return list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]))


@pytest.fixture(scope="module")
def hooks() -> Any:
    specification = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site_hooks.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_page_has_one_place_in_the_navigation():
    there = sorted([FIRST_PAGE, *(path.name for path in (ROOT / "docs").glob("*.md"))])
    assert sorted(navigation()) == there, "mkdocs.yml: nav has to have each page of docs/ once"


def test_every_page_can_be_read_on_github_too():
    """Documents link to documents: what else the checkout has is not in the site."""
    outside = {}
    for page in (ROOT / "docs").glob("*.md"):
        links = LINK.findall(BLOCK.sub("", page.read_text()))
        names = {link.partition("#")[0] for link in links if "://" not in link} - {
            "",
            "../README.md",
        }
        outside[page.name] = {name for name in names if not (ROOT / "docs" / name).is_file()}
        outside[page.name] |= {name for name in names if name.endswith((".json", ".jsonl", ".py"))}
    assert {page: names for page, names in outside.items() if names} == {}


def test_what_has_not_been_run_is_on_one_page():
    """Each page that says so of itself is linked from it."""
    said = re.compile(
        r"never\s+(?:been\s+)?run\b|(?:has|have|was|were) not been run|was not run", re.I
    )
    page = (ROOT / "docs/not_run.md").read_text()
    linked = {link.partition("#")[0] for link in LINK.findall(page)}
    saying = {p.name for p in (ROOT / "docs").glob("*.md") if said.search(p.read_text())}
    assert saying - {"not_run.md"} <= linked
    assert len(saying) > 5


def test_the_first_page_is_the_readme(hooks):
    readme = "[a](docs/rewards.md#your-own) [b](https://example.org/docs/)"
    assert hooks.first_page(readme) == "[a](rewards.md#your-own) [b](https://example.org/docs/)"
    assert hooks.site_page("[r](../README.md#rewards)") == "[r](index.md#rewards)"


def test_borders_of_tables_are_github_s(hooks):
    table = "| `a\\|b` | c\\|d |\n\n`x\\|y`\n\n```\n| `a\\|b` |\n```\n"
    expected = "| `a|b` | c\\|d |\n\n`x\\|y`\n\n```\n| `a\\|b` |\n```\n"
    assert hooks.site_page(table) == expected


class Resources(HTMLParser):
    """What a page fetches, where its links lead, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(values.get("href", ""))
        elif "src" in values:
            self.fetched.append(values["src"])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[Path, Resources]:
    """The pages of the site, with proxies that refuse every connection."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {}
    for path in folder.rglob("*.html"):
        pages[path] = Resources()
        pages[path].feed(path.read_text())
    return pages


@pytest.mark.runs
def test_the_site_is_built_and_fetches_nothing(built):
    assert {path.stem for path in built} >= {page.removesuffix(".md") for page in navigation()}
    fetched = {url for page in built.values() for url in page.fetched}
    assert [url for url in fetched if re.match(r"(https?:)?//", url)] == []
    styles = [path.read_text() for path in next(iter(built)).parent.rglob("*.css")]
    assert styles and not [
        url for text in styles for url in re.findall(r"url\((https?:[^)]*)", text)
    ]


@pytest.mark.runs
def test_links_of_the_site_lead_somewhere(built):
    wrong = []
    for path, page in built.items():
        if path.name == "404.html":  # its links are of the site's root
            continue
        for link in page.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or link in ("", ".", "./"):
                continue
            target = (path.parent / name).resolve() if name else path
            known = built.get(target)
            if not target.exists() or anchor and known and anchor not in known.anchors:
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


@pytest.mark.runs
def test_a_cell_with_a_border_in_code_is_one_cell(built):
    first = next(path for path in built if path.name == "index.html")
    assert "<code>easyrl endpoints add|remove|list RUN_DIR [URL]</code>" in first.read_text()
