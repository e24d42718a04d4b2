"""Check that PySpark is installed. Import this module before a module that imports PySpark.

If PySpark is missing, the import raises MissingDependency with the command that installs it.
"""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency

try:
    import_module("pyspark")
except ModuleNotFoundError:
    raise MissingDependency("oncelog.spark needs PySpark: pip install 'oncelog[spark]'") from None
