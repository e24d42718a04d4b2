"""Audits in one process, without Spark: of topics and of segment files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncelog.local_audit.log_audit import audit_files, audit_topic

__all__ = ["audit_files", "audit_topic"]


def __getattr__(name: str) -> Any:
    # Spark's workers import modules of this package, but need none of these.
    if name in __all__:
        from oncelog.local_audit import log_audit

        return getattr(log_audit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
