"""Oncelog for Spark: source, exactly-once sink and audit, for any cluster that speaks the Kafka protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.spark.provenance import provenance_headers
    from oncelog.spark.schema_registry import registry_json
    from oncelog.spark.sink.atomic import write_atomic
    from oncelog.spark.sink.determinism import require_deterministic

__all__ = ["provenance_headers", "registry_json", "require_deterministic", "write_atomic"]


def __getattr__(name: str) -> Any:
    # Import these modules on first use, because they need PySpark.
    if name in __all__:
        from oncelog.spark import _pyspark as _pyspark
        from oncelog.spark import provenance, schema_registry
        from oncelog.spark.sink import atomic, determinism

        modules = (provenance, schema_registry, atomic, determinism)
        return getattr(next(module for module in modules if hasattr(module, name)), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
