"""Oncelog takes over a directory of Apache Kafka, and Apache Kafka can use it again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.operations import Load

from oncelog.testing.broker_process import BrokerProcess


@pytest.mark.soak
def test_the_directory_of_apache_kafka_is_taken_and_given_back(tmp_path: Path, kafka_class_path: str) -> None:
    """Oncelog has the records, transactions and topics of Apache Kafka. Afterwards, Apache Kafka has those of
    Oncelog, too.
    """
    kafka = ApacheKafka(directory=tmp_path / "kafka")
    kafka.start()
    try:
        with Load(kafka.bootstrap_servers) as load:
            load.wait_for_progress(100)
            load.stop()
        load.check()
        kafka.stop()
        data_dir = kafka.nodes[0].data_dir
        with BrokerProcess(data_dir, log_file=tmp_path / "ours.log", settings={"node.id": 1}) as ours:
            load.check(ours.bootstrap_servers)
        assert "oncelog.format.version=1" in (data_dir / "meta.properties").read_text()
        kafka.start()
        load.check()
    finally:
        kafka.stop()
