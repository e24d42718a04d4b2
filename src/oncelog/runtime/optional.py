"""Checks that optional packages are installed."""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency


def check_pyarrow(feature: str) -> None:
    """Raise MissingDependency if PyArrow is missing. `feature` is what needs it, for the error's text."""
    try:
        import_module("pyarrow")
    except ModuleNotFoundError:
        raise MissingDependency(f"{feature} needs PyArrow: pip install 'oncelog[arrow]'") from None
