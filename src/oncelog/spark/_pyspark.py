"""Check that PySpark, PyArrow and NumPy are installed. Import this module before a module that imports them.

If one is missing, the import raises MissingDependency with the command that installs it.
"""

from __future__ import annotations

from oncelog.runtime.optional import check_packages

check_packages("oncelog.spark", "spark", ("pyspark", "pyarrow", "numpy"))
