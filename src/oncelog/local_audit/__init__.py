"""Audits in one process, without Spark: of topics, of segment files, and of tables written from topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oncelog.runtime.optional import check_pyarrow

if TYPE_CHECKING:
    from oncelog.local_audit.log_audit import audit_files, audit_topic
    from oncelog.local_audit.table_audit import audit_table
    from oncelog.local_audit.table_result import TableAuditResult, TableFinding, TableTotals

__all__ = ["TableAuditResult", "TableFinding", "TableTotals", "audit_files", "audit_table", "audit_topic"]


def __getattr__(name: str) -> Any:
    # Import these functions on first use: Spark's workers import other modules of this package, but do not
    # need these functions.
    if name in __all__:
        check_pyarrow("an audit")
        from oncelog.local_audit import log_audit, table_audit, table_result

        for module in (log_audit, table_audit, table_result):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
