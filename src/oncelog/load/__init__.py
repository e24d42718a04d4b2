"""Loads files into a topic exactly once, over any number of runs (behaviour P4, docs/behaviours.md).

Without PyArrow, the import raises MissingDependency.
"""

from oncelog.runtime.optional import check_pyarrow

check_pyarrow("oncelog.load")
