"""Spark looks for installed packages named pyspark_* and registers their DefaultSource by itself."""

from oncelog.spark.sink.sink import OncelogFormat as DefaultSource

__all__ = ["DefaultSource"]
