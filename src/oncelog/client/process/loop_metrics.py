"""The counters of a consume-transform-produce loop."""

from __future__ import annotations


class LoopMetrics:
    """Counters since the start of the loop."""

    def __init__(self) -> None:
        self.consumed = 0
        self.produced = 0
        self.dead_letters = 0
        self.failed_attempts = 0
        self.commits = 0
        self.aborts = 0
        self.repeated_commits = 0
        self.replaced_producers = 0
        self.rebalances = 0
        self.in_flight = 0

    def to_dict(self) -> dict[str, float]:
        """Return all metrics by name."""
        return {
            "records-consumed-total": float(self.consumed),
            "records-produced-total": float(self.produced),
            "records-dead-lettered-total": float(self.dead_letters),
            "failed-attempts-total": float(self.failed_attempts),
            "transactions-committed-total": float(self.commits),
            "transactions-aborted-total": float(self.aborts),
            "commits-repeated-total": float(self.repeated_commits),
            "producers-replaced-total": float(self.replaced_producers),
            "rebalances-total": float(self.rebalances),
            "records-in-flight": float(self.in_flight),
        }


METRICS = {
    "records-consumed-total": ("counter", "records", "Records whose transaction was committed."),
    "records-produced-total": ("counter", "records", "Output records of committed transactions."),
    "records-dead-lettered-total": ("counter", "records", "Records in the dead-letter topic, committed."),
    "failed-attempts-total": ("counter", "calls", "A transform raised, or an output was refused."),
    "transactions-committed-total": ("counter", "transactions", "Transactions committed."),
    "transactions-aborted-total": ("counter", "transactions", "Transactions aborted and done again."),
    "commits-repeated-total": ("counter", "calls", "Commits called again because the outcome was unknown."),
    "producers-replaced-total": ("counter", "producers", "Producers replaced after a fatal error."),
    "rebalances-total": ("counter", "events", "Rebalances that took or gave partitions."),
    "records-in-flight": ("gauge", "records", "Consumed records of the open transaction."),
}  # fmt: skip
"""Name -> kind, unit, meaning: what `Processor.metrics()` returns, for docs/reference/metrics.md."""
