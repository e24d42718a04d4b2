"""A broker process that tests start again keeps its port, which no outgoing connection takes meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oncelog import Producer
from oncelog.testing.broker_process import BrokerProcess

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the ports of outgoing connections")
def test_a_restarted_broker_keeps_a_port_that_outgoing_connections_do_not_get(tmp_path: Path) -> None:
    first, last = map(int, RANGE.read_text().split())
    with BrokerProcess(tmp_path / "data") as broker:
        port = broker.port
        assert port not in range(first, last + 1)
        broker.kill()
        broker.start()
        assert broker.port == port
        with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
            assert producer.send("payments", b"42").result(60).offset == 0
