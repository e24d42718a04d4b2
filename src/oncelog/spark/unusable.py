"""The reason why `format("oncelog")` cannot be used with the packages that are installed."""

from __future__ import annotations

from oncelog.errors import MissingDependency


def cause_of(error: ImportError) -> MissingDependency:
    """Return the exception for a user whose installation failed to import the format with `error`."""
    if isinstance(error, MissingDependency):
        return error
    if error.name is not None and error.name.split(".")[0] == "pyspark":
        what = f"PySpark 4.2 or newer ({error})"
    else:
        what = f"more packages: pip install 'oncelog[spark]' ({error})"
    return MissingDependency(f"format('oncelog') needs {what}")
