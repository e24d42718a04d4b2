"""Checks that optional packages are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from oncelog.errors import MissingDependency

_PACKAGES = {"pyspark": "PySpark", "pyarrow": "PyArrow", "numpy": "NumPy"}
"""The names of the packages in error texts, by module."""


def check_pyarrow(feature: str) -> None:
    """Raise MissingDependency if PyArrow, or NumPy, which computes with its columns, is missing.

    `feature` is what needs them, for the error's text.
    """
    check_packages(feature, "arrow", ("pyarrow", "numpy"))


def check_packages(feature: str, extra: str, modules: Iterable[str]) -> None:
    """Raise MissingDependency for the first of the modules that is missing; `extra` installs all of them."""
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError:
            text = f"{feature} needs {_PACKAGES[module]}: pip install 'oncelog[{extra}]'"
            raise MissingDependency(text) from None
