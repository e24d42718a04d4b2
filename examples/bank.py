"""A bank that books every transfer exactly once, however often its teller is killed.

python examples/bank.py [-b HOST:PORT]     # on that Kafka cluster, or with a broker of its own

    transfers --> teller --> balances    what each account holds; compacted
                        \\-> receipts    one record for each transfer that was booked

The teller is a process that consumes, transforms and produces. New balances, receipts and its position in
the transfers are one transaction: all of it happens, or nothing. It is killed with SIGKILL at random and
started again. An auditor looks on: whenever it looks, the balances add up.
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

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, Record, TopicPartition

ACCOUNTS, OPENING_BALANCE = 50, 1_000
PARTITIONS, TRANSFERS_PER_TRANSACTION, PATIENCE_SECONDS = 3, 10, 60


class Bank:
    """Where it is, and the names of one run's topics: other runs are left alone."""

    def __init__(self, servers: str, run: str) -> None:
        self.run, self.at = run, {"bootstrap.servers": servers}
        self.transfers, self.receipts = f"bank-{run}-transfers", f"bank-{run}-receipts"
        self.teller = f"bank-{run}-teller"
        # In one partition: of several, a reader would meet the parts of a transaction at different moments.
        self.balances = TopicPartition(f"bank-{run}-balances", 0)

    def open(self) -> None:
        """Topics, and the same balance in every account: all accounts are there at once."""
        compacted = {"cleanup.policy": "compact"}
        with Admin(self.at) as admin:
            admin.create_topics([NewTopic(name, PARTITIONS) for name in (self.transfers, self.receipts)])
            admin.create_topics([NewTopic(self.balances.topic, 1, configs=compacted)])
        with Producer({**self.at, "transactional.id": self.teller}) as producer:
            producer.init_transactions()
            with producer.transaction():
                for account in range(ACCOUNTS):
                    producer.send(self.balances.topic, b"%d" % OPENING_BALANCE, b"%d" % account)


def book_transfers(bank: Bank) -> None:
    """The teller. An error ends the process; its successor goes on from what is committed."""
    reading = {
        **bank.at,
        "group.id": bank.teller,
        "group.instance.id": bank.teller,  # the successor takes over at once, without waiting for a time-out
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,  # the position is committed together with what was made of the records
    }
    with Consumer(reading) as consumer, Producer({**bank.at, "transactional.id": bank.teller}) as producer:
        producer.init_transactions()  # fences a predecessor and ends what it left open: now nothing moves
        held = dict(read(consumer, bank.balances)[0])
        consumer.subscribe(bank.transfers)
        for number, records in enumerate(polls(consumer)):
            if number == 0:
                print("at work", flush=True)
            with producer.transaction():
                for record in records:
                    for account, change in changes(*json.loads(record.value or b"")):
                        held[account] += change
                        producer.send(bank.balances.topic, b"%d" % held[account], b"%d" % account)
                    producer.send(bank.receipts, b"1", record.key)
                ends = {TopicPartition(each.topic, each.partition): each.offset + 1 for each in records}
                producer.send_offsets_to_transaction(ends, consumer.group_metadata())


def polls(consumer: Consumer) -> Iterator[list[Record]]:
    while True:
        if records := consumer.poll(max_records=TRANSFERS_PER_TRANSACTION):
            yield records


def changes(payer: int, payee: int, amount: int) -> list[tuple[int, int]]:
    """What a transfer does to which account."""
    return [(payer, -amount), (payee, amount)]


def read(consumer: Consumer, at: TopicPartition, start: int = 0) -> tuple[list[tuple[int, int]], int]:
    """Keys and values from `start` to the end of what is decided by now, and that end."""
    end = consumer.end_offsets([at])[at]  # with read_committed, the default: the last stable offset
    pieces = [batch.select(["key", "value"]).to_pydict() for batch in consumer.fetch_range(at, start, end)]
    rows = [row for piece in pieces for row in zip(piece["key"], piece["value"], strict=True)]
    return [(int(key), int(value)) for key, value in rows], end


