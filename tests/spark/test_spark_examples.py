"""The Spark examples run as documented, and the audit's page names every kind of finding."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.spark.topics import START_MS, create_topic, store

import oncelog
from oncelog.audit.partition import FindingKind
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store_flights(bootstrap: str, topic: str) -> None:
    create_topic(bootstrap, topic, partitions=2)
    for partition, delays in enumerate([(1, 3), (8,)]):
        rows = [
            NewRecord(START_MS, b"f%d" % d, json.dumps({"carrier": "UA", "dep_delay": d}).encode())
            for d in delays
        ]
        batch = build_batch(rows, producer_id=3, producer_epoch=0, base_sequence=0)
        store(bootstrap, topic, [batch], partition)


@pytest.mark.spark
def test_examples_run(
    spark: Any, shared_broker: oncelog.Broker, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    store_flights(bootstrap, topic)
    found = load("spark_batch").delays(spark, bootstrap, topic).collect()
    assert [tuple(row) for row in found] == [("UA", 3, 4.0)]

    for _ in range(2):  # the second run has no new rows
        load("spark_stream").keep_as_parquet(spark, bootstrap, topic, str(tmp_path)).awaitTermination()
    kept = spark.read.parquet(str(tmp_path / "records"))
    assert sorted(row.key for row in kept.collect()) == ["f1", "f3", "f8"]

    assert load("spark_audit").audit(spark, bootstrap, topic).verdict == "clean"
    assert capsys.readouterr().out.splitlines()[-1] == "3 records: clean"


def test_every_kind_of_finding_is_documented() -> None:
    page = (ROOT / "docs" / "spark.md").read_text()
    assert [kind.value for kind in FindingKind if f"| `{kind.value}` |" not in page] == []
