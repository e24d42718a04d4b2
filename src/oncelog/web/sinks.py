"""The state of Spark sinks, from the committed offsets that they keep on the cluster. No I/O.

A sink's groups are PREFIX-NAME/begun, PREFIX-NAME/finished, PREFIX-NAME/plan and PREFIX-NAME/TASK, where
slashes in the name are escaped. Each has one offset: a batch id, with further state in JSON as metadata.
Source: oncelog.spark.sink.state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oncelog.types import OffsetAndMetadata, TopicPartition

_PARTS = ("begun", "finished", "plan")
_MAX_TASK_DIGITS = 9


@dataclass(slots=True)
class TaskState:
    """The last batch that a task committed, with its rows."""

    task: int
    batch_id: int
    rows: int


@dataclass(slots=True)
class SinkState:
    """A sink: the newest batch that was begun, and the newest one that all tasks committed.

    Batch ids are None before the first batch. `tasks` has the last batch of each task, by task number.
    """

    name: str
    begun_id: int | None = None
    begun_ms: int | None = None
    finished_id: int | None = None
    finished_rows: int | None = None
    tasks: list[TaskState] = field(default_factory=list)

    @property
    def unfinished(self) -> list[TaskState]:
        """Return the tasks that a restart would skip: they committed a batch that is not finished."""
        finished = -1 if self.finished_id is None else self.finished_id
        return [task for task in self.tasks if task.batch_id > finished]


def sink_groups(group_ids: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the groups of each sink: sink -> part ("begun", "finished", "plan" or a task) -> group id.

    Only a name with a group "begun" or "finished" is a sink.
    """
    found: dict[str, dict[str, str]] = {}
    for group_id in group_ids:
        sink, slash, part = group_id.rpartition("/")
        if slash and (part in _PARTS or _is_task(part)):
            found.setdefault(sink, {})[part] = group_id
    return {sink: parts for sink, parts in found.items() if "begun" in parts or "finished" in parts}


def some_parts(parts: Mapping[str, str], max_tasks: int) -> dict[str, str]:
    """Return the parts of a sink with its first `max_tasks` tasks only."""
    tasks = sorted((part for part in parts if _is_task(part)), key=int)[:max_tasks]
    return {part: parts[part] for part in (*_PARTS, *tasks) if part in parts}


def sink_state(
    sink: str, offsets: Mapping[str, Mapping[TopicPartition, OffsetAndMetadata]]
) -> SinkState | None:
    """Return the state of a sink from the committed offsets of its parts.

    Return None if an offset's metadata is not a sink's note, because another application uses the group name.
    """
    state = SinkState(sink.replace("%2F", "/").replace("%25", "%"))
    for part, held in offsets.items():
        for kept in held.values():
            note = _note(kept.metadata)
            if note is None:
                return None
            if part == "begun":
                state.begun_id, state.begun_ms = kept.offset, _whole(note, "begun_ms")
            elif part == "finished":
                state.finished_id, state.finished_rows = kept.offset, _whole(note, "rows")
            elif _is_task(part):
                state.tasks.append(TaskState(int(part), kept.offset, _whole(note, "rows") or 0))
    state.tasks.sort(key=lambda task: task.task)
    return state


def _is_task(part: str) -> bool:
    return part.isdecimal() and len(part) <= _MAX_TASK_DIGITS


def _whole(note: Mapping[str, Any], name: str) -> int | None:
    """Return the whole number `name` in a note; None for any other value. The type is checked because every
    client that may commit can write a note.

    Guard: test_a_note_with_other_values_than_numbers_does_not_end_the_page.
    """
    value = note.get(name)
    return value if type(value) is int else None


def _note(metadata: str | None) -> Mapping[str, Any] | None:
    try:
        note = json.loads(metadata or "")
    except (ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) and "oncelog" in note else None
