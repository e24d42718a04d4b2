"""The documentation site builds without a warning: no dead link, no page outside the navigation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.full("builds the whole documentation site")


def _build(target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = _build(target)
    assert built.returncode == 0, built.stderr
    return target


def test_the_pages_at_the_root_of_the_repository_are_on_the_site(site: Path) -> None:
    for name in ("ARCHITECTURE.html", "CHANGELOG.html", "CONTRIBUTING.html"):
        assert (site / name).stat().st_size > 10_000


def test_the_api_pages_show_signatures(site: Path) -> None:
    page = (site / "reference" / "api" / "oncelog.html").read_text()
    assert 'id="oncelog.Producer.send"' in page


def test_every_link_of_the_site_leads_to_a_file_of_it(site: Path) -> None:
    dead = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="([^"#?:]+)[#?"]', page.read_text()):
            if not (page.parent / target).exists():
                dead.append(f"{page.relative_to(site)}: {target}")
    assert dead == []
