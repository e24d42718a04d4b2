"""Check that PySpark and PyArrow are installed. Import this module before a module that imports them.

If one is missing, the import raises MissingDependency with the command that installs it.
"""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency

try:
    import_module("pyspark")
    import_module("pyarrow")
except ModuleNotFoundError as error:
    package = "PyArrow" if error.name == "pyarrow" else "PySpark"
    raise MissingDependency(f"oncelog.spark needs {package}: pip install 'oncelog[spark]'") from None
