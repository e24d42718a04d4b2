"""One sink's names on the cluster, and what is kept under them.

Everything is a consumer group's offset for one partition of the marker topic, with the batch id as offset:

    PREFIX-NAME/3         marker of lane 3, in the transaction of its rows; also its transactional id
    PREFIX-NAME/plan      which run writes the newest batch; also a transactional id
    PREFIX-NAME/begun     the newest batch that was begun
    PREFIX-NAME/finished  the newest batch that is committed whole

No name holds a slash (it is escaped), so no two sinks share a group. Offsets that are committed in a
transaction expire after offsets.retention.minutes; `begun` and `finished` say how long they are kept.
Version 0.4.1 used PREFIX-NAME and PREFIX-NAME-3, which are still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from oncelog.client.admin.blocking import Admin
from oncelog.errors import OncelogError, TransactionalIdNotFound, UnsupportedVersion
from oncelog.runtime.system import current
from oncelog.spark.sink.decisions import BatchBegun, Finished, LaneMarker, PlanNote, SinkError
from oncelog.spark.sink.sink_options import SinkSettings
from oncelog.types import OffsetAndMetadata, TopicPartition

KEPT_MS = 50 * 365 * 24 * 3_600_000
"""How long `begun` and `finished` are kept: 50 years."""
_ENDED_KEPT_MS = 24 * 3_600_000
"""How long a write without a name is known to have ended: longer than its last task can go on alone."""


def new_run_id() -> str:
    """Return an id for one attempt of the driver to write a batch."""
    return current().new_uuid().hex()[:12]


@dataclass(frozen=True, slots=True)
class Sink:
    """One sink (a streaming query, or a batch write) and where its markers are kept.

    `part`: of a name that has several. `run_id`: of one attempt of the driver to write a batch, which its
    tasks share. `is_named`: False when nobody can ask for the name again, so that nothing need be kept.
    """

    name: str
    settings: SinkSettings
    part: str = ""
    run_id: str = field(default_factory=new_run_id)
    is_named: bool = True

    @property
    def marker_at(self) -> TopicPartition:
        """Offsets need a partition that exists; this one does not move, whatever the rows are."""
        return TopicPartition(self.settings.marker_topic, 0)

    @property
    def group(self) -> str:
        """What all names of the sink begin with."""
        escaped = self.name.replace("%", "%25").replace("/", "%2F")
        return f"{self.settings.prefix}-{escaped}{self.part and '/' + self.part}"

    @property
    def plan_id(self) -> str:
        """Transactional id, and group, of the note which run writes a batch."""
        return f"{self.group}/plan"

    @property
    def begun_id(self) -> str:
        """Group of the note which batch was begun."""
        return f"{self.group}/begun"

    @property
    def finished_id(self) -> str:
        """Group of the note which batch is committed whole."""
        return f"{self.group}/finished"

    def lane_id(self, lane: int) -> str:
        """Transactional id of the lane, and the group that keeps its marker."""
        return f"{self.group}/{lane}"

    @property
    def id_in_0_4_1(self) -> str:
        """What was called so by version 0.4.1 and older; another sink may have it now as well."""
        return f"{self.settings.prefix}-{self.name}{self.part and '-' + self.part}"

    # What is kept

    def plan(self, admin: Admin, *, is_stable: bool = True) -> PlanNote | None:
        """Return the run that writes the newest batch, after transactions that may change it.

        Not `is_stable`: at once. The transaction of a writer that died ends with its timeout, or with the
        next writer.
        """
        return PlanNote.decode(self.plan_id, self._kept(admin, self.plan_id, is_stable=is_stable))

    def begun(self, admin: Admin) -> BatchBegun | None:
        """Return the newest batch that was begun."""
        return BatchBegun.decode(self.begun_id, self._kept(admin, self.begun_id))

    def finished(self, admin: Admin) -> Finished | None:
        """Return the newest batch that is committed whole."""
        found = Finished.decode(self.finished_id, self._kept(admin, self.finished_id))
        if found is not None:
            return found
        try:
            return Finished.decode(self.id_in_0_4_1, self._kept(admin, self.id_in_0_4_1))
        except SinkError:
            return None  # of a sink called "x", lane 1 was called as a sink "x-1" is

    def has_ended(self, admin: Admin) -> bool:
        """Return True for a write without a name that is over, so that none of its tasks may write."""
        return Finished.decode(self.finished_id, self._kept(admin, self.finished_id)) is not None

    def marker(self, admin: Admin) -> LaneMarker | None:
        """Return the last batch that was committed as one transaction (`write_atomic`).

        To be asked for once earlier attempts are fenced. Brokers with the classic coordinator show offsets
        a moment after their transaction is complete, so the answer waits for them.
        """
        return LaneMarker.decode(self.group, self._kept(admin, self.group, is_stable=True))

    def lane_marker(self, admin: Admin, lane: int, *, is_fenced: bool) -> LaneMarker | None:
        """Return the last batch the lane committed.

        `is_fenced`: earlier attempts can no longer write, so wait for offsets of complete transactions, as in
        `marker`. Otherwise a transaction may be open, and waiting for its end would be in vain.
        """
        name = self.lane_id(lane)
        return LaneMarker.decode(name, self._kept(admin, name, is_stable=is_fenced))

    def lanes(self, admin: Admin, finished: Finished | None) -> list[int]:
        """Return all lanes that ever began a transaction and are not forgotten; asks every broker.

        Brokers before Kafka 3.0 list no transactional ids: there, lanes with a marker and of `finished`.
        """
        names = {each.group_id for each in admin.list_groups()}
        try:
            names |= {each.transactional_id for each in admin.list_transactions()}
        except UnsupportedVersion:
            names |= {self.lane_id(lane) for lane in range(finished.lanes if finished else 0)}
        return sorted(_numbers(names, f"{self.group}/"))

    def keep(self, admin: Admin, group: str, kept: OffsetAndMetadata, *, retention_ms: int = KEPT_MS) -> None:
        """Note it for years, in one of the groups that are not written in transactions."""
        admin.alter_group_offsets(group, {self.marker_at: kept}, retention_ms=retention_ms)

    def _kept(self, admin: Admin, group: str, *, is_stable: bool = False) -> OffsetAndMetadata | None:
        stable = [self.marker_at] if is_stable else None
        return admin.group_offsets(group, stable).get(self.marker_at)

    # Version 0.4.1

    def has_state_of_0_4_1(self, admin: Admin) -> bool:
        """Return True when the older version may have written a batch, so that lanes of it may be there."""
        finished = self.finished(admin)
        if finished is not None:
            return finished.sum is None
        return bool(self.lanes_in_0_4_1(admin))

    def lanes_in_0_4_1(self, admin: Admin) -> list[int]:
        """Return the lanes that have a marker of the older version."""
        names = (each.group_id for each in admin.list_groups())
        return sorted(_numbers(names, f"{self.id_in_0_4_1}-"))

    def lane_in_0_4_1(self, lane: int) -> str:
        """Return the older version's name of a lane."""
        return f"{self.id_in_0_4_1}-{lane}"

    def marker_in_0_4_1(self, admin: Admin, name: str) -> LaneMarker | None:
        """Return the marker that the older version left under a name, if it is one."""
        try:
            return LaneMarker.decode(name, self._kept(admin, name))
        except SinkError:
            return None

    def is_transactional_id(self, admin: Admin, name: str) -> bool:
        """Return True when a coordinator knows the transactional id, or cannot say (before Kafka 3.0)."""
        with suppress(UnsupportedVersion):
            try:
                admin.describe_transactions([name])
            except TransactionalIdNotFound:
                return False
        return True


def forget_markers(sink: Sink, admin: Admin, lanes: Iterable[int]) -> None:
    """Delete the markers of a write that nobody can ask for again, as far as the user may.

    Copies of its tasks may still begin, or go on. So it is noted first that the write has ended: who finds no
    marker looks for that note.
    """
    known = list(lanes)
    try:
        sink.keep(admin, sink.finished_id, Finished(0, len(known)).encode(), retention_ms=_ENDED_KEPT_MS)
    except OncelogError:
        return  # the markers stay, and expire; what was written is written
    for lane in known:
        try:
            sink._kept(admin, sink.lane_id(lane), is_stable=True)  # once its transaction is complete
            admin.delete_group(sink.lane_id(lane))
        except OncelogError:
            continue  # not allowed, or not there: it expires


def _numbers(names: Iterable[str], begin: str) -> Iterable[int]:
    rests = (name.removeprefix(begin) for name in names if name.startswith(begin))
    return (int(rest) for rest in rests if rest.isdecimal())
