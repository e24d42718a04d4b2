"""The Java client (kafka-clients) against our broker: producer, consumer and admin, and through faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers_foreign import INTEROP, load_past_a_kill, load_past_a_lost_acknowledgement, run

from oncelog import Broker


class Java:
    """The program's command lines; Java compiles it at each start."""

    def __init__(self, class_path: str) -> None:
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        self.base = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", quiet, "-cp", class_path]
        self.base.append(str(INTEROP / "java" / "Check.java"))

    def __call__(self, *arguments: str) -> list[str]:
        return [*self.base, *arguments]


@pytest.fixture(scope="module")
def java(kafka_class_path: str) -> Java:
    if not shutil.which("javac"):
        pytest.skip("the Java client's program is compiled as it starts, which needs a JDK, not only Java")
    return Java(kafka_class_path)


def test_producer_consumer_and_admin(java: Java) -> None:
    with Broker() as broker:
        lines = run(java(broker.bootstrap_servers, "everything"))
    codecs = [f"codec {codec}" for codec in ("none", "gzip", "snappy", "lz4", "zstd")]
    assert lines == ["topics", *codecs, "acks", "reading", "records", "cluster"]


@pytest.mark.behaviour("I1")
def test_a_lost_acknowledgement(java: Java) -> None:
    load_past_a_lost_acknowledgement(java)


@pytest.mark.behaviour("I17")
def test_the_broker_is_killed_in_the_middle(java: Java, tmp_path: Path) -> None:
    load_past_a_kill(java, tmp_path)
