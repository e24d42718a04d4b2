"""Each guide's code and commands run from top to bottom and print what the guide shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_documents import DocumentRun, blocks_of

from oncelog import Broker

PAGES = sorted((Path(__file__).parents[1] / "docs" / "guides").glob("*.md"))
GUIDES = [path for path in PAGES if blocks_of(path.read_text())]


def test_guides_have_code() -> None:
    assert len(GUIDES) >= 8


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    with Broker() as broker:
        assert DocumentRun(broker.bootstrap_servers, tmp_path).run(path) > 0
