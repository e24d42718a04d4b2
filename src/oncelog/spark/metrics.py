"""Deprecated name of `oncelog.spark.sink.sink_metrics`, kept for one release."""

from __future__ import annotations

import warnings

from oncelog.spark.sink.sink_metrics import FILE_VARIABLE, SinkMetrics

__all__ = ["FILE_VARIABLE", "SinkMetrics"]

warnings.warn(
    "oncelog.spark.metrics is oncelog.spark.sink.sink_metrics now", DeprecationWarning, stacklevel=2
)
