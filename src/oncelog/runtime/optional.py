"""Checks that optional packages are installed."""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency


def check_pyarrow(feature: str) -> None:
    """Raise MissingDependency if PyArrow, or NumPy, which computes with its columns, is missing.

    `feature` is what needs them, for the error's text.
    """
    for module, package in (("pyarrow", "PyArrow"), ("numpy", "NumPy")):
        try:
            import_module(module)
        except ModuleNotFoundError:
            raise MissingDependency(f"{feature} needs {package}: pip install 'oncelog[arrow]'") from None
