"""Producer ids are never assigned twice: restarts, lost files, restored backups (behaviours I4 and I27)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.broker import RawClient, batch
from support.topics import producer_of

from oncelog import Broker
from oncelog.broker.coordinators.producer_ids import (
    FILE_NAME,
    IDS_PER_MS_BITS,
    ProducerIds,
    first_producer_id,
)
from oncelog.errors import StorageError
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire import messages as m

NOW_MS = 1_790_000_000_000
BY_CLOCK = NOW_MS << IDS_PER_MS_BITS


@pytest.mark.behaviour("I4", "I27")
@pytest.mark.parametrize(
    ("stored", "seen", "now_ms", "first"),
    [
        (0, -1, NOW_MS, BY_CLOCK),
        (5_000, 8_000, NOW_MS, BY_CLOCK),
        (BY_CLOCK + 7, -1, NOW_MS, BY_CLOCK + 7),  # the clock went back
        (0, BY_CLOCK + 7, NOW_MS, BY_CLOCK + 8),
        (0, 41, 0, 42),
        # The seen id is the largest possible: a client chose it, so it is ignored.
        (0, 2**63 - 1, NOW_MS, BY_CLOCK),
        (0, -1, 2**60, 0),  # the clock shows an impossible time, so it is ignored
    ],
)
def test_ids_begin_above_everything_known(stored: int, seen: int, now_ms: int, first: int) -> None:
    assert first_producer_id(stored, seen, now_ms) == first


def test_ids_of_this_century_are_exact_as_doubles() -> None:
    end_of_2100_ms = 4_133_980_799_000
    assert first_producer_id(0, -1, end_of_2100_ms) < 2**53


def test_two_starts_a_millisecond_apart_share_no_id() -> None:
    """Two copies of a directory start 1 ms apart. Each assigns as many ids as fit into a millisecond."""
    ids = []
    for now_ms in (NOW_MS, NOW_MS + 1):
        taker = ProducerIds(MemoryDisk(), now_ms)
        ids += [taker.take() for _ in range(1 << IDS_PER_MS_BITS)]
    assert len(set(ids)) == len(ids)


@pytest.mark.behaviour("I27")
def test_a_lost_file_of_producer_ids_gives_no_id_twice(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        old = client.new_producer_id()
        assert client.produce("t", batch(b"old", pid=old, sequence=0)).error_code == 0
    (tmp_path / FILE_NAME).unlink()
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.new_producer_id() > old


@pytest.mark.behaviour("I27")
def test_a_restored_backup_gives_no_id_of_producers_that_came_after_it(tmp_path: Path) -> None:
    """If a new producer got the id of a live one, its records would count as duplicates."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    with Broker(data) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
    shutil.copytree(data, backup)
    with Broker(data) as broker, RawClient(broker.bootstrap_servers) as client:
        living = client.new_producer_id()
    with Broker(backup) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.produce("t", batch(b"of the living", pid=living, sequence=0)).error_code == 0
        new = client.new_producer_id()
        assert new != living
        assert client.produce("t", batch(b"of the new", pid=new, sequence=0)).error_code == 0
        assert client.values("t") == [b"of the living", b"of the new"]


@pytest.mark.behaviour("I27")
def test_an_id_near_the_end_does_not_use_up_all_others(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        for pid in (2**62 + 5, 2**63 - 1):
            assert client.produce("t", batch(b"v", pid=pid, sequence=0)).error_code == 0
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert 0 < client.new_producer_id() < 2**62


@pytest.mark.behaviour("I27")
def test_ids_of_the_transaction_log_are_not_given_again(tmp_path: Path) -> None:
    """The clock shows 1970, so the ids that are derived from it may be in use.

    The broker must also read the producer ids in the transaction log.
    """
    with Broker(tmp_path) as broker:
        with producer_of(broker.bootstrap_servers, transactional_id="x") as producer:
            producer.init_transactions()
        running = broker._running
        assert running is not None
        (entry,) = running.node.transactions.all()
        assert running.node._largest_producer_id() == entry.producer_id


@pytest.mark.behaviour("I4", "I27")
@pytest.mark.parametrize("stored", ["1e30", "Infinity", str(2**63), "-1", "true", '"7"'])
def test_a_file_with_no_possible_id_stops_the_start(tmp_path: Path, stored: str) -> None:
    (tmp_path / FILE_NAME).write_text(f'{{"version": 1, "next_producer_id": {stored}}}')
    with pytest.raises(StorageError, match="restore it from a backup"):
        Broker(tmp_path).start()


@pytest.mark.behaviour("I4")
def test_clients_keep_their_connection_when_no_producer_id_is_left(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(f'{{"version": 1, "next_producer_id": {2**63 - 1}}}')
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        request = m.InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1
        )
        assert client.ask(request, 4).error_code != 0
        assert client.ask(request, 4).error_code != 0
