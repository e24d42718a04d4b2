"""The judgements of the matrix: pure functions from a recording to a cell. The table is ROWS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from oncelog.testing.proxy import BatchSummary, Direction, Fate, WireEvent
from oncelog_devtools.client_matrix.recording import Recording, ReplyKind

MAX_REMEMBERED_BATCHES = 5
"""Batches of a producer that a broker remembers for each partition."""
FAULTS_END = "faults end"
FENCED = "another producer has the transactional id"
FIRST_ENDS = "the first transaction has ended"
TRANSACTION_2_PRODUCE, TRANSACTION_2_END = 12, 5
"""First versions of Produce and EndTxn that a client of KIP-890 part 2 uses."""
READ_COMMITTED = 1


class Verdict(StrEnum):
    """The text of a cell. UNCLEAR: the scenario ended before the behaviour could be seen."""

    YES = "yes"
    NO = "no"
    NOT_OFFERED = "not offered"
    UNCLEAR = "unclear"


class Cell(NamedTuple):
    """A verdict, and the observation that led to it."""

    verdict: Verdict
    seen: str


def yes_or_no(is_yes: bool, seen: str) -> Cell:
    """Return a cell with the verdict YES or NO."""
    return Cell(Verdict.YES if is_yes else Verdict.NO, seen)


# --- idempotence


def judge_default(recording: Recording) -> Cell:
    """Decide whether the client's batches have sequence numbers with its default settings."""
    batches = recording.batches()
    if not batches:
        return Cell(Verdict.UNCLEAR, "no batch was sent")
    acks = next(event.acks for event in recording.requests("Produce"))
    is_numbered = all(batch.producer_id is not None for batch in batches)
    seen = "batches have a producer id" if is_numbered else "batches have no producer id"
    return yes_or_no(is_numbered, f"{seen}; acks={acks}")


def judge_in_flight(recording: Recording) -> Cell:
    """Decide whether no more batches are in flight than a broker remembers, while a response is late."""
    most, requests = _max_in_flight(recording.events)
    if most == 0:
        return Cell(Verdict.UNCLEAR, "no batch was sent")
    seen = f"{_count(most, 'batch', 'batches')} of a partition and {_count(requests, 'request')} at most"
    return yes_or_no(most <= MAX_REMEMBERED_BATCHES, seen)


def _max_in_flight(events: Sequence[WireEvent]) -> tuple[int, int]:
    """Return the most batches of a partition, and the most requests, that one connection had in flight."""
    open_requests: dict[int, dict[int, WireEvent]] = {}
    most_batches = most_requests = 0
    for event in events:
        if event.api != "Produce":
            continue
        connection = open_requests.setdefault(event.connection, {})
        if event.direction is Direction.REQUEST and event.fate is not Fate.COPY:
            connection[event.correlation_id] = event
        elif event.direction is Direction.RESPONSE and event.fate not in (Fate.HELD, Fate.QUEUED):
            connection.pop(event.correlation_id, None)
        partitions = Counter(
            (batch.topic, batch.partition) for request in connection.values() for batch in request.batches
        )
        most_batches = max(most_batches, *partitions.values(), 0)
        most_requests = max(most_requests, len(connection))
    return most_batches, most_requests


def judge_lost_ack(recording: Recording) -> Cell:
    """Decide whether a batch whose acknowledgement was lost is sent again with the same sequence number."""
    lost = _batches_without_response(recording)
    if not lost:
        return Cell(Verdict.UNCLEAR, "no acknowledgement was lost")
    first_lost, lost_at = lost[0]
    again = [batch for batch in recording.batches(first=lost_at + 1) if _is_same_place(batch, first_lost)]
    if first_lost.producer_id is None:
        doubled = _doubled(recording.stored)
        seen = f"stored twice: {', '.join(doubled)}" if doubled else "batches have no producer id"
        return Cell(Verdict.NO, seen)
    same = [batch for batch in again if batch == first_lost]
    if not same:
        sent = _describe(again[0]) if again else "nothing"
        return Cell(Verdict.NO, f"{_describe(first_lost)} was lost, then {sent} was sent")
    fault = _stored_fault(recording)
    return yes_or_no(not fault, fault or f"{_describe(first_lost)} was sent again unchanged")


def _batches_without_response(recording: Recording) -> list[tuple[BatchSummary, int]]:
    """Return the batches whose acknowledgement a rule cut, each with the number of the event of the cut."""
    requests = {(event.connection, event.correlation_id): event for event in recording.requests("Produce")}
    return [
        (batch, event.number)
        for event in recording.events
        if event.direction is Direction.RESPONSE and event.api == "Produce" and event.fate is Fate.CUT
        for batch in requests[event.connection, event.correlation_id].batches
    ]


