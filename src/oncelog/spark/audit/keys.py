"""Checks of business keys by Spark queries: does a key occur once in a topic, or as often as in another
topic?

    key                                                  finding
    more than once in a topic                            repeated_key
    in the other topic, and less often here              lost_key
    in the other topic, and more often here              doubled_key
    not in the other topic                               unexpected_key

Records without a key (null) are counted but not checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oncelog.audit.key_findings import OFFSETS_NAMED, Place, differing_key, repeated_key
from oncelog.audit.result import DIFFERENCE_KINDS, AuditFinding, Difference, KeyTotals

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row


def _keyed(records: DataFrame, key: bool | str | Column) -> DataFrame:
    """Return a DataFrame with topic, key and place of each record. If `key` is a bool, it has the records'
    own keys.
    """
    from pyspark.sql import functions as f

    what = f.col("key") if isinstance(key, bool) else f.expr(key) if isinstance(key, str) else key
    return records.select("topic", what.alias("key"), f.struct("topic", "partition", "offset").alias("at"))


def check_keys(
    records: DataFrame, key: bool | str | Column, max_findings: int
) -> tuple[list[AuditFinding], KeyTotals]:
    """Return findings for keys that occur more than once in a topic, and totals.

    `records` has the columns of `format("oncelog")`. At most `max_findings` keys become findings.
    """
    from pyspark.sql import functions as f

    keyed = _keyed(records, key)
    ends = f.min("at").alias("first"), f.max("at").alias("last")
    counted = keyed.groupBy("topic", "key").agg(f.count(f.lit(1)).alias("times"), *ends).persist()
    has_key, times = f.col("key").isNotNull(), f.col("times")
    try:
        sums = counted.agg(
            f.sum(f.when(has_key, times)),
            f.count_if(has_key),
            f.count_if(has_key & (times > 1)),
            f.sum(f.when(~has_key, times)),
        ).first()
        repeated = counted.where(has_key & (times > 1))
        rows = repeated.orderBy("topic", "first").limit(max_findings).collect()
    finally:
        counted.unpersist()
    assert sums is not None
    places = _places(keyed, rows)
    findings = [_repeated(row, places[number]) for number, row in enumerate(rows)]
    return findings, KeyTotals(sums[0] or 0, sums[1], sums[2], sums[3] or 0)


def _places(keyed: DataFrame, repeated: Sequence[Row]) -> Mapping[int, Sequence[Row]]:
    """Return the first places of each repeated key, by the key's index in `repeated`.

    The places come from a second pass over the records. If the first pass collected all places of a key in
    one row, a frequent key would need much memory. See test_a_key_of_many_records_is_shown_with_a_few_places.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f
    from pyspark.sql.types import IntegerType, StructField, StructType

    places: dict[int, list[Row]] = defaultdict(list)
    if not repeated:
        return places
    schema = StructType(
        [StructField("key_number", IntegerType()), keyed.schema["topic"], keyed.schema["key"]]
    )
    numbered = [(index, row["topic"], row["key"]) for index, row in enumerate(repeated)]
    keys = f.broadcast(keyed.sparkSession.createDataFrame(numbered, schema))
    in_order = Window.partitionBy("key_number").orderBy("at")
    placed = keyed.join(keys, ["topic", "key"]).select("key_number", "at")
    few = placed.withColumn("rank", f.row_number().over(in_order)).where(f"rank <= {OFFSETS_NAMED}")
    for row in few.orderBy("key_number", "rank").collect():
        places[row["key_number"]].append(row["at"])
    return places


def _repeated(row: Row, places: Sequence[Row]) -> AuditFinding:
    # If fewer than two places were found, retention or DeleteRecords has removed records of the key since the
    # count. Then use the places from the count.
    if len(places) < 2:
        places = row["first"], row["last"]
    return repeated_key(row["key"], row["times"], [Place(*place) for place in places])


def compare_keys(
    records: DataFrame, expected: DataFrame, key: bool | str | Column, max_findings: int
) -> tuple[list[AuditFinding], Difference]:
    """Return findings for keys that do not occur equally often in `records` and in `expected`, and totals.

    At most `max_findings` keys become findings.
    """
    from pyspark.sql import functions as f

    sides = [_keyed(frame, key).withColumn("side", f.lit(n)) for n, frame in enumerate((records, expected))]
    found, wanted = f.col("side") == 0, f.col("side") == 1
    counted = sides[0].unionByName(sides[1]).groupBy("key").agg(
        f.count_if(found).alias("found"),
        f.count_if(wanted).alias("expected"),
        f.min(f.when(found, f.col("at"))).alias("found_first"),
        f.max(f.when(found, f.col("at"))).alias("found_last"),
        f.max(f.when(wanted, f.col("at"))).alias("expected_last"),
    )  # fmt: skip
    counted = counted.withColumn("kind", f.expr(_KIND_OF_DIFFERENCE)).persist()
    try:
        keyed = f.col("key").isNotNull()
        sums = counted.agg(
            f.sum(f.when(keyed, f.col("expected"))),
            f.sum(f.when(keyed, f.col("found"))),
            *[f.count_if(f.col("kind") == kind) for kind in DIFFERENCE_KINDS],
            f.sum(f.when(~keyed, f.col("found") + f.col("expected"))),
        ).first()
        shown = counted.where("kind IS NOT NULL").orderBy("kind", "expected_last", "found_last")
        rows = shown.limit(max_findings).collect()
    finally:
        counted.unpersist()
    assert sums is not None
    return [_differing(row) for row in rows], Difference(*(value or 0 for value in sums))


_KIND_OF_DIFFERENCE = """
CASE WHEN key IS NULL OR found = expected THEN NULL
     WHEN expected = 0 THEN 'unexpected_key'
     WHEN found < expected THEN 'lost_key'
     ELSE 'doubled_key' END
"""


def _differing(row: Row) -> AuditFinding:
    places = [
        None if row[name] is None else Place(*row[name])
        for name in ("expected_last", "found_first", "found_last")
    ]
    return differing_key(row["kind"], row["key"], row["expected"], row["found"], *places)
