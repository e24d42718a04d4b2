"""Spark's own Kafka connector from Maven Central, as the reference for Oncelog's."""

from __future__ import annotations

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
_POM = (
    '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
    "<groupId>oncelog</groupId><artifactId>connector</artifactId><version>1</version><dependencies>\n"
    + "\n".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>{_ALONE}</dependency>"
        for group, name, version in _PARTS
    )
    + "\n</dependencies></project>\n"
)


def connector_jars() -> list[Path]:
    """Return the jars of `format("kafka")`. Maven downloads them once. Raises MissingDependency."""
    jars = fetch_pom(_POM, CACHE_ROOT / "spark-kafka-connector", "Spark's own Kafka connector")
    return sorted(jars.glob("*.jar"))


def add_connector(spark: Any) -> None:
    """Add the jars of `format("kafka")` to the session. Raises MissingDependency."""
    for jar in connector_jars():
        spark.sql(f"ADD JAR '{jar}'")
