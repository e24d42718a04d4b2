"""Spark looks for installed packages named pyspark_* and registers their DefaultSource by itself."""

from oncelog.spark.source import OncelogSource as DefaultSource

__all__ = ["DefaultSource"]
