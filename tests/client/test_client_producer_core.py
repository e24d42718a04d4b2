"""The producer's core against the broker's own append rule, through seeded loss, delay and reordering.

It uses no socket and no clock. A seed decides the fate of each request and response, so a failing seed
replays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.client.producer.batch import ProducerBatch, split
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.options import resolve
from oncelog.client.producer.produce_messages import ProduceCall
from oncelog.client.producer.rows import row_size_bytes
from oncelog.config import PRODUCER
from oncelog.errors import (
    DisconnectedError,
    MessageTooLarge,
    NotConnectedError,
    NotEnoughReplicas,
    OutcomeUnknown,
    RequestTimedOut,
    TimedOut,
)
from oncelog.rules.idempotence.append import (
    Duplicate,
    ProducedBatch,
    ProducerEntry,
    Reject,
    Store,
    decide_append,
)
from oncelog.types import Compression, Origin, TopicPartition
from oncelog.wire import records
from oncelog.wire.batch import read_header
from oncelog.wire.messages import MetadataResponse, ProduceResponse
from oncelog.wire.records import decode_records

TP = [TopicPartition("t", 0), TopicPartition("t", 1)]
RECORDS = 120
STEP_MS = 10.0
MAX_STEPS = 20_000
PRODUCER_ID = 5


def metadata() -> ClusterMetadata:
    cluster = ClusterMetadata()
    topic = MetadataResponse.MetadataResponseTopic(
        name="t",
        partitions=[
            MetadataResponse.MetadataResponsePartition(
                partition_index=tp.partition, leader_id=1, leader_epoch=0
            )
            for tp in TP
        ],
    )
    broker = MetadataResponse.MetadataResponseBroker(node_id=1, host="h", port=1)
    cluster.update(MetadataResponse(brokers=[broker], topics=[topic], cluster_id="c", controller_id=1))
    return cluster


class FakeBroker:
    """A broker with two partitions that store what `decide_append` accepts."""

    def __init__(self) -> None:
        self.logs: dict[TopicPartition, list[bytes | None]] = {tp: [] for tp in TP}
        self.entries: dict[tuple[TopicPartition, int], ProducerEntry] = {}
        self.max_records = RECORDS
        """Maximum number of records in a batch.

        A larger batch is refused, even if it repeats one that is already stored.
        """

    def produce(self, call: ProduceCall) -> ProduceResponse:
        rows = []
        for part in call.message.topic_data[0].partition_data:
            rows.append(self._append(TopicPartition("t", part.index), bytes(part.records)))
        topic = ProduceResponse.TopicProduceResponse(name="t", partition_responses=rows)
        return ProduceResponse(responses=[topic])

    def _append(self, tp: TopicPartition, data: bytes) -> ProduceResponse.PartitionProduceResponse:
        header, log = read_header(data), self.logs[tp]
        answer = ProduceResponse.PartitionProduceResponse(index=tp.partition, base_offset=len(log))
        if header.last_offset_delta >= self.max_records:
            answer.error_code, answer.base_offset = MessageTooLarge.code, -1
            return answer
        if header.producer_id is not None:
            batch = ProducedBatch(
                header.producer_id,
                header.producer_epoch or 0,
                header.base_sequence,
                header.last_offset_delta,
                header.max_timestamp_ms,
                False,
            )
            key = (tp, header.producer_id)
            match decide_append(self.entries.get(key), batch, Origin.CLIENT, base_offset=len(log), now_ms=0):
                case Store(entry=entry):
                    self.entries[key] = entry
                case Duplicate(base_offset=base_offset):
                    answer.base_offset = base_offset
                    return answer
                case Reject(error=error):
                    answer.error_code, answer.base_offset = error.code, -1
                    return answer
        log += [record.value for record in decode_records(data)]
        return answer


class SimulatedCluster:
    """One run of a core and a broker, over a network whose faults a seed decides."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.random = random.Random(seed)
        config = {
            "bootstrap.servers": "h:1",
            "batch.size": 400,
            "linger.ms": 5,
            "request.timeout.ms": 1_000,
            "delivery.timeout.ms": 100_000,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 80,
            **settings,
        }
        self.core = ProducerCore(resolve(PRODUCER.parse(config)), metadata(), self.random)
        self.core.set_partition_count("t", len(TP), 0.0)
        self.broker = FakeBroker()
        self.now_ms = 0.0
        self.outcomes: list[tuple[TopicPartition, bytes, object, int]] = []
        self.events: list[tuple[float, int, object]] = []
        self.numbers: dict[ProducerBatch, object] = {}
        self.trouble = True
        self.limits: tuple[int, ...] = ()
        self.serial = 0

    def send(self, number: int) -> None:
        tp, value = TP[number % 2], b"%06d" % number
        row = (1_700_000_000_000, None, value, ())
        outcome, index, _ = self.core.append(
            tp.topic, tp.partition, row, row_size_bytes(*row[1:]), self.now_ms
        )
        self.outcomes.append((tp, value, outcome, index))

    def later(self, delay_ms: float, action: object) -> None:
        self.serial += 1
        self.events.append((self.now_ms + delay_ms, self.serial, action))

    def step(self) -> None:
        self.now_ms += STEP_MS
        if self.core.is_identity_needed and self.core.identity is None:
            self.core.set_identity(PRODUCER_ID, 0)
        due = sorted(event for event in self.events if event[0] <= self.now_ms)
        self.events = [event for event in self.events if event[0] > self.now_ms]
        for _, _, action in due:
            action()  # type: ignore[operator]
        for call in self.core.drain(self.now_ms):
            self._check_numbers(call)
            self._carry(call)

    def _check_numbers(self, call: ProduceCall) -> None:
        """Check that no batch changes its sequence while it may be stored (behaviour I10).

        Also check that at most five batches of a partition are in flight.
        """
        for batch in call.batches:
            numbers = (batch.identity, batch.base_sequence)
            if batch.may_be_stored:
                # A child batch has no sequence until it is first sent.
                assert self.numbers.get(batch, numbers) == numbers
            self.numbers[batch] = numbers
        for part in self.core._partitions.values():
            assert len(part.sequences.unacknowledged) <= 5 or self.limits

    def _carry(self, call: ProduceCall) -> None:
        """Deliver, delay, refuse or lose one request or its response, as the seed decides."""
        roll = self.random.random() if self.trouble else 1.0
        delay = self.random.choice((1, 15, 40)) if self.trouble else 1
        if self.limits:
            self.broker.max_records = self.random.choice(self.limits) if self.trouble else RECORDS
        if roll < 0.06:  # the request is lost
            self.later(200, lambda: self._fail(call, DisconnectedError("cut")))
        elif roll < 0.12:  # the response is lost
            self.later(delay, lambda: self.broker.produce(call))
            self.later(200, lambda: self._fail(call, DisconnectedError("cut")))
        elif roll < 0.16:  # the request arrives after the client gave it up
            copy = ProduceCall(call.node_id, _frozen(call), call.batches, True)
            self.later(300, lambda: self.broker.produce(copy))
            self.later(100, lambda: self._fail(call, TimedOut("late")))
        elif roll < 0.20:
            self.later(1, lambda: self._fail(call, NotConnectedError("refused")))
        elif roll < 0.25:  # the response is an error, and the batch is not stored; in the next branch it is
            self.later(delay, lambda: self._answer_error(call, NotEnoughReplicas.code, False))
        elif roll < 0.30:
            self.later(delay, lambda: self._answer_error(call, RequestTimedOut.code, True))
        else:
            self.later(delay, lambda: self._answer(call, self.broker.produce(call)))

    def _fail(self, call: ProduceCall, error: Exception) -> None:
        self.core.on_failure(call, error, self.now_ms)  # type: ignore[arg-type]

    def _answer(self, call: ProduceCall, response: ProduceResponse) -> None:
        if call.expects_response:
            self.core.on_response(call, response, self.now_ms)
        else:
            self.core.on_sent(call, self.now_ms)

    def _answer_error(self, call: ProduceCall, code: int, is_stored: bool) -> None:
        stored = self.broker.produce(call) if is_stored else None
        rows = [
            ProduceResponse.PartitionProduceResponse(
                index=batch.tp.partition, error_code=code, base_offset=-1
            )
            for batch in call.batches
        ]
        if stored is not None:  # a refused batch keeps its own error
            for row, real in zip(rows, stored.responses[0].partition_responses, strict=True):
                if real.error_code:
                    row.error_code = real.error_code
        topic = ProduceResponse.TopicProduceResponse(name="t", partition_responses=rows)
        self._answer(call, ProduceResponse(responses=[topic]))

    def run(self) -> None:
        for number in range(RECORDS):
            self.send(number)
            if self.random.random() < 0.3:
                self.step()
        self.core.flush()
        for count in range(MAX_STEPS):
            if self.core.is_idle and not self.events:
                return
            self.trouble = count < 500
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps")

    def results(self) -> Iterator[tuple[TopicPartition, bytes, Exception | None]]:
        for tp, value, outcome, index in self.outcomes:
            assert outcome.is_done  # type: ignore[attr-defined]
            yield tp, value, outcome.error_of(index)  # type: ignore[attr-defined]


