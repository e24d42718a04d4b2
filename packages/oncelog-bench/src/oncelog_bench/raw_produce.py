"""A lightweight producer that is never the bottleneck: it builds frames once and only patches sequence
numbers.

`python -m oncelog_bench.raw_produce JSON` reads a ProduceSpec, sends, and prints a ProduceReport as JSON.
Every connection has its own producer id and keeps `depth` requests in flight.
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from oncelog.errors import OncelogError, PeerError, raise_for_code
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.header import write_crc
from oncelog.wire.messages import ProduceRequest, ProduceResponse
from oncelog.wire.records import NewRecord
from oncelog_bench.process import cpu_seconds, settle
from oncelog_bench.raw_wire import CLIENT_ID, connect, new_producer_id, quantiles, receive_frame

VERSION = 12
"""The version of Produce that the Java client uses with a broker without topic ids."""

_SIZE = struct.Struct(">i")
_PRODUCER = struct.Struct(">qh")
_PRODUCER_POSITION, _SEQUENCE_POSITION = 43, 53
_SEQUENCES = 2**31
OPENING_BATCHES = 3
"""Number of batches that a connection sends to each partition before the measured load."""
_RETRIABLE = (3, 5, 6, 51)
"""Errors to retry for a while: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER and
CONCURRENT_TRANSACTIONS.

