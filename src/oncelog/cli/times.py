"""Times and durations as values of options. oncelog.client.times parses them."""

from __future__ import annotations

import time

import click

from oncelog.client.times import parse_duration, parse_time

__all__ = ["DurationType", "TimeType", "now_ms", "parse_duration", "parse_time"]


def now_ms() -> int:
    """Return the wall clock's time in ms since the epoch."""
    return time.time_ns() // 1_000_000


class TimeType(click.ParamType):  # type: ignore[type-arg]
    """The type of a click option that takes a time; the command gets ms since the epoch."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the time in ms since the epoch. Raises click.BadParameter for malformed text."""
        if isinstance(value, int):
            return value
        try:
            return parse_time(str(value), now_ms())
        except ValueError as error:
            self.fail(str(error), param, ctx)


class DurationType(click.ParamType):  # type: ignore[type-arg]
    """The type of a click option that takes a duration; the command gets ms."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the duration in ms. Raises click.BadParameter for malformed text."""
        if isinstance(value, int):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
