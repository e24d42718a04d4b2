"""Consumers light enough not to be the limit: they read whole answers and look at one batch header in each.

`python -m oncelog_bench.raw_fetch JSON` reads a FetchOrder and prints a FetchReport as JSON. Every consumer
is a connection with one fetch in flight, without a session, as our consumer is.
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
from oncelog_bench.raw_produce import ProduceOrder, Sender
from oncelog_bench.raw_wire import CLIENT_ID, connect, quantiles, receive_frame

VERSION = 12
MAX_WAIT_MS = 500
MAX_BYTES = 50 * 2**20
MAX_PARTITION_BYTES = 2**20
"""The Java consumer's defaults."""


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Batches of `batch_bytes` lie in each partition up to `end_offset`; a consumer that has read them all
    begins again, for `seconds`. `produce` set: consumers wait at the end of the one partition instead,
    while the batches of that (paced) order arrive."""

    bootstrap_servers: str
    broker_pid: int
    topic: str
    partitions: int
    consumers: int
    batch_bytes: int
    end_offset: int
    seconds: float
    produce: ProduceOrder | None = None


@dataclass(frozen=True, slots=True)
class FetchReport:
    """`bytes`: of whole batches delivered to all consumers. `quantiles`: of the time from writing a batch to
    having it read, when producing; else of a fetch."""

    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float
    bytes: int
    batches: int
    fetches: int
    quantiles: dict[str, float]


class Consumer:
    """One connection that follows all partitions of a topic."""

    def __init__(self, order: FetchOrder, start_offset: int = 0) -> None:
        self.socket = connect(order.bootstrap_servers)
        self._order = order
        self.offsets = [start_offset] * order.partitions
        self.asked = 0.0

    def ask(self) -> None:
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
        topic = FetchRequest.FetchTopic(topic=self._order.topic, partitions=parts)
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=MAX_WAIT_MS,
            min_bytes=1,
            max_bytes=MAX_BYTES,
            session_id=0,
            session_epoch=-1,
            topics=[topic],
        )
        self.asked = time.perf_counter()
        self.socket.sendall(encode_request(request, VERSION, 0, CLIENT_ID))

    def receive(self) -> int:
        """Read the answer, move on in every partition; how many batches it held."""
        _, answer = decode_response(FetchResponse, VERSION, receive_frame(self.socket))
        size = self._order.batch_bytes
        total = 0
        for part in answer.responses[0].partitions:
            raise_for_code(part.error_code, "a raw generator's fetch")
            batches = len(part.records or b"") // size
            if batches:
                last = read_header(part.records or b"", (batches - 1) * size)
                self.offsets[part.partition_index] = last.last_offset + 1
            total += batches
        return total

    def close(self) -> None:
        self.socket.close()

    def begin_again(self) -> None:
        """Start over when all that was loaded is read."""
        if all(offset >= self._order.end_offset for offset in self.offsets):
            self.offsets = [0] * len(self.offsets)


def run(order: FetchOrder) -> FetchReport:
    """Fetch as ordered, and measure."""
    settle(order.broker_pid)
    broker_began, cpu_began = cpu_seconds(order.broker_pid), time.process_time()
    began = time.perf_counter()
    batches, fetches, latencies_ms = _tail(order) if order.produce else _catch_up(order)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(order.broker_pid) - broker_began
    size = batches * order.batch_bytes
    return FetchReport(seconds, cpu, broker_cpu, size, batches, fetches, quantiles(latencies_ms))


def _catch_up(order: FetchOrder) -> tuple[int, int, list[float]]:
    consumers = [Consumer(order) for _ in range(order.consumers)]
    until = time.perf_counter() + order.seconds
    poll, by_number = _poll(consumers)
    batches, latencies_ms = 0, []
    for consumer in consumers:
        consumer.ask()
    while by_number:
        for number, _ in poll.poll():
            consumer = by_number[number]
            batches += consumer.receive()
            now = time.perf_counter()
            latencies_ms.append((now - consumer.asked) * 1000)
            if now < until:
                consumer.begin_again()
                consumer.ask()
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


def _tail(order: FetchOrder) -> tuple[int, int, list[float]]:
    """Producer and consumers in one loop, so that one clock tells when a batch left and when it came."""
    assert order.produce is not None
    with closing(Sender(order.produce, 0)) as sender, ExitStack() as stack:
        sender.open()
        first = _end_offset(order)
        consumers = [stack.enter_context(closing(Consumer(order, first))) for _ in range(order.consumers)]
        tail = _Tail(order.produce, round(order.seconds * order.produce.rate_per_s), first, sender, consumers)
        fetches = tail.run()
        return tail.count * len(consumers), fetches, tail.latencies_ms


class _Tail:
    """`count` paced batches on their way from one sender to every consumer."""

    def __init__(
        self, produce: ProduceOrder, count: int, first: int, sender: Sender, consumers: list[Consumer]
    ) -> None:
        self.count, self.latencies_ms = count, list[float]()
        self._produce, self._first, self._sender, self._consumers = produce, first, sender, consumers
        self._written: list[float] = []
        self._began = time.perf_counter()

    def run(self) -> int:
        """Until every consumer has every batch; how many fetches that took."""
        poll, by_number = _poll(self._consumers)
        poll.register(self._sender.socket.fileno(), select.POLLIN)
        acknowledged: list[float] = []
        fetches, missing = 0, self.count * len(self._consumers)
        for consumer in self._consumers:
            consumer.ask()
        while missing:
            for number, _ in poll.poll(self._send_due()):
                if number not in by_number:
                    self._sender.receive(acknowledged)
                    continue
                missing -= self._take(by_number[number])
                by_number[number].ask()
                fetches += 1
        return fetches

    def _send_due(self) -> float:
        """Send what is due; milliseconds until the next is, at most a second."""
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
        got = consumer.receive()
        now = time.perf_counter()
        index = (before - self._first) // self._produce.batch_records
        self.latencies_ms += [(now - at) * 1000 for at in self._written[index : index + got]]
        return got


def _end_offset(order: FetchOrder) -> int:
    """Where the batches sent so far end, found by reading them."""
    with closing(Consumer(order)) as reader:
        reader.ask()
        reader.receive()
        return reader.offsets[0]


def main() -> None:
    """Entry point of the child process."""
    order = json.loads(sys.argv[1])
    produce = ProduceOrder(**order["produce"]) if order["produce"] else None
    print(json.dumps(asdict(run(FetchOrder(**{**order, "produce": produce})))))


if __name__ == "__main__":
    main()
