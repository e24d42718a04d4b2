"""The clients of the matrix, and how each one's program is built. Downloads and builds stay in a cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from oncelog_devtools.apache_kafka import CACHE_ROOT, MissingDependency, fetch_jars

BUILD_LIMIT_S = 600


class ClientUnderTest(NamedTuple):
    """A client to check: one column of the matrix.

    `command` builds the client's program from its sources below a folder if needed, and returns the program's
    command line. Raises MissingDependency.
    """

    key: str
    title: str
    command: Callable[[Path], list[str]]


def _python(program: str, module: str) -> Callable[[Path], list[str]]:
    def command(programs: Path) -> list[str]:
        if importlib.util.find_spec(module) is None:
            raise MissingDependency(f"the Python package {module} is not installed")
        return [sys.executable, str(programs / "python" / f"{program}.py")]

    return command


def _java(programs: Path) -> list[str]:
    class_path = fetch_jars()
    source = programs / "java" / "MatrixClient.java"
    classes = _cached("java", source)
    if not (classes / "complete").exists():
        _build(["javac", "-cp", class_path, "-d", str(classes), str(source)], source.parent)
        (classes / "complete").touch()
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    return [
        "java",
        "-Xmx256m",
        "-XX:TieredStopAtLevel=1",
        quiet,
        "-cp",
        f"{class_path}:{classes}",
        source.stem,
    ]


def _go(program: str) -> Callable[[Path], list[str]]:
    def command(programs: Path) -> list[str]:
        sources = programs / "go"
        built = _cached("go", *sources.rglob("*.go"), sources / "go.mod", sources / "go.sum") / program
        if not built.exists():
            _build(["go", "build", "-buildvcs=false", "-o", str(built), f"./{program}"], sources)
        return [str(built)]

    return command


def _node(programs: Path) -> list[str]:
    sources = programs / "node"
    home = _cached("node", *sources.iterdir())
    if not (home / "complete").exists():
        shutil.copytree(sources, home, dirs_exist_ok=True)
        _build(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], home)
        (home / "complete").touch()
    return ["node", str(home / "client.js")]


def _cached(language: str, *sources: Path) -> Path:
    """Return the cache folder for the program that is built from these sources."""
    state = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources)))
    return CACHE_ROOT / f"client-matrix-{language}-{state.hexdigest()[:16]}"


def _build(command: list[str], folder: Path) -> None:
    """Run a command that downloads or builds a program. Raises MissingDependency if that is impossible."""
    if not shutil.which(command[0]):
        raise MissingDependency(f"{command[0]} is not installed")
    environment = {**os.environ, "GOTOOLCHAIN": "auto"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise MissingDependency(f"{' '.join(command[:2])} did not end within {BUILD_LIMIT_S} s") from None
    if done.returncode:
        raise MissingDependency(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-500:]}")


CLIENTS = (
    ClientUnderTest("oncelog", "Oncelog", _python("oncelog_blocking", "oncelog")),
    ClientUnderTest("oncelog-aio", "Oncelog asyncio", _python("oncelog_asyncio", "oncelog")),
    ClientUnderTest("librdkafka", "librdkafka", _python("confluent", "confluent_kafka")),
    ClientUnderTest("java", "Java (kafka-clients)", _java),
    ClientUnderTest("franz-go", "franz-go", _go("franz")),
    ClientUnderTest("sarama", "sarama", _go("sarama")),
    ClientUnderTest("kafka-go", "segmentio/kafka-go", _go("kafkago")),
    ClientUnderTest("aiokafka", "aiokafka", _python("aiokafka_client", "aiokafka")),
    ClientUnderTest("kafka-python", "kafka-python", _python("kafka_python", "kafka")),
    ClientUnderTest("kafkajs", "KafkaJS", _node),
)
