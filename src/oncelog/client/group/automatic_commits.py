"""The consumers of this process that commit automatically.

A transaction must not commit positions for the group of such a consumer: `poll` and `close` would also commit
the positions of aborted records. `Consumer.group_metadata` refuses such a consumer. But
`send_offsets_to_transaction` also takes a group id, and then only this registry shows the mistake. Consumers
of other processes are unknown here.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from oncelog.runtime.system import Runtime


class AutomaticConsumer(Protocol):
    """A consumer's session in its group, with enable.auto.commit=true."""

    @property
    def group_id(self) -> str: ...

    @property
    def cluster_id(self) -> str | None:
        """The cluster's id, or None before the first connection."""

    @property
    def holds_partitions(self) -> bool:
        """True while the consumer has partitions whose positions it commits."""


# A dict and not a WeakSet, because other threads may add and remove consumers while one thread iterates.
_consumers: dict[int, tuple[Runtime, weakref.ref[AutomaticConsumer]]] = {}


def register(runtime: Runtime, consumer: AutomaticConsumer) -> None:
    """Add a consumer. Its entry is removed when the consumer is freed."""
    key = id(consumer)
    _consumers[key] = runtime, weakref.ref(consumer, lambda _: _consumers.pop(key, None))


def commits_automatically(runtime: Runtime, group_id: str, cluster_id: str | None) -> bool:
    """Return True if a consumer of this process now commits automatically for the group in that cluster."""
    for owner, reference in list(_consumers.values()):
        consumer = reference()
        if owner is not runtime or consumer is None or consumer.group_id != group_id:
            continue
        if consumer.holds_partitions and cluster_id is not None and consumer.cluster_id == cluster_id:
            return True
    return False
