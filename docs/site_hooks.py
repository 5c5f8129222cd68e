"""MkDocs hooks: what GitHub shows as it is, in the form that the site wants (``mkdocs.yml``).

README.md is the site's first page. A link that is right on GitHub is right in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FIRST_PAGE = "index.md"
FENCED = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")


def first_page(readme: str) -> str:
    """README.md as a page of ``docs/``."""
    return readme.replace("](docs/", "](")


def site_page(markdown: str) -> str:
    r"""A page of ``docs/`` with links to the first page, and with tables as Python-Markdown reads
    them: it takes no ``|`` in a code span for a border, and would show the backslash of ``\|``."""
    parts = FENCED.split(markdown.replace("](../README.md", f"]({FIRST_PAGE}"))
    parts[::2] = ["\n".join(map(_table_line, part.split("\n"))) for part in parts[::2]]
    return "".join(parts)


def _table_line(line: str) -> str:
    if not line.startswith("|"):
        return line
    return CODE_SPAN.sub(lambda span: span[0].replace(r"\|", "|"), line)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Called by MkDocs with the files of ``docs/``."""
    from mkdocs.structure.files import File

    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, FIRST_PAGE, content=first_page(readme)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return site_page(markdown)
