"""The message tables, one file per family of APIs; together they are everything we can read and write."""

from oncelog.wire.tables import (
    cluster,
    configs,
    consumer_groups,
    groups,
    offsets,
    producers,
    records,
    topics,
    transactions,
)

TABLES: tuple[str, ...] = (
    records.TABLE,
    cluster.TABLE,
    producers.TABLE,
    transactions.TABLE,
    topics.TABLE,
    configs.TABLE,
    groups.TABLE,
    offsets.TABLE,
    consumer_groups.TABLE,
)
