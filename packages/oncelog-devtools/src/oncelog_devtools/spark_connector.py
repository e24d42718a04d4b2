"""Jars for Spark from Maven Central: its own Kafka connector, sinks for tables, and a JDBC driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncelog_devtools.apache_kafka import CACHE_ROOT, fetch_pom

# The newest version of which Maven Central has all parts. It runs with Spark 4.3. The dependencies excluded
# below come with Spark.
_PARTS = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
_DRIVER = ("org.postgresql", "postgresql", "42.7.14")

DELTA_VERSION, DELTA_SPARK = "4.4.0", "4.2"
"""The version of Delta's Spark sink, and the version of Spark for which it is built."""

ICEBERG_VERSION, ICEBERG_SPARK = "1.12.0", "4.1"
"""The version of Iceberg's Spark runtime, and the newest version of Spark for which it is built."""

ICEBERG_CONNECTOR = "4.1.3"
"""The version of Spark's Kafka connector for that version of Spark."""

_DELTA = (
    ("io.delta", f"delta-spark_{DELTA_SPARK}_2.13", DELTA_VERSION),
    ("io.delta", "delta-storage", DELTA_VERSION),
)
_ICEBERG = (("org.apache.iceberg", f"iceberg-spark-runtime-{ICEBERG_SPARK}_2.13", ICEBERG_VERSION),)


def _pom(name: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """Return a Maven project with these artifacts (group, name, version), and without their dependencies."""
    dependencies = "\n".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version>{_ALONE}</dependency>"
        for group, artifact, version in parts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        f"<groupId>oncelog</groupId><artifactId>{name}</artifactId><version>1</version><dependencies>\n"
        f"{dependencies}\n</dependencies></project>\n"
    )


def connector_jars(version: str | None = None) -> list[Path]:
    """Return the jars of `format("kafka")`. Maven downloads them once. Raises MissingDependency.

    `version` is the connector's, for another Spark than this project's. None means the default version.
    """
    parts, cache = _PARTS, CACHE_ROOT / "spark-kafka-connector"
    if version is not None:
        parts = ((*_PARTS[0][:2], version), *_PARTS[1:])
        cache = cache.with_name(f"{cache.name}-{version}")
    jars = fetch_pom(_pom("connector", parts), cache, "Spark's own Kafka connector")
    return sorted(jars.glob("*.jar"))


def delta_jars() -> list[Path]:
    """Return the jars of `format("delta")`. Maven downloads them once. Raises MissingDependency."""
    jars = fetch_pom(_pom("delta", _DELTA), CACHE_ROOT / f"delta-spark-{DELTA_VERSION}", "Delta's Spark sink")
    return sorted(jars.glob("*.jar"))


def iceberg_jars() -> list[Path]:
    """Return the jar of `format("iceberg")`. Maven downloads it once. Raises MissingDependency."""
    cache = CACHE_ROOT / f"iceberg-spark-{ICEBERG_VERSION}"
    return sorted(fetch_pom(_pom("iceberg", _ICEBERG), cache, "Iceberg's Spark runtime").glob("*.jar"))


def postgresql_driver() -> Path:
    """Return the jar of PostgreSQL's JDBC driver. Maven downloads it once. Raises MissingDependency."""
    pom = _pom("driver", [_DRIVER])
    (jar,) = fetch_pom(pom, CACHE_ROOT / "postgresql-driver", "PostgreSQL's JDBC driver").glob("*.jar")
    return jar


def add_connector(spark: Any) -> None:
    """Add the jars of `format("kafka")` to the session. Raises MissingDependency."""
    for jar in connector_jars():
        spark.sql(f"ADD JAR '{jar}'")