def _frozen(call: ProduceCall) -> object:
    """Return a copy of the request as it was sent: its batches may get new sequences later."""
    return type(call.message).decode(9, call.message.encode(9))


def check_patient_producer(seed: int) -> None:
    """Check that no record is stored twice, that acknowledged records are stored in order, and that results
    are true.
    """
    cluster = SimulatedCluster(seed)
    cluster.run()
    for tp in TP:
        log = cluster.broker.logs[tp]
        assert len(log) == len(set(log)), f"seed {seed}: doubled"
        delivered = [
            value for result_tp, value, error in cluster.results() if result_tp == tp and error is None
        ]
        assert [value for value in log if value in set(delivered)] == delivered, f"seed {seed}: order"
    check_words(cluster, seed)


def check_producer_of_too_large_batches(seed: int, *limits: int) -> int:
    """Run while max.message.bytes changes between the values `limits`. Return the number of failed
    records.
    """
    cluster = SimulatedCluster(seed)
    cluster.limits = limits
    cluster.run()
    check_words(cluster, seed)
    return sum(error is not None for _, _, error in cluster.results())


def check_hasty_producer(seed: int) -> tuple[int, int]:
    """Run with a delivery.timeout.ms shorter than the faults. Return the number of failed records and of
    raised epochs.
    """
    cluster = SimulatedCluster(
        seed, **{"delivery.timeout.ms": 250, "request.timeout.ms": 200, "linger.ms": 5}
    )
    cluster.run()
    failed = sum(error is not None for _, _, error in cluster.results())
    check_words(cluster, seed)
    return failed, cluster.core.metrics.epoch_bumps


