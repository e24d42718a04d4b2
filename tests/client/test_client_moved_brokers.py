"""Brokers come back at another address or with an invalid host name, or some partitions have no leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.client import ScriptedBroker, batch_of, metadata, scripted_broker
from support.topics import new_topic
from support.wait import attempts, rest

from oncelog import Admin, Broker, TopicPartition
from oncelog.aio import Consumer
from oncelog.client.connection.broker_connection import BrokerConnection
from oncelog.client.connection.connector import address_text
from oncelog.config import CONSUMER
from oncelog.errors import DisconnectedError, LeaderNotAvailable, NotConnectedError
from oncelog.wire.batch import stamp
from oncelog.wire.messages import (
    FetchResponse,
    FindCoordinatorResponse,
    MetadataResponse,
    OffsetCommitResponse,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def test_a_coordinator_that_restarted_elsewhere_gets_the_requests_there() -> None:
    """Regression: FindCoordinator returned the coordinator's new address, but requests went to the old one in
    the metadata.
    """

    async def run() -> None:
        async with scripted_broker() as first, scripted_broker() as before, scripted_broker() as after:
            now = before

            def answer_metadata(header: Any, message: Any) -> Any:
                answer = metadata(first.port, {"t": 1})
                broker = MetadataResponse.MetadataResponseBroker(node_id=2, host="127.0.0.1", port=now.port)
                answer.brokers.append(broker)
                return answer

            def answer_coordinator(header: Any, message: Any) -> Any:
                coordinator = FindCoordinatorResponse.Coordinator(
                    key="g", node_id=2, host="127.0.0.1", port=now.port
                )
                return FindCoordinatorResponse(coordinators=[coordinator])

            def committed(header: Any, message: Any) -> Any:
                row = OffsetCommitResponse.OffsetCommitResponsePartition(partition_index=0)
                topic = OffsetCommitResponse.OffsetCommitResponseTopic(name="t", partitions=[row])
                return OffsetCommitResponse(topics=[topic])

            first.handlers |= {"Metadata": answer_metadata, "FindCoordinator": answer_coordinator}
            after.handlers["OffsetCommit"] = before.handlers["OffsetCommit"] = committed
            config = {"bootstrap.servers": first.bootstrap_servers, "group.id": "g"}
            pauses = {"reconnect.backoff.ms": 2, "reconnect.backoff.max.ms": 2, "retry.backoff.ms": 2}
            async with Consumer(config, **pauses, request_timeout_ms=3000) as consumer:
                await consumer.commit({T0: 1})
                assert not api_count(after, "OffsetCommit")
                now = after
                before.handlers["OffsetCommit"] = lambda header, message: before.cut_all()
                await consumer.commit({T0: 2})
                assert api_count(after, "OffsetCommit") == 1

    asyncio.run(run())


def api_count(broker: ScriptedBroker, api: str) -> int:
    return sum(1 for name, _ in broker.seen if name == api)


def test_an_invalid_host_name_is_refused_at_once() -> None:
    """Regression: connecting raised UnicodeError, and the client did not try again. So requests waited until
    their time-out.
    """
    settings = {"request.timeout.ms": 600_000, "oncelog.bootstrap.timeout.ms": 0}
    with (
        Admin({"bootstrap.servers": "kafka..example:9092", **settings}) as admin,
        pytest.raises(NotConnectedError, match=r"kafka\.\.example:9092"),
    ):
        admin.list_topics()


def test_an_invalid_host_name_does_not_prevent_requests_to_other_servers() -> None:
    with Broker() as broker:
        topic = new_topic(broker.bootstrap_servers)
        servers = f"kafka..example:9092,{broker.bootstrap_servers}"
        with Admin({"bootstrap.servers": servers, "request.timeout.ms": 600_000}) as admin:
            assert topic in {listed.name for listed in admin.list_topics()}


@pytest.mark.parametrize("how", ["drops packets", "is silent", "ends connections"])
def test_an_unresponsive_address_does_not_prevent_attempts_at_others_of_its_host(how: str) -> None:
    """A host name may resolve to several machines, of which the first is unreachable, hangs, or has no
    broker.
    """

    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "is silent":
            await reader.read()
        writer.close()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection
        other = await asyncio.start_server(broken, "127.0.0.1", 0)
        other_port = other.sockets[0].getsockname()[1]

        async def addresses(host: str, port: int, **_: Any) -> list[Any]:
            return [(0, 0, 0, "", (address, port)) for address in ("192.0.2.1", "127.0.0.1")]

        async def connected(factory: Any, host: str, port: int, **options: Any) -> Any:
            if host != "127.0.0.1":
                if how == "drops packets":
                    await asyncio.Event().wait()
                port = other_port
            return await connect(factory, "127.0.0.1", port, **options)

        loop.getaddrinfo, loop.create_connection = addresses, connected  # type: ignore[method-assign]
        async with scripted_broker() as broker:
            config = {"bootstrap.servers": f"kafka.example:{broker.port}"}
            limits = {"socket.connection.setup.timeout.ms": 500, "oncelog.bootstrap.timeout.ms": 60_000}
            async with Consumer(config, **limits) as consumer:
                assert consumer._cluster is not None
                assert consumer._cluster.metadata.brokers
        other.close()

    asyncio.run(run())


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if not (ready := select(0)) and timeout:
                self.now_s += timeout
            return ready

        selector.select = jump

    def time(self) -> float:
        return self.now_s


@pytest.mark.parametrize("count", [1, 2, 10])
def test_addresses_that_drop_packets_share_the_time_of_one_attempt(count: int) -> None:
    """Regression: the time-out began again for each address.

    With ten addresses, the attempt took 1.9 times as long as its error message said.
    """
    loop = JumpingLoop()

    async def addresses(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (f"192.0.2.{number}", 9092)) for number in range(count)]

    async def unanswered(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        loop.getaddrinfo, loop.create_connection = addresses, unanswered  # type: ignore[method-assign]
        config = {"bootstrap.servers": "a:1", "socket.connection.setup.timeout.ms": 1_000}
        connection = BrokerConnection("kafka.example", 9092, CONSUMER.parse(config))
        with pytest.raises(DisconnectedError, match=r"within socket\.connection\.setup\.timeout\.ms=1000"):
            await connection._connector.connect(connection)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    assert loop.now_s == pytest.approx(1.0)


def test_a_link_local_address_keeps_its_interface() -> None:
    """A link-local address such as fe80::1 needs its scope id for a connection."""
    assert address_text(("fe80::1", 9092, 0, 2)) == "fe80::1%2"
    assert address_text(("::1", 9092, 0, 0)) == "::1"
    assert address_text(("127.0.0.1", 9092)) == "127.0.0.1"


def test_a_topic_that_may_be_created_soon_is_requested_once_at_a_time() -> None:
    """Regression: each fetch of another partition started one more search for the topic. In the end there
    were thousands of searches.
    """
    unknown = TopicPartition("u", 0)

    async def run() -> None:
        async with scripted_broker() as broker:
            fetch_count = 0

            def answer_metadata(header: Any, message: Any) -> Any:
                requested = message.topics or ()
                return metadata(
                    broker.port, {"t": 1} if requested else None, errors={"u": 3} if requested else None
                )

            async def fetched(header: Any, message: Any) -> Any:
                nonlocal fetch_count
                fetch_count += 1
                row = FetchResponse.PartitionData(
                    partition_index=0, high_watermark=0, last_stable_offset=0, records=b""
                )
                topic = FetchResponse.FetchableTopicResponse(topic="t", partitions=[row])
                return FetchResponse(responses=[topic])

            broker.handlers |= {"Metadata": answer_metadata, "Fetch": fetched}
            config = {"bootstrap.servers": broker.bootstrap_servers, "request.timeout.ms": 600_000}
            async with Consumer(config, **{"retry.backoff.ms": 20, "retry.backoff.max.ms": 20}) as consumer:
                await consumer.start()
                fetcher = consumer._fetcher
                assert fetcher is not None
                find, running, max_running, search_count = fetcher._find_leaders, 0, 0, 0

                async def counted(partitions: Any) -> None:
                    nonlocal running, max_running, search_count
                    if unknown not in partitions:
                        return await find(partitions)
                    running, search_count = running + 1, search_count + 1
                    max_running = max(max_running, running)
                    # Only the end of this search may start the next one.
                    await find(partitions)
                    running -= 1

                fetcher._find_leaders = counted  # type: ignore[method-assign]
                consumer.assign([T0, unknown])
                for tp in (T0, unknown):
                    consumer.seek(tp, 0)
                for _ in attempts():
                    if search_count >= 5 and fetch_count >= 50:
                        break
                    await consumer.poll(0.01)
                assert max_running <= 2

    asyncio.run(run())


def test_a_partition_without_a_leader_does_not_delay_the_others() -> None:
    """Regression: a partition whose leader was found was fetched only after a wait for all other partitions,
    up to request.timeout.ms.
    """

    async def run() -> None:
        async with scripted_broker() as broker:

            def half_led(header: Any, message: Any) -> Any:
                answer = metadata(broker.port, {"t": 2} if message.topics else None)
                for topic in answer.topics:
                    topic.partitions[0].error_code, topic.partitions[0].leader_id = (
                        LeaderNotAvailable.code,
                        -1,
                    )
                return answer

            async def fetched(header: Any, message: Any) -> Any:
                (requested,) = message.topics[0].partitions
                records = batch_of(b"v") if requested.fetch_offset == 0 else bytearray()
                if records:
                    stamp(records, 0, 0, 0)
                else:
                    await rest(message.max_wait_ms / 1000)
                row = FetchResponse.PartitionData(
                    partition_index=requested.partition, high_watermark=1, last_stable_offset=1,
                    records=bytes(records),
                )  # fmt: skip
                topic = FetchResponse.FetchableTopicResponse(topic="t", partitions=[row])
                return FetchResponse(responses=[topic])

            broker.handlers |= {"Metadata": half_led, "Fetch": fetched}
            settings = {"request.timeout.ms": 600_000, "retry.backoff.ms": 2, "retry.backoff.max.ms": 2}
            async with Consumer({"bootstrap.servers": broker.bootstrap_servers, **settings}) as consumer:
                consumer.assign([T0, T1])
                for tp in (T0, T1):
                    consumer.seek(tp, 0)
                (record,) = await consumer.poll(60)
                assert record.partition == 1

    asyncio.run(run())
