"""The consumer groups that store one sink's state on the cluster, and access to that state.

Each group has one committed offset, for partition 0 of the topic of the option markerTopic. The offset is a
batch id, and its metadata contains the rest of the state. Here, a marker is the last committed batch (not a
transaction marker), and a lease is the right of one attempt of a task to write.

    PREFIX-NAME/3         marker of task 3, in the transaction of its rows; also its transactional id
    PREFIX-NAME/atomic    marker of `write_atomic`, in the transaction of its rows; also its transactional id
    PREFIX-NAME/atomic/3  lease of task 3 of `write_atomic`, which has no marker
    PREFIX-NAME/plan      the run that writes the newest batch; also a transactional id
    PREFIX-NAME/begun     the newest batch that was begun
    PREFIX-NAME/finished  the newest batch that is committed as a whole

Slashes in the sink's name are escaped, so no two sinks share a group. Offsets that a transaction commits
expire after offsets.retention.minutes. `begun` and `finished` are stored without a transaction, with a longer
retention time. Version 0.4.1 used PREFIX-NAME and PREFIX-NAME-3; state under those names is still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from oncelog.client.admin.blocking import Admin
from oncelog.errors import OncelogError, TransactionalIdNotFound, UnsupportedVersion
from oncelog.runtime.system import current
from oncelog.spark.sink.decisions import BatchBegun, BatchCommit, PlanNote, SinkError, TaskMarker
from oncelog.spark.sink.sink_options import SinkSettings
from oncelog.types import OffsetAndMetadata, TopicPartition

KEPT_MS = 50 * 365 * 24 * 3_600_000
"""Retention of `begun` and `finished` in milliseconds: 50 years."""
_ENDED_KEPT_MS = 24 * 3_600_000
"""Retention, in milliseconds, of the state that shows that a write without a name has ended: one day.