def check_words(cluster: SimulatedCluster, seed: int) -> None:
    """Compare the reported results with the log.

    No record is stored twice; a reported success is stored, and a definite error is not.
    """
    for tp, value, error in cluster.results():
        count = cluster.broker.logs[tp].count(value)
        assert count <= 1, f"seed {seed}: doubled"
        if error is None:
            assert count == 1, f"seed {seed}: lost"
        elif not isinstance(error, OutcomeUnknown):
            assert count == 0, f"seed {seed}: stored though told it is not"


@pytest.mark.behaviour("I1", "I9", "I10", "I11")
@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_every_record_is_stored_once_and_in_order_whatever_the_network_does(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        check_patient_producer(seed)


@pytest.mark.behaviour("I22")
def test_record_retry_total_counts_each_record_of_each_batch_that_is_sent_again() -> None:
    for seed in range(50):
        cluster = SimulatedCluster(seed)
        cluster.run()
        metrics = cluster.core.metrics
        assert metrics.sent - metrics.retries == RECORDS, f"seed {seed}"


@pytest.mark.behaviour("I11", "I12")
def test_a_batch_that_is_too_large_after_a_lost_attempt_is_split_and_nothing_is_doubled() -> None:
    """Regression: the producer dropped the batch with an unknown outcome, because it may have been stored
    before it was split.
    """
    assert sum(check_producer_of_too_large_batches(seed, 1 + seed % 8) for seed in range(100)) == 0
    for seed in range(100):
        check_producer_of_too_large_batches(seed, 1, 3, 8, RECORDS)


@pytest.mark.parametrize("sizes", [(9_000, 10), (10, 9_000)])
def test_a_batch_that_was_split_gives_all_of_its_memory_back(sizes: tuple[int, ...]) -> None:
    """R1500: a half that was never sent gave back its own size, but had taken half of the batch's size."""
    options = resolve(PRODUCER.parse({"delivery.timeout.ms": 60_000}))
    core = ProducerCore(options, metadata(), random.Random(0))
    core.set_identity(PRODUCER_ID, 0)
    core.set_partition_count("t", 2, 0.0)
    for size in sizes:
        value = bytes(size)
        core.append("t", 0, (0, None, value, ()), row_size_bytes(None, value, ()), 0.0, None)
    held_bytes = core.buffered_bytes
    (call,) = core.drain(10.0)
    refused = ProduceResponse.PartitionProduceResponse(index=0, error_code=MessageTooLarge.code)
    topic = ProduceResponse.TopicProduceResponse(name="t", partition_responses=[refused])
    core.on_response(call, ProduceResponse(responses=[topic]), 20.0)
    assert core.buffered_bytes == held_bytes
    assert len(core.drain(30.0)) == 1  # the first half; the second one waits for its response
    core.drain(60_000.0)
    assert core.is_idle and core.buffered_bytes == 0


def test_a_batch_of_more_records_than_a_reader_takes_at_once_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 20)
    batch = ProducerBatch(TP[0], 0.0, 1)
    for number in range(50):
        batch.buffer.append((0, None, b"%d" % number, ()), 23, None)
    batch.seal()
    batch.encode(Compression.NONE, None)
    children = split(batch)
    values = [row.value for child in children for row in child.decoded_rows()]
    assert values == [b"%d" % number for number in range(50)]


