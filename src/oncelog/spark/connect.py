"""Sessions of Spark Connect: which server a command uses, and what needs a session of classic Spark.

A client of Spark Connect sends plans to a server. It has no JVM, no SparkContext and perhaps no py4j (package
pyspark-client). The source, the sink and the audits need only plans.
"""

from __future__ import annotations

from typing import Any

from oncelog.errors import ConfigError

URL_PREFIX = "sc://"


def connect_url(master: str | None, remote: str | None) -> str | None:
    """Return the URL of the Spark Connect server that a command uses; None for a Spark of its own.

    `master` is the command's option --master, `remote` is PySpark's variable SPARK_REMOTE. Raises ConfigError
    if both name a Spark, which PySpark refuses.
    """
    if master is None or master.startswith(URL_PREFIX):
        return master or remote or None
    if remote:
        raise ConfigError(
            f"SPARK_REMOTE={remote} and the master {master} exclude each other: unset SPARK_REMOTE"
        )
    return None


def check_classic(session: Any, what: str) -> None:
    """Raise ConfigError if `session` belongs to Spark Connect. `what` is the function that needs a JVM."""
    if any(base.__module__.startswith("pyspark.sql.connect.") for base in type(session).__mro__):
        raise ConfigError(
            f"{what} needs a session of classic Spark, and this one is a session of Spark Connect, which has "
            'no SparkContext. With Spark Connect, write with format("oncelog")'
        )


def spark_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the exceptions with which Spark reports a failed job."""
    from pyspark.errors import PySparkException

    try:
        from py4j.protocol import Py4JError
    except ModuleNotFoundError:  # The package pyspark-client does not need py4j.
        return (PySparkException,)
    return (PySparkException, Py4JError)