A new topic may still be unknown or without a leader, or a previous transaction may still have markers to
write.
"""


@dataclass(frozen=True, slots=True)
class ProduceSpec:
    """The load to send. It ends after `seconds` or after `requests`, whichever comes first. 0 means that the
    load has no such limit.

    A request carries one batch for each of `batches` partitions. Successive requests rotate over all
    `partitions`. With `rate_per_s` 0 the load is as fast as `depth` allows. Otherwise one connection sends
    `rate_per_s` requests per second, one at a time.
    """

    bootstrap_servers: str
    broker_pid: int
    topic: str
    partitions: int = 1
    connections: int = 1
    depth: int = 5
    record_bytes: int = 1_024
    batch_records: int = 1
    batches: int = 1
    idempotence: bool = True
    seconds: float = 0.0
    requests: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProduceReport:
    """The cost from the first send to the last acknowledgement. All requests were acknowledged.

    `quantiles` contains `p50_ms`, `p99_ms` and `p999_ms` of the time from writing a request to its response.
    """

    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float
    requests: int
    batches: int
    records: int
    quantiles: dict[str, float] = field(default_factory=dict)


class Template:
    """A request frame with one batch per partition. `next()` patches new sequence numbers into the frame.

    With a transactional id, the batches belong to a transaction. The first batch of an epoch begins the
    transaction.
    """

    def __init__(
        self,
        spec: ProduceSpec,
        partitions: Sequence[int],
        producer: tuple[int, int] | None,
        transactional_id: str | None = None,
    ) -> None:
        now_ms = round(time.time() * 1000)
        value = bytes(range(256)) * (spec.record_bytes // 256 + 1)
        record = NewRecord(now_ms, None, value[: spec.record_bytes])
        producer_id, epoch = producer or (None, None)
        batch = build_batch(
            [record] * spec.batch_records,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0 if producer else None,
            is_transactional=transactional_id is not None,
        )
        parts = [ProduceRequest.PartitionProduceData(index=index, records=batch) for index in partitions]
        topic = ProduceRequest.TopicProduceData(name=spec.topic, partition_data=parts)
        request = ProduceRequest(
            acks=-1, timeout_ms=30_000, topic_data=[topic], transactional_id=transactional_id
        )
        self.frame = bytearray(encode_request(request, VERSION, 0, CLIENT_ID))
        self.batch_bytes = len(batch)
        self._positions = list(_positions(self.frame, batch))
        self._sequence, self._step = (0, spec.batch_records) if producer else (-1, 0)

    def next(self) -> bytearray:
        """Return the frame to send next. The next call changes the same buffer.

        Without a producer id, sequence numbers do not change. They are written nevertheless, so that the
        generator does the same work with idempotence off and on.
        """
        for position in self._positions:
            _SIZE.pack_into(self.frame, position + _SEQUENCE_POSITION, self._sequence)
            write_crc(self.frame, position, self.batch_bytes)
        if self._step:
            self._sequence = (self._sequence + self._step) % _SEQUENCES
        return self.frame

    def restart(self, producer: tuple[int, int]) -> None:
        """Continue with this producer id and epoch, from sequence 0."""
        for position in self._positions:
            _PRODUCER.pack_into(self.frame, position + _PRODUCER_POSITION, *producer)
        self._sequence = 0


def _positions(frame: bytearray, batch: bytearray) -> Iterator[int]:
    position = frame.find(batch)
    while position >= 0:
        yield position
        position = frame.find(batch, position + len(batch))


class Sender:
    """One connection. It sends templates in turn, reads responses, and checks every error code in them."""

    first_pause_s = 0.02
    """Seconds between two attempts of `send_first`."""

    def __init__(self, spec: ProduceSpec, index: int, transactional_id: str | None = None) -> None:
        self.socket = connect(spec.bootstrap_servers)
        self.producer = new_producer_id(self.socket, transactional_id) if spec.idempotence else None
        every = range(spec.partitions)
        chunks = [every[i : i + spec.batches] for i in range(0, len(every), spec.batches)]
        self.templates = [Template(spec, chunk, self.producer, transactional_id) for chunk in chunks]
        self._turn = index % len(chunks)
        self._sent: deque[tuple[float, struct.Struct]] = deque()
        self._pending = bytearray()
        # The response begins with size, correlation id, tags, topics, name, partitions and the first index.
        # Then each partition has an error code. Between two error codes are 31 bytes: base offset, append
        # time, start offset, two empty fields, tags and the next index.
        self._first_error = 4 + 4 + 1 + 1 + 1 + len(spec.topic.encode()) + 1 + 4
        self._errors = [struct.Struct(">" + "h31x" * len(chunk)) for chunk in chunks]

    def open(self) -> None:
        """Send OPENING_BATCHES batches to every partition, one by one.

        A partition's first batches create its files and the first pages of its indexes. Each of these batches
        took Apache Kafka up to 8 ms of processor time, which must not count in a measured rate.
        """
        for template in self.templates:
            self.send_first(template)
            for _ in range(OPENING_BATCHES - 1):
                self.socket.sendall(template.next())
                receive_frame(self.socket)

    def send_first(self, template: Template | None = None) -> None:
        """Send one request and wait for its response. Retry the errors in _RETRIABLE for 10 s.

        If `template` is None, send the first template. Raises the exception of an error that remains.
        """
        template = template or self.templates[0]
        frame = template.next()
        deadline = time.monotonic() + 10.0
        while True:
            self.socket.sendall(frame)
            _, response = decode_response(ProduceResponse, VERSION, receive_frame(self.socket))
            codes = {part.error_code for part in response.responses[0].partition_responses}
            if not codes.intersection(_RETRIABLE) or time.monotonic() > deadline:
                break
            time.sleep(self.first_pause_s)
        for code in codes:
            raise_for_code(code, "a raw generator's first request")

    def send(self) -> None:
        turn = self._turn
        frame = self.templates[turn].next()
        self._turn = (turn + 1) % len(self.templates)
        self._sent.append((time.perf_counter(), self._errors[turn]))
        self.socket.sendall(frame)

    def close(self) -> None:
        self.socket.close()

    @property
    def in_flight_count(self) -> int:
        return len(self._sent)

    def receive(self, latencies_ms: list[float]) -> int:
        """Wait for bytes. Append a latency for each response that is now complete, and return their number.

        Raises OncelogError if the broker rejected a batch, and PeerError if it closed the connection.
        """
        chunk = self.socket.recv(65_536)
        now = time.perf_counter()
        if not chunk:
            raise PeerError("the broker closed the connection of a raw generator")
        data = self._pending + chunk if self._pending else chunk
        position, end, responses = 0, len(data), 0
        while end - position >= 4:
            stop = position + 4 + _SIZE.unpack_from(data, position)[0]
            if stop > end:
                break
            sent, errors = self._sent.popleft()
            if any(errors.unpack_from(data[position:stop] + bytes(31), self._first_error)):
                raise OncelogError("the broker rejected a batch of a raw generator")
            latencies_ms.append((now - sent) * 1000)
            responses += 1
            position = stop
        self._pending = bytearray(data[position:])
        return responses


def run(spec: ProduceSpec) -> ProduceReport:
    """Open the connections, send the load, and measure."""
    senders = [Sender(spec, index) for index in range(spec.connections)]
    for sender in senders:
        sender.open()
    settle(spec.broker_pid)
    latencies_ms: list[float] = []
    broker_began, cpu_began = cpu_seconds(spec.broker_pid), time.process_time()
    began = time.perf_counter()
    (_paced if spec.rate_per_s else full_speed)(spec, senders, latencies_ms)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(spec.broker_pid) - broker_began
    for sender in senders:
        sender.close()
    requests = len(latencies_ms)
    batches = requests * min(spec.batches, spec.partitions)
    records = batches * spec.batch_records
    return ProduceReport(seconds, cpu, broker_cpu, requests, batches, records, quantiles(latencies_ms))


def full_speed(spec: ProduceSpec, senders: Sequence[Sender], latencies_ms: list[float]) -> None:
    """Send as fast as `depth` allows until the load ends, and wait for every response."""
    wait = _ready(senders)
    until = time.perf_counter() + spec.seconds if spec.seconds else float("inf")
    left = spec.requests or sys.maxsize
    for _ in range(spec.depth):
        for sender in senders[:left]:
            sender.send()
            left -= 1
    while any(sender.in_flight_count for sender in senders):
        for sender in wait():
            responses = sender.receive(latencies_ms)
            if time.perf_counter() < until:
                for _ in range(min(responses, left)):
                    sender.send()
                    left -= 1


def _ready(senders: Sequence[Sender]) -> Callable[[], Sequence[Sender]]:
    """Return a function that waits until connections have received bytes, and returns these connections.

    A single connection is returned without waiting, because `Sender.receive` waits.
    """
    if len(senders) == 1:
        return lambda: senders
    poll = select.poll()
    by_number = {sender.socket.fileno(): sender for sender in senders}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return lambda: [by_number[number] for number, _ in poll.poll()]


def _paced(spec: ProduceSpec, senders: Sequence[Sender], latencies_ms: list[float]) -> None:
    """Send each request when it is due and the previous one has a response, whichever is later."""
    (sender,) = senders
    began = time.perf_counter()
    count = spec.requests or round(spec.seconds * spec.rate_per_s)
    for index in range(count):
        if (wait := began + index / spec.rate_per_s - time.perf_counter()) > 0:
            time.sleep(wait)
        sender.send()
        while not sender.receive(latencies_ms):
            pass


def main() -> None:
    """Run the load of the ProduceSpec on the command line, and print the report. Both are JSON."""
    print(json.dumps(asdict(run(ProduceSpec(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
