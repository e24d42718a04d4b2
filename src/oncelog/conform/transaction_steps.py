"""Steps of scenarios about transactions.

Each producer has a name. `$A` is the id of producer A, `$A_epoch` its epoch, `$A_txn` its transactional id.

    init A -> 0                        InitProducerId with a new transactional id: the epoch, or an error
    init B like=A -> 1                 the same with A's transactional id; pid=$A epoch=$A_epoch: with both
    add A T/0 T/1 -> NONE              AddPartitionsToTxn: each different error, sorted
    add_offsets A G -> NONE            AddOffsetsToTxn for the group $G; the first use chooses its id
    commit_offsets A G T/0=5 -> NONE   TxnOffsetCommit; generation=, member=, metadata=
    end A commit -> NONE               EndTxn, or `end A abort`; version 5 sets $A and $A_epoch
    write T/0 a b by=A seq=0 -> 0      Produce of a transactional batch; acks, epoch, pid as in `produce`
    read T/0 -> a <commit> b           Fetch: values and markers; flag `committed`: as read_committed sees
    offsets G T/0 -> 5                 OffsetFetch, or `none`; flag `stable` sets require_stable
    end_offset T/0 -> 3                ListOffsets latest; flag `committed`: the last stable offset
    state A -> Ongoing                 DescribeTransactions
    open T/0 by=A -> 0                 DescribeProducers: first offset of the open transaction

`open` yields -1 if the producer has no open transaction, and `none` if the partition does not know it.

A header `Versions:` sets the version of one API. Other APIs use the classic protocol (Produce 11, EndTxn 4,
TxnOffsetCommit 4). With the header `Transactions: epoch` they use the versions of KIP-890 (12, 5, 5), whose
EndTxn raises the producer epoch.

A request is repeated after a transient error (CONCURRENT_TRANSACTIONS, COORDINATOR_...), unless the step
expects that error. A read is repeated until its result is as expected. Both end at the scenario's time limit.
"""

from __future__ import annotations

from typing import Any

from oncelog.conform.context import Context, Verbs
from oncelog.conform.values import ERROR_NAMES, Tagged, resolve, split_batches
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation
from oncelog.wire.batch import read_header
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.records import decode_records

TIMEOUT_MS = 60_000


