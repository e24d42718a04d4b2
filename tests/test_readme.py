"""The README's code and commands run exactly as printed, and their output equals what it shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents import DocumentRun, blocks_of, commands_of
from support.spark.worker_python import spark_python

from oncelog.testing.process import free_ports

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SPARK = "pyspark"


def commands() -> list[str]:
    """Return the commands of the README's `console` blocks."""
    blocks = [block for block in blocks_of(README.read_text()) if block.language == "console"]
    return [command.text for block in blocks for command in commands_of(block.code)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Start a broker with the README's own command, and yield its address."""
    (serve,) = [text for text in commands() if text.startswith("oncelog serve")]
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    words = serve.removesuffix("&").replace("127.0.0.1:9092", address).split()[1:]
    words[words.index("--data-dir") + 1] = str(tmp_path / "data")
    broker = subprocess.Popen(
        [sys.executable, "-m", "oncelog.cli.main", *words], stdout=subprocess.PIPE, text=True
    )
    assert broker.stdout is not None
    assert broker.stdout.readline() == f"listening on {address}\n"
    yield address
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(timeout=200) == 0
    broker.stdout.close()


def test_every_block_is_run_by_a_test() -> None:
    assert {block.language for block in blocks_of(README.read_text())} == {"python", "console"}
    targets = (ROOT / "Makefile").read_text()
    makes = [text.split()[1] for text in commands() if text.startswith("make ")]
    assert makes == ["demo", "test"] and all(f"\n{target}:" in targets for target in makes)
    assert {text.split()[0] for text in commands()} == {"pip", "oncelog", "printf", "make"}


def test_the_readme_runs_from_top_to_bottom(served: str, tmp_path: Path) -> None:
    assert DocumentRun(served, tmp_path).run(README, leave_out=SPARK) >= 4


@pytest.mark.spark
@pytest.mark.full("a Spark driver in a process of its own")
def test_the_readme_runs_with_spark(served: str, tmp_path: Path) -> None:
    environment = {"PYSPARK_PYTHON": spark_python(), "SPARK_LOCAL_IP": "127.0.0.1"}
    assert DocumentRun(served, tmp_path, environment).run(README) >= 5


def test_no_link_is_dead_on_the_page_of_a_package_index(tmp_path: Path) -> None:
    build = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        headers, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    assert text.startswith("# Oncelog") and "`docs/spark.md`" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
