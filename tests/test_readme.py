"""The README's commands and code, run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_spark_python import spark_python

from oncelog.testing.process import free_ports

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMAND = ".venv/bin/oncelog"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_example_runs() -> None:
    example = code_blocks("python")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "payments 0 0" in done.stdout
    assert "[b'42.00']" in done.stdout


@pytest.fixture
def served(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a shell in which the README's broker runs."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    serve = [
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "serve",
        "--data-dir",
        str(tmp_path),
        "--listen",
        address,
    ]
    broker = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert broker.stdout is not None
    assert broker.stdout.readline() == f"listening on {address}\n"
    yield {**os.environ, "ONCELOG_BOOTSTRAP_SERVER": address, "HOME_OF_TEST": str(tmp_path)}
    broker.send_signal(signal.SIGTERM)
    assert broker.wait(timeout=200) == 0
    broker.stdout.close()


def python_scripts() -> list[str]:
    """The examples in their order, without the test for pytest. Each may use names of those before it."""
    return [block for block in code_blocks("python") if "def test_" not in block]


def run_python(script: str, served: dict[str, str], **environment: str) -> str:
    # What stands for "a cluster" in the text is the test's; the checkpoint is in the test's directory.
    script = script.replace("127.0.0.1:9092", served["ONCELOG_BOOTSTRAP_SERVER"])
    script = script.replace("/tmp/enriched-checkpoint", str(Path(served["HOME_OF_TEST"]) / "checkpoint"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        env={**served, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_is_run_by_a_test() -> None:
    assert set(re.findall(r"^```(\w+)$", README, re.MULTILINE)) == {"python", "console"}
    assert len(code_blocks("python")) == len(python_scripts()) + 1
    lines = [line for block in code_blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    targets = (Path(__file__).parents[1] / "Makefile").read_text()
    makes = [line.split()[2] for line in lines if line.startswith("$ make ")]
    assert makes and all(f"\n{target}:" in targets for target in makes)
    assert all(line.startswith(("$ make ", "$ kill %1")) or COMMAND in line for line in lines)


def test_python_examples_run_one_after_the_other(served: dict[str, str]) -> None:
    scripts = [script for script in python_scripts() if "spark" not in script]
    assert len(scripts) >= 3
    assert "[('paid', 0, b'42.00')]" in run_python("\n".join(scripts), served)


@pytest.mark.spark
@pytest.mark.full("a Spark driver in a process of its own")
def test_spark_examples_run_after_them(served: dict[str, str]) -> None:
    printed = run_python(
        "\n".join(python_scripts()), served, PYSPARK_PYTHON=spark_python(), SPARK_LOCAL_IP="127.0.0.1"
    )
    assert re.search(r"paid\|\s*0\|\s*42\.00", printed)
    command = [sys.executable, "-m", "oncelog.cli.main", "consume", "enriched", "--from-beginning", "-n", "1"]
    read = subprocess.run(command, capture_output=True, text=True, timeout=240, env=served)
    assert read.stdout == "42.00 EUR\n"


def test_the_example_of_a_test_passes(tmp_path: Path) -> None:
    (example,) = [block for block in code_blocks("python") if "def test_" in block]
    (tmp_path / "test_example.py").write_text(example)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-c",
        "/dev/null",
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_five_minutes_run_from_top_to_bottom(served: dict[str, str]) -> None:
    (console,) = [block for block in code_blocks("console") if "topics create" in block]
    lines = [line[2:] for line in console.splitlines() if line.startswith("$ ") and COMMAND in line]
    commands = [line for line in lines if " serve " not in line]
    assert len(commands) >= 5
    printed = ""
    for line in commands:
        shell = line.replace(COMMAND, f"{sys.executable} -m oncelog.cli.main")
        done = subprocess.run(shell, shell=True, env=served, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed += done.stdout
    for expected in ("hello", "world", "PRODUCER ID", "It ended as told."):
        assert expected in printed


def test_no_link_is_dead_on_the_page_of_a_package_index(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    build = "import sys, hatchling.build as b; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=root, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        headers, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    assert text.startswith("# Oncelog") and "`docs/spark.md`" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
