"""Support for tests: the pytest plugin, the fault-injecting proxy, broker processes, an in-memory disk, and
an assertion that each record is there exactly once.
"""

from oncelog.testing.exactly_once import assert_exactly_once

__all__ = ["assert_exactly_once"]