def test_children_of_a_batch_that_was_too_large_have_all_their_retries() -> None:
    cluster = SimulatedCluster(0, retries=1, **{"batch.size": 4_000})
    cluster.limits, cluster.broker.max_records = (1,), 1
    failures = [NotConnectedError("refused")]

    def carry(call: ProduceCall) -> None:
        if len(call.batches[0].result.times) == 1 and failures:  # type: ignore[arg-type]
            error = failures.pop()
            cluster.later(1, lambda: cluster._fail(call, error))
        else:
            cluster.later(1, lambda: cluster._answer(call, cluster.broker.produce(call)))

    with patch.object(cluster, "_carry", carry):
        cluster.run()
    assert not failures and not [error for *_, error in cluster.results() if error]


@pytest.mark.behaviour("I1", "I9", "I10", "I11")
def test_with_a_short_delivery_timeout_nothing_is_doubled_and_every_error_is_true() -> None:
    runs = [check_hasty_producer(seed) for seed in range(150)]
    assert sum(failed for failed, _ in runs) > 0
    assert sum(bumped for _, bumped in runs) > 0


@pytest.mark.soak
@pytest.mark.parametrize("first_seed", range(1_000, 21_000, 1_000))
def test_twenty_thousand_more_networks_lose_and_double_nothing(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 1_000):
        check_patient_producer(seed)
        check_hasty_producer(seed)


@pytest.mark.behaviour("I1", "I25")
def test_with_idempotence_off_the_same_networks_double_records() -> None:
    doubled = 0
    for seed in range(50):
        cluster = SimulatedCluster(seed, **{"enable.idempotence": "false"})
        cluster.run()
        for log in cluster.broker.logs.values():
            doubled += len(log) - len(set(log))
        for tp, value, error in cluster.results():
            assert error is not None or value in cluster.broker.logs[tp]
    assert doubled > 0


@pytest.mark.parametrize("partitioner", ["default", "round_robin", "consistent_random"])
@pytest.mark.parametrize("batch_size", [0, 300, 16_384])
def test_the_fast_path_of_send_leaves_the_same_batches_as_append(partitioner: str, batch_size: int) -> None:
    """For speed, `append_to_open_batch` repeats the steps of `append` inline. Its batches must be equal."""

    def batches_of(core: ProducerCore, *, has_fast_path: bool) -> list[object]:
        core.set_identity(PRODUCER_ID, 0)
        core.set_partition_count("t", 2, 0.0)
        draw = random.Random(1)
        for number in range(200):
            key, partition = draw.choice([None, b"", b"a", b"b"]), draw.choice([None, None, 0, 1])
            row = (number, key, b"v" * draw.randrange(120), ())
            callback = print if number % 3 == 0 else None
            size_bytes = row_size_bytes(*row[1:])
            if (
                not has_fast_path
                or core.append_to_open_batch("t", partition, row, size_bytes, callback) is None
            ):
                core.append("t", partition, row, size_bytes, 0.0, callback)
        return [
            core.buffered_bytes,
            *(
                (tp, batch.decoded_rows(), batch.size_bytes, batch.result.callbacks)
                for tp, queue in core._partitions.items()
                for batch in queue.batches()
            ),
        ]

    options = resolve(PRODUCER.parse({"partitioner": partitioner, "batch.size": batch_size}))
    plain, fast = (ProducerCore(options, metadata(), random.Random(0)) for _ in range(2))
    assert batches_of(fast, has_fast_path=True) == batches_of(plain, has_fast_path=False)