def audit(bank: Bank, held: dict[int, int], sums: Counter[int], stopped: threading.Event) -> None:
    """Add up all balances again and again, as any reader of the topic could."""
    position, told_at, is_last = 0, 0.0, False
    with Consumer(bank.at) as consumer:
        while not is_last:
            is_last = stopped.wait(0.05)
            changed, position = read(consumer, bank.balances, position)
            held.update(changed)
            if not held:
                continue  # a commit returns when it is decided, and is seen a moment later
            sums[sum(held.values())] += 1
            if is_last or time.monotonic() - told_at > 3:
                told_at = time.monotonic()
                print(f"audit {sums.total():>5,}: the balances add up to {sum(held.values()):,}", flush=True)


def trade(bank: Bank, kills: int, transfers_per_kill: int) -> list[tuple[int, int, int]]:
    """Order transfers and kill the teller, then wait until all is booked; (payer, payee, amount) of each."""
    ordered: list[tuple[int, int, int]] = []
    teller = hire_teller(bank)
    try:
        with Producer(bank.at) as producer:
            for _ in range(kills):
                for number in range(len(ordered), len(ordered) + transfers_per_kill):
                    payer, payee = random.sample(range(ACCOUNTS), 2)
                    ordered.append((payer, payee, random.randint(1, 100)))
                    producer.send(bank.transfers, json.dumps(ordered[-1]).encode(), b"%d" % number)
                assert teller.stdout is not None
                teller.stdout.readline()  # it is at work
                time.sleep(random.uniform(0, 0.3))
                teller.kill()
                teller.communicate()
                teller = hire_teller(bank)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(count_receipts(bank)) < len(ordered) and time.monotonic() < deadline:
            if teller.poll() is not None:  # ended by an error, which it has printed
                teller = hire_teller(bank)
            time.sleep(0.2)
        return ordered
    finally:
        teller.kill()
        teller.communicate()


def hire_teller(bank: Bank) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "-b", bank.at["bootstrap.servers"], "--teller", bank.run]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def count_receipts(bank: Bank, isolation: str = "read_committed") -> Counter[int]:
    """How often each transfer was booked, by its number."""
    with Consumer({**bank.at, "isolation.level": isolation}) as consumer:
        places = [
            TopicPartition(bank.receipts, each.partition) for each in consumer.partitions_for(bank.receipts)
        ]
        return Counter(number for at in places for number, _ in read(consumer, at)[0])


def run_bank(servers: str, kills: int, transfers_per_kill: int) -> bool:
    """Open, trade, report; whether every transfer was booked exactly once, and no audit found otherwise."""
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
    for account, change in (each for transfer in ordered for each in changes(*transfer)):
        expected[account] += change
    print(f"\n{len(ordered):,} transfers, the teller killed and restarted {kills} times")
    print(
        f"{written - receipts.total()} receipts in the log are of transactions cut short: nobody reads them"
    )
    print(f"lost {lost}, doubled {doubled}; {sums.total():,} audits found the sums {sorted(sums)}")
    print(f"every balance as without a kill: {'yes' if held == expected else 'NO'}")
    return held == expected and not lost and not doubled and list(sums) == [ACCOUNTS * OPENING_BALANCE]


def main() -> None:
    parser = argparse.ArgumentParser(description="Transfers, booked exactly once by a teller that is killed.")
    parser.add_argument("-b", "--bootstrap-server", metavar="HOST:PORT", help="default: a broker of its own")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--transfers-per-kill", type=int, default=500, metavar="COUNT")
    parser.add_argument("--teller", metavar="RUN", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.teller:
        return book_transfers(Bank(given.bootstrap_server, given.teller))
    with ExitStack() as stack:
        servers = given.bootstrap_server or stack.enter_context(Broker()).bootstrap_servers
        sys.exit(not run_bank(servers, given.kills, given.transfers_per_kill))


if __name__ == "__main__":
    main()
