"""Headers that say from which source record a row was made. With them, repetitions of at-least-once sinks can
be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.rules.idempotence.provenance import HEADERS

if TYPE_CHECKING:
    from pyspark.sql import Column


def provenance_headers(*, keep: str | None = None) -> Column:
    """Return the column `headers` with the source's topic, partition and offset of each row.

        rows.select("key", "value", oncelog.spark.provenance_headers().alias("headers"))

    The rows need the columns topic, partition and offset of a Kafka source. Only built-in functions of Spark
    are used, so that the query may run in real-time mode. `keep` names a column with headers of the source
    (includeHeaders). These headers are kept, except earlier provenance headers.

    `oncelog.ProvenanceFilter` and `oncelog audit --distinct provenance` read these headers.
    """
    from pyspark.sql import functions as f

    places = zip(HEADERS, ("topic", "partition", "offset"), strict=True)
    ours = f.array(
        *[
            f.struct(f.lit(name).alias("key"), f.encode(f.col(column).cast("string"), "UTF-8").alias("value"))
            for name, column in places
        ]
    )
    if keep is None:
        return ours
    others = f.filter(f.col(keep), lambda header: ~header["key"].isin(*HEADERS))
    return f.concat(f.coalesce(others, f.filter(ours, lambda _: f.lit(False))), ours)