Tasks of the write that still run when this state is stored will have ended within a day.
"""


def new_run_id() -> str:
    """Return an id for one attempt of the driver to write a batch: 12 hexadecimal digits."""
    return current().new_uuid().hex()[:12]


@dataclass(frozen=True, slots=True)
class Sink:
    """One sink (a streaming query or a batch write) and access to its state.

    `part` distinguishes several sinks of one name. `run_id` identifies one attempt of the driver to write a
    batch; the tasks of that attempt share the id. `is_named` is False for a batch write without a writeId.
    Such a write cannot be repeated, so no state is needed after its end. `marker_topic_id` is the id that the
    marker topic had when the write began, or None. The sink's state is deleted with that topic.
    """

    name: str
    settings: SinkSettings
    part: str = ""
    run_id: str = field(default_factory=new_run_id)
    is_named: bool = True
    marker_topic_id: str | None = None

    @property
    def marker_at(self) -> TopicPartition:
        """Return the partition for which all offsets of the sink are committed: partition 0 of the marker
        topic.
        """
        return TopicPartition(self.settings.marker_topic, 0)

    @property
    def noted_topic(self) -> str:
        """Return the topic that is noted for a batch write with a writeId; "" for all other sinks."""
        return (self.settings.topic or "") if self.settings.write_id is not None else ""

    @property
    def group(self) -> str:
        """Return the prefix of the sink's group names and transactional ids.

        For `write_atomic` it ends in /atomic, and is also the transactional id and the marker's group.
        """
        escaped = self.name.replace("%", "%25").replace("/", "%2F")
        return f"{self.settings.prefix}-{escaped}{self.part and '/' + self.part}"

    @property
    def plan_id(self) -> str:
        """Return the transactional id, which is also the group, of the note that names the run that writes a
        batch (PlanNote).
        """
        return f"{self.group}/plan"

    @property
    def begun_id(self) -> str:
        """Return the group that stores the newest batch that was begun."""
        return f"{self.group}/begun"

    @property
    def finished_id(self) -> str:
        """Return the group that stores the newest batch that is committed as a whole."""
        return f"{self.group}/finished"

    def task_id(self, task: int) -> str:
        """Return the task's transactional id. The group that stores its marker or lease has the same name."""
        return f"{self.group}/{task}"

    @property
    def id_in_0_4_1(self) -> str:
        """Return the group that version 0.4.1 and older used for the sink. Two sinks could have the same
        group.
        """
        return f"{self.settings.prefix}-{self.name}{self.part and '-' + self.part}"

    # Stored state

    def plan(self, admin: Admin, *, is_stable: bool = True) -> PlanNote | None:
        """Return the note that names the run that writes the newest batch, or None.

        With `is_stable`, first wait for the end of an open transaction that may change the note. If the
        transaction's writer died, it ends at its timeout or when the next writer begins.
        """
        return PlanNote.decode(self.plan_id, self._kept(admin, self.plan_id, is_stable=is_stable))

    def begun(self, admin: Admin) -> BatchBegun | None:
        """Return the newest batch that was begun, or None."""
        return BatchBegun.decode(self.begun_id, self._kept(admin, self.begun_id))

    def finished(self, admin: Admin) -> BatchCommit | None:
        """Return the newest batch that is committed as a whole, or None."""
        found = BatchCommit.decode(self.finished_id, self._kept(admin, self.finished_id))
        if found is not None:
            return found
        try:
            return BatchCommit.decode(self.id_in_0_4_1, self._kept(admin, self.id_in_0_4_1))
        except SinkError:
            # The offset may be another sink's marker: in 0.4.1, task 1 of a sink "x" had the same group as a
            # sink "x-1".
            return None

    def has_ended(self, admin: Admin) -> bool:
        """Return True if a write without a name has ended. From then on, none of its tasks may write."""
        return BatchCommit.decode(self.finished_id, self._kept(admin, self.finished_id)) is not None

    def atomic_marker(self, admin: Admin) -> TaskMarker | None:
        """Return the marker of the last batch that `write_atomic` committed, or None.

        The caller must have fenced earlier attempts. Brokers with the classic group coordinator show a
        transaction's offsets only a moment after the transaction is complete, so this call waits for them.
        """
        return TaskMarker.decode(self.group, self._kept(admin, self.group, is_stable=True))

    def task_marker(self, admin: Admin, task: int, *, is_fenced: bool) -> TaskMarker | None:
        """Return the marker of the last batch that the task committed, or None.

        Set `is_fenced` if earlier attempts are fenced. Then the call waits for the offsets of complete
        transactions, as `atomic_marker` does. Otherwise an earlier attempt's transaction may be open, and the
        call does not wait for its end.
        """
        name = self.task_id(task)
        return TaskMarker.decode(name, self._kept(admin, name, is_stable=is_fenced))

    def tasks(self, admin: Admin, finished: BatchCommit | None) -> list[int]:
        """Return the numbers of the tasks whose marker or transactional id a broker still has.

        Brokers before Kafka 3.0 cannot list transactional ids. For them, return the tasks with a marker and
        those that `finished` counts.
        """
        names = {group.group_id for group in admin.list_groups()}
        try:
            names |= {listing.transactional_id for listing in admin.list_transactions()}
        except UnsupportedVersion:
            names |= {self.task_id(task) for task in range(finished.lanes if finished else 0)}
        return sorted(_numbers(names, f"{self.group}/"))

    def keep(self, admin: Admin, group: str, kept: OffsetAndMetadata, *, retention_ms: int = KEPT_MS) -> None:
        """Store a note of the driver as the offset of a group, without a transaction, for `retention_ms` ms.

        Offsets that a transaction commits expire, so a missing marker does not prove that nothing was
        written. Therefore this call uses version 4 of OffsetCommit, which can set the retention time. See
        test_an_offset_is_kept_as_long_as_its_commit_says.
        """
        admin.alter_group_offsets(group, {self.marker_at: kept}, retention_ms=retention_ms)

    def _kept(self, admin: Admin, group: str, *, is_stable: bool = False) -> OffsetAndMetadata | None:
        stable = [self.marker_at] if is_stable else None
        return admin.group_offsets(group, stable).get(self.marker_at)

    # Version 0.4.1

    def has_state_of_0_4_1(self, admin: Admin) -> bool:
        """Return True if version 0.4.1 may have written a batch of this sink, so that markers of that version
        may exist.
        """
        finished = self.finished(admin)
        if finished is not None:
            return finished.sum is None
        return bool(self.tasks_in_0_4_1(admin))

    def tasks_in_0_4_1(self, admin: Admin) -> list[int]:
        """Return the numbers of tasks that have a marker of version 0.4.1."""
        names = (group.group_id for group in admin.list_groups())
        return sorted(_numbers(names, f"{self.id_in_0_4_1}-"))

    def task_in_0_4_1(self, task: int) -> str:
        """Return the transactional id and group that a task had in version 0.4.1."""
        return f"{self.id_in_0_4_1}-{task}"

    def marker_in_0_4_1(self, admin: Admin, name: str) -> TaskMarker | None:
        """Return the marker that version 0.4.1 stored under a name, or None if there is none.

        A sink of another name may have used the same group. An offset that is not a marker is ignored.
        """
        try:
            return TaskMarker.decode(name, self._kept(admin, name))
        except SinkError:
            return None

    def is_transactional_id(self, admin: Admin, name: str) -> bool:
        """Return True if a coordinator has an entry for the transactional id.

        Brokers before Kafka 3.0 cannot list transactional ids; for them, return True.
        """
        with suppress(UnsupportedVersion):
            try:
                admin.describe_transactions([name])
            except TransactionalIdNotFound:
                return False
        return True


def forget_markers(sink: Sink, admin: Admin, tasks: Iterable[int]) -> None:
    """Delete the markers of a write that cannot be repeated, as far as the user's ACLs allow.

    Late copies of the write's tasks may still start or run. So a note that the write has ended is stored
    first. If a task finds no marker but this note, it writes nothing.
    """
    tasks = list(tasks)
    try:
        sink.keep(admin, sink.finished_id, BatchCommit(0, len(tasks)).encode(), retention_ms=_ENDED_KEPT_MS)
    except OncelogError:
        # Keep the markers until they expire: without the note and the marker, a late copy of a task would
        # write its rows again.
        return
    for task in tasks:
        try:
            # Wait for the end of the task's transaction: only then can the group be deleted.
            sink._kept(admin, sink.task_id(task), is_stable=True)
            admin.delete_group(sink.task_id(task))
        except OncelogError:
            # Ignore the error: the ACLs forbid the deletion, or the marker is missing. A marker that is not
            # deleted will expire.
            continue


def _numbers(names: Iterable[str], begin: str) -> Iterable[int]:
    rests = (name.removeprefix(begin) for name in names if name.startswith(begin))
    return (int(rest) for rest in rests if rest.isdecimal())
