"""The broker's disk: acknowledgements that wait for a sync, a full disk, failing syncs."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from support.broker import RawClient, assert_unanswered, batch, produce_request
from support.wait import wait_until

from oncelog import errors
from oncelog.broker.topics import topics as topics_topics
from oncelog.errors import StorageError
from oncelog.server import disk
from oncelog.server.disk import RealDisk, RealFile
from oncelog.server.embedded import Broker
from oncelog.wire.messages import CreatePartitionsRequest, CreateTopicsRequest, MetadataRequest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event for which fdatasync of segment files waits. It is set at first."""
    opened, real = threading.Event(), RealFile.sync
    opened.set()

    def sync(self: RealFile) -> None:
        opened.wait(200)
        real(self)

    monkeypatch.setattr(RealFile, "sync", sync)
    return opened


def test_an_append_is_acknowledged_only_when_it_is_synced(gate: threading.Event) -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("synced", flush_messages=1)
        gate.clear()
        sent = [
            client.send(produce_request("synced", batch(b"%d" % n, pid=1, sequence=n)), 9) for n in range(3)
        ]
        with RawClient(broker.bootstrap_servers) as other:
            # Readers do not see the three records yet, but offset 3 is in range once they are in the log.
            wait_until(lambda: other.fetch("synced", 3).error_code == 0)
            assert other.offset("synced") == 0
            # A retry from another connection is a duplicate of a batch that is not durable yet, so its
            # response waits too.
            retry_id = other.send(produce_request("synced", batch(b"0", pid=1, sequence=0)), 9)
            for connection in (client, other):
                assert_unanswered(connection)
            gate.set()
            frame = other.read_frame()
            assert frame is not None and int.from_bytes(frame[:4], "big") == retry_id
        frames = [client.read_frame() for _ in sent]
        assert [int.from_bytes((f or b"")[:4], "big") for f in frames] == sent


def test_many_waiting_appends_share_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    real = RealFile.sync

    def sync(self: RealFile) -> None:
        syncs.append(1)
        real(self)

    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("group-commit", flush_messages=1)
        monkeypatch.setattr(RealFile, "sync", sync)
        sent = [client.send(produce_request("group-commit", batch(b"%d" % n)), 9) for n in range(200)]
        assert all(client.read_frame() for _ in sent)
        assert 1 <= len(syncs) < 200


def test_flush_ms_syncs_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    real = RealFile.sync

    def sync(self: RealFile) -> None:
        syncs.append(1)
        real(self)

    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("by-time", flush_ms=100)
        client.create_topic("by-nothing")
        monkeypatch.setattr(RealFile, "sync", sync)
        client.produce("by-nothing", batch(b"x"))
        assert client.produce("by-time", batch(b"x")).error_code == 0
        wait_until(lambda: len(syncs) > 0)
        assert client.values("by-time") == [b"x"]


def test_a_failing_sync_is_a_storage_error_and_the_broker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("failing", flush_messages=1)
        client.create_topic("healthy")
        assert client.produce("failing", batch(b"ok")).error_code == 0

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as broken:
            broken.setattr(disk, "_fdatasync", fail)
            lost = client.produce("failing", batch(b"lost"))
            assert (lost.error_code, lost.base_offset) == (errors.KafkaStorageError.code, -1)
        assert client.produce("failing", batch(b"later")).error_code == errors.KafkaStorageError.code
        assert client.produce("healthy", batch(b"fine")).error_code == 0


