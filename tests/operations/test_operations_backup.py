"""Backups: a copy of a running broker's directory, made as docs/operations.md describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.broker import RawClient
from support.operations import Load, frozen
from support.topics import new_topic, producer_of, values

from oncelog import Broker, Consumer, TopicPartition
from oncelog.errors import InvalidProducerIdMapping, ProducerFenced, error_for_code
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.messages import EndTxnRequest, InitProducerIdRequest

SETTINGS = {
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 2,
    "log.segment.bytes": 100_000,
    "log.flush.interval.messages": 100,
    "log.flush.offset.checkpoint.interval.ms": 100,
    "log.cleaner.backoff.ms": 100,
}


def update(source: Path, target: Path) -> None:
    """Update a copy as `rsync -a --delete` does.

    Copy files whose size or time differs, and remove files that the source does not have.
    """
    for path in sorted(target.rglob("*"), reverse=True):
        there = source / path.relative_to(target)
        if not there.exists():
            path.rmdir() if path.is_dir() else path.unlink()
    # Copy in reverse order, so partitions before checkpoints and small files. The order must not matter.
    for path in sorted(source.rglob("*"), reverse=True):
        copy = target / path.relative_to(source)
        try:
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif not _is_same(path, copy):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
        except FileNotFoundError:
            pass  # the file was deleted meanwhile; rsync reports that (exit code 24) and continues


def _is_same(path: Path, copy: Path) -> bool:
    if not copy.exists():
        return False
    here, there = path.stat(), copy.stat()
    return (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)


@pytest.mark.behaviour("I17", "T6")
@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_a_copy_whose_last_pass_was_frozen_has_all_that_was_acknowledged(tmp_path: Path, rounds: int) -> None:
    """The copy contains all records that were acknowledged before the last pass, and only complete
    transactions.

    The load on the original broker continues undisturbed.
    """
    target = tmp_path / "copy"
    with (
        BrokerProcess(tmp_path / "data", settings=SETTINGS) as broker,
        Load(broker.bootstrap_servers, padding=200) as load,
    ):
        for each in range(rounds):
            load.wait_for_progress(50)
            update(broker.data_dir, target)
            load.wait_for_progress(20)
            acked = load.acknowledged()
            with frozen(broker):
                update(broker.data_dir, target)
            opened = tmp_path / f"opened-{each}"
            shutil.copytree(target, opened)
            with BrokerProcess(opened, settings=SETTINGS) as copy:
                load.check(copy.bootstrap_servers, acked)
                # A broker can run on the copy, and the load's transactional id can continue there.
                topic = new_topic(copy.bootstrap_servers)
                with producer_of(copy.bootstrap_servers, transactional_id=load.pairs) as producer:
                    producer.init_transactions()
                    with producer.transaction():
                        producer.send(topic, b"after")
                assert values(copy.bootstrap_servers, topic) == [b"after"]
            shutil.rmtree(opened)
        load.stop()
        load.check()


@pytest.mark.soak
@pytest.mark.behaviour("T7")
def test_a_copy_has_the_groups_positions(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", settings=SETTINGS) as broker:
        at = TopicPartition(new_topic(broker.bootstrap_servers), 0)
        with producer_of(broker.bootstrap_servers) as producer:
            producer.send_many(at.topic, [b"%d" % number for number in range(10)]).result(60)
        config = {"group.id": "readers", "enable.auto.commit": False}
        with Consumer({"bootstrap.servers": broker.bootstrap_servers, **config}) as consumer:
            consumer.assign([at])
            consumer.commit({at: 7})
        with frozen(broker):
            shutil.copytree(broker.data_dir, tmp_path / "copy")
    with (
        BrokerProcess(tmp_path / "copy", settings=SETTINGS) as copy,
        Consumer({"bootstrap.servers": copy.bootstrap_servers, **config}) as consumer,
    ):
        found = consumer.committed([at])[at]
        assert found is not None and found.offset == 7
        assert len(values(copy.bootstrap_servers, at.topic)) == 10


def initialized(client: RawClient) -> tuple[int, int]:
    """Start a new instance of a transactional id, retrying if necessary. Return its producer id and epoch."""
    request = InitProducerIdRequest(transactional_id="id", transaction_timeout_ms=60_000)
    while (response := client.ask(request, 4)).error_code:
        assert error_for_code(response.error_code).retriable
    return response.producer_id, response.producer_epoch


@pytest.mark.parametrize("is_open", [False, True])
def test_a_producer_from_after_a_backup_is_not_taken_for_a_new_one(tmp_path: Path, is_open: bool) -> None:
    """Without oncelog.fence.transactions, a new instance of the transactional id would get an epoch that a
    producer already got after the backup.
    """
    config: dict[str, object] = {"transaction.state.log.num.partitions": 1}
    producer = None
    with Broker(tmp_path / "data", config=config) as broker:
        servers = broker.bootstrap_servers
        with RawClient(servers) as client:
            backed_up = initialized(client)
        if is_open:
            producer = producer_of(servers, transactional_id="id")
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("t", b"open").result()
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
    if not is_open:
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with Broker(tmp_path / "data", config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        old = [initialized(client) for _ in range(3)]
    if producer is not None:
        producer.close(0.0)
    fencing = {**config, "oncelog.fence.transactions": True}
    with Broker(tmp_path / "copy", config=fencing) as broker, RawClient(broker.bootstrap_servers) as client:
        new = [initialized(client) for _ in range(5)]
        assert not {*old, backed_up} & {*new} and len({producer_id for producer_id, _ in new}) == 1
        for producer_id, epoch in (*old, backed_up):
            request = EndTxnRequest(
                transactional_id="id", producer_id=producer_id, producer_epoch=epoch, committed=True
            )
            error = error_for_code(client.ask(request, 3).error_code)
            assert isinstance(error, ProducerFenced | InvalidProducerIdMapping)
        if is_open:
            assert client.offset("t") == 2  # offset 2 is the end: one record and its abort marker come before
