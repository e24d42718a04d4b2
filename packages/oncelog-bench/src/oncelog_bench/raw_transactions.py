"""The raw producer with transactions, one after the other, at full speed within each.

`python -m oncelog_bench.raw_transactions JSON` reads a TransactionSpec, sends, and prints a report as JSON.
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
from oncelog_bench.raw_produce import ProduceSpec, Sender, full_speed
from oncelog_bench.raw_wire import exchange

END_TXN_VERSION = 5
"""The version of EndTxn that raises the epoch at the end of each transaction (KIP-890).

Produce 12 then adds partitions to the transaction, so no AddPartitionsToTxn is needed.
"""


@dataclass(frozen=True, slots=True)
class TransactionSpec:
    """The load to send.

    A transaction ends after `commit_ms` or after `commit_records`, whichever comes first; 0 is no limit.
    `produce` has one connection, and its `seconds` limit the whole run.
    """

    produce: ProduceSpec
    commit_ms: float = 0.0
    commit_records: int = 0


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """The cost from the start of the first transaction to the response to the last commit.

    All records were committed.
    """

    seconds: float
    cpu_seconds: float
    broker_cpu_seconds: float
    batches: int
    records: int
    transactions: int


class TransactionalSender(Sender):
    """A connection with a transactional id. The transactional id is the topic's name."""

    first_pause_s = 0.001

    def __init__(self, spec: ProduceSpec) -> None:
        super().__init__(spec, 0, spec.topic)
        self._transactional_id = spec.topic

    def commit(self) -> None:
        """Commit the transaction. The next transaction uses the epoch in the response."""
        if self.producer is None:
            raise OncelogError("a transactional generator needs a producer id, but idempotence is off")
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            committed=True,
        )
        response = exchange(self.socket, request, END_TXN_VERSION)
        assert isinstance(response, EndTxnResponse)
        raise_for_code(response.error_code, "a raw generator's commit")
        self.producer = response.producer_id, response.producer_epoch
        for template in self.templates:
            template.restart(self.producer)


def run(spec: TransactionSpec) -> TransactionReport:
    """Open the connection, send and commit the load, and measure."""
    produce = spec.produce
    sender = TransactionalSender(produce)
    sender.open()
    sender.commit()
    settle(produce.broker_pid)
    requests = transactions = 0
    broker_began, cpu_began = cpu_seconds(produce.broker_pid), time.process_time()
    began = time.perf_counter()
    while (left_s := began + produce.seconds - time.perf_counter()) > 0:
        requests += _transaction(spec, sender, left_s)
        transactions += 1
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    broker_cpu = cpu_seconds(produce.broker_pid) - broker_began
    sender.close()
    batches = requests * min(produce.batches, produce.partitions)
    records = batches * produce.batch_records
    return TransactionReport(seconds, cpu, broker_cpu, batches, records, transactions)


def _transaction(spec: TransactionSpec, sender: TransactionalSender, left_s: float) -> int:
    """Run one transaction, which ends after at most `left_s` seconds. Return the number of its requests."""
    began = time.perf_counter()
    for template in sender.templates:
        sender.send_first(template)
    sent = len(sender.templates)
    commit_s = spec.commit_ms / 1000 if spec.commit_ms else left_s
    seconds = min(commit_s, left_s) - (time.perf_counter() - began)
    per_request = spec.produce.batch_records * min(spec.produce.batches, spec.produce.partitions)
    requests = max(-(-spec.commit_records // per_request) - sent, 0)
    latencies_ms: list[float] = []
    if seconds > 0 and (requests or not spec.commit_records):
        full_speed(replace(spec.produce, seconds=seconds, requests=requests), [sender], latencies_ms)
    sender.commit()
    return sent + len(latencies_ms)


def _spec_from(fields: Mapping[str, Any]) -> TransactionSpec:
    return TransactionSpec(**{**fields, "produce": ProduceSpec(**fields["produce"])})


def main() -> None:
    """Run the load of the TransactionSpec on the command line, and print the report. Both are JSON."""
    print(json.dumps(asdict(run(_spec_from(json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