def test_a_full_disk_is_a_storage_error_and_nothing_is_corrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RealFile.pwrite

    def full(self: RealFile, data: Any, position: int) -> None:
        # A disk that becomes full in the middle of a write stores a part of the data.
        real(self, memoryview(data)[: len(data) // 2], position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_room(self: RealDisk, path: str, data: bytes, **how: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("filling")
        pid = client.new_producer_id()
        assert client.produce("filling", batch(b"0", pid=pid, sequence=0)).error_code == 0
        with monkeypatch.context() as filled:
            filled.setattr(RealFile, "pwrite", full)
            filled.setattr(RealDisk, "replace", no_room)
            refused = client.produce("filling", batch(b"1", pid=pid, sequence=1))
            assert refused.error_code == errors.KafkaStorageError.code
            assert refused.error_message and "No space left" in refused.error_message
            topic = CreateTopicsRequest.CreatableTopic(name="other", num_partitions=1, replication_factor=1)
            (failed,) = client.ask(CreateTopicsRequest(topics=[topic]), 7).topics
            assert failed.error_code == errors.KafkaStorageError.code
            assert client.values("filling") == [b"0"]
        again = client.produce("filling", batch(b"1", pid=pid, sequence=1))
        assert (again.error_code, again.base_offset) == (0, 1)
        assert client.create_topic("other").error_code == 0
        assert client.values("filling") == [b"0", b"1"]
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.values("filling") == [b"0", b"1"]


@pytest.mark.parametrize("failing", [0, 2], ids=["the first", "the last"])
def test_a_topic_that_cannot_be_created_whole_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Nothing is left behind that prevents the next attempt, before or after a restart."""
    real = RealDisk.replace

    def full(self: RealDisk, path: str, data: bytes, **how: bool) -> None:
        if path == f"half-{failing}/partition.metadata":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, path, data, **how)

    requested = CreateTopicsRequest.CreatableTopic(name="half", num_partitions=3, replication_factor=1)
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        for _ in range(2):
            with monkeypatch.context() as filled:
                filled.setattr(RealDisk, "replace", full)
                (refused,) = client.ask(CreateTopicsRequest(topics=[requested]), 7).topics
            assert refused.error_code == errors.KafkaStorageError.code
            assert "make room" in (refused.error_message or "")
        assert not list(tmp_path.glob("half-?"))
        client.create_topic("half", 3)
        assert client.produce("half", batch(b"x"), 2).error_code == 0
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.values("half", 2) == [b"x"]


def test_partitions_that_cannot_be_added_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RealDisk.mkdir

    def full(self: RealDisk, path: str) -> None:
        if path == "more-3":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, path)

    def grow(client: RawClient) -> int:
        request = CreatePartitionsRequest.CreatePartitionsTopic(name="more", count=4, assignments=None)
        return int(client.ask(CreatePartitionsRequest(topics=[request]), 3).results[0].error_code)

    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("more", 2)
        with monkeypatch.context() as filled:
            filled.setattr(RealDisk, "mkdir", full)
            assert grow(client) == errors.KafkaStorageError.code
        assert client.produce("more", batch(b"x"), 2).error_code == errors.UnknownTopicOrPartition.code
        assert grow(client) == 0
        assert client.produce("more", batch(b"x"), 3).error_code == 0


def test_a_directory_that_is_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="taken"):
        Broker(tmp_path / "taken").start()


def test_a_broker_that_does_not_run_leaves_no_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression (R540): a broker that was never started, or whose start failed, left an empty temporary
    directory.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Broker() as running:
        assert running.data_dir.parent == tmp_path and running.data_dir.stat().st_mode & 0o777 == 0o700
        Broker()
        with pytest.raises(StorageError):
            Broker(port=running.port).start()
        assert list(tmp_path.iterdir()) == [running.data_dir]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_temporary", [True, False])
def test_only_a_directory_that_stays_is_synced_by_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_temporary: bool
) -> None:
    """Regression (R1112): a stop synced a temporary directory that it then removed, which took over a
    minute.
    """
    synced: list[str] = []
    real = disk._sync

    def sync(function: Any, descriptor: int, path: str) -> None:
        synced.append(path)
        real(function, descriptor, path)

    with Broker(None if is_temporary else tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", 3)
        assert client.produce("t", batch(b"x"), 0).error_code == 0
        monkeypatch.setattr(disk, "_sync", sync)
    assert bool(synced) == (not is_temporary)
    assert broker.data_dir.exists() == (not is_temporary)


def test_an_unreadable_producer_id_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "oncelog-producer-ids.json").write_text("{")
    with pytest.raises(StorageError, match="oncelog-producer-ids"):
        Broker(tmp_path).start()
    (tmp_path / "oncelog-producer-ids.json").write_text('{"version": 1, "next_producer_id": 5000}')
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.new_producer_id() >= 5000


def test_a_topic_that_cannot_be_made_by_its_first_use_does_not_end_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: Any) -> None:
        raise StorageError("no room")

    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name="new")], allow_auto_topic_creation=True
    )
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        with monkeypatch.context() as patch:
            patch.setattr(topics_topics, "write_state", no_room)
            assert client.ask(request, 9).topics[0].error_code == errors.KafkaStorageError.code
        assert client.ask(request, 9).topics[0].error_code == 0


def test_appends_without_a_thread_for_their_flush_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may limit the number of threads (pids.max). Appends must not wait for good, and later ones
    must be flushed.
    """
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("oncelog-flush"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", flush_messages=1)
        pid = client.new_producer_id()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            answer = client.produce("t", batch(b"v", pid=pid, sequence=0))
            assert answer.error_code == errors.KafkaStorageError.code
        assert client.produce("t", batch(b"v", pid=pid, sequence=0)).error_code == 0
        assert client.values("t") == [b"v"]