class TransactionSteps:
    """Requests of transactional producers, and reads that show their effect."""

    def __init__(self, context: Context) -> None:
        self._context, self._variables = context, context.variables
        self.verbs: Verbs = {
            "init": self._init,
            "add": self._add,
            "add_offsets": self._add_offsets,
            "commit_offsets": self._commit_offsets,
            "end": self._end,
            "write": self._write,
            "read": self._read,
            "offsets": self._offsets,
            "end_offset": self._end_offset,
            "state": self._state,
            "open": self._open,
        }

    def _init(self, name: str, *words: str) -> None:
        self._context.find_coordinators()
        options, expected = self._context.split(words)
        like = options.pop("like", None)
        if like:
            transactional_id = self._variables[f"{like}_txn"]
        elif "id" in options:
            text = resolve(options.pop("id"), self._variables)
            transactional_id = self._context.transactional_id(text)
        elif f"{name}_txn" in self._variables:
            transactional_id = self._variables[f"{name}_txn"]
        else:
            transactional_id = self._context.transactional_id(f"{self._variables['free']}-txn-{name}")

        def call() -> tuple[str, Any]:
            response = self._context.call(
                "InitProducerId",
                transactional_id=transactional_id,
                transaction_timeout_ms=options.get("timeout", TIMEOUT_MS),
                producer_id=options.get("pid", -1),
                producer_epoch=options.get("epoch", -1),
            )
            error = ERROR_NAMES[response.error_code]
            return (str(response.producer_epoch) if error == "NONE" else error), response

        response = self._context.call_until(expected, call)
        self._variables[f"{name}_txn"] = transactional_id
        if not response.error_code:
            self._variables[name] = response.producer_id
            self._variables[f"{name}_epoch"] = response.producer_epoch

    def _add(self, name: str, *words: str) -> None:
        options, expected = self._context.split(words)
        partitions = options.pop("values", [])
        topics = [
            {"name": topic, "partitions": [index]}
            for topic, _, index in (self._context.partition(text) for text in partitions)
        ]
        producer = {f"v3_and_below_{key}": value for key, value in _producer_fields(name, options).items()}

        def call() -> tuple[str, Any]:
            response = self._context.call("AddPartitionsToTxn", **producer, v3_and_below_topics=topics)
            rows = [
                row for topic in response.results_by_topic_v3_and_below for row in topic.results_by_partition
            ]
            codes = [ERROR_NAMES[row.partition_error_code] for row in rows]
            return " ".join(sorted(set(codes))), response

        self._context.call_until(expected, call)

    def _add_offsets(self, name: str, group: str, *words: str) -> None:
        options, expected = self._context.split(words)
        producer = _producer_fields(name, options)

        def call() -> tuple[str, Any]:
            response = self._context.call(
                "AddOffsetsToTxn", **producer, group_id=self._context.group_id(group)
            )
            return ERROR_NAMES[response.error_code], response

        self._context.call_until(expected, call)

    def _commit_offsets(self, name: str, group: str, *words: str) -> None:
        options, expected = self._context.split(words)
        body = {
            **_producer_fields(name, options),
            "group_id": self._context.group_id(group),
            "generation_id": options.get("generation", -1),
            "member_id": options.get("member", ""),
            "group_instance_id": options.get("instance"),
            "topics": self._context.offsets_to_commit(options),
        }

        def call() -> tuple[str, Any]:
            response = self._context.call("TxnOffsetCommit", **body)
            codes = [ERROR_NAMES[part.error_code] for topic in response.topics for part in topic.partitions]
            return " ".join(sorted(set(codes))), response

        self._context.call_until(expected, call)

    def _end(self, name: str, outcome: str, *words: str) -> None:
        is_commit = {"commit": True, "abort": False}[outcome]
        options, expected = self._context.split(words)
        producer = _producer_fields(name, options)

        def call() -> tuple[str, Any]:
            response = self._context.call("EndTxn", **producer, committed=is_commit)
            return ERROR_NAMES[response.error_code], response

        response = self._context.call_until(expected, call)
        if not response.error_code and response.producer_id >= 0:
            self._variables[name] = response.producer_id
            self._variables[f"{name}_epoch"] = response.producer_epoch

    def _write(self, partition: str, *words: str) -> None:
        options, expected = self._context.split(words)
        options.setdefault("values", [])
        options.setdefault("transactional", True)
        name = options.pop("by")
        options.setdefault("pid", self._variables[name])
        options.setdefault("epoch", self._variables.get(f"{name}_epoch"))
        transactional_id = options.pop("id", self._variables.get(f"{name}_txn"))
        topic, topic_id, index = self._context.partition(partition)
        batch = resolve(Tagged("batch", options), self._variables)
        data = {"name": topic, "topic_id": topic_id, "partition_data": [{"index": index, "records": batch}]}

        def call() -> tuple[str, Any]:
            response = self._context.call(
                "Produce", transactional_id=transactional_id, acks=-1, timeout_ms=10_000, topic_data=[data]
            )
            result = response.responses[0].partition_responses[0]
            error = ERROR_NAMES[result.error_code]
            return (str(result.base_offset) if error == "NONE" else error), response

        self._context.call_until(expected, call)

    def _read(self, partition: str, *words: str) -> None:
        options, expected = self._context.split(words)
        is_committed = "committed" in options.pop("values", [])
        topic, topic_id, index = self._context.partition(partition)
        part = {"partition": index, "fetch_offset": options.pop("from", 0), "partition_max_bytes": 1 << 20}
        data = {"topic": topic, "topic_id": topic_id, "partitions": [part]}

        def call() -> tuple[str, Any]:
            response = self._context.call("Fetch", isolation_level=int(is_committed), topics=[data])
            result = response.responses[0].partitions[0]
            if result.error_code:
                return ERROR_NAMES[result.error_code], response
            return " ".join(_visible_values(result, is_committed)), response

        self._context.call_until(expected, call, is_read=True)

    def _offsets(self, group: str, *words: str) -> None:
        options, expected = self._context.split(words)
        partition, *flags = options.pop("values")
        topic, _, index = self._context.partition(partition)
        self._context.require("OffsetFetch", 8)  # since version 8, OffsetFetch has a list of groups
        topics = [{"name": topic, "partition_indexes": [index]}]
        request = {"group_id": self._context.group_id(group), "topics": topics}

        def call() -> tuple[str, Any]:
            response = self._context.call("OffsetFetch", groups=[request], require_stable="stable" in flags)
            if response.groups[0].error_code:
                return ERROR_NAMES[response.groups[0].error_code], response
            part = response.groups[0].topics[0].partitions[0]
            if part.error_code:
                return ERROR_NAMES[part.error_code], response
            return ("none" if part.committed_offset < 0 else str(part.committed_offset)), response

        self._context.call_until(expected, call, is_read=True)

    def _end_offset(self, partition: str, *words: str) -> None:
        options, expected = self._context.split(words)
        is_committed = "committed" in options.pop("values", [])
        topic, _, index = self._context.partition(partition)
        request = {"name": topic, "partitions": [{"partition_index": index, "timestamp": -1}]}

        def call() -> tuple[str, Any]:
            response = self._context.call(
                "ListOffsets", replica_id=-1, isolation_level=int(is_committed), topics=[request]
            )
            part = response.topics[0].partitions[0]
            return (ERROR_NAMES[part.error_code] if part.error_code else str(part.offset)), response

        self._context.call_until(expected, call, is_read=True)

    def _state(self, name: str, *words: str) -> None:
        _, expected = self._context.split(words)

        def call() -> tuple[str, Any]:
            response = self._context.call("DescribeTransactions", transactional_ids=[f"${name}_txn"])
            (described,) = response.transaction_states
            error = ERROR_NAMES[described.error_code]
            return (described.transaction_state if error == "NONE" else error), response

        self._context.call_until(expected, call, is_read=True)

    def _open(self, partition: str, *words: str) -> None:
        options, expected = self._context.split(words)
        producer_id = self._variables[options["by"]]
        topic, _, index = self._context.partition(partition)
        topics = [{"name": topic, "partition_indexes": [index]}]

        def call() -> tuple[str, Any]:
            response = self._context.call("DescribeProducers", topics=topics)
            producers = response.topics[0].partitions[0].active_producers
            offsets = [row.current_txn_start_offset for row in producers if row.producer_id == producer_id]
            return str(offsets[0] if offsets else "none"), response

        self._context.call_until(expected, call, is_read=True)


def _producer_fields(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "transactional_id": options.pop("id", f"${name}_txn"),
        "producer_id": options.pop("pid", f"${name}"),
        "producer_epoch": options.pop("epoch", f"${name}_epoch"),
    }


def _visible_values(result: Any, is_committed: bool) -> list[str]:
    """Return the values that a consumer would deliver; without `is_committed` (read_uncommitted) also the
    markers.

    Markers are returned as `<commit>` and `<abort>`.
    """
    isolation = Isolation.READ_COMMITTED if is_committed else Isolation.READ_UNCOMMITTED
    aborted = [(row.producer_id, row.first_offset) for row in result.aborted_transactions or ()]
    visible = VisibilityFilter(isolation, aborted)
    values: list[str] = []
    for batch in split_batches(result.records):
        header = read_header(batch)
        control = decode_control(batch) if header.is_control else None
        kind = control.type if control else None
        verdict = visible.decide(header, is_abort_marker=kind is ControlType.ABORT)
        if verdict is Verdict.DELIVER:
            values += [(record.value or b"").decode() for record in decode_records(batch)]
        elif verdict is Verdict.MARKER and kind is not None and not is_committed:
            values.append(f"<{kind.name.lower()}>")
    return values
