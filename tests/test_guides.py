"""The code and commands of docs/index.md and of each guide run, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documents import DocumentRun, blocks_of
from support.schema_registry import running_registry

from oncelog import Broker

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md"))]
GUIDES = [path for path in PAGES if blocks_of(path.read_text())]


def test_guides_have_code() -> None:
    assert len(GUIDES) >= 8


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    with Broker() as broker, running_registry() as registry:
        addresses = {"http://127.0.0.1:8081": registry.url}
        assert DocumentRun(broker.bootstrap_servers, tmp_path, addresses=addresses).run(path) > 0