def judge_order(recording: Recording) -> Cell:
    """Decide whether every record is stored once and in order after a retriable error in the middle."""
    if not _forged(recording):
        return Cell(Verdict.UNCLEAR, "no request was refused")
    most, _ = _max_in_flight(recording.events)
    fault = _stored_fault(recording)
    seen = fault or "stored once and in order"
    return yes_or_no(not fault, f"{seen}; {_count(most, 'batch', 'batches')} in flight at most")


def _forged(recording: Recording) -> bool:
    return any(event.fate is Fate.FORGED for event in recording.events)


def _stored_fault(recording: Recording) -> str:
    """Return the first fault of the stored records as text; "" if each record is stored once, in order."""
    failed = {value: result for value, result in recording.results.items() if result != "ok"}
    if failed:
        value, result = next(iter(failed.items()))
        return f"{value} failed: {result}"
    return _lost_or_doubled(recording)


def _lost_or_doubled(recording: Recording) -> str:
    """Return the first fault of the acknowledged records in the topic as text; "" if there is none."""
    acknowledged = recording.acknowledged
    faults = {
        "stored twice": _doubled(recording.stored),
        "acknowledged but not stored": [value for value in acknowledged if value not in recording.stored],
    }
    if any(faults.values()):
        return "; ".join(f"{fault}: {', '.join(values)}" for fault, values in faults.items() if values)
    kept = [value for value in recording.stored if value in set(acknowledged)]
    return "" if kept == acknowledged else f"stored in the order {', '.join(recording.stored)}"


def _doubled(stored: Iterable[str]) -> list[str]:
    return [value for value, count in Counter(stored).items() if count > 1]


def judge_unknown_state(recording: Recording) -> Cell:
    """Decide whether no later record gets the sequence number of a batch that may be stored.

    The acknowledgements of one batch are lost until the client gives it up. The batch is stored.
    """
    boundary = recording.note_number(FAULTS_END)
    lost = [batch for batch, _ in _batches_without_response(recording)]
    if not lost:
        return Cell(Verdict.UNCLEAR, "no acknowledgement was lost")
    if lost[-1].producer_id is None:
        return Cell(Verdict.NO, "batches have no producer id")
    if fault := _lost_or_doubled(recording):
        return Cell(Verdict.NO, fault)
    later = [batch for batch in recording.batches(first=boundary) if _is_same_place(batch, lost[-1])]
    if recording.replies["lost"].results.get("lost") == "pending":
        return Cell(Verdict.YES, "the client does not give up a batch that may be stored")
    if not later:
        error = next(iter(recording.replies["later"].results.values()), "")
        return Cell(Verdict.YES, f"the producer ends with a fatal error: {_short(error)}")
    return _judge_numbering(lost[-1], later)


def _judge_numbering(lost: BatchSummary, later: Sequence[BatchSummary]) -> Cell:
    producer = lost.producer_id, lost.producer_epoch
    for batch in later:
        if (batch.producer_id, batch.producer_epoch) == producer and batch != lost:
            if _base(batch) <= _last(lost):
                return Cell(Verdict.NO, f"{_describe(lost)} was lost, then {_describe(batch)} was new")
            return Cell(Verdict.YES, f"the sequence continues: {_describe(lost)}, then {_describe(batch)}")
        if (batch.producer_id, batch.producer_epoch) != producer:
            kind = "epoch" if batch.producer_id == lost.producer_id else "producer id"
            return Cell(Verdict.YES, f"a new {kind}: {_describe(lost)}, then {_describe(batch)}")
    return Cell(Verdict.YES, "the batch was sent again unchanged after it was given up")


def judge_recovery(recording: Recording) -> Cell:
    """Decide whether the producer continues by itself after the broker seems to have lost its state."""
    if not _forged(recording):
        return Cell(Verdict.UNCLEAR, "no request was refused")
    fault = _stored_fault(recording)
    numbers = [(batch.producer_id, batch.producer_epoch) for batch in recording.batches()]
    if not fault:
        is_same = len(set(numbers)) == 1
        how = "sent again under the same number" if is_same else f"{_step(numbers)}, then sent again"
        return Cell(Verdict.YES, how)
    results = recording.replies["later"].results.values()
    continues = any(result == "ok" for result in results)
    return Cell(Verdict.NO, f"{fault}; later records {'are sent' if continues else 'fail, too'}")


def _step(numbers: Sequence[tuple[int | None, int | None]]) -> str:
    (first_id, first_epoch), (last_id, last_epoch) = numbers[0], numbers[-1]
    return f"epoch {first_epoch} to {last_epoch}" if first_id == last_id else "a new producer id"


# --- transactions


