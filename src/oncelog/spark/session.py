"""A local Spark session for commands, with little log output. Its Python workers run this interpreter."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from oncelog.errors import ConfigError, MissingDependency
from oncelog.spark.connect import connect_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHORT_LIVED = "-XX:TieredStopAtLevel=1"
"""A JVM option for short sessions: it turns off the JVM's optimizing compiler (C2). In a short session, the
compiler takes a sixth of the processor time, and the code that it optimizes saves less than that.
"""
DEFAULT_MASTER = "local[*]"
_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")


def check_spark() -> None:
    """Raise MissingDependency if PySpark is missing, and ConfigError if Java is missing.

    The error's text says what to install.
    """
    import_module("oncelog.spark._pyspark")
    home = os.environ.get("JAVA_HOME")
    if not (shutil.which("java") or (home and (Path(home) / "bin" / "java").exists())):
        raise ConfigError(
            "Spark needs Java 17 or newer, and none was found: install it (Debian, Ubuntu: sudo apt-get "
            "install openjdk-17-jre-headless; macOS: brew install openjdk@17), on PATH or in JAVA_HOME"
        )


@contextmanager
def local_session(
    app_name: str,
    master: str = DEFAULT_MASTER,
    conf: Mapping[str, str] | None = None,
    *,
    is_short: bool = False,
) -> Iterator[SparkSession]:
    """Yield this process's active Spark session, or start a session and stop it afterwards.

    `conf` contains Spark settings for a new session, which override the defaults for commands. `is_short`
    optimizes for a session of a minute or two. Raises ConfigError and MissingDependency like `check_spark`,
    and ConfigError for a server of Spark Connect, which runs the driver itself.
    """
    if url := connect_url(master, os.environ.get("SPARK_REMOTE")):
        raise ConfigError(
            f"{url} is a server of Spark Connect, and this command starts Spark's driver itself: give a "
            "master such as local[*] or spark://HOST:PORT"
        )
    check_spark()
    from pyspark.sql import SparkSession

    if (active := SparkSession.getActiveSession()) is not None:
        yield active
        return
    session = _start(app_name, master, conf or {}, is_short=is_short)
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def any_session(app_name: str, master: str | None) -> Iterator[SparkSession]:
    """Yield a session for a command that needs only plans, of Spark Connect or as `local_session` does.

    `master` may be the URL of a Spark Connect server. If it is None, the server is that of SPARK_REMOTE, if
    set. Raises ConfigError if the server cannot be reached, or if PySpark lacks packages of Spark Connect.
    """
    url = connect_url(master, os.environ.get("SPARK_REMOTE"))
    if url is None:
        with local_session(app_name, master or DEFAULT_MASTER) as session:
            yield session
        return
    session = _connect(url)
    try:
        yield session
    finally:
        session.stop()


def _connect(url: str) -> SparkSession:
    import_module("oncelog.spark._pyspark")
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        session = SparkSession.builder.remote(url).getOrCreate()
        # The session asks the server for nothing before this.
        session.conf.set("spark.sql.session.timeZone", "UTC")
    except ImportError as error:
        text = f"Spark Connect needs more packages: pip install 'pyspark[connect]' ({error})"
        raise MissingDependency(text) from None
    except PySparkException as error:
        raise ConfigError(f"the Spark Connect server {url} cannot be used: {error}") from None
    return session


def _start(app_name: str, master: str, conf: Mapping[str, str], *, is_short: bool) -> SparkSession:
    from pyspark.sql import SparkSession

    # Planning and tasks run in Python worker processes, which need the packages of this interpreter.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Hide PySpark's warning about pandas versions with which it was not tested, because nothing here uses
    # pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    builder = SparkSession.builder.master(master).appName(app_name)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # Configure logging by a JVM option: the JVM starts to log before setLogLevel can be called.
        "spark.driver.extraJavaOptions": _java_options(is_short=is_short),
    }
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        }
    for key, value in {**settings, **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _java_options(*, is_short: bool) -> str:
    # Put the JVM's temporary files into Python's temporary directory, which the caller can set and remove: a
    # JVM ignores TMPDIR, and leaves the files if it is killed.
    temporary = shlex.quote(f"-Djava.io.tmpdir={tempfile.gettempdir()}")
    options = f"-Dlog4j2.configurationFile={_LOG_CONFIG.as_uri()} {temporary}"
    return f"{options} {SHORT_LIVED}" if is_short else options
