"""ClusterConnection with a scripted broker on a real socket: every failure of a peer has an error type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.client import CUT, ScriptedBroker, free_port, metadata, scripted_broker
from support.wait import hang, until

from oncelog.client.connection.cluster import ClusterConnection, parse_bootstrap
from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.config import ADMIN
from oncelog.errors import (
    ConfigError,
    DisconnectedError,
    InvalidTopicException,
    MisuseError,
    PeerError,
    TimedOut,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from oncelog.types import TopicPartition
from oncelog.wire.frames import encode_response
from oncelog.wire.messages import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    ListOffsetsRequest,
    MetadataRequest,
    ProduceRequest,
    SaslAuthenticateResponse,
    SaslHandshakeResponse,
)

T0 = TopicPartition("t", 0)
QUICK = {"reconnect.backoff.ms": 1, "reconnect.backoff.max.ms": 20, "retry.backoff.ms": 5}


def cluster_at(servers: str, **settings: object) -> ClusterConnection:
    return ClusterConnection(ADMIN.parse({"bootstrap.servers": servers, **QUICK, **settings}))


Story = Callable[[ScriptedBroker, ClusterConnection], Coroutine[Any, Any, None]]


def play(story: Story, prepare: Callable[[ScriptedBroker], None] | None = None, **settings: object) -> None:
    """Run the coroutine `story` with a scripted broker that has topic t, and with a connection to it."""

    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 3}
            if prepare:
                prepare(broker)
            cluster = cluster_at(broker.bootstrap_servers, **settings)
            try:
                await story(broker, cluster)
            finally:
                await cluster.close()

    asyncio.run(run())


def ask() -> DescribeClusterRequest:
    return DescribeClusterRequest()


def answer_number(broker: ScriptedBroker) -> None:
    """Let the broker answer each DescribeCluster with the next number as controller_id."""
    count = iter(range(1000))
    broker.handlers["DescribeCluster"] = lambda header, message: DescribeClusterResponse(
        controller_id=next(count)
    )


def test_start_finds_the_cluster_and_leaders() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        await cluster.start()
        assert isinstance(cluster.metadata, ClusterMetadata)
        assert cluster.metadata.brokers[1].port == broker.port
        assert await cluster.leader(TopicPartition("t", 2)) == 1
        assert broker.connection_count == 1

    play(story)


def test_requests_leave_in_call_order_also_before_the_connection_is_open() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.refresh_metadata(())
        broker.cut_all()
        await until(lambda: broker.idle)
        futures = [cluster.submit(1, ask()) for _ in range(5)]
        await futures[0]
        futures += [cluster.submit(1, ask()) for _ in range(5)]
        answers = await asyncio.gather(*futures)
        assert [answer.controller_id for answer in answers] == list(range(10))

    play(story, answer_number)


def test_a_channel_is_a_connection_of_its_own() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        release = asyncio.Event()

        async def slow(header: Any, message: Any) -> DescribeClusterResponse:
            await release.wait()
            return DescribeClusterResponse()

        broker.handlers["DescribeCluster"] = slow
        waiting = cluster.submit(1, ask(), channel="fetch")
        await cluster.refresh_metadata(["t"])
        assert not waiting.done()
        release.set()
        await waiting
        assert broker.connection_count == 2

    play(story)


@pytest.mark.behaviour("I18")
def test_start_fails_if_no_broker_listens() -> None:
    async def run() -> None:
        port = await free_port()
        cluster = cluster_at(f"127.0.0.1:{port}", **{"oncelog.bootstrap.timeout.ms": 50})
        with pytest.raises(
            DisconnectedError, match=rf"cannot connect to 127\.0\.0\.1:{port}.*refused.*check"
        ):
            await cluster.start()
        await cluster.close()

    asyncio.run(run())


def test_start_waits_for_a_broker_that_comes_late() -> None:
    async def run() -> None:
        port = await free_port()
        cluster = cluster_at(f"127.0.0.1:{port}")
        starting = asyncio.create_task(cluster.start())
        await until(lambda: any(c._backoff.failure_count for c in cluster._connections.values()))
        async with scripted_broker(port):
            await starting
            assert cluster.metadata.brokers[1].port == port
            await cluster.close()

    asyncio.run(run())


def test_any_of_several_bootstrap_servers_is_enough() -> None:
    async def run() -> None:
        dead = await free_port()
        async with scripted_broker() as broker:
            cluster = cluster_at(f"127.0.0.1:{dead},{broker.bootstrap_servers}")
            await cluster.start()
            assert cluster.metadata.brokers[1].port == broker.port
            await cluster.close()

    asyncio.run(run())


@pytest.mark.behaviour("I18")
@pytest.mark.parametrize(
    "banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\x15\x03\x01\x00\x02\x02\x16"]
)
def test_a_port_of_another_protocol_is_a_peer_error(banner: bytes) -> None:
    async def run() -> None:
        def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(banner)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cluster = cluster_at(f"127.0.0.1:{port}", **{"oncelog.bootstrap.timeout.ms": 100})
        with pytest.raises((PeerError, DisconnectedError), match=rf"127\.0\.0\.1:{port}.*Kafka broker"):
            await cluster.start()
        await cluster.close()
        server.close()

    asyncio.run(run())


def test_a_silent_port_is_given_up_after_the_setup_timeout() -> None:
    async def run() -> None:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = {"socket.connection.setup.timeout.ms": 50, "oncelog.bootstrap.timeout.ms": 10}
        cluster = cluster_at(f"127.0.0.1:{port}", **settings)
        with pytest.raises(DisconnectedError, match=r"socket\.connection\.setup\.timeout\.ms=50"):
            await cluster.start()
        await cluster.close()
        server.close()

    asyncio.run(run())


@pytest.mark.behaviour("I18")
def test_the_broker_dies_with_requests_in_flight_and_comes_back() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["DescribeCluster"] = lambda header, message: None
        first, second = cluster.submit(1, ask()), cluster.submit(1, ask())
        await until(lambda: [name for name, _ in broker.seen].count("DescribeCluster") == 2)
        broker.cut_all()
        for future in (first, second):
            with pytest.raises(
                DisconnectedError, match=rf"{broker.port}.*2 requests had no response.*may have"
            ):
                await future
        answer_number(broker)
        assert (await cluster.request(1, ask())).controller_id == 0
        assert broker.connection_count == 2

    play(story)


def test_an_unanswered_request_times_out_and_the_connection_is_given_up() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["DescribeCluster"] = lambda header, message: None
        first = cluster.submit(1, ask(), timeout_ms=50)
        second = cluster.submit(1, ask(), timeout_ms=60_000)
        with pytest.raises(TimedOut, match=rf"{broker.port} did not respond to DescribeCluster"):
            await first
        with pytest.raises(DisconnectedError, match="may have carried out"):
            await second
        answer_number(broker)
        assert (await cluster.request(1, ask())).controller_id == 0

    play(story)


def test_waiting_for_a_connection_has_a_timeout() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["ApiVersions"] = lambda header, message: None
        broker.cut_all()
        await until(lambda: broker.idle)
        with pytest.raises(TimedOut, match=rf"no connection to 127\.0\.0\.1:{broker.port} within 50 ms"):
            await cluster.request(1, ask(), timeout_ms=50)

    play(story)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda frame: (len(frame) - 4 - 3).to_bytes(4, "big") + frame[4:-3],
        lambda frame: frame[:4] + b"\x7f\xff\xff\xff" + frame[8:],
        lambda frame: b"\xff\xff\xff\xff" + frame[4:],
        lambda frame: (len(frame) - 4 + 9).to_bytes(4, "big") + frame[4:] + bytes(9),
    ],
    ids=["truncated", "correlation id", "negative size", "trailing bytes"],
)
def test_tampered_answers_end_the_connection_typed_and_the_next_one_works(tamper: Any) -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["DescribeCluster"] = lambda header, message: tamper(
            encode_response(DescribeClusterResponse(), header.api_version, header.correlation_id)
        )
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{broker.port}"):
            await cluster.request(1, ask())
        answer_number(broker)
        assert (await cluster.request(1, ask())).controller_id == 0

    play(story)


def test_an_unsupported_api_fails_alone() -> None:
    def old(broker: ScriptedBroker) -> None:
        from support.client import api_versions

        broker.handlers["ApiVersions"] = lambda header, message: api_versions({60: (5, 6), 2: (0, 2)})

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        with pytest.raises(UnsupportedVersion, match=rf"127\.0\.0\.1:{broker.port} supports DescribeCluster"):
            await cluster.request(1, ask())
        with pytest.raises(
            UnsupportedVersion, match="in versions 0-2; this client needs one of the versions 7-"
        ):
            await cluster.request(None, ListOffsetsRequest(replica_id=-1), min_version=7)
        await cluster.refresh_metadata(["t"])

    play(story, old)


def test_produce_without_acknowledgement_does_not_wait() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["Produce"] = lambda header, message: None
        assert await cluster.request(1, ProduceRequest(acks=0, timeout_ms=1)) is None
        assert await cluster.leader(T0) == 1

    play(story)


@pytest.mark.behaviour("I18")
def test_a_topic_that_stays_unknown_is_an_error_that_says_what_to_do() -> None:
    def unknown(broker: ScriptedBroker) -> None:
        broker.handlers["Metadata"] = lambda header, message: metadata(
            broker.port, errors={topic.name: 3 for topic in message.topics}
        )

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        with pytest.raises(
            UnknownTopicOrPartition, match=rf"'t' does not exist at 127.*{broker.port}; create it"
        ):
            await cluster.leader(T0)

    play(story, unknown, **{"request.timeout.ms": 1_000})


def test_a_topic_that_appears_after_a_while_is_waited_for() -> None:
    def slow(broker: ScriptedBroker) -> None:
        answers = iter([3, 5, 5])

        def handler(header: Any, message: Any) -> Any:
            code = next(answers, 0) if message.topics else 0
            return metadata(broker.port, errors={"t": code}) if code else metadata(broker.port, {"t": 1})

        broker.handlers["Metadata"] = handler

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        assert await cluster.leader(T0) == 1

    play(story, slow)


def test_a_partition_that_the_topic_lacks_is_an_error() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        with pytest.raises(UnknownTopicOrPartition, match=r"3 partitions \(0 to 2\).*no partition 7"):
            await cluster.leader(TopicPartition("t", 7))

    play(story, **{"request.timeout.ms": 1_000})


def test_a_final_error_is_raised_at_once() -> None:
    def bad(broker: ScriptedBroker) -> None:
        broker.handlers["Metadata"] = lambda header, message: metadata(broker.port, errors={"a b": 17})

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        with pytest.raises(InvalidTopicException, match="a b"):
            await cluster.leader(TopicPartition("a b", 0))

    play(story, bad)


def test_calls_that_wait_for_a_leader_share_one_metadata_request() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        broker.topics = {}
        await cluster.start()
        broker.topics = {"t": 3}
        broker.seen.clear()
        await asyncio.gather(*(cluster.leader(TopicPartition("t", i % 3)) for i in range(30)))
        assert [name for name, _ in broker.seen] == ["Metadata"]

    play(story)


def test_metadata_is_refreshed_by_age() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        version = cluster.metadata.version
        await until(lambda: cluster.metadata.version >= version + 2)
        assert cluster.metadata.brokers

    play(story, **{"metadata.max.age.ms": 20})


def test_a_request_to_an_unknown_node_fails() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        with pytest.raises(
            DisconnectedError, match=r"broker 9 is not in the cluster's metadata \(known: 1\)"
        ):
            await cluster.request(9, ask())

    play(story)


def test_close_fails_what_is_in_flight_and_forbids_more() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        broker.handlers["DescribeCluster"] = lambda header, message: None
        future = cluster.submit(1, ask())
        await cluster.close()
        with pytest.raises(DisconnectedError, match="closed"):
            await future
        with pytest.raises(MisuseError, match="closed"):
            await cluster.request(1, ask())

    play(story)


def test_an_idle_connection_is_closed_and_opened_again() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        await until(lambda: broker.idle)
        await cluster.refresh_metadata(())
        assert broker.connection_count == 2

    play(story, **{"connections.max.idle.ms": 50})


def test_a_cut_during_metadata_tries_the_other_address() -> None:
    async def run() -> None:
        async with scripted_broker() as bad, scripted_broker() as good:
            bad.handlers["Metadata"] = lambda header, message: CUT
            cluster = cluster_at(f"{bad.bootstrap_servers},{good.bootstrap_servers}")
            await cluster.start()
            assert cluster.metadata.brokers[1].port == good.port
            await cluster.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("servers", "parsed"),
    [(["a:1", "b:65535"], [("a", 1), ("b", 65535)]), (["[::1]:9092"], [("::1", 9092)])],
)
def test_bootstrap_servers_are_parsed(servers: list[str], parsed: list[tuple[str, int]]) -> None:
    assert parse_bootstrap(servers) == parsed


@pytest.mark.parametrize("servers", [None, [], ["host"], ["host:"], [":9092"], ["h:0"], ["h:65536"], ["h:x"]])
def test_invalid_bootstrap_servers_are_refused(servers: list[str] | None) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        parse_bootstrap(servers)


def metadata_requests(broker: ScriptedBroker) -> list[tuple[list[str], bool]]:
    """Return the topics and allow_auto_topic_creation of each Metadata request so far."""
    return [
        ([topic.name for topic in message.topics], message.allow_auto_topic_creation)
        for message in broker.messages
        if isinstance(message, MetadataRequest)
    ]


async def refreshed(cluster: ClusterConnection, times: int = 2) -> None:
    """Wait until `times` more Metadata responses have arrived."""
    version = cluster.metadata.version
    await until(lambda: cluster.metadata.version >= version + times)


def test_a_refresh_by_age_creates_no_topic_and_asks_for_none_that_was_forgotten() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        broker.topics = {"t": 3, "u": 1}
        assert await cluster.leader(T0) == 1
        await cluster.refresh_metadata(["u"])
        assert metadata_requests(broker)[-2:] == [(["t"], True), (["u"], True)]
        await cluster.start()
        await refreshed(cluster)
        assert metadata_requests(broker)[-1] == (["t", "u"], False)
        cluster.forget_topics(["t"])
        await refreshed(cluster)
        assert metadata_requests(broker)[-1] == (["u"], False)

    play(story, **{"metadata.max.age.ms": 20})


def test_a_client_that_names_its_topics_keeps_metadata_of_no_others() -> None:
    async def run() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 3, "u": 1}
            settings = ADMIN.parse({"bootstrap.servers": broker.bootstrap_servers, "metadata.max.age.ms": 20})
            in_use = ["t", "u"]
            cluster = ClusterConnection(settings, topics_in_use=lambda: in_use)
            try:
                await cluster.leader(T0)
                await cluster.start()
                await refreshed(cluster)
                assert metadata_requests(broker)[-1] == (["t", "u"], False)
                broker.topics = {"u": 1}
                in_use.remove("t")
                await refreshed(cluster, 3)
                assert metadata_requests(broker)[-1] == (["u"], False)
                assert cluster.metadata.topics() == ["u"]
            finally:
                await cluster.close()

    asyncio.run(run())


def test_refreshing_by_age_survives_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        raised = []

        async def fail(*_: object, **__: object) -> None:
            raised.append(KeyError("a fault of ours"))
            raise raised[-1]

        with monkeypatch.context() as patch:
            patch.setattr(cluster, "fetch_metadata", fail)
            await until(lambda: raised)
        await refreshed(cluster)

    play(story, **{"metadata.max.age.ms": 20})


@pytest.mark.parametrize("topic", [b"t", None, 7])
def test_a_topic_that_is_no_str_is_refused_and_not_asked_for_again(topic: Any) -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        with pytest.raises(MisuseError, match="must be a str"):
            await cluster.leader(TopicPartition(topic, 0))
        with pytest.raises(MisuseError, match="expected topic names"):
            await cluster.refresh_metadata([topic])
        await refreshed(cluster)
        assert metadata_requests(broker)[-1] == ([], False)

    play(story, **{"metadata.max.age.ms": 20})


def test_refreshes_at_the_same_time_close_each_connection_once() -> None:
    class Unused:
        in_flight_count = closed_count = 0

        async def close(self) -> None:
            self.closed_count += 1
            await asyncio.sleep(0)

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        connections = [Unused() for _ in range(3)]
        cluster._connections.update({("gone", i, ""): c for i, c in enumerate(connections)})  # type: ignore[misc]
        await asyncio.gather(*(cluster.fetch_metadata(()) for _ in range(3)))
        assert [connection.closed_count for connection in connections] == [1, 1, 1]
        assert all(key[0] != "gone" for key in cluster._connections)

    play(story)


def test_a_topic_may_be_waited_for_longer_than_the_short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.client.connection.cluster.UNKNOWN_TOPIC_PATIENCE_MS", 0)

    def slow(broker: ScriptedBroker) -> None:
        answers = iter([3] * 8)

        def handler(header: Any, message: Any) -> Any:
            code = next(answers, 0) if message.topics else 0
            return metadata(broker.port, errors={"t": code}) if code else metadata(broker.port, {"t": 1})

        broker.handlers["Metadata"] = handler

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        with pytest.raises(UnknownTopicOrPartition):
            await cluster.leader(T0)
        assert await cluster.leader(T0, unknown_topic_patience_ms=60_000) == 1

    play(story, slow)


def test_requests_that_wait_for_reauthentication_survive_the_connection() -> None:
    """If the connection is lost during re-authentication, the client connects again immediately for the
    waiting requests.
    """

    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        second_login = asyncio.Event()

        def fall_silent(header: Any, message: Any) -> None:
            second_login.set()
            broker.handlers["SaslHandshake"] = shake_hands

        broker.handlers["SaslHandshake"] = fall_silent
        await second_login.wait()
        answer = cluster.submit(1, ask())
        broker.cut_all()
        assert (await asyncio.wait_for(answer, 60)).controller_id == 0
        assert broker.connection_count >= 2

    def shake_hands(header: Any, message: Any) -> SaslHandshakeResponse:
        return SaslHandshakeResponse(mechanisms=["PLAIN"])

    def prepare(broker: ScriptedBroker) -> None:
        answer_number(broker)
        broker.handlers["SaslHandshake"] = shake_hands
        broker.handlers["SaslAuthenticate"] = lambda header, message: SaslAuthenticateResponse(
            session_lifetime_ms=100
        )

    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    user = {"sasl.username": "alice", "sasl.password": "secret"}
    play(story, prepare, **login, **user, **{"request.timeout.ms": 600_000})


def test_a_request_without_a_response_is_done_when_the_socket_has_accepted_it() -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        released = asyncio.Event()

        async def read_no_further(header: Any, message: Any) -> None:
            await released.wait()

        broker.handlers["Produce"] = read_no_further
        sent = [cluster.submit(1, produce_without_answer()) for _ in range(64)]
        await sent[0]
        await asyncio.sleep(0)
        assert not sent[-1].done()
        connection = next(iter(cluster._connections.values()))
        assert connection.in_flight_count
        released.set()
        await asyncio.wait_for(asyncio.gather(*sent), 60)
        assert not connection.in_flight_count

    play(story)


@pytest.mark.parametrize("how", ["cut", "late", "closed"])
def test_a_request_without_a_response_fails_with_its_connection(how: str) -> None:
    async def story(broker: ScriptedBroker, cluster: ClusterConnection) -> None:
        await cluster.start()
        begun = asyncio.Event()

        async def never(header: Any, message: Any) -> None:
            begun.set()
            await hang()

        broker.handlers["Produce"] = never
        timeout_ms = 200 if how == "late" else 600_000
        sent = [cluster.submit(1, produce_without_answer(), timeout_ms=timeout_ms) for _ in range(64)]
        await begun.wait()
        if how == "cut":
            broker.abort_all()
        elif how == "closed":
            await cluster.close()
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(sent[-1], 60)
        await asyncio.gather(*sent, return_exceptions=True)

    play(story)


def produce_without_answer() -> ProduceRequest:
    """Return a Produce request of a megabyte with acks=0."""
    partition = ProduceRequest.PartitionProduceData(index=0, records=bytes(1 << 20))
    topic = ProduceRequest.TopicProduceData(name="t", partition_data=[partition])
    return ProduceRequest(acks=0, timeout_ms=1000, topic_data=[topic])
