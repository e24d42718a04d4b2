"""A bank that books every transfer exactly once, no matter how often its teller is killed.

python examples/bank.py [-b HOST:PORT]     # on that Kafka cluster; by default with its own broker

    transfers --> teller --> balances    what each account holds; compacted
                        \\-> receipts    one record for each transfer that was booked

The teller is a process that consumes, transforms and produces with `oncelog.process`. One transaction holds
new balances, receipts and its position in the transfers: all of it happens, or nothing. SIGKILL ends the
teller at random, and a successor starts. An auditor reads the balances all the time, and they always add up.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from oncelog import (
    Admin,
    Broker,
    Consumer,
    NewTopic,
    Producer,
    ProducerRecord,
    Record,
    TopicPartition,
    process,
)

ACCOUNTS, OPENING_BALANCE = 50, 1_000
PARTITIONS, TRANSFERS_PER_TRANSACTION, PATIENCE_SECONDS = 3, 10, 60


class Bank:
    """The address of the cluster, and the names of one run's topics."""

    def __init__(self, servers: str, run: str) -> None:
        self.run, self.config = run, {"bootstrap.servers": servers}
        self.transfers, self.receipts = f"bank-{run}-transfers", f"bank-{run}-receipts"
        self.teller = f"bank-{run}-teller"
        # Use one partition: with several, a reader could see the parts of a transaction at different times.
        self.balances = TopicPartition(f"bank-{run}-balances", 0)

    def open(self) -> None:
        """Create the topics, and open all accounts with the same balance in one transaction."""
        compacted = {"cleanup.policy": "compact"}
        with Admin(self.config) as admin:
            admin.create_topics([NewTopic(name, PARTITIONS) for name in (self.transfers, self.receipts)])
            admin.create_topics([NewTopic(self.balances.topic, 1, configs=compacted)])
        with Producer({**self.config, "transactional.id": self.teller}) as producer:
            producer.init_transactions()
            with producer.transaction():
                for account in range(ACCOUNTS):
                    producer.send(self.balances.topic, b"%d" % OPENING_BALANCE, b"%d" % account)


def book_transfers(bank: Bank) -> None:
    """Run the teller. Its successor continues from the committed state."""
    held: dict[int, int] = {}

    def restore(_: object) -> None:
        held.clear()
        held.update(committed_balances(bank))
        print("at work", flush=True)

    def book(transfer: Record) -> Iterator[ProducerRecord]:
        for account, change in changes(*json.loads(transfer.value or b"")):
            held[account] += change
            yield ProducerRecord(bank.balances.topic, b"%d" % held[account], b"%d" % account)
        yield ProducerRecord(bank.receipts, b"1", transfer.key)

    options: dict[str, Any] = {
        "group_id": bank.teller,
        "transactional_id": bank.teller,
        "config": bank.config,
    }
    process(bank.transfers, book, restore=restore, max_records=TRANSFERS_PER_TRANSACTION, **options)


def committed_balances(bank: Bank) -> list[tuple[int, int]]:
    """Return all balances, including those of a commit that is decided but not yet visible."""
    with Consumer({**bank.config, "isolation.level": "read_uncommitted"}) as consumer:
        end = consumer.end_offsets([bank.balances])[bank.balances]
    with Consumer(bank.config) as consumer:
        return read(consumer, bank.balances, 0, end)[0]


def changes(payer: int, payee: int, amount: int) -> list[tuple[int, int]]:
    """Return each account that a transfer changes, with the change."""
    return [(payer, -amount), (payee, amount)]


def read(
    consumer: Consumer, tp: TopicPartition, start: int = 0, end: int | None = None
) -> tuple[list[tuple[int, int]], int]:
    """Return the keys and values from `start` to `end`, and `end`. By default, `end` is the last stable
    offset.
    """
    if end is None:
        end = consumer.end_offsets([tp])[tp]  # the last stable offset, since read_committed is the default
    pieces = [batch.select(["key", "value"]).to_pydict() for batch in consumer.fetch_range(tp, start, end)]
    rows = [row for piece in pieces for row in zip(piece["key"], piece["value"], strict=True)]
    return [(int(key), int(value)) for key, value in rows], end


