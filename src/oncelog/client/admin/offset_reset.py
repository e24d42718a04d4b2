"""Plans a reset of a group's committed offsets. The caller commits the planned offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import NamedTuple

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ListedOffset
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.errors import MisuseError
from oncelog.types import TopicPartition

WAYS = ("to_earliest", "to_latest", "to_offset", "to_datetime", "shift_by")


class PlannedOffset(NamedTuple):
    """A partition's committed offset (None if there is none), and the offset that would replace it."""

    tp: TopicPartition
    offset: int | None
    new_offset: int


def plan_reset(
    admin: Admin, group: str, tps: Collection[TopicPartition], way: str, value: object = None
) -> list[PlannedOffset]:
    """Return the new offset of each partition, clamped to the partition's start and end offsets.

    `way` is one of WAYS. `value` is an offset for `to_offset`, a number of offsets for `shift_by`, and a
    time in ISO 8601 for `to_datetime`. A partition without a committed offset is shifted from its start.
    Raises MisuseError for any other way, and for an invalid value.
    """
    held = {tp: kept.offset for tp, kept in admin.group_offsets(group).items()}
    first, last = _limits(admin, tps)
    requested = _requested(admin, tps, held, first, last, way, value)
    return [
        PlannedOffset(tp, held.get(tp), min(max(requested[tp], first[tp]), last[tp])) for tp in sorted(tps)
    ]


def plan_offsets(admin: Admin, group: str, offsets: Mapping[TopicPartition, int]) -> list[PlannedOffset]:
    """Return these offsets as a plan, each clamped to the start and end offsets of its partition."""
    held = {tp: kept.offset for tp, kept in admin.group_offsets(group).items()}
    first, last = _limits(admin, offsets)
    return [
        PlannedOffset(tp, held.get(tp), min(max(offsets[tp], first[tp]), last[tp])) for tp in sorted(offsets)
    ]


def _limits(
    admin: Admin, tps: Collection[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the start and the end offset of each partition."""
    first = {tp: _known(found.offset) for tp, found in _list(admin, tps, "earliest").items()}
    last = {tp: _known(found.offset) for tp, found in _list(admin, tps, "latest").items()}
    return first, last


def _requested(
    admin: Admin,
    tps: Collection[TopicPartition],
    held: Mapping[TopicPartition, int],
    first: Mapping[TopicPartition, int],
    last: Mapping[TopicPartition, int],
    way: str,
    value: object,
) -> dict[TopicPartition, int]:
    if way == "to_earliest":
        return dict(first)
    if way == "to_latest":
        return dict(last)
    if way == "to_offset":
        return dict.fromkeys(tps, _whole(value))
    if way == "shift_by":
        shift = _whole(value)
        return {tp: held.get(tp, first[tp]) + shift for tp in tps}
    if way != "to_datetime":
        raise MisuseError(f"{way!r} is not a way to reset offsets; there are {', '.join(WAYS)}")
    try:
        moment_ms = int(datetime.fromisoformat(str(value)).timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise MisuseError(f"{value!r} is not a time such as 2026-11-28T12:00:00: {error}") from None
    # Times before 1970 become 0: no record is older, and ListOffsets gives negative numbers special meanings.
    found = _list(admin, tps, max(moment_ms, 0))
    return {tp: last[tp] if (offset := found[tp].offset) is None else offset for tp in tps}


def _list(
    admin: Admin, tps: Collection[TopicPartition], spec: OffsetSpec
) -> Mapping[TopicPartition, ListedOffset]:
    return admin.list_offsets(dict.fromkeys(tps, spec))


def _known(offset: int | None) -> int:
    return 0 if offset is None else offset


def _whole(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise MisuseError(f"{value!r} is not a whole number") from None
