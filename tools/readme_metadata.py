"""A metadata hook of hatchling: README.md as a package index shows it.

A link to a file of this repository leads nowhere on a page of the index, so there it becomes the file's name.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """The project's `readme`."""

    def update(self, metadata: dict[str, object]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_local_links(text)}


def without_local_links(text: str) -> str:
    """Return Markdown whose links to files are their text and, where that does not say it, the path."""

    def replaced(link: re.Match[str]) -> str:
        words, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path = target.partition("#")[0]
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", replaced, text)