def judge_partitions_added(recording: Recording) -> Cell:
    """Decide whether each partition belongs to the transaction before its first batch is stored."""
    if fault := _failed_reply(recording):
        return Cell(Verdict.UNCLEAR, fault)
    coordinator = [
        event
        for event in recording.requests("FindCoordinator")
        if event.txn and event.txn.is_transaction_coordinator
    ]
    added: set[tuple[str, int]] = set()
    for event in recording.events:
        is_added = (
            event.direction is Direction.RESPONSE and not event.txn_error_code and event.txn is not None
        )
        if event.api == "AddPartitionsToTxn" and is_added and event.txn is not None:
            added.update(event.txn.partitions)
        if event.api == "EndTxn" and event.direction is Direction.REQUEST:
            added.clear()
        if event.api == "Produce" and event.api_version < TRANSACTION_2_PRODUCE:
            early = [batch for batch in event.batches if (batch.topic, batch.partition) not in added]
            if early:
                return Cell(Verdict.NO, f"a batch for partition {early[0].partition} came first")
    how = "AddPartitionsToTxn" if any(recording.requests("AddPartitionsToTxn")) else "Produce"
    return yes_or_no(bool(coordinator), f"FindCoordinator, then {how} adds them")


def judge_transaction_v2(recording: Recording) -> Cell:
    """Decide whether the client uses transactions of KIP-890 part 2 on a broker that offers them."""
    versions = {
        api: max((event.api_version for event in recording.requests(api)), default=None)
        for api in ("Produce", "AddPartitionsToTxn", "EndTxn")
    }
    if fault := _failed_reply(recording):
        return Cell(Verdict.UNCLEAR, fault)
    boundary = recording.note_number(FIRST_ENDS)
    first, second = recording.batches(end=boundary), recording.batches(first=boundary)
    if not first or not second:
        return Cell(Verdict.UNCLEAR, "no batches in two transactions")
    is_bumped = _number(second[0]) != _number(first[0])
    is_new = (versions["Produce"] or 0) >= TRANSACTION_2_PRODUCE and (
        versions["EndTxn"] or 0
    ) >= TRANSACTION_2_END
    used = ", ".join(f"{api} {version}" for api, version in versions.items() if version is not None)
    epochs = f"epoch {first[0].producer_epoch}, then {second[0].producer_epoch}"
    return yes_or_no(is_new and is_bumped and versions["AddPartitionsToTxn"] is None, f"{used}; {epochs}")


def judge_group_metadata(recording: Recording) -> Cell:
    """Decide whether offsets in a transaction carry the member and its generation (KIP-447)."""
    commits = [event.member for event in recording.requests("TxnOffsetCommit") if event.member]
    if not commits:
        return Cell(Verdict.UNCLEAR, _failed_reply(recording) or "no TxnOffsetCommit was sent")
    is_named = all(member.member_id and member.generation is not None for member in commits)
    version = max(event.api_version for event in recording.requests("TxnOffsetCommit"))
    seen = "member id and generation" if is_named else "no member id or no generation"
    return yes_or_no(is_named, f"{seen} in TxnOffsetCommit {version}")


def judge_fenced(recording: Recording) -> Cell:
    """Decide whether a fenced producer stays fenced, and does not take the transactional id back."""
    boundary = recording.note_number(FENCED)
    commit, again = recording.replies["commit"], recording.replies["again"]
    retaken = [event for event in recording.requests("InitProducerId") if event.number > boundary]
    if commit.kind is ReplyKind.OK:
        return Cell(Verdict.NO, "the commit of the fenced producer returned")
    if retaken:
        return Cell(Verdict.NO, f"after {_short(commit.text)}, the producer sent InitProducerId again")
    if again.kind is ReplyKind.OK:
        return Cell(Verdict.NO, f"after {_short(commit.text)}, a further transaction was committed")
    return Cell(Verdict.YES, f"commit: {_short(commit.text)}; then: {_short(again.text)}")


def judge_lost_end(recording: Recording) -> Cell:
    """Decide whether a commit whose response was lost is repeated, and takes effect once."""
    ends = [event.txn for event in recording.requests("EndTxn") if event.txn]
    cut = [event for event in recording.events if event.api == "EndTxn" and event.fate is Fate.CUT]
    if not cut:
        return Cell(Verdict.UNCLEAR, _failed_reply(recording) or "no response to EndTxn was lost")
    reply = recording.replies["commit"]
    same = [end for end in ends[1:] if end == ends[0]]
    if reply.kind is not ReplyKind.OK:
        return Cell(Verdict.NO, f"EndTxn was sent {_count(len(ends), 'time')}; commit: {reply.text}")
    if not same:
        return Cell(Verdict.NO, "commit returned, and EndTxn was not sent again unchanged")
    fault = _lost_or_doubled(recording)
    return yes_or_no(not fault, fault or f"EndTxn was sent {_count(len(ends), 'time')}; commit returned")


