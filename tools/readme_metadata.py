"""A metadata hook of hatchling that adapts the README to a package index.

A package index does not have the files of this repository, so links to files become their names.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """The hook that sets the project's `readme`."""

    def update(self, metadata: dict[str, object]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_local_links(text)}


def without_local_links(text: str) -> str:
    """Return the Markdown with each link to a file replaced by the link's text.

    If the file's path differs from the text, the path is appended.
    """

    def replaced(link: re.Match[str]) -> str:
        words, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path = target.partition("#")[0]
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", replaced, text)
