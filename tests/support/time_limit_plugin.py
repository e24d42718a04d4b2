"""`pytest --stop-after=SECONDS`: skip each test that has not begun after this time.

CI ends a run that takes too long, and then there is no result. With this option, a slow machine runs as many
tests as it has time for, and counts the others.
"""

from __future__ import annotations

import time

import pytest

REASON = "not run: the time of --stop-after is over"


class TimeLimit:
    """Skips tests that begin `seconds` or more after this object was made, and prints their number."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._left_out = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip the test before its fixtures are made."""
        if time.monotonic() >= self._until:
            pytest.skip(REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and REASON in report.longrepr[2]:
            self._left_out += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.section("time limit")
            terminalreporter.write_line(f"{self._left_out} tests were {REASON}")
