"""A broker has more files than its limit of open files permits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from support.broker import RawClient, batch
from support.operations import LimitedBroker, wait_for

from oncelog import errors

COUNT = 60


@pytest.mark.behaviour("I7", "I17")
def test_without_descriptors_appends_are_refused_and_later_taken(tmp_path: Path) -> None:
    """Partitions with open files keep working.

    Once connections are closed, all partitions work again without a restart.
    """
    limited = LimitedBroker(tmp_path / "data", 64, {"log.flush.interval.messages": 1})
    with limited as broker, RawClient(broker.bootstrap_servers) as client, ExitStack() as others:
        client.create_topic("many", COUNT)
        for _ in range(8):
            others.enter_context(RawClient(broker.bootstrap_servers)).new_producer_id()
        pid = client.new_producer_id()
        answers = [client.produce("many", batch(b"x", pid=pid, sequence=0), index) for index in range(COUNT)]
        codes = [answer.error_code for answer in answers]
        assert set(codes) == {0, errors.KafkaStorageError.code}
        refused = [index for index, code in enumerate(codes) if code]
        assert any("raise it (ulimit -n, LimitNOFILE=)" in str(answer.error_message) for answer in answers)
        assert client.produce("many", batch(b"y", pid=pid, sequence=1), 0).error_code == 0
        assert client.values("many", 0) == [b"x", b"y"]
        others.close()

        def is_taken() -> bool:
            return client.produce("many", batch(b"x", pid=pid, sequence=0), refused[0]).error_code == 0

        wait_for(is_taken)
        assert client.values("many", refused[0]) == [b"x"], "once, though it was tried before"
    assert limited.log_file.read_text().count('event="disk refuses"') == 1
    limited.open_files = 1024
    with limited as broker, RawClient(broker.bootstrap_servers) as client:
        for index in range(COUNT):
            assert client.produce("many", batch(b"x", pid=pid, sequence=0), index).error_code == 0
            assert client.values("many", index)[0] == b"x"
