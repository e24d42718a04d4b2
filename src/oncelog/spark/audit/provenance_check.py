"""The check of provenance by Spark queries: is a source record stored more than once, and would a
ProvenanceFilter be exact?

The findings and totals are the same as those of oncelog.local_audit.provenance_check. The rules of
oncelog.rules.idempotence.provenance are written in SQL. See test_spark_and_one_process_find_the_same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.audit.key_findings import Place
from oncelog.audit.provenance_findings import (
    RepeatedRun,
    SourceCopies,
    late_record,
    malformed_provenance,
    repeated_run,
    repetitions,
)
from oncelog.audit.result import AuditFinding, ProvenanceTotals
from oncelog.rules.idempotence.provenance import HEADERS, Malformed, read_provenance
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Use `get` instead of an index: Spark's compiled code may read the element of an empty array before it
# compares the size. Guard: test_compiled_queries_read_no_header_that_is_missing.
_IS_SOUND = r"""
size(topics) = 1 AND size(partitions) = 1 AND size(offsets) = 1
AND source_topic RLIKE r'\A[a-zA-Z0-9._-]{1,249}\z'
AND CAST(get(partitions, 0) AS STRING) RLIKE r'\A[0-9]{1,19}\z' AND source_partition IS NOT NULL
AND CAST(get(offsets, 0) AS STRING) RLIKE r'\A[0-9]{1,19}\z' AND source_offset IS NOT NULL
"""
_IS_NEW = "highest IS NULL OR source_offset > highest"


def check_provenance(
    records: DataFrame, max_findings: int
) -> tuple[list[AuditFinding], list[AuditFinding], ProvenanceTotals]:
    """Return violations and notes, at most `max_findings` of each kind, and totals.

    `records` has the columns of `format("oncelog")` with headers.
    """
    from pyspark.sql import functions as f

    read = _read_headers(records)
    is_malformed = f.col("is_marked") & ~f.col("is_sound")
    counted = read.agg(f.count_if(~f.col("is_marked")), f.count_if(is_malformed)).first()
    assert counted is not None
    unmarked, malformed_count = counted
    malformed = _malformed(read.where(is_malformed), max_findings) if malformed_count else []
    judged = _judged(read.where("is_sound"))
    copies = judged.groupBy("topic", "key", "partition").agg(
        f.struct("partition", f.min("offset").alias("first"), f.max("offset").alias("last")).alias("at"),
        f.count(f.lit(1)).alias("times"),
        f.max("is_new").alias("is_new"),
    )
    sources = copies.groupBy("topic", "key").agg(
        f.sum("times").alias("times"),
        f.count_if("is_new").alias("new"),
        f.sort_array(f.collect_list("at")).alias("places"),
    )
    sources.persist()
    try:
        conditions = [f.count_if(f.expr(condition)) for condition in ("new = 0", "new > 1")]
        sums = sources.agg(f.sum("times"), f.count("times"), *conditions).first()
        assert sums is not None
        late, in_two, repeated = [
            _first(sources.where(condition), max_findings)
            for condition in ("new = 0", "new > 1", "times > 1")
        ]
    finally:
        sources.unpersist()
    stored: int = sums[0] or 0
    totals = ProvenanceTotals(stored, sums[1], stored - sums[1], sums[2], sums[3], malformed_count, unmarked)
    runs = _runs(judged, max_findings) if totals.repeated and not totals.filter_loses else []
    notes = [*malformed, *map(late_record, late)]
    return repetitions(totals, runs, in_two, repeated), notes, totals


def _read_headers(records: DataFrame) -> DataFrame:
    """Return place and provenance of each record. `is_marked`: the record has any of the headers. `is_sound`:
    it has all three, well-formed.
    """
    from pyspark.sql import functions as f

    def values(name: str) -> Column:
        of_name = f.filter("headers", lambda header: header["key"] == name)
        return f.transform(of_name, lambda header: header["value"])

    names = zip(("topics", "partitions", "offsets"), HEADERS, strict=True)
    with_values = records.select(
        "topic", "partition", "offset", "headers", *[values(header).alias(name) for name, header in names]
    )
    parsed = with_values.withColumns(
        {
            "source_topic": f.expr("CAST(get(topics, 0) AS STRING)"),
            "source_partition": f.expr("try_cast(CAST(get(partitions, 0) AS STRING) AS INT)"),
            "source_offset": f.expr("try_cast(CAST(get(offsets, 0) AS STRING) AS BIGINT)"),
        }
    )
    is_marked = "coalesce(size(topics) + size(partitions) + size(offsets) > 0, false)"
    return parsed.withColumns(
        {
            "is_marked": f.expr(f"headers IS NOT NULL AND {is_marked}"),
            "is_sound": f.expr(f"coalesce({_IS_SOUND}, false)"),
        }
    )


def _judged(sound: DataFrame) -> DataFrame:
    """Return each record with `is_new`, the verdict of a ProvenanceFilter, and `highest`, the highest source
    offset before the record.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    pair = Window.partitionBy("topic", "partition", "source_topic", "source_partition").orderBy("offset")
    before = pair.rowsBetween(Window.unboundedPreceding, -1)
    key = f.concat_ws("", "source_topic", f.lit("-"), "source_partition", f.lit(":"), "source_offset")
    judged = sound.withColumns({"highest": f.max("source_offset").over(before), "key": key})
    return judged.withColumn("is_new", f.expr(_IS_NEW))


def _runs(judged: DataFrame, max_findings: int) -> list[AuditFinding]:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    names = ("topic", "partition", "source_topic", "source_partition")
    # Consecutive repetitions of a source partition's records in a target partition are one run: no new record
    # of the same pair is between them.
    new_before = f.count_if("is_new").over(Window.partitionBy(*names).orderBy("offset"))
    repeated = judged.withColumn("run", new_before).where("NOT is_new")
    runs = repeated.groupBy(*names, "run").agg(
        f.min("offset").alias("first"),
        f.max("offset").alias("last"),
        f.min_by("source_offset", "offset").alias("source_first"),
        f.max_by("source_offset", "offset").alias("source_last"),
        f.count(f.lit(1)).alias("records"),
        f.max("highest").alias("highest"),
    )
    rows = runs.orderBy("topic", "partition", "first").limit(max_findings).collect()
    fields = RepeatedRun._fields[1:]
    return [
        repeated_run(
            TopicPartition(row["topic"], row["partition"]),
            RepeatedRun(
                TopicPartition(row["source_topic"], row["source_partition"]), *[row[name] for name in fields]
            ),
        )
        for row in rows
    ]


def _first(sources: DataFrame, max_findings: int) -> list[SourceCopies]:
    return [
        SourceCopies(
            row["key"],
            row["times"],
            tuple(Place(row["topic"], at["partition"], at["first"]) for at in row["places"]),
            Place(row["topic"], row["places"][-1]["partition"], row["places"][-1]["last"]),
        )
        for row in sources.orderBy("topic", "key").limit(max_findings).collect()
    ]


def _malformed(read: DataFrame, max_findings: int) -> list[AuditFinding]:
    findings = []
    rows = read.orderBy("topic", "partition", "offset").limit(max_findings)
    for row in rows.select("topic", "partition", "offset", "headers").collect():
        # Convert to bytes, because PySpark returns bytearray.
        headers = [(name, None if value is None else bytes(value)) for name, value in row["headers"]]
        found = read_provenance(headers)
        reason = found.reason if isinstance(found, Malformed) else "the headers name no source record"
        findings.append(malformed_provenance(Place(*row[:3]), reason))
    return findings
