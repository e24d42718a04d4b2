"""The audit as Spark jobs: is what topics or segment files hold exactly once?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.spark.audit.audit import AuditResult, audit_files, audit_topic

__all__ = ["AuditResult", "audit_files", "audit_topic"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded when first used: it needs PySpark
        from oncelog.spark.audit import audit

        return getattr(audit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
