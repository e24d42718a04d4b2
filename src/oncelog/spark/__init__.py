"""Oncelog for Spark: source, exactly-once sink and audit, for any cluster that speaks the Kafka protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.spark.sink.atomic import write_atomic

__all__ = ["write_atomic"]


def __getattr__(name: str) -> Any:
    # The module of write_atomic needs PySpark, so it is imported at the first use.
    if name == "write_atomic":
        from oncelog.spark import _pyspark as _pyspark
        from oncelog.spark.sink.atomic import write_atomic

        return write_atomic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
