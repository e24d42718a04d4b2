"""Prove that a topic holds every record once, or name the offsets where it does not.

oncelog serve &
python examples/spark_audit.py 127.0.0.1:9092 flights
"""

from __future__ import annotations

import os
import sys

# Spark's Python workers must be this interpreter.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

from oncelog.spark.audit import AuditResult, audit_topic


def audit(spark: SparkSession, bootstrap_servers: str, topic: str) -> AuditResult:
    # The business key here is the record's key; it may also be an SQL expression over the value.
    result = audit_topic(spark, bootstrap_servers, topic, key_check=True)
    for finding in result.findings:
        place = f"{finding.topic}-{finding.partition} offset {finding.base_offset}"
        print(f"{place}: {finding.kind}: {finding.explanation}")
    print(f"{result.totals.records} records: {result.verdict}")
    return result


if __name__ == "__main__":
    verdict = audit(SparkSession.builder.getOrCreate(), *sys.argv[1:3]).verdict
    sys.exit(0 if verdict == "clean" else 3)
