"""Hooks of mkdocs.yml that make pages written for readers of the repository work on the site, too.

- ARCHITECTURE.md, CHANGELOG.md and CONTRIBUTING.md at the root of the repository become pages of the site.
- A link to a page leads to that page, and a link to README.md to the first page.
- A link to another file of the repository leads to `repo_url`, or becomes plain text without `repo_url`.
  A link to a file that does not exist is a warning, which `mkdocs build --strict` makes an error.
- A list may follow a paragraph without an empty line, and code in a table may escape `|`, as on GitHub.
- A page that a docstring mentions becomes a link, such as docs/spark.md or behaviour I7 (docs/behaviours.md).
- Pages of docs/ and its folders that mkdocs.yml does not list are added to the navigation.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
SECTIONS = {".": "Guides", "guides": "Guides", "reference": "Reference", "internals": "Internals"}
"""Each folder of docs/, and the section of the navigation to which its pages belong."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"`[^`]*`")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_BEHAVIOUR = re.compile(r"^\*\*([A-Z]\d+)\*\*", re.MULTILINE)
_MENTION = re.compile(r"(?:\bbehaviour ([A-Z]\d+)(, | \())?\bdocs/([\w/-]+)\.md\b")
_log = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: Any) -> Any:
    """Add the pages that mkdocs.yml does not list to the navigation."""
    listed = set(_pages_of(config.nav))
    for folder, title in SECTIONS.items():
        section = next(entry[title] for entry in config.nav if title in entry)
        pages = sorted(str(path.relative_to(DOCS)) for path in (DOCS / folder).glob("*.md"))
        section += [page for page in pages if page not in listed]
    return config


def _pages_of(nav: Any) -> Iterator[str]:
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(target, list):
            yield from _pages_of(target)
        else:
            yield target


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root of the repository."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page, and insert an empty line before each list."""
    uri = page.file.src_uri
    if uri == "behaviours.md":
        markdown = _BEHAVIOUR.sub(r'<span id="\1"></span>**\1**', markdown)
    lines, is_code, previous = [], False, ""
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            if _ITEM.match(line) and previous.strip() and not _ITEM.match(previous) and previous[0] != " ":
                lines.append("")
            if line.startswith("|"):
                line = _CODE.sub(lambda match: match[0].replace("\\|", "|"), line)
            line = _LINK.sub(lambda match: _link(match, uri, config.repo_url), line)
        lines.append(line)
        previous = line
    return "\n".join(lines)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """In pages of the API reference, turn mentions of pages, such as docs/spark.md, into links."""
    folder = os.path.dirname(page.file.src_uri)
    if folder != "reference/api":
        return html

    def link(match: re.Match[str]) -> str:
        behaviour, between, name = match.groups()
        if not (DOCS / f"{name}.md").exists():
            _log.warning("%s: a docstring mentions docs/%s.md, which does not exist", page.file.src_uri, name)
            return match[0]
        target = os.path.relpath(f"{name}.html", folder)
        if behaviour:
            return f'behaviour <a href="{target}#{behaviour}">{behaviour}</a>{between}docs/{name}.md'
        return f'<a href="{target}">docs/{name}.md</a>'

    return _MENTION.sub(link, html)


def _link(match: re.Match[str], uri: str, repo_url: str | None) -> str:
    """Return a link of the page `uri`, changed so that it works on the site.

    Without `repo_url`, a link to a file that is not a page becomes plain text.
    """
    is_image, text, target = match.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or ":" in path:
        return match[0]
    source = ROOT / uri if uri in ROOT_PAGES else DOCS / uri
    linked = Path(os.path.normpath(source.parent / path))
    if not linked.exists():
        _log.warning("%s: the link to %s leads nowhere", uri, target)
        return text
    name = str(linked.relative_to(ROOT)) if linked.is_relative_to(ROOT) else ""
    page = _page(name)
    if page is None:
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{name})" if repo_url else text
    relative = os.path.relpath(page, os.path.dirname(uri) or ".")
    return f"{is_image}[{text}]({relative}{hash_sign}{anchor})"


def _page(name: str) -> str | None:
    """Return the page of the site that shows a file of the repository, or None if no page does."""
    if name == "README.md":
        return "index.md"
    if name in ROOT_PAGES:
        return name
    is_shown = name.startswith("docs/") and (ROOT / name).is_file()
    return name.removeprefix("docs/") if is_shown else None
