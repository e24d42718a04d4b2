"""The raw generator with transactions: full speed within one, then its end, then the next.

`python -m oncelog_bench.raw_transactions JSON` reads a TransactionOrder, sends, and prints a report as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from oncelog.errors import OncelogError, raise_for_code
from oncelog.wire.messages import EndTxnRequest, EndTxnResponse
from oncelog_bench.process import cpu_seconds, settle
from oncelog_bench.raw_produce import ProduceOrder, Sender, full_speed
from oncelog_bench.raw_wire import ask

END_TXN_VERSION = 5
"""Raises the epoch with every end (KIP-890), as Produce 12 makes partitions part of a transaction."""


@dataclass(frozen=True, slots=True)
class TransactionOrder:
    """A commit after `commit_ms` or `commit_records`, whichever is first; 0: not for that.

    `produce`: one connection; its `seconds` end it all.
    """

    produce: ProduceOrder
    commit_ms: float = 0.0
    commit_records: int = 0


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """From the first begin to the answer to the last commit; all records were committed."""

    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float
    batches: int
    records: int
    transactions: int


class TransactionalSender(Sender):
    """A connection with a transactional id, the topic's name."""

    first_pause_s = 0.001

    def __init__(self, order: ProduceOrder) -> None:
        super().__init__(order, 0, order.topic)
        self._transactional_id = order.topic

    def commit(self) -> None:
        """End the transaction; the next one goes on under the epoch that this gave."""
        if self.producer is None:
            raise OncelogError("a transactional generator needs a producer id: idempotence is off")
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            committed=True,
        )
        answer = ask(self.socket, request, END_TXN_VERSION)
        assert isinstance(answer, EndTxnResponse)
        raise_for_code(answer.error_code, "a raw generator's commit")
        self.producer = answer.producer_id, answer.producer_epoch
        for template in self.templates:
            template.begin_anew(self.producer)


def run(order: TransactionOrder) -> TransactionReport:
    """Open the connection, send and commit as ordered, and measure."""
    produce = order.produce
    sender = TransactionalSender(produce)
    sender.open()
    sender.commit()
    settle(produce.broker_pid)
    requests = transactions = 0
    broker_began, cpu_began = cpu_seconds(produce.broker_pid), time.process_time()
    began = time.perf_counter()
    while (left_s := began + produce.seconds - time.perf_counter()) > 0:
        requests += _transaction(order, sender, left_s)
        transactions += 1
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(produce.broker_pid) - broker_began
    sender.close()
    batches = requests * min(produce.batches, produce.partitions)
    records = batches * produce.batch_records
    return TransactionReport(seconds, cpu, broker_cpu, batches, records, transactions)


def _transaction(order: TransactionOrder, sender: TransactionalSender, left_s: float) -> int:
    """One of them, of at most `left_s` seconds; how many requests."""
    began = time.perf_counter()
    for template in sender.templates:
        sender.send_first(template)
    sent = len(sender.templates)
    commit_s = order.commit_ms / 1000 if order.commit_ms else left_s
    seconds = min(commit_s, left_s) - (time.perf_counter() - began)
    per_request = order.produce.batch_records * min(order.produce.batches, order.produce.partitions)
    requests = max(-(-order.commit_records // per_request) - sent, 0)
    latencies_ms: list[float] = []
    if seconds > 0 and (requests or not order.commit_records):
        full_speed(replace(order.produce, seconds=seconds, requests=requests), [sender], latencies_ms)
    sender.commit()
    return sent + len(latencies_ms)


def _order_from(fields: Mapping[str, Any]) -> TransactionOrder:
    return TransactionOrder(**{**fields, "produce": ProduceOrder(**fields["produce"])})


def main() -> None:
    """Entry point of the child process."""
    print(json.dumps(asdict(run(_order_from(json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
