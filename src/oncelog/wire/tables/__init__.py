"""The message tables, one file per family of APIs; together they are everything we can read and write."""

from oncelog.wire.tables import cluster, configs, producers, records, topics

TABLES: tuple[str, ...] = (records.TABLE, cluster.TABLE, producers.TABLE, topics.TABLE, configs.TABLE)