def test_a_batch_that_waits_for_a_leader_is_not_due_by_itself() -> None:
    """If the batch were due, the producer's loop would run without a pause until there is a leader."""
    core = ProducerCore(resolve(PRODUCER.parse({"linger.ms": 5})), ClusterMetadata(), random.Random(0))
    core.set_identity(PRODUCER_ID, 0)
    core.set_partition_count("t", 2, 0.0)
    core.append("t", 0, (0, None, b"v", ()), row_size_bytes(None, b"v", ()), 100.0, None)
    assert core.next_wakeup_ms() == 105.0
    assert core.drain(105.0) == [] and core.stale_leaders == {TP[0]}
    assert core.next_wakeup_ms() == 100.0 + core.options.delivery_timeout_ms


def test_a_topic_that_was_forgotten_continues_its_sequences() -> None:
    """If the sequences began at 0 again, the broker would refuse the topic's first batch or take it for a
    duplicate.
    """
    cluster = SimulatedCluster(0)
    cluster.trouble = False
    for number in range(10):
        cluster.send(number)
    for _ in range(20):
        cluster.step()
    assert cluster.core.is_idle and cluster.core.forgotten_topics == []
    cluster.now_ms += cluster.core.options.metadata_max_idle_ms
    cluster.step()
    assert cluster.core.forgotten_topics == ["t"] and cluster.core.topic("t") is None
    assert not cluster.core._partitions
    cluster.core.set_partition_count("t", len(TP), cluster.now_ms)
    for number in range(10, 20):
        cluster.send(number)
    for _ in range(20):
        cluster.step()
    assert all(error is None for _, _, error in cluster.results())
    assert [len(log) for log in cluster.broker.logs.values()] == [10, 10]
    assert cluster.core.metrics.epoch_bumps == 0


def test_a_topic_with_records_under_way_is_not_forgotten() -> None:
    cluster = SimulatedCluster(0, **{"metadata.max.idle.ms": 5_000})
    cluster.core.set_identity(PRODUCER_ID, 0)
    cluster.send(0)
    assert len(cluster.core.drain(10.0)) == 1
    for now_ms in (6_000.0, 12_000.0, 60_000.0):
        cluster.core.drain(now_ms)
        assert cluster.core.topic("t") is not None and cluster.core.forgotten_topics == []


def test_sequences_of_too_many_forgotten_partitions_are_dropped_with_a_new_epoch() -> None:
    cluster = SimulatedCluster(0)
    cluster.trouble = False
    with patch("oncelog.client.producer.core.MAX_KEPT_SEQUENCES", 1):
        for number in range(2):
            cluster.send(number)
        for _ in range(20):
            cluster.step()
        cluster.now_ms += cluster.core.options.metadata_max_idle_ms
        cluster.step()
        cluster.step()
    assert cluster.core.metrics.epoch_bumps == 1
    cluster.core.set_partition_count("t", len(TP), cluster.now_ms)
    for number in range(2, 4):
        cluster.send(number)
    for _ in range(20):
        cluster.step()
    assert all(error is None for _, _, error in cluster.results())
    assert [len(log) for log in cluster.broker.logs.values()] == [2, 2]


def test_a_request_that_no_connection_took_counts_as_not_sent() -> None:
    cluster = SimulatedCluster(0, **{"delivery.timeout.ms": 1_100, "linger.ms": 0})
    cluster.core.set_identity(PRODUCER_ID, 0)
    cluster.send(0)
    (call,) = cluster.core.drain(1.0)
    error = DisconnectedError("broker 1 is not in the cluster's metadata")
    cluster.core.on_failure(call, error, 2.0, was_sent=False)
    cluster.core.drain(2_000.0)
    ((_, _, error),) = cluster.results()
    assert type(error) is TimedOut
