"""Jars for Spark from Maven Central: its own Kafka connector, as our reference, and a JDBC driver."""

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


def connector_jars() -> list[Path]:
    """Return the jars of `format("kafka")`. Maven downloads them once. Raises MissingDependency."""
    pom = _pom("connector", _PARTS)
    jars = fetch_pom(pom, CACHE_ROOT / "spark-kafka-connector", "Spark's own Kafka connector")
    return sorted(jars.glob("*.jar"))


def postgresql_driver() -> Path:
    """Return the jar of PostgreSQL's JDBC driver. Maven downloads it once. Raises MissingDependency."""
    pom = _pom("driver", [_DRIVER])
    (jar,) = fetch_pom(pom, CACHE_ROOT / "postgresql-driver", "PostgreSQL's JDBC driver").glob("*.jar")
    return jar


def add_connector(spark: Any) -> None:
    """Add the jars of `format("kafka")` to the session. Raises MissingDependency."""
    for jar in connector_jars():
        spark.sql(f"ADD JAR '{jar}'")
