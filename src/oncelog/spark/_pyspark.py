"""Import this before a module that imports PySpark.

Raises MissingDependency, which says how to install it.
"""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency

try:
    import_module("pyspark")
except ModuleNotFoundError:
    raise MissingDependency("this needs PySpark: pip install 'oncelog[spark]'") from None
