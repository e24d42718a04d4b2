"""Samples a cluster in the background while somebody looks at the pages."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from oncelog.client.admin.blocking import Admin
from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.errors import OncelogError
from oncelog.runtime import system
from oncelog.types import Isolation, TopicPartition
from oncelog.web.history import History, Sample, lag, sum_by_topic

_LOG = logging.getLogger("oncelog.web")
INTERVAL_S = 2.0
IDLE_S = 60.0
"""Sampling stops if no page was requested for this number of seconds."""
MAX_PARTITIONS = 2_000
MAX_GROUPS = 100


class Sampler:
    """Takes a sample every two seconds, or less often if a sample takes long. Threads may share it.

    `touch` starts the sampling thread, or keeps it running. On a large cluster only the first MAX_PARTITIONS
    partitions and MAX_GROUPS groups are sampled; `is_partial` is then True.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.history = History()
        self.is_partial = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._touched_s = 0.0
        self._is_closed = False

    def touch(self) -> None:
        """Record that a page was requested, and start the sampling thread if it is not running."""
        with self._lock:
            self._touched_s = time.monotonic()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="oncelog-web-sampler", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait until its current request has ended."""
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Let the thread end after the sample that it is taking."""
        with self._lock:
            self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                self.take()
            except OncelogError:
                pass  # the page itself shows that the cluster does not answer
            except Exception:  # log it and continue, because nothing restarts the thread
                _LOG.exception("the sample failed")
            took_s = time.monotonic() - started_s
            self._wake.wait(max(INTERVAL_S - took_s, 4 * took_s))
            with self._lock:
                if self._is_closed or time.monotonic() - self._touched_s > IDLE_S:
                    self._thread = None
                    return

    def take(self) -> Sample:
        """Take a sample now, and add it to the history.

        Raises OncelogError if the cluster does not answer.
        """
        topics = self._admin.list_topics(include_internal=True)
        tps = [
            TopicPartition(topic.name, index) for topic in topics for index in range(topic.partition_count)
        ]
        lags = self._group_lags()
        sample = Sample(
            time.monotonic(),
            self._ends(tps[:MAX_PARTITIONS]),
            self._sizes(),
            lags,
            *self._open_transactions(),
        )
        self.is_partial = len(tps) > MAX_PARTITIONS or len(lags) == MAX_GROUPS
        self.history.add(sample)
        return sample

    def _ends(self, tps: list[TopicPartition]) -> dict[TopicPartition, PartitionEnds]:
        # Look up stable ends before ends, as in `partition_ends`: both only grow, so no stable end is above
        # its end.
        starts = self._admin.list_offsets(dict.fromkeys(tps, "earliest"), raise_errors=False)
        stable = self._admin.list_offsets(
            dict.fromkeys(tps, "latest"), Isolation.READ_COMMITTED, raise_errors=False
        )
        ends = self._admin.list_offsets(dict.fromkeys(tps, "latest"), raise_errors=False)
        return {tp: PartitionEnds(starts[tp].offset, ends[tp].offset, stable[tp].offset, None) for tp in tps}

    def _sizes(self) -> dict[str, int]:
        with contextlib.suppress(OncelogError):
            return sum_by_topic(
                (replica.tp, replica.size_bytes)
                for directory in self._admin.describe_log_dirs()
                for replica in directory.replicas
                if not replica.is_future
            )
        return {}

    def _group_lags(self) -> dict[str, int]:
        lags: dict[str, int] = {}
        for group in self._admin.list_groups()[:MAX_GROUPS]:
            # Check before each group: a broker that does not answer delays `close` by half a minute a group.
            if self._is_closed:
                break
            with contextlib.suppress(OncelogError):
                held = {tp: kept.offset for tp, kept in self._admin.group_offsets(group.group_id).items()}
                ends = self._admin.list_offsets(dict.fromkeys(held, "latest"), raise_errors=False)
                lags[group.group_id] = lag(
                    held, {tp: PartitionEnds(None, ends[tp].offset, None, None) for tp in held}
                )
        return lags

    def _open_transactions(self) -> tuple[int, int | None]:
        """Return the number of open transactions, and the age of the oldest one in ms."""
        with contextlib.suppress(OncelogError):
            names = [
                listed.transactional_id
                for listed in self._admin.list_transactions()
                if listed.state in ("Ongoing", "PrepareCommit", "PrepareAbort")
            ]
            started = [
                described.start_ms
                for described in self._admin.describe_transactions(names).values()
                if described.start_ms is not None and described.start_ms >= 0
            ]
            now_ms = system.current().wall_ns() // 1_000_000
            return len(names), max(now_ms - min(started), 0) if started else None
        return 0, None