def _failed_reply(recording: Recording) -> str:
    failed = (
        f"{label}: {reply.text}"
        for label, reply in recording.replies.items()
        if reply.kind is ReplyKind.ERROR
    )
    return next(failed, "")


# --- consumers


def judge_read_committed(recording: Recording) -> Cell:
    """Decide whether a read_committed consumer hides the records of an aborted transaction."""
    levels = {event.isolation_level for event in recording.requests("Fetch")}
    reply = recording.replies["read"]
    if reply.kind is not ReplyKind.RECORDS or not levels:
        return Cell(Verdict.UNCLEAR, reply.text or "nothing was fetched")
    seen = (
        f"read {', '.join(reply.fields)}; isolation_level={READ_COMMITTED if READ_COMMITTED in levels else 0}"
    )
    return yes_or_no(levels == {READ_COMMITTED} and reply.fields == recording.stored, seen)


def judge_consumer_protocol(recording: Recording) -> Cell:
    """Decide whether the consumer joins its group by ConsumerGroupHeartbeat (KIP-848), and reads."""
    reply = recording.replies["read"]
    if reply.kind is not ReplyKind.RECORDS:
        return Cell(Verdict.UNCLEAR, reply.text)
    heartbeats = list(recording.requests("ConsumerGroupHeartbeat"))
    if not heartbeats:
        return Cell(Verdict.NO, "the group was joined by JoinGroup")
    version = max(event.api_version for event in heartbeats)
    return yes_or_no(
        reply.fields == recording.stored,
        f"ConsumerGroupHeartbeat {version}; read {', '.join(reply.fields)}",
    )


def judge_static_member(recording: Recording) -> Cell:
    """Decide whether a static member names its instance id and does not leave the group when it closes."""
    reply = recording.replies["read"]
    if reply.kind is not ReplyKind.RECORDS:
        return Cell(Verdict.UNCLEAR, reply.text)
    joins = [event.member for event in recording.requests("JoinGroup") if event.member]
    if not joins:
        return Cell(Verdict.UNCLEAR, "no JoinGroup was sent")
    if any(member.instance_id is None for member in joins):
        return Cell(Verdict.NO, "JoinGroup has no group.instance.id")
    has_left = any(recording.requests("LeaveGroup"))
    left = "LeaveGroup was sent at the close" if has_left else "no LeaveGroup at the close"
    return yes_or_no(not has_left, f"JoinGroup has the group.instance.id; {left}")


# --- words


def _is_same_place(batch: BatchSummary, other: BatchSummary) -> bool:
    return (batch.topic, batch.partition) == (other.topic, other.partition)


def _number(batch: BatchSummary) -> tuple[int | None, int | None]:
    return batch.producer_id, batch.producer_epoch


def _base(batch: BatchSummary) -> int:
    return -1 if batch.base_sequence is None else batch.base_sequence


def _last(batch: BatchSummary) -> int:
    return -1 if batch.last_sequence is None else batch.last_sequence


def _describe(batch: BatchSummary) -> str:
    return f"epoch {batch.producer_epoch} sequence {batch.base_sequence}"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


class Row(NamedTuple):
    """A row of the matrix. Rows with the same scenario are judged from one recording."""

    key: str
    title: str
    scenario: str
    judge: Callable[[Recording], Cell]


ROWS = (
    Row("default", "idempotent by default", "default", judge_default),
    Row("in-flight", "at most 5 batches of a partition in flight", "in_flight", judge_in_flight),
    Row("lost-ack", "same number after a lost acknowledgement", "lost_ack", judge_lost_ack),
    Row("order", "order kept after a retriable error", "order", judge_order),
    Row("unknown-state", "no new number for what may be stored", "unknown_state", judge_unknown_state),
    Row("unknown-producer", "recovers from UNKNOWN_PRODUCER_ID", "unknown_producer", judge_recovery),
    Row("out-of-order", "recovers from OUT_OF_ORDER_SEQUENCE_NUMBER", "out_of_order", judge_recovery),
    Row("partitions-added", "partitions join before their batches", "transactions", judge_partitions_added),
    Row("transaction-v2", "transactions of KIP-890 part 2", "transactions", judge_transaction_v2),
    Row("group-metadata", "group metadata with offsets (KIP-447)", "group_metadata", judge_group_metadata),
    Row("fenced", "a fenced producer stays ended", "fenced", judge_fenced),
    Row("lost-end", "a lost EndTxn response is repeated", "lost_end", judge_lost_end),
    Row("read-committed", "read_committed hides aborted records", "read_committed", judge_read_committed),
    Row("kip-848", "KIP-848 consumer groups", "consumer_protocol", judge_consumer_protocol),
    Row("static-member", "static membership (KIP-345)", "static_member", judge_static_member),
)