def audit(bank: Bank, held: dict[int, int], sums: Counter[int], stopped: threading.Event) -> None:
    """Add up all balances until `stopped`, as any reader of the topic could."""
    position, printed_at, is_last = 0, 0.0, False
    with Consumer(bank.config) as consumer:
        while not is_last:
            is_last = stopped.wait(0.05)
            changed, position = read(consumer, bank.balances, position)
            held.update(changed)
            if not held:
                continue  # a commit returns when it is decided, and becomes visible a moment later
            sums[sum(held.values())] += 1
            if is_last or time.monotonic() - printed_at > 3:
                printed_at = time.monotonic()
                print(f"audit {sums.total():>5,}: the balances add up to {sum(held.values()):,}", flush=True)


def trade(bank: Bank, kills: int, transfers_per_kill: int) -> list[tuple[int, int, int]]:
    """Order transfers and kill the teller, then wait until all are booked.

    Returns (payer, payee, amount) of each transfer.
    """
    ordered: list[tuple[int, int, int]] = []
    teller = hire_teller(bank)
    try:
        with Producer(bank.config) as producer:
            for _ in range(kills):
                for number in range(len(ordered), len(ordered) + transfers_per_kill):
                    payer, payee = random.sample(range(ACCOUNTS), 2)
                    ordered.append((payer, payee, random.randint(1, 100)))
                    producer.send(bank.transfers, json.dumps(ordered[-1]).encode(), b"%d" % number)
                assert teller.stdout is not None
                teller.stdout.readline()  # the teller has started to work
                time.sleep(random.uniform(0, 0.3))
                teller.kill()
                teller.communicate()
                teller = hire_teller(bank)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(count_receipts(bank)) < len(ordered) and time.monotonic() < deadline:
            if teller.poll() is not None:  # the teller has ended with an error, and has printed it
                teller = hire_teller(bank)
            time.sleep(0.2)
        return ordered
    finally:
        teller.kill()
        teller.communicate()


def hire_teller(bank: Bank) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "-b", bank.config["bootstrap.servers"], "--teller", bank.run]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def count_receipts(bank: Bank, isolation: str = "read_committed") -> Counter[int]:
    """Return how often each transfer was booked, by its number."""
    with Consumer({**bank.config, "isolation.level": isolation}) as consumer:
        infos = consumer.partitions_for(bank.receipts)
        partitions = [TopicPartition(bank.receipts, info.partition) for info in infos]
        return Counter(number for tp in partitions for number, _ in read(consumer, tp)[0])


def run_bank(servers: str, kills: int, transfers_per_kill: int) -> bool:
    """Open the bank, trade, report. Return True if every transfer was booked once and every audit agreed."""
    bank = Bank(servers, uuid.uuid4().hex[:8])
    bank.open()
    held, sums, stopped = dict[int, int](), Counter[int](), threading.Event()
    auditor = threading.Thread(target=audit, args=(bank, held, sums, stopped))
    auditor.start()
    try:
        ordered = trade(bank, kills, transfers_per_kill)
    finally:
        stopped.set()
        auditor.join()
    receipts, written = count_receipts(bank), count_receipts(bank, "read_uncommitted").total()
    lost, doubled = len(ordered) - len(receipts), receipts.total() - len(receipts)
    expected = dict.fromkeys(range(ACCOUNTS), OPENING_BALANCE)
    for account, change in (pair for transfer in ordered for pair in changes(*transfer)):
        expected[account] += change
    print(f"\n{len(ordered):,} transfers, the teller killed and restarted {kills} times")
    print(
        f"{written - receipts.total()} receipts in the log are of aborted transactions: no reader sees them"
    )
    print(f"lost {lost}, doubled {doubled}; {sums.total():,} audits found the sums {sorted(sums)}")
    print(f"every balance as without a kill: {'yes' if held == expected else 'NO'}")
    return held == expected and not lost and not doubled and list(sums) == [ACCOUNTS * OPENING_BALANCE]


def main() -> None:
    parser = argparse.ArgumentParser(description="Transfers, booked exactly once by a teller that is killed.")
    parser.add_argument("-b", "--bootstrap-server", metavar="HOST:PORT", help="default: its own broker")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--transfers-per-kill", type=int, default=500, metavar="COUNT")
    parser.add_argument("--teller", metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.teller:
        return book_transfers(Bank(arguments.bootstrap_server, arguments.teller))
    with ExitStack() as stack:
        servers = arguments.bootstrap_server or stack.enter_context(Broker()).bootstrap_servers
        sys.exit(not run_bank(servers, arguments.kills, arguments.transfers_per_kill))


if __name__ == "__main__":
    main()
