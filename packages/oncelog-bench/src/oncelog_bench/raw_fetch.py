"""Lightweight consumers that are never the bottleneck.

They read whole responses, but parse only one batch header of each. `python -m oncelog_bench.raw_fetch JSON`
reads a FetchSpec and prints a FetchReport as JSON. Each consumer is a connection with one fetch in flight and
no fetch session, as in Oncelog's consumer.
"""

from __future__ import annotations

import json
import select
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from oncelog.errors import raise_for_code
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.header import read_header
from oncelog.wire.messages import FetchRequest, FetchResponse
from oncelog_bench.process import cpu_seconds, settle
from oncelog_bench.raw_produce import ProduceSpec, Sender
from oncelog_bench.raw_wire import CLIENT_ID, connect, quantiles, receive_frame

VERSION = 12
MAX_WAIT_MS = 500
MAX_BYTES = 50 * 2**20
MAX_PARTITION_BYTES = 2**20
"""This and the two constants above are the Java consumer's defaults."""


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """The load to read for `seconds`.

    Without `produce`, each partition contains batches of `batch_bytes` up to `end_offset`. A consumer that
    has read them all starts again at the beginning. With `produce`, consumers wait at the end of the only
    partition, and a producer sends batches at the pace of `produce`.
    """

    bootstrap_servers: str
    broker_pid: int
    topic: str
    partitions: int
    consumers: int
    batch_bytes: int
    end_offset: int
    seconds: float
    produce: ProduceSpec | None = None


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The result. `bytes` counts whole batches, summed over all consumers.

    With a producer, `quantiles` describes the time from writing a batch to reading it. Without one, it
    describes the time of a fetch.
    """

    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float
    bytes: int
    batches: int
    fetches: int
    quantiles: dict[str, float]


class Consumer:
    """One connection that reads all partitions of a topic."""

    def __init__(self, spec: FetchSpec, start_offset: int = 0) -> None:
        self.socket = connect(spec.bootstrap_servers)
        self._spec = spec
        self.offsets = [start_offset] * spec.partitions
        self.sent_at = 0.0

    def send(self) -> None:
        """Send the next fetch."""
        parts = [
            FetchRequest.FetchPartition(
                partition=index,
                fetch_offset=offset,
                current_leader_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=MAX_PARTITION_BYTES,
            )
            for index, offset in enumerate(self.offsets)
        ]
        topic = FetchRequest.FetchTopic(topic=self._spec.topic, partitions=parts)
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=MAX_WAIT_MS,
            min_bytes=1,
            max_bytes=MAX_BYTES,
            session_id=0,
            session_epoch=-1,
            topics=[topic],
        )
        self.sent_at = time.perf_counter()
        self.socket.sendall(encode_request(request, VERSION, 0, CLIENT_ID))

    def receive(self) -> int:
        """Read the response, advance every partition, and return the number of batches."""
        _, response = decode_response(FetchResponse, VERSION, receive_frame(self.socket))
        size = self._spec.batch_bytes
        total = 0
        for part in response.responses[0].partitions:
            raise_for_code(part.error_code, "a raw generator's fetch")
            batches = len(part.records or b"") // size
            if batches:
                last = read_header(part.records or b"", (batches - 1) * size)
                self.offsets[part.partition_index] = last.last_offset + 1
            total += batches
        return total

    def close(self) -> None:
        self.socket.close()

    def start_over_if_done(self) -> None:
        """Set all offsets to 0 if every partition was read up to `end_offset`."""
        if all(offset >= self._spec.end_offset for offset in self.offsets):
            self.offsets = [0] * len(self.offsets)


def run(spec: FetchSpec) -> FetchReport:
    """Fetch the load that `spec` describes, and return the measured cost."""
    settle(spec.broker_pid)
    broker_began, cpu_began = cpu_seconds(spec.broker_pid), time.process_time()
    began = time.perf_counter()
    batches, fetches, latencies_ms = _tail(spec) if spec.produce else _catch_up(spec)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(spec.broker_pid) - broker_began
    size = batches * spec.batch_bytes
    return FetchReport(seconds, cpu, broker_cpu, size, batches, fetches, quantiles(latencies_ms))


def _catch_up(spec: FetchSpec) -> tuple[int, int, list[float]]:
    consumers = [Consumer(spec) for _ in range(spec.consumers)]
    until = time.perf_counter() + spec.seconds
    poll, by_number = _poll(consumers)
    batches, latencies_ms = 0, []
    for consumer in consumers:
        consumer.send()
    while by_number:
        for number, _ in poll.poll():
            consumer = by_number[number]
            batches += consumer.receive()
            now = time.perf_counter()
            latencies_ms.append((now - consumer.sent_at) * 1000)
            if now < until:
                consumer.start_over_if_done()
                consumer.send()
            else:
                poll.unregister(number)
                by_number.pop(number).close()
    return batches, len(latencies_ms), latencies_ms


def _poll(consumers: list[Consumer]) -> tuple[select.poll, dict[int, Consumer]]:
    poll = select.poll()
    by_number = {consumer.socket.fileno(): consumer for consumer in consumers}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return poll, by_number


def _tail(spec: FetchSpec) -> tuple[int, int, list[float]]:
    """Run producer and consumers in one thread, so that one clock measures both sending and delivery."""
    assert spec.produce is not None
    with closing(Sender(spec.produce, 0)) as sender, ExitStack() as stack:
        sender.open()
        first = _end_offset(spec)
        consumers = [stack.enter_context(closing(Consumer(spec, first))) for _ in range(spec.consumers)]
        tail = _Tail(spec.produce, round(spec.seconds * spec.produce.rate_per_s), first, sender, consumers)
        fetches = tail.run()
        return tail.count * len(consumers), fetches, tail.latencies_ms


class _Tail:
    """A run in which one sender sends `count` batches at an even pace to every consumer."""

    def __init__(
        self, produce: ProduceSpec, count: int, first: int, sender: Sender, consumers: list[Consumer]
    ) -> None:
        self.count, self.latencies_ms = count, list[float]()
        self._produce, self._first, self._sender, self._consumers = produce, first, sender, consumers
        self._written: list[float] = []
        self._began = time.perf_counter()

    def run(self) -> int:
        """Run until every consumer has every batch, and return the number of fetches."""
        poll, by_number = _poll(self._consumers)
        poll.register(self._sender.socket.fileno(), select.POLLIN)
        acknowledged: list[float] = []
        fetches, missing = 0, self.count * len(self._consumers)
        for consumer in self._consumers:
            consumer.send()
        while missing:
            for number, _ in poll.poll(self._send_due()):
                if number not in by_number:
                    self._sender.receive(acknowledged)
                    continue
                missing -= self._take(by_number[number])
                by_number[number].send()
                fetches += 1
        return fetches

    def _send_due(self) -> float:
        """Send the batches that are due.

        Return the milliseconds until the next batch is due, at most 1000; 1000 if all batches are sent.
        """
        while len(self._written) < self.count:
            now = time.perf_counter()
            due = self._began + len(self._written) / self._produce.rate_per_s
            if due > now:
                return min(1000.0, (due - now) * 1000)
            self._written.append(now)
            self._sender.send()
        return 1000.0

    def _take(self, consumer: Consumer) -> int:
        before = consumer.offsets[0]
        batches = consumer.receive()
        now = time.perf_counter()
        index = (before - self._first) // self._produce.batch_records
        self.latencies_ms += [(now - written) * 1000 for written in self._written[index : index + batches]]
        return batches


def _end_offset(spec: FetchSpec) -> int:
    """Read the batches sent so far, and return the offset after the last one."""
    with closing(Consumer(spec)) as reader:
        reader.send()
        reader.receive()
        return reader.offsets[0]


def main() -> None:
    """Run the load of the FetchSpec on the command line, and print the report. Both are JSON."""
    fields = json.loads(sys.argv[1])
    produce = ProduceSpec(**fields["produce"]) if fields["produce"] else None
    print(json.dumps(asdict(run(FetchSpec(**{**fields, "produce": produce})))))


if __name__ == "__main__":
    main()
