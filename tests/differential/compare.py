"""Convert responses to a comparable form, and find the first difference between two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.broker import split_batches

from differential.references import AGE_MS
from differential.sequence import Rule, Sequence, Step
from oncelog.conform.values import ERROR_NAMES
from oncelog.errors import OncelogError
from oncelog.wire.batch import read_header
from oncelog.wire.control import decode_control
from oncelog.wire.message import Part
from oncelog.wire.messages import NO_ID
from oncelog.wire.records import decode_records

CLOSED, NO_ANSWER, NO_RESPONSE, DONE = (
    "connection closed",
    "no answer in time",
    "no response (acks=0)",
    "done",
)

ASSIGNED = {
    "producer_id": "producer",
    "session_id": "session",
    "member_id": "member",
    "leader": "member",
}
"""The fields whose values a broker assigns, each with the kind of its value. Values of one kind share their
symbols.
"""
NOT_COMPARED = {
    "throttle_time_ms",
    "error_message",
    "batch_index_error_message",
    "log_append_time_ms",
    "node_endpoints",
    "current_leader",
    "host",
    "port",
    "node_id",
    "controller_id",
    "cluster_id",
    "leader_id",
    "replica_nodes",
    "isr_nodes",
    "log_dir",
    "documentation",
    "total_bytes",
    "usable_bytes",
    "client_host",
}
"""Fields that are not compared: timestamps, texts, and addresses of nodes."""
IDENTIFYING = (
    "name", "topic", "topic_id", "partition_index", "index", "partition", "transactional_id", "group_id",
    "member_id", "group_instance_id", "producer_id", "resource_type", "resource_name", "pattern_type",
    "principal", "operation", "user", "key", "entity_type", "entity_name", "source",
)  # fmt: skip
"""Fields that identify the elements of a list."""
ONLY_THE_SIGN = {"transaction_start_time_ms", "last_timestamp", "offset_metadata_timestamp"}
"""Names of timestamps of which only the presence is compared."""


MARKERS_TIME = "the broker's time"


class Symbols:
    """Puts symbols in place of the values that one broker assigns.

    Symbols are numbered in the order in which the run received the values, so both brokers get the same ones.
    """

    def __init__(self, prefix: str, topic_ids: dict[str, bytes], now_ms: int) -> None:
        self.prefix = prefix
        self._youngest_ms = now_ms + AGE_MS // 2
        self._topics = {value: f"id of {text}" for text, value in topic_ids.items()}
        self._known: dict[tuple[str, Any], str] = {}
        self._counts: dict[str, int] = {}

    def bind(self, variable: str, value: Any) -> None:
        """Record that a member id or topic id belongs to a variable. If several variables have it, the first
        one counts.
        """
        owner, _, what = variable.partition(".")
        if what == "member":
            self._known.setdefault(("member", value), f"member {owner}")
        elif what == "id":
            self._topics.setdefault(value, f"id of {owner}")

    def of(self, kind: str, value: Any) -> Any:
        """Return the symbol of a value. The values -1, 0, None and the empty text mean "no value", and are
        returned unchanged.
        """
        if value in (-1, 0, "", None):
            return value
        if kind == "member" and (kind, value) not in self._known:
            # Symbols numbered by arrival would depend on the order of the member ids, which is random.
            return value.replace(self.prefix, "~") if self.prefix in value else "an unbound member"
        if (kind, value) not in self._known:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            self._known[kind, value] = f"{kind} {number}"
        return self._known[kind, value]

    def plain(self, value: Any, version: int, field: str = "") -> Any:
        """Return the value as JSON. Assigned values are replaced by symbols, and lists are sorted."""
        if isinstance(value, Part):
            text, topic_id = getattr(value, "name", None), getattr(value, "topic_id", NO_ID)
            # Ignore rejected rows: they may combine the name of one topic with the id of another.
            if text and topic_id != NO_ID and not getattr(value, "error_code", 0):
                self._topics.setdefault(topic_id, f"id of {text.replace(self.prefix, '~')}")
            fields = [f.name for f in value._struct.fields if f.is_in(version) and f.name not in NOT_COMPARED]
            plain = {name: self.plain(getattr(value, name), version, name) for name in fields}
            if type(value).__name__ == "PartitionProduceResponse" and value.error_code:
                plain.pop(
                    "log_start_offset", None
                )  # docs/differences.md explains this field in rejected rows
            if type(value).__name__ == "PartitionData":
                plain["aborted_transactions"] = _aborted_in(plain)
            if plain.get("timestamp") == MARKERS_TIME:
                # Records of the same millisecond share a timestamp, so each broker may return another
                # record's offset.
                plain["offset"] = "of the youngest marker"
            return plain
        if field == "records":
            return None if value is None else [self._batch(data) for data in split_batches(value)]
        if isinstance(value, list):
            plain = [self.plain(part, version, field) for part in value if not self._is_foreign(part)]
            return sorted(_merge_rows(plain), key=_place_in_list)
        return self._scalar(value, field)

    def _is_foreign(self, part: Any) -> bool:
        """Return True for a group or quota entity that another sequence created."""
        kind = type(part).__name__
        if kind == "ListedGroup":
            return not part.group_id.startswith(f"{self.prefix}-")
        if kind == "EntryData" and hasattr(part, "values"):
            return not any(f"{self.prefix}-" in (row.entity_name or "") for row in part.entity)
        return False

    def _scalar(self, value: Any, field: str) -> Any:
        if field.endswith("error_code"):
            return ERROR_NAMES.get(value, value)
        if field in ASSIGNED:
            return self.of(ASSIGNED[field], value)
        if field == "topic_id":
            return self._topics.get(value, value.hex())
        if field in ONLY_THE_SIGN:
            return value if value < 0 else "a time"
        if field == "heartbeat_interval_ms":
            return value and "an interval"
        if field == "timestamp":
            return self._time(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).hex()
        return value.replace(self.prefix, "~") if isinstance(value, str) else value

    def _time(self, value: int) -> Any:
        """Return a record's timestamp, or a symbol if the broker set the timestamp, as it does for
        markers.
        """
        return MARKERS_TIME if value > self._youngest_ms else value

    def _batch(self, data: bytes) -> dict[str, Any]:
        header = read_header(data)
        plain = {key: value for key, value in header._asdict().items() if key not in ("crc", "batch_length")}
        plain["producer_id"] = self.of("producer", header.producer_id)
        for field in ("base_timestamp_ms", "max_timestamp_ms"):
            plain[field] = self._time(plain[field])
        if header.is_control:
            marker = decode_control(data)
            return plain | {"marker": marker and [marker.type and marker.type.name, marker.coordinator_epoch]}
        try:
            records = [(r.offset, self._time(r.timestamp_ms), r.key, r.value) for r in decode_records(data)]
        except OncelogError as error:
            return plain | {"data": f"{type(error).__name__}: {data[61:].hex()}"}
        return plain | {"data": [[str(cell) for cell in row] for row in records]}


def _aborted_in(fetched: dict[str, Any]) -> list[Any]:
    """Return the aborted transactions that begin within the records of the response.

    Kafka also lists later ones, and sends null instead of an empty list.
    """
    records = fetched["records"]
    end = records[-1]["base_offset"] + records[-1]["last_offset_delta"] if records else -1
    return [aborted for aborted in fetched["aborted_transactions"] or [] if aborted["first_offset"] <= end]


def _is_fetched(row: dict[str, Any]) -> bool:
    partitions = row.get("partitions")
    return bool(partitions) and isinstance(partitions[0], dict) and "aborted_transactions" in partitions[0]


def _merge_rows(rows: list[Any]) -> list[Any]:
    """Merge the rows of one topic.

    In a Fetch response, Kafka sends a separate topic row for each failed partition.
    """
    if not any(isinstance(row, dict) and _is_fetched(row) for row in rows):
        return rows
    merged: dict[str, Any] = {}
    for row in rows:
        text = str(row.get("topic", row.get("topic_id")))
        known = merged.setdefault(text, row | {"partitions": []})
        known["partitions"] = sorted(known["partitions"] + row["partitions"], key=_place_in_list)
    return list(merged.values())


def _place_in_list(element: Any) -> tuple[list[str], str]:
    """Return a sort key that sorts the lists of both brokers alike."""
    names = [str(element[key]) for key in IDENTIFYING if key in element] if isinstance(element, dict) else []
    return names, json.dumps(element, sort_keys=True, default=str)


class Difference(NamedTuple):
    """A difference between two responses. `number` is that of the step, and `path` leads to the differing
    value.

    Observations have the numbers after those of the steps.
    """

    number: int
    step: Step
    path: str
    ours: Any
    theirs: Any

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return a value that is probably equal for two differences with the same cause: the API, the path
        and the values.
        """
        path = ".".join(part for part in self.path.split(".") if not part.isdigit())
        values = [value if _is_error(value) else type(value).__name__ for value in (self.ours, self.theirs)]
        return self.step.api, path, *values


def _is_error(value: Any) -> bool:
    return isinstance(value, str) and value.isupper()


class Explained(NamedTuple):
    """A difference that a rule explains, and the number of its step."""

    rule: Rule
    number: int


def compare(
    sequence: Sequence, rules: tuple[Rule, ...], ours: list[Any], theirs: list[Any]
) -> tuple[Difference | None, list[Explained]]:
    """Return the first difference that no rule explains, and the explained ones before it."""
    explained: list[Explained] = []
    for number, step in enumerate((*sequence.steps, *sequence.observations)):
        ends = False
        for path, one, other in differing(ours[number], theirs[number]):
            rule = next((rule for rule in rules if rule.explains(step, one, other, path)), None)
            if rule is None:
                return Difference(number, step, path, one, other), explained
            explained.append(Explained(rule, number))
            ends |= rule.ends
        if ends:
            break
    return None, explained


def differing(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every path at which two plain values differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from differing(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(one, other, f"{path}.{index}" if path else str(index))
    elif ours != theirs:
        yield path, ours, theirs
