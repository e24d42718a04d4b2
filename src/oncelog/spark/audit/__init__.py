"""The audit as Spark jobs: do topics or segment files contain each record exactly once?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.audit.result import AuditFinding, AuditResult, Difference, KeyTotals
    from oncelog.spark.audit.audit import audit_files, audit_topic
    from oncelog.spark.audit.table import audit_table

__all__ = [
    "AuditFinding",
    "AuditResult",
    "Difference",
    "KeyTotals",
    "audit_files",
    "audit_table",
    "audit_topic",
]


def __getattr__(name: str) -> Any:
    # Import the modules of the audit on first use, because they need PySpark.
    if name in __all__:
        from oncelog.spark import _pyspark as _pyspark  # isort: skip
        from oncelog.audit import result
        from oncelog.spark.audit import audit, table

        return getattr(next(module for module in (result, audit, table) if hasattr(module, name)), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
