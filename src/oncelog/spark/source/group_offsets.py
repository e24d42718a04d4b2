"""Commit a stream's offsets to a consumer group, where monitoring tools look for its lag.

The offsets are never read back: the checkpoint alone decides where a query continues.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from oncelog.client.admin.blocking import Admin
from oncelog.config import ADMIN
from oncelog.errors import ConfigError, GroupIdNotFound
from oncelog.spark.source.commit_schedule import RETRY_MS, CommitSchedule
from oncelog.spark.source.offset_ranges import Position

T = TypeVar("T")
MAX_COMMIT_MS = 5_000
"""Maximum time in ms that a micro-batch waits for a commit."""

_log = logging.getLogger("oncelog.spark")


class GroupOffsets:
    """The consumer group to which one run of a query commits its offsets. Call `close` after use."""

    def __init__(self, group: str, client: Mapping[str, object]) -> None:
        self._group = group
        self._settings = _short_timeouts(client)
        self._admin: Admin | None = None
        self._schedule = CommitSchedule()

    def refuse_members(self) -> None:
        """Raise ConfigError if the group has members, because the commits would replace the members' offsets.

        If the cluster does not respond, or forbids the request, only log the error.
        """
        try:
            admin = self._connected()
            members = self._run(admin, admin._async.describe_groups([self._group]))[self._group].members
        except GroupIdNotFound:
            return
        except Exception as error:
            _log.warning("commitOffsetsToGroup=%s: the group cannot be described: %s", self._group, error)
            return
        if members:
            clients = ", ".join(sorted({f"{member.client_id} at {member.host}" for member in members}))
            raise ConfigError(
                f"commitOffsetsToGroup={self._group}: the group has {len(members)} members ({clients}). "
                "Set it to a group that only this query uses, or stop these consumers"
            )

    def commit(self, finished: Position, now_ms: int) -> None:
        """Commit the end of a finished micro-batch if a commit is due. Failures are only logged and
        counted.
        """
        schedule = self._schedule
        if not (offsets := schedule.due(finished, now_ms)):
            return
        try:
            admin = self._connected()
            self._run(admin, admin._async.alter_group_offsets(self._group, offsets))
        except Exception as error:  # a commit is only for monitoring, so its failure must not end a query
            schedule.fail(now_ms)
            self._log_failure(error)
            return
        if schedule.failures_in_row:
            _log.warning(
                "commitOffsetsToGroup=%s: offsets are committed again, after %d failures",
                self._group,
                schedule.failures_in_row,
            )
        schedule.succeed(offsets, now_ms)

    def _log_failure(self, error: Exception) -> None:
        _log.warning(
            "commitOffsetsToGroup=%s: commit %d in a row failed (%d since the query started), so tools "
            "show a lag that is too high. The query continues, and commits again in %d s: %s",
            self._group,
            self._schedule.failures_in_row,
            self._schedule.failures,
            RETRY_MS // 1000,
            error,
        )

    def _run(self, admin: Admin, call: Coroutine[Any, Any, T]) -> T:
        # Limit the whole call: the settings limit each request, but a call can consist of several requests.
        # See test_a_call_that_does_not_end_is_cancelled.
        return admin._thread.run(call, MAX_COMMIT_MS / 1000)

    def _connected(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._settings)
        return self._admin

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None


def _short_timeouts(client: Mapping[str, object]) -> dict[str, object]:
    """Return those settings of `client` that an Admin has, with time-outs of at most MAX_COMMIT_MS."""
    settings = {key: value for key, value in client.items() if ADMIN.get(key)}
    parsed = ADMIN.parse(settings)
    bounded = ("request.timeout.ms", "socket.connection.setup.timeout.ms", "oncelog.bootstrap.timeout.ms")
    return settings | {key: min(parsed[key], MAX_COMMIT_MS) for key in bounded}
