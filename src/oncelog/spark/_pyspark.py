"""Check that PySpark, PyArrow and NumPy are installed. Import this module before a module that imports them.

If one is missing, the import raises MissingDependency with the command that installs it.
"""

from __future__ import annotations

from importlib import import_module

from oncelog.errors import MissingDependency

for _module, _package in (("pyspark", "PySpark"), ("pyarrow", "PyArrow"), ("numpy", "NumPy")):
    try:
        import_module(_module)
    except ModuleNotFoundError:
        raise MissingDependency(f"oncelog.spark needs {_package}: pip install 'oncelog[spark]'") from None
