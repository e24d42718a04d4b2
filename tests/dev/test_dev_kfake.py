"""kfake as a process: it starts with its topic, keeps its port, and stores nothing."""

from __future__ import annotations

import os

import pytest
from oncelog_devtools.apache_kafka import MissingDependency
from oncelog_devtools.kfake import Kfake, version

from oncelog import Producer
from oncelog.errors import OncelogError


def test_kfake_runs_with_a_topic_and_forgets_its_records() -> None:
    try:
        broker = Kfake("payments")
    except MissingDependency as error:
        pytest.skip(str(error))
    config = {"bootstrap.servers": broker.bootstrap_servers}
    pids = []
    for _ in range(2):
        with broker, Producer(config) as producer:
            assert producer.send("payments", b"42.00").result(timeout=60).offset == 0
            pids.append(broker.pid)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(OncelogError, match="kfake is not running"):
        broker.pid  # noqa: B018
    assert version().startswith("v0.")
