"""Spark looks for installed packages named pyspark_* and registers their DefaultSource by itself."""

from __future__ import annotations

try:
    from oncelog.spark.sink.sink import OncelogFormat as DefaultSource
except ImportError as _error:
    # Do not raise. Spark imports all packages named pyspark_* together, and after an error it registers none
    # of them. Guard: test_a_missing_package_is_named_and_does_not_hide_other_sources.
    from oncelog.spark.unusable import cause_of

    _CAUSE = cause_of(_error)

    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):  # type: ignore[misc, no-redef]
        """A stand-in for a format that cannot be used here. Each use raises MissingDependency."""

        def __init__(self, options: dict[str, str]) -> None:
            raise _CAUSE

        @classmethod
        def name(cls) -> str:
            return "oncelog"


__all__ = ["DefaultSource"]
